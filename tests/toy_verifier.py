"""A verifier for tests of the job loop: verdicts and costs from the schedule table alone, in no time or a set time.

Run as a program it works on one job of a store: ``toy_verifier.py STORE JOB SECONDS LOG``; every verification that
begins or ends adds a line to LOG.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from kernelmill.agents.jobs import scoring
from kernelmill.agents.jobs.model import Job, sha256
from kernelmill.agents.jobs.run import Candidate, Offer, Tools, Watch, run
from kernelmill.agents.jobs.store import Store
from kernelmill.agents.paths import lib_folder, seed_file
from kernelmill.agents.proposers.search import Search
from kernelmill.specs.registry import family
from kernelmill.verify.build.schedules import parse, read_table
from kernelmill.verify.evidence import ArtifactClaim, Claims, Context, Evidence, RunClaim
from kernelmill.verify.run import Progress, Request
from kernelmill.verify.verdict import Code, Level, Verdict

FAMILY = family("attn_res")
SEED = seed_file("attn_res").read_text()
Rule = Callable[[dict, int], float | None]


def cost(schedule: dict, size: int) -> float | None:
    """Model units of one call; None: rejected. The optimum is 224 threads and first_warp up to size 8, 896 above."""
    if schedule["keep"] == "shared" and schedule["threads"] == 896:
        return None
    wanted = 224 if size <= 8 else 896
    return 1000.0 + abs(schedule["threads"] - wanted) + 50 * (schedule["reduce"] == "every_warp")


def evidence(request: Request, rule: Rule = cost) -> Evidence:
    """What the real verifier would say if the rule were the truth."""
    table = read_table(parse(request.source))
    specs = [s for s in FAMILY.specs if s.name in request.specs]
    runs, rejected = [], False
    for spec in specs:
        for workload in spec.workloads:
            if request.workloads is not None and workload.name not in request.workloads:
                continue
            units = rule(table.pick(workload.axes["T"]), workload.axes["T"])
            rejected |= units is None
            for target in request.targets:
                runs.append(
                    RunClaim(
                        spec=spec.name,
                        workload=workload.name,
                        target=target,
                        artifact="0" * 64,
                        seed=request.seeds[0],
                        order_independent=True,
                        comparisons=(),
                        counters=(),
                        model_cost=units or 0.0,
                    )
                )
    code = Code.emulate_mismatch if rejected else Code.accepted
    levels = {} if rejected else dict.fromkeys(request.targets, Level.emulated)
    artifact = ArtifactClaim(
        id="0" * 64,
        spec=specs[0].name,
        target=request.targets[0],
        binding={},
        schedule={},
        ptx_sha256="0" * 64,
        ptx_bytes=1000,
        resources=(),
        dynamic_shared_bytes=0,
    )
    return Evidence(
        claims=Claims(
            candidate=sha256(request.source),
            family=FAMILY.name,
            specs={s.name: s.id for s in specs},
            targets=request.targets,
            seeds=request.seeds,
            verdict=Verdict(code=code, reason="by the toy's rule", reproduce="-", levels=levels),
            artifacts=(artifact,),
            runs=() if rejected else tuple(runs),
        ),
        context=Context(
            started=datetime.now(UTC),
            seconds=0.0,
            stages=(),
            python="3",
            platform="toy",
            versions={},
            sandbox="none",
        ),
    )


class Toy:
    """Callable as a verifier; remembers what it was asked, with the number of calls in flight at most."""

    def __init__(self, rule: Rule = cost, seconds: float = 0.0, log: Path | None = None) -> None:
        self.rule, self.seconds, self.log = rule, seconds, log
        self.requests: list[Request] = []
        self.in_flight = self.most = 0
        self._lock = threading.Lock()

    def __call__(
        self, request: Request, *, parallel: int, progress: Callable[[Progress], None] | None = None
    ) -> Evidence:
        with self._lock:
            self.requests.append(request)
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)
        try:
            self._note("begin", request)
            if progress:
                progress(Progress(stage="emulate", done=1, total=2))
            time.sleep(self.seconds)
            self._note("end", request)
            return evidence(request, self.rule)
        finally:
            with self._lock:
                self.in_flight -= 1

    def _note(self, what: str, request: Request) -> None:
        if self.log:
            phase = "screen" if request.workloads else "prove"
            with self.log.open("a") as file:
                file.write(f"{what} {phase} {sha256(request.source)}\n")


def tools(
    verify: Callable[..., Evidence],
    folder: Path,
    *,
    incumbents: tuple[Candidate, ...] = (),
    opened: list[Offer] | None = None,
    barred: Callable[[str], bool] = lambda sha: False,
    limit: int = 12,
) -> Tools:
    def open_pull(offer: Offer) -> str:
        if opened is not None:
            opened.append(offer)
        return f"attn_res-{offer.winner.sha[:6]}"

    points = scoring.points(FAMILY, scoring.screen(FAMILY))
    return Tools(
        family=FAMILY,
        verify=verify,
        proposer=Search(points, seed=0, limit=limit),
        seed=Candidate("seed", "agents/seeds/attn_res.py", SEED),
        incumbents=incumbents,
        barred=barred,
        open_pull=open_pull,
        lib=lib_folder(),
        cache=folder / "cache",
    )


def work(store: Store, job: str, made: Tools, watch: Watch = lambda update: None) -> Job:
    return run(store, job, made, threading.Event(), watch)


if __name__ == "__main__":
    folder, job, seconds, log = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), Path(sys.argv[4])
    print(work(Store(folder), job, tools(Toy(seconds=seconds, log=log), folder)).status)
