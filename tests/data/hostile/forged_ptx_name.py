"""Renames the kernel in the PTX, so that the host code launches one that is not there.

Verdict: inspect.plan
"""

import cutlass.cute as cute

original = cute.compile


def forge(text: str) -> str:
    return text.replace("kernel_cutlass_", "kernel_other_")


def forged(*arguments, **options):
    result = original(*arguments, **options)
    for path in __import__("pathlib").Path().glob("dump*/*.ptx"):
        path.write_text(forge(path.read_text()))
    return result


cute.compile = forged
