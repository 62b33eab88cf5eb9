"""The report: what comes first, what is escaped, that figures are those of the evidence, that the page stands alone."""

from __future__ import annotations

import base64
import html.parser
import io
import re
import xml.etree.ElementTree as ElementTree

import pytest
from pulls_fixture import BROKEN, FAMILY, GOOD, META, SEED, make_evidence
from rich.console import Console

from kernelmill.agents.pulls import html as page
from kernelmill.agents.pulls import report as report_module
from kernelmill.agents.pulls import terminal
from kernelmill.agents.pulls.plots import plots
from kernelmill.agents.pulls.recheck import Recheck
from kernelmill.agents.pulls.report import MODEL_UNITS, Report, build_report
from kernelmill.agents.text import printable
from kernelmill.verify.evidence import Evidence
from kernelmill.verify.verdict import Level

EVIL = '\x1b[31m\u202e\u2066\u200b\x07"><script>alert(1)</script>[bold]{{ 7 * 7 }}'


class Tags(html.parser.HTMLParser):
    """Collects tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def make(source: str = GOOD, evidence: Evidence | None = None, **given: object) -> Report:
    arguments = {"incumbent": None, "seed": SEED, "recheck": None, "meta": META} | given
    return build_report("situ_and_mul-7f3a01", source, evidence or make_evidence(source), **arguments)  # type: ignore


def evil_report() -> Report:
    evidence = make_evidence(GOOD)
    claims = evidence.claims
    run = claims.runs[0].model_copy(update={"workload": EVIL, "spec": EVIL})
    artifact = claims.artifacts[0].model_copy(update={"spec": EVIL, "target": EVIL})
    verdict = claims.verdict.model_copy(update={"reason": EVIL, "levels": {EVIL: Level.emulated}})
    changes = {
        "runs": (run, *claims.runs[1:3]),
        "artifacts": (artifact,),
        "verdict": verdict,
        "family": EVIL,
        "targets": (EVIL, "sm_103a"),
        "candidate": EVIL,
    }
    context = evidence.context.model_copy(update={"versions": {EVIL: EVIL}, "sandbox": EVIL})
    evidence = Evidence(claims=claims.model_copy(update=changes), context=context)
    meta = META.model_copy(update={"title": EVIL, "job": EVIL, "proposer": EVIL, "how": EVIL, "base_branch": EVIL})
    return make(f"x = 1  # {EVIL}\n", evidence, meta=meta)


def in_terminal(report: Report) -> str:
    out = io.StringIO()
    terminal.show(report, Console(file=out, width=110, force_terminal=False))
    return out.getvalue()


def tags(text: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(text)
    return parser.found


def in_order(text: str, *parts: str) -> None:
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_the_level_of_every_target_comes_first_then_what_is_not_shown() -> None:
    report = make()
    for text in (page.render(report).split("<body>")[1], in_terminal(report)):
        in_order(text, "sm_103a: emulated, never executed", "sm_90a: emulated, never executed", "accepted")
        in_order(text, "accepted", "Real hardware", "Weak memory", "T (rows", "against tolerance", "ounters on sm_103a")
        in_order(text, "ounters on sm_103a", "VECTOR", "proposer", "kernelmill pulls verify situ_and_mul-7f3a01")
        assert MODEL_UNITS in text


def test_a_target_without_level_and_an_executed_one_are_told_apart() -> None:
    evidence = make_evidence(GOOD)
    verdict = evidence.claims.verdict.model_copy(update={"levels": {"sm_90a": Level.executed}})
    claims = evidence.claims.model_copy(update={"verdict": verdict})
    report = make(GOOD, evidence.model_copy(update={"claims": claims}))
    assert [level.text for level in report.levels] == [
        "sm_103a: no level, never executed",
        "sm_100a: no level, never executed",
        "sm_90a: executed",
    ]


def test_the_page_has_no_scripts_and_fetches_nothing() -> None:
    text = page.render(make())
    found = tags(text)
    names = {name for name, _ in found}
    assert not names & {"script", "iframe", "object", "embed", "link", "form", "base", "svg", "a"}
    assert next(a["content"] for n, a in found if n == "meta" and "content" in a) == (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    )
    # The policy only holds for what follows it.
    assert text.index("Content-Security-Policy") < text.index("<style>")
    images = [a["src"] for n, a in found if n == "img"]
    assert images and all(src and src.startswith("data:image/svg+xml;base64,") for src in images)
    assert not any(key.startswith("on") for _, attributes in found for key in attributes)
    assert "http://" not in text and "https://" not in text and "url(" not in text


def test_hostile_text_is_shown_and_does_nothing() -> None:
    report = evil_report()
    text, shown = page.render(report), in_terminal(report)
    honest = {name for name, _ in tags(page.render(make()))}
    assert {name for name, _ in tags(text)} <= honest
    for output in (text, shown):
        assert not set(output) & set("\x1b\x07\u202e\u2066\u200b")
        assert r"\u202e" in output and r"\u001b" in output and "{{ 7 * 7 }}" in output
    assert "&lt;script&gt;" in text and "<script>" in shown and "[bold]" in shown


def test_hostile_text_in_plots_stays_text() -> None:
    for plot in plots(evil_report()):
        if plot.uri:
            svg = base64.b64decode(plot.uri.partition(",")[2]).decode()
            root = ElementTree.fromstring(svg)
            assert not any(e.tag.endswith(("script", "foreignObject", "image", "}a")) for e in root.iter())
            assert not set(svg) & set("\x1b\x07\u202e\u2066\u200b")


def test_mathematics_in_a_name_is_not_evaluated() -> None:
    evidence = make_evidence(GOOD)
    comparisons = (evidence.claims.runs[0].comparisons[0].model_copy(update={"output": "$\\frac{$"}),)
    runs = [r.model_copy(update={"spec": "$\\bad{$", "comparisons": comparisons}) for r in evidence.claims.runs[:2]]
    claims = evidence.claims.model_copy(update={"runs": (*runs, *evidence.claims.runs[2:4])})
    assert plots(make(GOOD, evidence.model_copy(update={"claims": claims})))


def test_errors_are_the_worst_over_targets_and_seeds() -> None:
    evidence = make_evidence(GOOD, (0, 1))
    runs = list(evidence.claims.runs)
    at = next(i for i, r in enumerate(runs) if r.target == "sm_90a" and r.seed == 1)
    worse = runs[at].comparisons[0].model_copy(update={"element_share": 1.7, "passed": False})
    runs[at] = runs[at].model_copy(update={"comparisons": (worse,)})
    claims = evidence.claims.model_copy(update={"runs": tuple(runs)})
    report = make(GOOD, evidence.model_copy(update={"claims": claims}))
    rows = [e for e in report.errors if e.share == 1.7]
    assert [(e.spec, e.workload) for e in rows] == [(runs[at].spec, runs[at].workload)]
    assert len(report.errors) == len({(r.spec, r.workload) for r in runs})
    assert "1.7 of limit" in page.render(report) and "1.7 " in in_terminal(report)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_told(value: float) -> None:
    evidence = make_evidence(GOOD)
    run = evidence.claims.runs[0]
    bad = run.comparisons[0].model_copy(update={"element_share": value, "max_error": value, "passed": False})
    runs = (run.model_copy(update={"comparisons": (bad,)}), *evidence.claims.runs[1:])
    claims = evidence.claims.model_copy(update={"runs": runs})
    text = page.render(make(GOOD, evidence.model_copy(update={"claims": claims})))
    assert "inf of limit" in text
    first = plots(make(GOOD, evidence.model_copy(update={"claims": claims})))[0]
    assert "not finite" in base64.b64decode(first.uri.partition(",")[2]).decode()


def test_counters_and_resources_stand_beside_the_merged_kernels() -> None:
    report = make(evidence=make_evidence(GOOD, cost=0.5), incumbent=(SEED, make_evidence(SEED)), seed=None)
    row, old = report.counters[0], report.old_counters[0]
    assert (row.spec, row.workload) == (old.spec, old.workload) and row.model_cost == old.model_cost / 2
    text = page.render(report)
    assert f'{row.model_cost:,.0f} <span class="less">({old.model_cost:,.0f})</span>' in re.sub(r"\s+", " ", text)
    by_title = {p.title: p for p in plots(report)}
    number = len(report.counters)
    assert by_title[f"Model cost ({MODEL_UNITS})"].text == (
        f"Against the merged kernel: smaller in {number}, equal in 0 of {number} workloads."
    )
    issued = by_title["Warp instructions issued"]
    assert issued.uri == "" and issued.text == f"Equal to the merged kernel's in all {number} workloads."
    assert "Shared-memory cycles" not in by_title


def test_sizes_that_were_not_run_are_named() -> None:
    report = make()
    assert any(
        line.startswith("T (rows") and "legal from 1 to 8192, ran only at: 1-3, 8, 33, 64" in line
        for line in report.uncovered
    ), report.uncovered
    # Every width that is legal in its spec was run; those of the other specs are not legal in it.
    assert len(report.uncovered) == 1
    evidence = make_evidence(GOOD)
    kept = tuple(r for r in evidence.claims.runs if "T8" not in r.workload)
    claims = evidence.claims.model_copy(update={"runs": kept})
    fewer = make(GOOD, evidence.model_copy(update={"claims": claims}))
    assert fewer.uncovered[0].startswith("Not every workload was run: ")


def test_ranges() -> None:
    assert report_module._ranges([0, 1, 3, 4, 5, 6, 9]) == "0, 1, 3-6, 9"
    assert report_module._by_values({"a": {1, 2}, "b": {1, 2}}) == "1, 2"
    assert report_module._by_values({"a": {1}, "b": {2}, "c": {1}, "d": set()}) == "1 in a, c; 2 in b"


def test_diff_is_against_the_seed_then_the_merged_kernel() -> None:
    report = make()
    assert report.against == "the seed"
    assert [(d.sign, d.old, d.new, d.text) for d in report.diff if d.sign != " "] == [
        ("-", 1, None, "VECTOR = 8"),
        ("+", None, 1, "VECTOR = 16"),
    ]
    text = page.render(report)
    assert '<span class="mi">16</span>' in text and '<span class="mi">8</span>' in text
    assert make(incumbent=(GOOD, make_evidence(GOOD))).diff == ()
    assert {d.sign for d in make(seed=None).diff} == {"+"}


def test_a_string_over_several_lines_is_coloured_line_by_line() -> None:
    source = 'x = """one\n<two>\nthree"""\n'
    rows = page._coloured(source)
    assert len(rows) == 4 and "&lt;two&gt;" in rows[1] and str(rows[1]).count("<span") == str(rows[1]).count("</span>")


def test_long_sources_are_cut_and_not_compared() -> None:
    source = "x = 1\n" * 6000
    report = make(source, make_evidence(source))
    assert len(report.diff) == report_module.MAX_DIFF_LINES + 1 and "cut here" in report.diff[-1].text
    assert len(page.render(report)) < 2_000_000


def test_a_refused_one_says_so_at_the_top() -> None:
    evidence = make_evidence(BROKEN)
    recheck = Recheck(
        base="c" * 40,
        evidence=evidence,
        secret_seed=77,
        problems=("rejected: emulate.mismatch: out differs",),
        notes=("not compared: x",),
        compared=0,
    )
    report = make(BROKEN, evidence, recheck=recheck)
    for text in (page.render(report).split("<body>")[1], in_terminal(report)):
        in_order(text, "emulate.mismatch", "emedy: ", "secret input seed 77", "ust not be merged", "Real hardware")
    assert "No workload was run" in page.render(report)


def test_an_unknown_family_and_no_runs_are_no_crash() -> None:
    evidence = make_evidence(BROKEN)
    claims = evidence.claims.model_copy(update={"family": "gone", "targets": ("sm_1",)})
    report = make(BROKEN, evidence.model_copy(update={"claims": claims}), seed=None)
    assert "does not know the family" in report.uncovered[0]
    assert "no known target" in page.render(report) and "no known target" in in_terminal(report)


def test_the_same_report_gives_the_same_page() -> None:
    assert page.render(make()) == page.render(make())


def test_printable_is_what_the_report_relies_on() -> None:
    assert printable("a\u202eb\x1b\n") == "a\\u202eb\\u001b "
    assert FAMILY in make().family
