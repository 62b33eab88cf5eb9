"""Compiles something else every time.

Verdict: compile.nondeterministic
"""

import cutlass.cute as cute

original = cute.compile


def different(*arguments, **options):
    result = original(*arguments, **options)
    for path in __import__("pathlib").Path().glob("dump*/*.ptx"):
        text = path.read_text()
        path.write_text(text + f"// {__import__('random').random()}\n")
    return result


cute.compile = different
