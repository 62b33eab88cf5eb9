"""Text from candidates, branches and jobs, made safe to show."""

from __future__ import annotations

import unicodedata

_SPACE = {"\n", "\t"}


def printable(text: str, keep_lines: bool = False) -> str:
    """``text`` with control, format (bidirectional, zero-width), surrogate and private characters shown as \\u escapes.

    Newlines and tabs stay when ``keep_lines``; otherwise they become spaces.
    """
    out = []
    for char in text:
        if char in _SPACE:
            out.append(char if keep_lines else " ")
        elif unicodedata.category(char)[0] == "C" or char in "\u2028\u2029":
            out.append(f"\\u{ord(char):04x}")
        else:
            out.append(char)
    return "".join(out)
