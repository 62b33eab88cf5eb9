"""Inside the sandbox: what scratch a candidate declares. Its ``workspace(axes)`` is evaluated here, beside it; the
answer is the candidate's word, and leaves as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kernelmill.verify.compile_job import kind, load_candidate


def main(folder: Path) -> None:
    """``request.json`` has the axes of each unit; ``result.json`` gets what ``workspace`` returned for each."""
    request = json.loads((folder / "request.json").read_text())
    declared: list[Any] = []
    reply: dict[str, Any] = {"declared": declared}
    try:
        candidate = load_candidate(folder / "candidate.py", Path(request["lib"]))
        for axes in request["axes"]:
            declared.append(candidate.workspace(axes))
        text = json.dumps(reply)
    except BaseException as error:
        text = json.dumps({"error": {"kind": kind(error), "message": f"{type(error).__name__}: {error}"[:20000]}})
    (folder / "result.json").write_text(text)
