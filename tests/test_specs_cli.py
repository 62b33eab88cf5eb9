"""`kernelmill specs`: what it prints and how it exits."""

from __future__ import annotations

import ast
import importlib
import json
import textwrap

import pytest
from click.testing import CliRunner

from kernelmill.specs.lint import FamilyLint
from kernelmill.specs.registry import families
from kernelmill.specs.schema import Family
from kernelmill.verify.audit import audit
from kernelmill.verify.build.schedules import read_table

command = importlib.import_module("kernelmill.agents.cli.specs")  # the package's attribute is the click group


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(command.specs, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_list_names_every_spec() -> None:
    code, out, _ = run("list")
    assert code == 0
    names = [s.name for f in families().values() for s in f.specs]
    assert all(any(line.split()[:1] == [n] for line in out.splitlines()) for n in names)
    code, out, _ = run("list", "--json")
    assert code == 0 and [r["spec"] for r in json.loads(out)] == names


@pytest.mark.parametrize("family", families().values(), ids=lambda f: f.name)
def test_the_form_that_show_prints_passes_the_audit(family: Family) -> None:
    form = textwrap.dedent(command._form(family))
    audit(form, family)
    last = family.specs[0].dynamic_axes[0].maximum
    assert [(r.first, r.last) for r in read_table(ast.parse(form)).ranges] == [(1, 8), (9, last)]
    absent = {t.name for t in family.tensors for s in family.specs if t.name not in {x.name for x in s.tensors}}
    assert {line.split(":")[0].strip() for line in form.splitlines() if "| None" in line} == absent


def test_show_has_what_a_writer_needs() -> None:
    code, out, _ = run("show", "attn_res.delta_norm")
    assert code == 0
    for text in ("softmax_j(s)", "here: write = 0, final = 0\n", "T3_nb8_range", "GB300", "neighbours", "exact"):
        assert text in out
    code, out, _ = run("show", "situ_and_mul", "--json")
    shown = json.loads(out)
    assert code == 0 and [s["variant"] for s in shown] == ["dense", "shared", "expert"]
    assert shown[2]["signature"] == ["x", "out", "schedule", "stream"]
    # 8 rows of 768 read and 384 written, two bytes each, at 8 TB/s.
    assert shown[2]["times"]["T8_P8"]["GB300"]["bound_us"] == pytest.approx(8 * 3 * 384 * 2 / 8e6)


@pytest.mark.parametrize("verb", ["show", "lint"])
def test_an_unknown_name_is_one_line_and_status_2(verb: str) -> None:
    code, out, err = run(verb, "attn_rez")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("Error: no spec named 'attn_rez'; nearest: attn_res")


def test_lint_exits_1_when_something_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run("lint", "situ_and_mul.expert", "--json")
    (report,) = json.loads(out)
    assert code == 0 and report["passed"] and report["family"] == "situ_and_mul"

    bad = FamilyLint.model_validate({k: v for k, v in report.items() if k != "passed"} | {"survivors": ["zeros"]})
    monkeypatch.setattr(command, "lint_family", lambda family: bad)
    code, out, _ = run("lint", "situ_and_mul")
    assert code == 1
    assert "FAILED" in out and "situ_and_mul: survived: zeros" in out
