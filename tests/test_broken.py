"""Broken copies of the seeds: each is one mistake and must earn its verdict. The seeds themselves are accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelmill.agents.paths import lib_folder, seed_file
from kernelmill.verify.run import Request, Verifier

FIXTURES = sorted((Path(__file__).parent / "data" / "broken").glob("*/*.json"))
FAMILIES = ("attn_res", "kda_in_proj", "kda_decode", "situ_and_mul")


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier() as made:
        yield made


def request(source: str, spec: str, cache: Path, workloads: list[str] | None) -> Request:
    return Request(
        name="kernel.py",
        source=source,
        specs=(spec,),
        targets=("sm_103a",),
        workloads=tuple(workloads) if workloads else None,
        lib=lib_folder(),
        cache=cache,
    )


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_broken_copy_is_rejected(path: Path, verifier: Verifier, tmp_path: Path) -> None:
    broken = json.loads(path.read_text())
    source = seed_file(path.parent.name).read_text()
    for edit in broken["replace"]:
        assert source.count(edit["old"]) == 1, f"the seed no longer has once: {edit['old']}"
        source = source.replace(edit["old"], edit["new"])
    evidence = verifier.verify(request(source, broken["spec"], tmp_path, broken["workloads"]))
    verdict = evidence.claims.verdict
    assert verdict.code == broken["expect"], f"{verdict.reason}\n{evidence.context.detail}"


@pytest.mark.parametrize("family", FAMILIES)
def test_there_are_enough_broken_copies(family: str) -> None:
    assert sum(p.parent.name == family for p in FIXTURES) >= 8


@pytest.mark.parametrize("family", FAMILIES)
def test_seed_is_accepted_where_the_copies_are_not(family: str, verifier: Verifier, tmp_path: Path) -> None:
    cases: dict[str, set[str]] = {}
    for path in FIXTURES:
        broken = json.loads(path.read_text())
        if path.parent.name == family:
            cases.setdefault(broken["spec"], set()).update(broken["workloads"])
    for spec, workloads in cases.items():
        evidence = verifier.verify(request(seed_file(family).read_text(), spec, tmp_path, sorted(workloads)))
        assert evidence.claims.verdict.accepted, evidence.claims.verdict.reason
        assert len(evidence.claims.runs) == len(workloads)


@pytest.mark.parametrize("family", FAMILIES)
def test_seed_is_accepted_at_every_workload(family: str, verifier: Verifier, tmp_path: Path) -> None:
    evidence = verifier.verify(request(seed_file(family).read_text(), family, tmp_path, None))
    assert evidence.claims.verdict.accepted, evidence.claims.verdict.reason
    assert all(run.order_independent for run in evidence.claims.runs)
