"""``python -m kernelmill.verify REQUEST.json OUT.json``: one verification, for callers that keep their distance.

``pulls verify`` runs this from a checkout of the base commit. Exit 0 when evidence was written (whatever the verdict),
3 with one line on standard error when the machine could not do it, 2 for a request that names what does not exist.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import ValidationError

from kernelmill.specs.registry import UnknownName
from kernelmill.verify.run import Progress, Request, verify
from kernelmill.verify.verdict import MachineFailure


def main(request_path: Path, out: Path) -> int:
    """Verify the request and write the evidence; progress goes to standard output, one JSON object a line."""
    try:
        request = Request.model_validate_json(request_path.read_text())
        evidence = verify(request, progress=_tell)
    except (OSError, ValidationError, UnknownName) as error:
        print(f"{request_path.name}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except MachineFailure as error:
        print(error, file=sys.stderr)
        return 3
    out.write_text(evidence.model_dump_json(indent=1))
    return 0


def _tell(step: Progress) -> None:
    print(step.model_dump_json(), flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m kernelmill.verify REQUEST.json OUT.json")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
