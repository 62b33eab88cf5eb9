"""What may be on a pull request's branch, and reading it: all of it is hostile input.

A valid branch is one commit on top of its base that adds or replaces, as regular files, only::

    kernels/ops/<family>/kernel.py
    kernels/ops/<family>/evidence/evidence.json    the recorded evidence
    kernels/ops/<family>/evidence/pull.json        PullMeta
    kernels/ops/<family>/evidence/report.html      never opened by us
"""

from __future__ import annotations

import hashlib
import re

import git
from pydantic import ValidationError

from kernelmill.agents.pulls import gitio
from kernelmill.agents.pulls.model import FORMAT, PullMeta
from kernelmill.agents.text import printable
from kernelmill.specs.data import Frozen
from kernelmill.verify.audit import MAX_SOURCE_BYTES
from kernelmill.verify.evidence import FORMAT as EVIDENCE_FORMAT
from kernelmill.verify.evidence import Evidence

ID = re.compile(r"([a-z][a-z0-9_]{0,39})-([0-9a-f]{6})")

KERNEL, EVIDENCE, META, REPORT = "kernel.py", "evidence/evidence.json", "evidence/pull.json", "evidence/report.html"
LIMITS = {KERNEL: MAX_SOURCE_BYTES, EVIDENCE: 64 << 20, META: 1 << 20, REPORT: 32 << 20}
"""The files of a pull request below its family's folder, and how many bytes each may have."""

MAX_COMMIT_BYTES = 64 * 1024
MAX_CHANGES = 32
"""Changed paths that are looked at, so that one which must not be there can be named."""


class Malformed(Exception):
    """A branch is not what it should be: one printable line."""


class Contents(Frozen):
    """A well-formed branch: where it starts, the candidate and what is claimed of how it was made."""

    base: str
    source: str
    meta: PullMeta


def folder(family: str) -> str:
    return f"kernels/ops/{family}"


def pull_id(family: str, source: str) -> str:
    return f"{family}-{hashlib.sha256(source.encode()).hexdigest()[:6]}"


def read(repo: git.Repo, name: str, commit: str) -> Contents:
    """Check a branch's form and read it. Raises Malformed."""
    match = ID.fullmatch(name)
    if match is None:
        raise Malformed("the name is not <family>-<6 hex digits>")
    family = match[1]
    base = _check_tree(repo, family, commit)
    source = _text(repo, commit, family, KERNEL)
    if pull_id(family, source) != name:
        raise Malformed(f"kernel.py has another hash: it would be {pull_id(family, source)}")
    try:
        meta = PullMeta.model_validate_json(_text(repo, commit, family, META))
    except ValidationError as error:
        raise Malformed(f"pull.json: {_first(error)}") from None
    if meta.format != FORMAT:
        raise Malformed(f"pull.json has format {meta.format}; this version reads {FORMAT}")
    if meta.base_commit != base:
        raise Malformed("pull.json names another base commit than the branch has")
    return Contents(base=base, source=source, meta=meta)


def read_evidence(repo: git.Repo, family: str, commit: str) -> Evidence:
    """The evidence beside a kernel. From a branch it is a claim only. Raises Malformed."""
    try:
        evidence = Evidence.model_validate_json(_text(repo, commit, family, EVIDENCE))
    except ValidationError as error:
        raise Malformed(f"evidence.json: {_first(error)}") from None
    if evidence.format != EVIDENCE_FORMAT:
        raise Malformed(f"evidence.json has format {evidence.format}; this version reads {EVIDENCE_FORMAT}")
    return evidence


def _check_tree(repo: git.Repo, family: str, commit: str) -> str:
    """The base commit of a branch whose changes are as they may be."""
    if gitio.kind_and_size(repo, commit)[1] > MAX_COMMIT_BYTES:
        raise Malformed("the commit message is too long")
    parents = gitio.parents(repo, commit)
    if len(parents) != 1:
        raise Malformed(f"the commit has {len(parents)} parents; one, the base, is expected")
    changes = gitio.changes(repo, parents[0], commit, MAX_CHANGES)
    if changes is None:
        raise Malformed(f"changes more than {MAX_CHANGES} files; a pull request has {len(LIMITS)}")
    allowed = {f"{folder(family)}/{name}".encode(): limit for name, limit in LIMITS.items()}
    for change in changes:
        path = printable(change.path.decode(errors="backslashreplace"))[:200]
        if change.path not in allowed:
            raise Malformed(f"{path} is not a file of a pull request of {family}")
        if change.mode != "100644" or change.status not in "AM":
            raise Malformed(f"{path} is not a regular file (mode {change.mode}, status {change.status})")
        try:
            size = gitio.kind_and_size(repo, change.blob)[1]
        except ValueError:
            raise Malformed(f"{path}: its content is missing from the repository") from None
        if size > allowed[change.path]:
            raise Malformed(f"{path} has {size} bytes, at most {allowed[change.path]} allowed")
    return parents[0]


def _text(repo: git.Repo, commit: str, family: str, name: str) -> str:
    try:
        data = gitio.read_file(repo, commit, f"{folder(family)}/{name}", LIMITS[name])
    except ValueError as error:
        raise Malformed(f"{name}: {error}") from None
    if data is None:
        raise Malformed(f"{name} is missing")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise Malformed(f"{name} is not UTF-8") from None


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return printable(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")[:300]
