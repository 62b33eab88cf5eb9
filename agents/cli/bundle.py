"""``kernelmill bundle``: artifacts and a runner in one folder, for a machine with a GPU and little else."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kernelmill.agents.cli.errors import REJECTED, MachineTrouble, UsageFailure
from kernelmill.agents.cli.verify import read_source
from kernelmill.agents.paths import lib_folder, store_folder
from kernelmill.agents.text import printable
from kernelmill.specs.registry import UnknownName, family, find, workloads
from kernelmill.specs.schema import Family, Spec
from kernelmill.verify.execute.bundle import MAX_BYTES, Built, BundleError, check_place, pack
from kernelmill.verify.execute.select import Choice, build_choice, guess_family
from kernelmill.verify.execute.store import remember
from kernelmill.verify.run import TARGETS, Verifier
from kernelmill.verify.verdict import REMEDIES, MachineFailure, Rejected

EPILOG = """
\b
Examples:
  kernelmill bundle agents/seeds/attn_res.py agents/seeds/situ_and_mul.py -o gpu
  kernelmill bundle my.py --schedules 12 --workloads T1_P8,T8_P8,T64_P8 -o gpu
  kernelmill bundle my.py --spec attn_res.delta_norm --schedules all -o gpu

\b
Then, on the machine with the GPU (Python 3.11, torch, numpy and cuda-bindings; nothing of kernelmill):
  python gpu/run.py --out results
and back here:
  kernelmill evidence import results

\b
Exit status: 0 packed, 1 a candidate was rejected, 2 usage, 3 the machine or we could not do it.
"""


class ScheduleCount(click.ParamType):
    """A number of schedules, or ``all``."""

    name = "N|all"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value == "all":
            return 1 << 30
        if str(value).isdecimal() and int(str(value)) > 0:
            return int(str(value))
        return self.fail(f"{value!r} is neither a positive number nor 'all'", param, ctx)


@click.command(epilog=EPILOG)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="CANDIDATE.py...")
@click.option("--spec", "spec_names", multiple=True, help="A family or spec, repeatable; default: what the files fit.")
@click.option("--schedules", type=ScheduleCount(), help="So many schedules of each, or all; default: its SCHEDULES.")
@click.option("--arch", "target", default="sm_90a", show_default=True, help="The GPU's architecture.")
@click.option("--workloads", "workload_names", help="Names, with commas between; default: all of the specs'.")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="The folder to make.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def bundle(
    files: tuple[Path, ...],
    spec_names: tuple[str, ...],
    schedules: int | None,
    target: str,
    workload_names: str | None,
    out: Path,
    as_json: bool,
) -> None:
    """Build candidates and pack them with a runner, to execute and time them on another machine."""
    try:
        check_place(out)
        if target not in TARGETS:
            raise UnknownName("target", target, TARGETS)
        specs = tuple(s for name in spec_names for s in find(name))
        names = tuple(workload_names.split(",")) if workload_names else None
        choices = [_choice(file, specs, target, schedules) for file in files]
        chosen = _with_workloads(choices, names)
        built, skipped = _build(chosen, quiet=as_json)
        manifest = pack(built, out)
        name = remember(store_folder(), out, built)
    except (UnknownName, BundleError) as error:
        raise UsageFailure(str(error)) from None
    except MachineFailure as error:
        raise MachineTrouble(str(error)) from None
    size = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    runs = sum(len(b.unit.workloads) for b in built)
    if as_json:
        data = {"out": str(out), "manifest": name, "bytes": size, "artifacts": list(manifest.artifacts)}
        click.echo(json.dumps(data | {"runs": runs, "skipped": skipped}, indent=1))
        return
    for line in skipped:
        click.echo(f"left out: {printable(line)}", err=True)
    click.echo(
        f"{out}: {len(manifest.artifacts)} artifacts, {runs} workload runs, {size / 2**20:.1f} MiB "
        f"of at most {MAX_BYTES >> 20}"
    )
    click.echo(
        "next: copy it to the GPU, there `python run.py --out results`, then `kernelmill evidence import results`"
    )


def _choice(file: Path, specs: tuple[Spec, ...], target: str, schedules: int | None) -> Choice:
    source = read_source(file)
    made_for = _family(file, source, specs)
    own = tuple(s for s in specs if s.family == made_for.name) or made_for.specs
    return Choice(file.name, source, made_for, own, (target,), None, schedules)


def _family(file: Path, source: str, specs: tuple[Spec, ...]) -> Family:
    named = {s.family for s in specs}
    if len(named) == 1:
        return family(named.pop())
    fitting = [f for f in guess_family(source) if not named or f.name in named]
    if len(fitting) != 1:
        what = " and ".join(f.name for f in fitting) or "no family"
        raise UsageFailure(f"{file} fits {what}; say which with --spec, or see `kernelmill verify {file} --spec NAME`")
    return fitting[0]


def _with_workloads(choices: list[Choice], names: tuple[str, ...] | None) -> list[Choice]:
    """The names shared out: each must be known to some candidate's specs, and each candidate must have one."""
    if names is None:
        return choices
    workloads([s for c in choices for s in c.specs], names)
    made = []
    for c in choices:
        known = {w.name for s in c.specs for w in s.workloads}
        own = tuple(n for n in names if n in known)
        if not own:
            raise UsageFailure(f"{c.name}: its specs have none of the workloads {', '.join(names)}")
        made.append(Choice(c.name, c.source, c.family, c.specs, c.targets, own, c.schedules))
    return made


def _build(choices: list[Choice], quiet: bool) -> tuple[list[Built], list[str]]:
    built: dict[tuple[str, str], Built] = {}
    skipped: list[str] = []
    with Verifier() as verifier:
        for choice in choices:
            count = 0

            def tell(_: str) -> None:
                nonlocal count
                count += 1
                if not quiet and count % 10 == 0:
                    click.echo(f"{choice.name}: {count} built", err=True)  # noqa: B023

            try:
                made, left = build_choice(choice, verifier, lib_folder(), store_folder() / "cache", 2, tell)
            except Rejected as error:
                click.echo(f"{choice.name}: {error.code}  {printable(error.reason)}", err=True)
                click.echo(f"  remedy: {REMEDIES[error.code]}", err=True)
                raise SystemExit(REJECTED) from None
            for b in made:
                built.setdefault(b.key, b)
            skipped += [f"{choice.name}: {line}" for line in left]
    return list(built.values()), skipped
