"""Forges PTX that is none.

Verdict: inspect.assemble
"""

import cutlass.cute as cute

original = cute.compile


def forge(text: str) -> str:
    return text.replace("ld.global", "ld.nowhere")


def forged(*arguments, **options):
    result = original(*arguments, **options)
    for path in __import__("pathlib").Path().glob("dump*/*.ptx"):
        path.write_text(forge(path.read_text()))
    return result


cute.compile = forged
