"""Declares fewer threads in the PTX than the host code launches.

Verdict: inspect.plan
"""

import cutlass.cute as cute

original = cute.compile


def forge(text: str) -> str:
    return text.replace(".reqntid 32", ".reqntid 16")


def forged(*arguments, **options):
    result = original(*arguments, **options)
    for path in __import__("pathlib").Path().glob("dump*/*.ptx"):
        path.write_text(forge(path.read_text()))
    return result


cute.compile = forged
