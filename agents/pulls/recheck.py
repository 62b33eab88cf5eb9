"""The trust root: a candidate verified anew by what the base branch says, not by what its own branch says.

Of the pull request's branch only the candidate's bytes are used. Verifier, specs, shared device functions and required
levels are those of the base branch's head (so that an old base with a weaker verifier is no way in), run in a process
that can import nothing else of the project, with an empty build cache, on every spec, workload and target of the
family, with the recorded seeds and a fresh secret one that is told only in the result.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import git
from pydantic import ValidationError

from kernelmill.agents.pulls import gitio
from kernelmill.agents.pulls.branch import Malformed
from kernelmill.agents.text import printable
from kernelmill.specs.data import Frozen, canonical_json
from kernelmill.verify.evidence import ArtifactClaim, Claims, Evidence, RunClaim
from kernelmill.verify.run import TARGETS, Progress, Request
from kernelmill.verify.verdict import Level, MachineFailure

OnProgress = Callable[[Progress], None]

Verifier = Callable[[Path, Request, OnProgress], Evidence]
"""Runs the verifier that lies in a folder (the exported base) on a request. Raises MachineFailure."""

TIMEOUT = 3600.0
"""Seconds for a whole verification."""

MAX_SEEDS = 4
"""Recorded seeds that are run again; a claim with more costs the reviewer too much."""

DECIDING = ("verify", "specs", "kernels/lib")
"""What decides over builds and figures: a record made with other contents of these cannot be expected to agree."""

DEFAULT_LEVELS = dict.fromkeys(TARGETS, Level.emulated)

MAX_TOLD = 10
"""Differences that are listed; the rest is counted."""

RELATIVE = 1e-6
"""Relative difference up to which recorded and fresh errors are equal: the float64 reference may sum in another order
on another machine. Everything else that is compared must be equal."""

_ORDER = list(Level)

# Runs in the child: nothing of the project may come from anywhere but the base, and the child ends with its parent.
_BOOTSTRAP = """
import ctypes, os, runpy, signal, sys
from pathlib import Path
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
root, parent, *sys.argv[1:] = sys.argv[1:]
if os.getppid() != int(parent): sys.exit(3)
def ours(): return [m for n, m in list(sys.modules.items()) if n.split(".")[0] == "kernelmill" and m]
def check():
    for module in ours():
        for place in [module.__file__] if getattr(module, "__file__", None) else list(module.__path__):
            if "__path_hook__" not in place and not Path(place).resolve().is_relative_to(root):
                sys.stderr.write(f"{module.__name__} comes from {place}, not from the base commit\\n"); os._exit(3)
import kernelmill.verify
check()
try: runpy.run_module("kernelmill.verify", run_name="__main__", alter_sys=True)
finally: check()
"""


class Recheck(Frozen):
    """A verification of the trust root. ``base``: the commit whose verifier ran. ``secret_seed``: fresh, told now.

    ``problems``: why this must not be merged, empty when it may be. ``notes``: what could not be compared.
    ``compared``: how many recorded artifacts and runs were compared with fresh ones.
    """

    base: str
    evidence: Evidence
    secret_seed: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    compared: int

    @property
    def holds(self) -> bool:
        return not self.problems


def recheck(
    repo: git.Repo,
    base: str,
    since: str,
    family: str,
    source: str,
    recorded: Evidence,
    verifier: Verifier,
    progress: OnProgress = lambda _: None,
) -> Recheck:
    """Verify ``source`` as ``base`` says and compare with the claims that were recorded at the commit ``since``.

    Raises MachineFailure when that could not be done, Malformed when the record asks for seeds that cannot be run."""
    seeds = recorded_seeds(recorded)
    secret = secrets.randbits(63)
    with gitio.worktree(repo, base) as folder:
        gitio.export(repo, base, folder)
        cache = folder.parent / "cache"
        cache.mkdir()
        request = Request(
            name="kernel.py",
            source=source,
            specs=(family,),
            seeds=(*seeds, *([] if secret in seeds else [secret])),
            lib=folder / "kernels" / "lib",
            cache=cache,
        )
        fresh = verifier(folder, request, progress)
    moved = [path for path in DECIDING if gitio.object_at(repo, since, path) != gitio.object_at(repo, base, path)]
    differences, notes, compared = compare(recorded, fresh, seeds, moved)
    problems = [*_verdict(fresh), *_levels(fresh, levels(repo, base)), *_sandbox(recorded, fresh)]
    problems += [f"the recorded evidence does not hold: {d}" for d in differences[:MAX_TOLD]]
    if len(differences) > MAX_TOLD:
        problems.append(f"and {len(differences) - MAX_TOLD} more differences from the recorded evidence")
    return Recheck(
        base=base,
        evidence=fresh,
        secret_seed=secret,
        problems=tuple(problems),
        notes=tuple(notes),
        compared=compared,
    )


def recorded_seeds(recorded: Evidence) -> tuple[int, ...]:
    """The recorded input seeds. Raises Malformed when there are none or they cannot be run again."""
    seeds = recorded.claims.seeds
    if not 1 <= len(seeds) <= MAX_SEEDS or len(set(seeds)) != len(seeds) or not all(0 <= s < 2**63 for s in seeds):
        raise Malformed(f"evidence.json has {len(seeds)} seeds; 1 to {MAX_SEEDS} different ones below 2^63 can be run")
    return seeds


def run_verifier(folder: Path, request: Request, progress: OnProgress) -> Evidence:
    """Run the verifier of an exported commit (``folder`` is called ``kernelmill``) in a process of its own."""
    private = folder.parent
    asked, answered, said = private / "request.json", private / "evidence.json", private / "errors.txt"
    asked.write_text(request.model_dump_json())
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    # The fork servers inherit this and the current folder, which Python searches first.
    environment |= {"PYTHONPATH": str(private), "PYTHONNOUSERSITE": "1", "LANG": "C.UTF-8"}
    command = [sys.executable, "-c", _BOOTSTRAP, str(folder.resolve()), str(os.getpid()), str(asked), str(answered)]
    with said.open("wb") as errors:
        process = subprocess.Popen(
            command,
            cwd=private,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    deadline = threading.Timer(TIMEOUT, process.kill)
    deadline.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            with suppress(ValidationError):
                progress(Progress.model_validate_json(line))
        status = process.wait()
    finally:
        late = not deadline.is_alive()
        deadline.cancel()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if late:
        raise MachineFailure(f"the base's verifier took more than {TIMEOUT:.0f} s; nothing was merged")
    if status != 0 or not answered.exists():
        lines = said.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        raise MachineFailure(f"the base's verifier ended with status {status}: {printable(lines[-1])[:500]}")
    try:
        return Evidence.model_validate_json(answered.read_bytes())
    except ValidationError:
        raise MachineFailure(
            "the base's verifier writes evidence of another format; update this installation"
        ) from None


def levels(repo: git.Repo, base: str) -> dict[str, Level]:
    """The level that a merge needs per target: ``[tool.kernelmill.levels]`` of the base's pyproject.toml over the
    defaults. Raises MachineFailure when that table cannot be read."""
    try:
        data = gitio.read_file(repo, base, "pyproject.toml", 1 << 20) or b""
        table = tomllib.loads(data.decode()).get("tool", {}).get("kernelmill", {}).get("levels", {})
        return DEFAULT_LEVELS | {target: Level(level) for target, level in table.items()}
    except (ValueError, AttributeError) as error:
        raise MachineFailure(f"pyproject.toml of the base, [tool.kernelmill.levels]: {error}") from None


def compare(
    recorded: Evidence, fresh: Evidence, seeds: tuple[int, ...], moved: Sequence[str]
) -> tuple[list[str], list[str], int]:
    """Recorded claims against fresh ones: differences, what could not be compared and why, how many were compared.

    Always compared: candidate, family, targets, verdict and levels. Artifacts and runs only where the project's folders
    (``moved``: those that changed), the specs and the versions that decide over them are the same: all of these change
    builds and figures legitimately."""
    old, new = recorded.claims, fresh.claims
    differences = [printable(d)[:300] for d in _fixed(old, new)]
    if not new.verdict.accepted:
        return differences, [], 0
    changed = sorted(name for name in old.specs if old.specs[name] != new.specs.get(name))
    versions = sorted(
        name
        for name in recorded.context.versions | fresh.context.versions
        if recorded.context.versions.get(name) != fresh.context.versions.get(name)
    )
    notes = [f"not compared: spec {printable(name)} has changed since" for name in changed]
    if versions or moved:
        what = [*(f"{path} has changed" for path in moved), *(f"another version of {printable(v)}" for v in versions)]
        return differences, [*notes, f"builds and runs not compared with the record: {', '.join(what)}"], 0
    artifacts = {_artifact_key(a): a for a in new.artifacts}
    runs = {_run_key(r): r for r in new.runs if r.seed in seeds}
    compared = 0
    for artifact in (a for a in old.artifacts if a.spec not in changed):
        compared += 1
        differences += _unequal(f"{artifact.spec} {artifact.target}", artifact, artifacts.get(_artifact_key(artifact)))
    for run in (r for r in old.runs if r.spec not in changed):
        compared += 1
        where = f"{run.spec} {run.workload} {run.target} seed {run.seed}"
        differences += _unequal(where, run, runs.get(_run_key(run)))
    missing = runs.keys() - {_run_key(r) for r in old.runs}
    if missing:
        spec, workload, target, seed = sorted(missing)[0]
        differences.append(f"{len(missing)} runs are not recorded, the first {spec} {workload} {target} seed {seed}")
    return [printable(d)[:300] for d in differences], notes, compared


def _fixed(old: Claims, new: Claims) -> Iterator[str]:
    for name in ("candidate", "family", "targets"):
        if getattr(old, name) != getattr(new, name):
            yield f"{name} is {_short(getattr(old, name))}, really {_short(getattr(new, name))}"
    if old.verdict.code != new.verdict.code:
        yield f"verdict is {old.verdict.code}, really {new.verdict.code}"
    for target, level in old.verdict.levels.items():
        if level != new.verdict.levels.get(target):
            yield f"level of {target} is {level}, really {new.verdict.levels.get(target, 'none')}"


def _artifact_key(artifact: ArtifactClaim) -> tuple[str, str, str]:
    return artifact.spec, artifact.target, canonical_json([artifact.binding, artifact.schedule])


def _run_key(run: RunClaim) -> tuple[str, str, str, int]:
    return run.spec, run.workload, run.target, run.seed


def _unequal(where: str, old: Frozen, new: Frozen | None) -> list[str]:
    if new is None:
        return [f"{where} is recorded but does not exist"]
    path = _first_difference(old.model_dump(mode="python"), new.model_dump(mode="python"))
    return [f"{where}: {path}"] if path else []


def _first_difference(old: Any, new: Any, path: str = "") -> str:
    """The first place where two JSON-like values differ, with both values, or an empty string."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        pairs = [(old[k], new[k], f"{path}.{k}" if path else str(k)) for k in old]
    elif isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)) and len(old) == len(new):
        pairs = [(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(old, new, strict=True))]
    elif isinstance(old, float) and isinstance(new, float):
        same = old == new or abs(old - new) <= RELATIVE * max(abs(old), abs(new)) or (old != old and new != new)
        return "" if same else f"{path} is {old!r}, really {new!r}"
    else:
        return "" if old == new else f"{path} is {_short(old)}, really {_short(new)}"
    return next(filter(None, (_first_difference(*pair) for pair in pairs)), "")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _verdict(fresh: Evidence) -> Iterator[str]:
    verdict = fresh.claims.verdict
    if not verdict.accepted:
        yield f"rejected: {verdict.code}: {printable(verdict.reason)}"


def _levels(fresh: Evidence, needed: dict[str, Level]) -> Iterator[str]:
    if not fresh.claims.verdict.accepted:
        return
    for target, level in needed.items():
        found = fresh.claims.verdict.levels.get(target)
        if found is None or _ORDER.index(found) < _ORDER.index(level):
            yield f"{target} needs level {level} here, this verification gives {found or 'none'}"


def _sandbox(recorded: Evidence, fresh: Evidence) -> Iterator[str]:
    if is_weak(fresh):
        yield "it was verified now in a weak sandbox"
    if is_weak(recorded):
        yield "its evidence was made in a weak sandbox; make it again without --weak-sandbox"


def is_weak(evidence: Evidence) -> bool:
    return "weak" in evidence.context.sandbox
