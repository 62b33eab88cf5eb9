"""The DSL's error messages as one line with a remedy. The text is a candidate's, printed by its own process."""

from __future__ import annotations

import re

REMEDIES = {
    "PHASE_REQUIRES_CONSTANT": "a run-time value decides at compile time: use const_expr only on Constexpr values",
    "PHASE_MUTATE_PYTHON": "run-time control flow cannot change a Python object: unroll with range_constexpr",
    "UNSUP_EARLY_EXIT": "no return, break or continue in staged control flow: use predicates",
    "UNSUP_LOOP_ELSE": "no else on a loop",
    "UNSUP_READ_UNDERSCORE": "the name _ cannot be read",
    "UNSUP_FSTRING": "format run-time values with cute.printf, not with an f-string",
    "UNSUP_ARCH": "this operation does not exist on this target",
    "SCOPE_READ_NEVER_SET": "bind the name before the branch that sets it",
    "TYPE_UNSTABLE_JOIN": "both arms of a branch must give the same type: write 0.0, not 0, for floats",
    "CONTAINER_LIST_SHAPE_MUTATED": "a list cannot grow in a run-time loop: use range_constexpr or a register tensor",
    "ARG_UNSUPPORTED_TYPE": "annotate the argument: cute.Tensor, cutlass.Constexpr or a cutlass number",
    "ARG_ANNOTATION_MISMATCH": "the argument is not of the type that the annotation says",
    "CALL_KERNEL_TARGET": "launch must be a @cute.jit function, not a kernel",
    "INTERNAL": "often an argument without annotation; do not trust the line that is blamed",
}
"""DSL diagnostic code to a one-line remedy (nvidia-cutlass-dsl 4.8.1)."""

_ESCAPE = re.compile(r"\x1b\[[0-9;]{0,20}m")
_CLASS = re.compile(r"[\w.]{1,80}:")
_CODE = re.compile(r"error\[(\w{1,64})\]")


def plain(message: str) -> str:
    """Without the codes that colour it."""
    return _ESCAPE.sub("", message)


def summary(message: str) -> str:
    """The line with the diagnostic code and its remedy, or the first that says something: an exception's class alone
    does not."""
    lines = [n.strip() for n in plain(message).splitlines() if n.strip()] or ["no message"]
    for line in lines:
        if found := _CODE.search(line):
            remedy = REMEDIES.get(found.group(1))
            return line[:300] + (f" ({remedy})" if remedy else "")
    telling = [line for line in lines if not _CLASS.fullmatch(line)]
    return (telling or lines)[0][:300]
