"""Forges PTX without a kernel.

Verdict: inspect.ptx
"""

import cutlass.cute as cute

original = cute.compile


def forge(text: str) -> str:
    return "no kernel here\n"


def forged(*arguments, **options):
    result = original(*arguments, **options)
    for path in __import__("pathlib").Path().glob("dump*/*.ptx"):
        path.write_text(forge(path.read_text()))
    return result


cute.compile = forged
