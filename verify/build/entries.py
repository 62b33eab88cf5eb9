"""The entries of a PTX text, found without a full parse: what recording and plans need to know of the kernels.

PTX is an attacker's text, so everything here is linear in its length.
"""

from __future__ import annotations

import math
import re

from kernelmill.specs.data import Frozen
from kernelmill.verify.plan import MAX_PARAM_BYTES
from kernelmill.verify.verdict import Code, Rejected

MAX_PTX_BYTES = 8 << 20
MAX_ENTRIES = 64
MAX_HEADER_CHARS = 1 << 20
"""Of one entry's parameter list or directives; a name can have 2,000 characters and comes with every parameter."""

_NAME = re.compile(r"[A-Za-z_$][\w$]{0,2000}")
_PARAM = re.compile(r"\.param (?:\.align \d{1,4} )?\.[bsuf](8|16|32|64) [\w$]+ ?(?:\[(\d{1,4})\])?", re.ASCII)
_NTID = re.compile(r"\.(req|max)ntid (\d{1,4})(?: ?, ?(\d{1,4}))?(?: ?, ?(\d{1,4}))?", re.ASCII)
_TARGET = re.compile(r"^[ \t]*\.target[ \t]+([^\n]{0,200})$", re.MULTILINE)
_FOREIGN = re.compile(
    r"\.func\b|\.alias\b|\.callprototype\b|\.(?:extern|weak|common)\s{1,9}\.(?!shared\b)|(?<![\w.%$])call(?:\.uni)?\s"
)


class Entry(Frozen):
    """``param_bytes``: size of each parameter. ``threads``: per CTA at most, when the entry says so; ``exactly``: it
    must be so many (reqntid)."""

    name: str
    param_bytes: tuple[int, ...]
    threads: int | None
    exactly: bool


def entries(ptx: str, target: str) -> dict[str, Entry]:
    """Name to entry of a self-contained module for ``target``. Raises Rejected(inspect.ptx): no or too many entries,
    another target, functions, calls or anything external but shared memory."""
    text = _without_comments(ptx)
    if found := _FOREIGN.search(text):
        raise Rejected(Code.inspect_ptx, f"{found.group().strip()!r}: a kernel may not use functions or other modules")
    targets = [t.strip() for t in _TARGET.findall(text)]
    if targets != [target]:
        raise Rejected(Code.inspect_ptx, f"the PTX is for {', '.join(targets)[:100] or 'no target'}, not {target}")
    _, *parts = text.split(".entry")
    if not parts or len(parts) > MAX_ENTRIES:
        raise Rejected(Code.inspect_ptx, f"the PTX has {len(parts)} entries, 1 to {MAX_ENTRIES} are allowed")
    read = [_entry(part) for part in parts]
    if len({e.name for e in read}) != len(read):
        raise Rejected(Code.inspect_ptx, "an entry comes twice in the PTX")
    return {e.name: e for e in read}


def _without_comments(ptx: str) -> str:
    text = re.sub(r"//[^\n]*", "", ptx)
    if "/*" in text:
        raise Rejected(Code.inspect_ptx, "comments between /* and */ are not allowed in the PTX")
    return text


def _entry(text: str) -> Entry:
    name, parenthesis, rest = text.partition("(")
    params, end, rest = rest.partition(")")
    directives, brace, _ = rest.partition("{")
    name = name.strip()
    if not (parenthesis and end and brace) or not _NAME.fullmatch(name):
        raise Rejected(Code.inspect_ptx, f"an entry of the PTX is malformed: {name[:100]!r}")
    if max(len(params), len(directives)) > MAX_HEADER_CHARS:
        raise Rejected(Code.inspect_ptx, f"entry {name[:100]} has too long a header")
    sizes = []
    for declared in filter(None, (" ".join(p.split()) for p in params.split(","))):
        param = _PARAM.fullmatch(declared)
        if param is None:
            raise Rejected(Code.inspect_ptx, f"entry {name[:100]} has a parameter of unknown form: {declared[:100]!r}")
        sizes.append(int(param.group(1)) // 8 * int(param.group(2) or 1))
    if sum(sizes) > MAX_PARAM_BYTES:
        raise Rejected(Code.inspect_ptx, f"entry {name[:100]} has {sum(sizes)} bytes of parameters")
    ntid = _NTID.search(" ".join(directives.split()))
    threads = math.prod(int(n or 1) for n in ntid.groups()[1:]) if ntid else None
    return Entry(name=name, param_bytes=tuple(sizes), threads=threads, exactly=bool(ntid and ntid.group(1) == "req"))
