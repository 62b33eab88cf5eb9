"""Forges PTX that calls an external function.

Verdict: inspect.ptx
"""

import cutlass.cute as cute

original = cute.compile


def forge(text: str) -> str:
    return text.replace("ret;", "call vprintf, (%rd1);\n\tret;")


def forged(*arguments, **options):
    result = original(*arguments, **options)
    for path in __import__("pathlib").Path().glob("dump*/*.ptx"):
        path.write_text(forge(path.read_text()))
    return result


cute.compile = forged
