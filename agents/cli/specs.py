"""``kernelmill specs``: what can be built, and whether each spec is worth testing against."""

from __future__ import annotations

import inspect
import json
from typing import Any

import click
import torch
from rich.table import Table

from kernelmill.agents.cli.console import wide_console
from kernelmill.agents.cli.errors import REJECTED, UsageFailure
from kernelmill.specs.hardware import HARDWARE, bound_seconds, target_seconds
from kernelmill.specs.lint import FamilyLint
from kernelmill.specs.lint import lint as lint_family
from kernelmill.specs.registry import UnknownName, families, family, find
from kernelmill.specs.schema import Family, Spec, TensorSpec, Workload

"""Columns of a table that no terminal bounds."""


@click.group()
def specs() -> None:
    """List, show and lint specs."""


@specs.command("list", epilog="\b\nExample:\n  kernelmill specs list")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def list_(as_json: bool) -> None:
    """List every family and its specs."""
    if as_json:
        rows = [
            {
                "family": f.name,
                "spec": s.name,
                "title": s.title,
                "stage": s.stage,
                "id": s.id,
                "workloads": len(s.workloads),
            }
            for f in families().values()
            for s in f.specs
        ]
        click.echo(json.dumps(rows, indent=1))
        return
    table = Table("spec", "stage", "workloads", "what", box=None)
    for f in families().values():
        for s in f.specs:
            table.add_row(s.name, s.stage, str(len(s.workloads)), s.title)
    wide_console().print(table)


@specs.command(epilog="\b\nExamples:\n  kernelmill specs show attn_res\n  kernelmill specs show attn_res.delta_norm")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def show(name: str, as_json: bool) -> None:
    """Show a spec, or all of a family: formula, tensors, workloads, bound and target time."""
    found = _find(name)
    if as_json:
        click.echo(json.dumps([_as_data(s) for s in found], indent=1))
        return
    console = wide_console()
    fam = family(found[0].family)
    console.print(f"[bold]{fam.name}[/]  ({found[0].stage})", highlight=False)
    console.print(found[0].formula, markup=False, highlight=False, soft_wrap=True)
    console.print("\n[bold]candidate[/]: one file of this form", highlight=False)
    console.print(_form(fam), markup=False, highlight=False, soft_wrap=True)
    console.print(_tensor_table(fam.tensors, found))
    if fam.params:
        params = Table("compile-time parameter", "kind", "meaning", box=None)
        for p in fam.params:
            params.add_row(p.name, p.kind, p.doc)
        console.print(params)
    console.print(inspect.getdoc(fam.functions.generate), markup=False, highlight=False, soft_wrap=True)
    for spec in found:
        console.print(f"\n[bold]{spec.name}[/]: {spec.title}", highlight=False)
        fixed = [f"{name} = {value}" for name, value in spec.flags.items()]
        absent = [f"{t.name} = None" for t in fam.tensors if t.name not in {s.name for s in spec.tensors}]
        if fixed or absent:
            console.print(f"  here: {', '.join(fixed + absent)}", markup=False, highlight=False)
        for axis in spec.axes:
            legal = ", ".join(map(str, axis.values)) or f"{axis.minimum}..{axis.maximum}"
            console.print(f"  {axis.name} ({axis.kind}): {axis.doc}; {legal}", markup=False, highlight=False)
        console.print(f"  neighbours: {'; '.join(spec.neighbours)}", markup=False, highlight=False)
        console.print(_workload_table(spec))


@specs.command(epilog="\b\nExamples:\n  kernelmill specs lint\n  kernelmill specs lint attn_res --json")
@click.argument("names", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def lint(names: tuple[str, ...], as_json: bool) -> None:
    """Prove that trivial outputs and wrong references fail. Exit 1 when one survives."""
    torch.set_num_threads(1)  # The tensors are small; on a busy machine threads that wait for each other cost minutes.
    chosen = dict.fromkeys(s.family for n in names for s in _find(n)) or families()
    reports = []
    for name in chosen:
        if not as_json:
            click.echo(f"linting {name} ...", err=True)
        reports.append(lint_family(family(name)))
    if as_json:
        click.echo(json.dumps([r.model_dump(mode="json") | {"passed": r.passed} for r in reports], indent=1))
    else:
        _show_lint(reports)
    raise SystemExit(0 if all(r.passed for r in reports) else REJECTED)


def _find(name: str) -> tuple[Spec, ...]:
    try:
        return find(name)
    except UnknownName as error:
        raise UsageFailure(str(error)) from None


def _show_lint(reports: list[FamilyLint]) -> None:
    console = wide_console()
    table = Table("family", "specs", "workloads", "trivial", "mutants", "killed", "result", box=None)
    for r in reports:
        killed = sum(1 for kills in r.kills.values() if kills)
        result = "[green]ok[/]" if r.passed else "[red]FAILED[/]"
        cells = (r.specs, r.workloads, r.trivial, r.mutants, f"{killed} of {len(r.kills)}")
        table.add_row(r.family, *map(str, cells), result)
    console.print(table)
    for r in reports:
        for name in r.survivors:
            console.print(f"{r.family}: survived: {name}; add a workload that tells it apart, or tighten", markup=False)
        for problem in r.problems:
            console.print(f"{r.family}: {problem}", markup=False)


def _form(fam: Family) -> str:
    """What a candidate must define, as source text."""
    always = set.intersection(*({t.name for t in s.tensors} for s in fam.specs))
    types = {t.name: "cute.Tensor" + ("" if t.name in always else " | None") for t in fam.tensors}
    types |= {name: "cutlass.Constexpr" for name in fam.signature if name not in types} | {"stream": "cuda.CUstream"}
    dynamic = fam.specs[0].dynamic_axes[0]
    return "\n".join(
        (
            "  import cutlass, cutlass.cute as cute, cuda.bindings.driver as cuda",
            "  from dataclasses import dataclass",
            "  from typing import Literal",
            "",
            "  @dataclass(frozen=True)",
            "  class Schedule:                       # compile-time choices: integers, booleans, words",
            "      threads: Literal[128, 256] = 128",
            "",
            f"  SCHEDULES = (                         # rows (first {dynamic.name}, last {dynamic.name}, choices)",
            f"      ({dynamic.minimum}, 8, Schedule(threads=128)),",
            f"      (9, {dynamic.maximum}, Schedule(threads=256)),",
            "  )",
            "",
            "  @cute.jit",
            "  def launch(",
            *(f"      {name}: {types[name]}," for name in fam.signature),
            "  ): ...",
            "",
        )
    )


def _tensor_table(tensors: tuple[TensorSpec, ...], found: tuple[Spec, ...]) -> Table:
    table = Table("tensor", "role", "dtype", "shape", "compared", "meaning", box=None)
    for t in tensors:
        rule = t.rule.kind if t.rule else ""
        strides = f" (rows may be strided, each {t.alignment}-byte aligned)" if t.strided else ""
        absent = (
            "" if all(t.name in {x.name for x in s.tensors} for s in found) else "; None where the variant lacks it"
        )
        dtypes = " or ".join(dict.fromkeys(x.dtype for s in found for x in s.tensors if x.name == t.name))
        table.add_row(t.name, t.role, dtypes, "x".join(map(str, t.shape)) + strides, rule, t.doc + absent)
    return table


def _times(spec: Spec, workload: Workload) -> dict[str, tuple[float, float]]:
    cost = family(spec.family).functions.cost(spec, spec.point(workload.axes))
    return {n: (bound_seconds(cost, h) * 1e6, target_seconds(cost, h) * 1e6) for n, h in HARDWARE.items()}


def _workload_table(spec: Spec) -> Table:
    table = Table("workload", "values", "launches/step", *(f"{n} bound / target us" for n in HARDWARE), box=None)
    for w in spec.workloads:
        times = (f"{bound:.2f} / {target:.2f}" for bound, target in _times(spec, w).values())
        table.add_row(w.name, w.values, f"{w.weight:g}", *times)
    return table


def _as_data(spec: Spec) -> dict[str, Any]:
    times = {
        w.name: {n: {"bound_us": b, "target_us": t} for n, (b, t) in _times(spec, w).items()} for w in spec.workloads
    }
    return {
        "name": spec.name,
        "id": spec.id,
        **spec.model_dump(mode="json"),
        "signature": family(spec.family).signature,
        "times": times,
    }
