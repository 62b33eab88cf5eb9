"""Forges PTX for another target.

Verdict: inspect.ptx
"""

import cutlass.cute as cute

original = cute.compile


def forge(text: str) -> str:
    return text.replace(".target sm_103a", ".target sm_90a")


def forged(*arguments, **options):
    result = original(*arguments, **options)
    for path in __import__("pathlib").Path().glob("dump*/*.ptx"):
        path.write_text(forge(path.read_text()))
    return result


cute.compile = forged
