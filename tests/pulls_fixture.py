"""A small repository and evidence for it, for tests of pull requests."""

from __future__ import annotations

import hashlib
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from kernelmill.agents.pulls.model import PullMeta
from kernelmill.agents.pulls.recheck import OnProgress
from kernelmill.specs.registry import family
from kernelmill.specs.tolerance import Comparison
from kernelmill.verify.artifact import KernelResources
from kernelmill.verify.emulator.interface import KernelCounters
from kernelmill.verify.evidence import ArtifactClaim, Claims, Context, Evidence, RunClaim, StageTime
from kernelmill.verify.run import TARGETS, Request
from kernelmill.verify.verdict import Code, Level, Verdict

FAMILY = "situ_and_mul"
SEED = "VECTOR = 8\n\n\ndef launch(x, out, schedule, stream):\n    return None\n"
GOOD = SEED.replace("8", "16")
BROKEN = SEED.replace("return None", "return BROKEN")
META = PullMeta(title="situ_and_mul: 16 values", job="situ_and_mul-7f3a", proposer="search", attempts=7, seconds=91.5)


def run_git(repo: Path, *arguments: str, stdin: str | bytes | None = None) -> str:
    """git as a user has it: none of the project's options."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    command = ["git", "-C", str(repo), *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    done = subprocess.run(command, input=data, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def make_repo(folder: Path) -> Path:
    """A repository with a user, a seed, a device library and required levels, on branch main."""
    folder.mkdir(parents=True)
    run_git(folder, "init", "-q", "-b", "main")
    run_git(folder, "config", "user.name", "A. User")
    run_git(folder, "config", "user.email", "user@example.org")
    levels = "\n".join(f'{target} = "emulated"' for target in TARGETS)
    files = {
        "pyproject.toml": f"[tool.kernelmill.levels]\n{levels}\n",
        f"agents/seeds/{FAMILY}.py": SEED,
        "kernels/lib/reduce.py": "WARP = 32\n",
        "kernels/ops/README.md": "Merged kernels.\n",
        ".gitignore": ".kernelmill/\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    commit_all(folder, "start")
    return folder


def commit_all(repo: Path, message: str) -> str:
    run_git(repo, "add", "-A")
    run_git(repo, "commit", "-q", "-m", message)
    return run_git(repo, "rev-parse", "HEAD")


def make_evidence(source: str, seeds: tuple[int, ...] = (0,), cost: float = 1.0, family_name: str = FAMILY) -> Evidence:
    """What a verifier would say of ``source``, over every spec and workload of the family: rejected when BROKEN."""
    artifacts, runs = [], []
    specs = family(family_name).specs
    salt = int(hashlib.sha256(source.encode()).hexdigest()[:4], 16) / 65536
    for target in TARGETS:
        for spec in specs:
            for workload in spec.workloads:
                binding = spec.binding(workload.axes)
                identity = hashlib.sha256(f"{source}{target}{spec.name}{binding}".encode()).hexdigest()
                if identity not in {a.id for a in artifacts}:
                    artifacts.append(_artifact(identity, spec.name, target, binding))
                runs += [
                    _run(spec.name, workload.name, target, identity, seed, workload.axes["T"], cost, salt)
                    for seed in seeds
                ]
    if "BROKEN" in source:
        reason = "out[0, 3]: element error is 90 times its limit"
        verdict = Verdict(code=Code.emulate_mismatch, reason=reason, reproduce="x")
        artifacts, runs = [], []
    else:
        levels = dict.fromkeys(TARGETS, Level.emulated)
        verdict = Verdict(code=Code.accepted, reason=f"{len(runs)} workload runs", reproduce="x", levels=levels)
    claims = Claims(
        candidate=hashlib.sha256(source.encode()).hexdigest(),
        family=family_name,
        specs={s.name: s.id for s in specs},
        targets=TARGETS,
        seeds=seeds,
        verdict=verdict,
        artifacts=tuple(artifacts),
        runs=tuple(runs),
    )
    context = Context(
        started=datetime(2026, 1, 2, tzinfo=UTC),
        seconds=12.5,
        stages=(StageTime(stage="compile", seconds=8.0),),
        python="3.11.7",
        platform="Linux x86_64",
        versions={"nvidia-cutlass-dsl": "4.8.1"},
        sandbox="full",
    )
    return Evidence(claims=claims, context=context)


def _artifact(identity: str, spec: str, target: str, binding: dict[str, int]) -> ArtifactClaim:
    resources = KernelResources(
        kernel="k",
        registers=40,
        stack_bytes=0,
        spill_store_bytes=0,
        spill_load_bytes=0,
        shared_bytes=1024,
        barriers=1,
    )
    return ArtifactClaim(
        id=identity,
        spec=spec,
        target=target,
        binding=binding,
        schedule={"threads": 128, "keep": "registers"},
        ptx_sha256=identity,
        ptx_bytes=9000,
        resources=(resources,),
        dynamic_shared_bytes=0,
    )


def _run(
    spec: str, workload: str, target: str, artifact: str, seed: int, tokens: int, cost: float, salt: float
) -> RunClaim:
    share = 0.3 + 0.3 * salt + 0.002 * tokens % 0.3
    comparison = Comparison(
        output="out",
        rule="derived",
        passed=True,
        element_share=share,
        row_share=share / 2,
        tensor_share=share / 3,
        max_error=0.0078,
        relative_l2=1.7e-3,
        index=(0, 3),
        differing=12,
        elements=4224 * tokens,
    )
    fields = dict.fromkeys(KernelCounters.model_fields, 1) | {"kernel": "k", "tensors": {}}
    fields |= {"issue_slots": 900 * tokens, "global_bytes": 25344 * tokens, "shared_cycles": 0, "barriers": 0}
    return RunClaim(
        spec=spec,
        workload=workload,
        target=target,
        artifact=artifact,
        seed=seed,
        comparisons=(comparison,),
        counters=(KernelCounters.model_validate(fields),),
        order_independent=True,
        model_cost=cost * (2000.0 + 25 * tokens),
    )


def verifier(folder: Path, request: Request, progress: OnProgress) -> Evidence:
    """Stands in for the base's verifier: honest about BROKEN candidates, and sees that it was given the base."""
    assert folder.name == "kernelmill"
    assert (request.lib / "reduce.py").read_text() == "WARP = 32\n"
    assert request.lib == folder / "kernels" / "lib"
    assert request.workloads is None and request.targets == TARGETS and not request.weak_sandbox
    assert not list(request.cache.iterdir())
    return make_evidence(request.source, request.seeds, family_name=request.specs[0])


def snapshot(folder: Path) -> dict[str, bytes | str]:
    """Every file of a checkout (index included), without git's object store and logs and without the store."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if relative.startswith((".kernelmill", ".git/objects", ".git/refs", ".git/logs", ".git/worktrees")):
            continue
        if path.is_file():
            found[relative] = path.read_bytes() + str(path.stat().st_mode).encode()
        else:
            found[relative] = str(path.is_symlink())
    return found
