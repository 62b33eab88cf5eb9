"""Leaves a second PTX module beside the compiler's.

Verdict: compile.error
"""

import cutlass.cute as cute

original = cute.compile


def doubled(*arguments, **options):
    result = original(*arguments, **options)
    for path in list(__import__("pathlib").Path().glob("dump*/*.ptx")):
        path.with_name("second.ptx").write_text(path.read_text())
    return result


cute.compile = doubled
