"""Git without surprises: no hooks, signatures, filters, replaced objects or user identity; never the user's index.

Content goes in and comes out as objects, so no attribute or filter sees it. A commit is put together in the private
index of a temporary linked worktree, and a branch moves only by a compare-and-swap of its ref: a kill at any moment
leaves at most unreferenced objects and a worktree, which the next :func:`worktree` removes.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

import git

from kernelmill.agents.pulls.model import PullError

NOTHING = "0" * 40
"""As a ref's expected value: the ref must not exist."""

_OPTIONS = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.attributesFile=/dev/null",
    "i18n.commitEncoding=utf-8",
    "gc.auto=0",
    "maintenance.auto=false",
    "merge.autoStash=false",
    "submodule.recurse=false",
)
_ENVIRONMENT = {
    "GIT_AUTHOR_NAME": "kernelmill",
    "GIT_AUTHOR_EMAIL": "kernelmill@localhost",
    "GIT_COMMITTER_NAME": "kernelmill",
    "GIT_COMMITTER_EMAIL": "kernelmill@localhost",
    "GIT_LITERAL_PATHSPECS": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
}
# What a surrounding git (a hook, an alias) sets: it would redirect every command to another repository or index.
_INHERITED = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_NAMESPACE",
    "GIT_AUTHOR_DATE",
    "GIT_COMMITTER_DATE",
)


class Change(NamedTuple):
    """One path that differs between two trees. ``mode`` and ``blob`` are the new ones; ``status`` A, M, D or T."""

    path: bytes
    mode: str
    blob: str
    status: str


def open_repo(path: Path) -> git.Repo:
    """The repository at or above ``path``. Raises PullError when there is none."""
    for name in _INHERITED:
        os.environ.pop(name, None)
    try:
        repo = git.Repo(path, search_parent_directories=True)
    except (git.InvalidGitRepositoryError, git.NoSuchPathError):
        raise PullError(f"{path} is not inside a git repository; run `git init` and commit first") from None
    _configure(repo)
    return repo


def _configure(repo: git.Repo) -> None:
    repo.git.set_persistent_git_options(c=list(_OPTIONS))
    repo.git.update_environment(**_ENVIRONMENT)


def resolve(repo: git.Repo, name: str) -> str | None:
    """The commit that ``name`` stands for, or None."""
    if name.startswith("-"):
        return None
    try:
        return str(repo.git.rev_parse("--verify", "--quiet", f"{name}^{{commit}}"))
    except git.GitCommandError:
        return None


def head_branch(repo: git.Repo) -> str | None:
    """The branch that HEAD points to (its short name), or None when HEAD is detached."""
    try:
        return str(repo.git.symbolic_ref("--quiet", "HEAD")).removeprefix("refs/heads/")
    except git.GitCommandError:
        return None


def is_ancestor(repo: git.Repo, ancestor: str, descendant: str) -> bool:
    try:
        repo.git.merge_base("--is-ancestor", ancestor, descendant)
    except git.GitCommandError:
        return False
    return True


def parents(repo: git.Repo, commit: str) -> tuple[str, ...]:
    return tuple(str(repo.git.rev_list("--parents", "-n", "1", commit)).split()[1:])


def object_at(repo: git.Repo, commit: str, path: str) -> str | None:
    """The id of the blob or tree at ``path`` in ``commit``, or None."""
    try:
        return str(repo.git.rev_parse("--verify", "--quiet", f"{commit}:{path}"))
    except git.GitCommandError:
        return None


def changes(repo: git.Repo, old: str, new: str, limit: int) -> list[Change] | None:
    """What differs between two commits' trees; None when it is more than ``limit`` paths.

    Reads no further than that, so a tree built to be endless costs nothing."""
    process = repo.git.diff_tree("-r", "-z", "--raw", "--no-renames", "--no-abbrev", old, new, as_process=True)
    stream: IO[bytes] = process.proc.stdout
    try:
        fields = stream.read(limit * 4096).split(b"\0")
    finally:
        stream.close()
        process.proc.kill()
        process.proc.wait()
    found = []
    for entry, path in zip(fields[::2], fields[1::2], strict=False):
        match = re.fullmatch(rb":\d{6} (\d{6}) [0-9a-f]+ ([0-9a-f]+) ([A-Z])", entry)
        if match is None:
            return None
        mode, blob, status = (g.decode() for g in match.groups())
        found.append(Change(path, mode, blob, status))
    return found if len(found) <= limit else None


def kind_and_size(repo: git.Repo, identity: str) -> tuple[str, int]:
    """What an object is and its size in bytes. Raises ValueError when it is missing."""
    # git's batch process answers; a name with a newline would be two questions.
    if not re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", identity):
        raise ValueError(f"{identity[:80]!r} is no object id")
    _, kind, size = repo.git.get_object_header(identity)
    return kind.decode() if isinstance(kind, bytes) else kind, size


def read_blob(repo: git.Repo, blob: str, limit: int) -> bytes:
    """A blob's bytes as stored. Raises ValueError when it is no blob or has more than ``limit`` bytes."""
    kind, size = kind_and_size(repo, blob)
    if kind != "blob":
        raise ValueError(f"a {kind} where a file is expected")
    if size > limit:
        raise ValueError(f"{size} bytes, at most {limit} allowed")
    return bytes(repo.git.get_object_data(blob)[3])


def read_file(repo: git.Repo, commit: str, path: str, limit: int) -> bytes | None:
    """The bytes of ``path`` in ``commit``, or None when there is no such path. Raises ValueError like read_blob."""
    blob = object_at(repo, commit, path)
    return None if blob is None else read_blob(repo, blob, limit)


def commit_files(repo: git.Repo, parents: Sequence[str], files: Mapping[str, bytes], message: str) -> str:
    """Make a commit: the first parent's tree with ``files`` (regular, 0644) put over it. Moves no ref."""
    with worktree(repo, parents[0]) as folder:
        work = git.Repo(folder)
        _configure(work)
        work.git.read_tree(parents[0])
        for path, data in files.items():
            work.git.update_index("--add", "--cacheinfo", f"100644,{_write_blob(work, data)},{path}")
        tree = work.git.write_tree()
        flags = [flag for parent in parents for flag in ("-p", parent)]
        commit = str(_with_input(work, "commit_tree", message.encode(), tree, *flags, "-F", "-"))
        work.close()
        return commit


def commit_record(repo: git.Repo, parent: str, message: str) -> str:
    """Make a commit with an empty tree: a note about ``parent`` that keeps it. Moves no ref."""
    tree = _with_input(repo, "hash_object", b"", "-t", "tree", "-w", "--stdin")
    return _with_input(repo, "commit_tree", message.encode(), tree, "-p", parent, "-F", "-")


def _write_blob(repo: git.Repo, data: bytes) -> str:
    # From standard input and without --path: no filter applies.
    return _with_input(repo, "hash_object", data, "-w", "--stdin")


def _with_input(repo: git.Repo, command: str, data: bytes, *arguments: str) -> str:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        return str(getattr(repo.git, command)(*arguments, istream=file))


def move_refs(repo: git.Repo, moves: Mapping[str, tuple[str, str]], reason: str) -> bool:
    """Move refs from expected old to new values (NOTHING: absent), all or none. False when one was not as expected."""
    lines = "".join(f"update {ref}\0{new}\0{old}\0" for ref, (old, new) in moves.items())
    try:
        _with_input(repo, "update_ref", lines.encode(), "-m", reason, "--stdin", "-z")
    except git.GitCommandError:
        return False
    return True


def checkouts(repo: git.Repo) -> dict[str, Path]:
    """Branch (short name) to the folder in which it is checked out."""
    found: dict[str, Path] = {}
    folder = ""
    for line in str(repo.git.worktree("list", "--porcelain")).splitlines():
        key, _, value = line.partition(" ")
        if key == "worktree":
            folder = value
        elif key == "branch":
            found[value.removeprefix("refs/heads/")] = Path(folder)
    return found


def uncommitted(folder: Path, below: str) -> list[str]:
    """Changed tracked paths of a checkout, and untracked ones below the folder ``below``."""
    work = open_repo(folder)
    try:
        tracked = work.git.status("--porcelain", "-z", "--untracked-files=no", "--ignore-submodules=none")
        untracked = work.git.ls_files("--others", "-z", "--", below)
    finally:
        work.close()
    return [entry[3:] for entry in tracked.split("\0") if entry] + [p for p in untracked.split("\0") if p]


def fast_forward(folder: Path, commit: str) -> bool:
    """Move the branch that is checked out in ``folder``, its index and its files to ``commit``: one command of git's
    that does all or nothing. False when the branch has moved or a local change would be overwritten."""
    work = open_repo(folder)
    try:
        work.git.merge("--ff-only", "--quiet", "--no-verify", commit)
    except git.GitCommandError:
        return False
    finally:
        work.close()
    return True


@contextmanager
def worktree(repo: git.Repo, commit: str) -> Iterator[Path]:
    """A temporary linked worktree at ``commit`` (detached, nothing checked out), removed afterwards.

    Its folder is called ``kernelmill``, alone in a private folder: put that on Python's path and, once
    :func:`export` filled it, it is the package. Worktrees that a killed process left are removed first."""
    home = _home(repo)
    with _locked(home / "lock", wait=True):
        _remove_abandoned(repo, home)
        private = Path(tempfile.mkdtemp(dir=home))
        owner = _locked(private / "owner", wait=True)
        owner.__enter__()
    folder = private / "kernelmill"
    try:
        repo.git.worktree("add", "--quiet", "--no-checkout", "--detach", str(folder), commit)
        yield folder
    finally:
        _remove(repo, private)
        owner.__exit__(None, None, None)


def export(repo: git.Repo, commit: str, folder: Path) -> None:
    """Write every regular file of ``commit`` below ``folder``, byte for byte as stored. Links are left out."""
    listing = str(repo.git.ls_tree("-r", "-z", "--full-tree", commit))
    for entry in filter(None, listing.split("\0")):
        description, _, path = entry.partition("\t")
        mode, _, blob = description.split()
        if mode in ("100644", "100755"):
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(repo.git.get_object_data(blob)[3])


def _home(repo: git.Repo) -> Path:
    """Where temporary worktrees are: the store of the main checkout; of a bare repository, the repository itself."""
    common = Path(repo.common_dir).resolve()
    store = common.parent / ".kernelmill" if common.name == ".git" else common / "kernelmill"
    home = store / "worktrees"
    home.mkdir(parents=True, exist_ok=True)
    ignore = store / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n")
    return home


@contextmanager
def _locked(path: Path, wait: bool) -> Iterator[None]:
    """Hold the advisory lock on a file, made when missing. Raises BlockingIOError when held elsewhere and not wait."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def _remove_abandoned(repo: git.Repo, home: Path) -> None:
    for private in home.iterdir():
        if private.is_dir():
            with suppress(BlockingIOError), _locked(private / "owner", wait=False):
                _remove(repo, private)


def _remove(repo: git.Repo, private: Path) -> None:
    # The files first: git then takes the worktree for lost and forgets it, however far an earlier removal had come.
    folder = private / "kernelmill"
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(git.GitCommandError):
        repo.git.worktree("remove", "--force", "--force", str(folder))
    shutil.rmtree(private, ignore_errors=True)
