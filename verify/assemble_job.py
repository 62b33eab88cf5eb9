"""Inside the sandbox: become ptxas. PTX is an attacker's text, and ptxas is a large parser."""

from __future__ import annotations

import json
import os
from pathlib import Path


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    command = [request["ptxas"], "-v", f"-arch={request['target']}", "kernel.ptx", "-o", "kernel.cubin"]
    os.execve(command[0], command, {"TMPDIR": str(folder), "LANG": "C"})
