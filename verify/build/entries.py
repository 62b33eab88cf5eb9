"""The entries of a PTX text, found without a full parse: what the recording needs to know of a kernel's parameters."""

from __future__ import annotations

import re

from kernelmill.specs.data import Frozen
from kernelmill.verify.verdict import Code, Rejected

MAX_PTX_BYTES = 8 << 20
MAX_ENTRIES = 64

_ENTRY = re.compile(r"\.entry\s+([A-Za-z_$][\w$]{0,2000})\s*\(([^)]{0,65536})\)\s*([^{]{0,2000})\{")
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]+)(\d+)\s+[\w$]+(?:\[(\d{1,5})\])?")
_REQNTID = re.compile(r"\.(?:req|max)ntid\s+(\d{1,5})(?:\s*,\s*(\d{1,5}))?(?:\s*,\s*(\d{1,5}))?")


class Entry(Frozen):
    """``param_bytes``: size of each parameter. ``threads``: per CTA at most, when the entry says so; ``exactly``: it
    must be so many (reqntid)."""

    name: str
    param_bytes: tuple[int, ...]
    threads: int | None
    exactly: bool


def entries(ptx: str) -> dict[str, Entry]:
    """Name to entry. Raises Rejected(inspect.ptx) when there is none, too many, or a name comes twice."""
    found: dict[str, Entry] = {}
    for match in _ENTRY.finditer(ptx):
        name, params, performance = match.groups()
        if name in found or len(found) >= MAX_ENTRIES:
            raise Rejected(Code.inspect_ptx, f"entry {name[:100]} is one of too many or comes twice")
        sizes = tuple(int(bits) // 8 * int(count or 1) for _, bits, count in _PARAM.findall(params))
        threads = _REQNTID.search(performance)
        limit = None
        if threads:
            limit = 1
            for part in threads.groups():
                limit *= int(part or 1)
        found[name] = Entry(name=name, param_bytes=sizes, threads=limit, exactly=".reqntid" in performance)
    if not found:
        raise Rejected(Code.inspect_ptx, "the PTX has no entry")
    return found
