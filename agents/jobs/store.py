"""The job store: one SQLite file with an append-only event log and the texts that its events name.

A text (a candidate's source, an attempt's evidence) goes in with the event that names it, in one transaction: a kill at
any moment leaves both or neither. ``synchronous=FULL``: what was stored survives a power failure too.
"""

from __future__ import annotations

import json
import re
import secrets
import sqlite3
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from kernelmill.agents.jobs.model import EVENT, Created, Event, Job, Record, replay, sha256
from kernelmill.verify.verdict import MachineFailure

SCHEMA = 1
"""``user_version`` of the file; a newer one is refused."""

APPLICATION = 0x6B6D696C
"""``application_id`` of the file ("kmil"): another program's database is refused."""

MAX_TEXT_BYTES = 256 * 1024 * 1024
"""Bound on one stored text, so that a corrupt row cannot fill the memory."""

TABLES = """
CREATE TABLE IF NOT EXISTS events (
    job TEXT NOT NULL, seq INTEGER NOT NULL, time TEXT NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL,
    PRIMARY KEY (job, seq)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS texts (sha TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS events_stay BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER IF NOT EXISTS events_remain BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'append-only'); END;
"""


class Store:
    """The jobs of one checkout, in ``folder/jobs.sqlite``. Safe with several threads and processes.

    Every method raises MachineFailure, with one line, when the file cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "jobs.sqlite"
        self._lock = threading.RLock()
        with self._failures():
            self._db = sqlite3.connect(self.path, timeout=30, isolation_level=None, check_same_thread=False)
            self._open()

    def _open(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        (application,) = self._db.execute("PRAGMA application_id").fetchone()
        (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version > SCHEMA:
            raise MachineFailure(
                f"{self.path} has schema {version}, written by a newer kernelmill; this one knows {SCHEMA}: upgrade it"
            )
        if tables and (application != APPLICATION or version < 1):
            raise MachineFailure(f"{self.path} is no job store of kernelmill; move it away to start a new one")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        if not tables:
            stamp = f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {SCHEMA};"
            self._db.executescript(f"BEGIN IMMEDIATE; {TABLES} {stamp} COMMIT;")

    @contextmanager
    def _failures(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except sqlite3.DatabaseError as error:
                raise MachineFailure(
                    f"job store {self.path}: {error}; move the file away to start a new one"
                ) from error
            except OSError as error:
                raise MachineFailure(f"job store {self.path}: {error.strerror}") from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._failures():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def create(self, created: Created) -> str:
        """Start a job's log. Returns its id: the family and four hex digits."""
        while True:
            job = f"{created.settings.family}-{secrets.token_hex(2)}"
            with self._transaction() as db:
                if db.execute("SELECT 1 FROM events WHERE job = ?", (job,)).fetchone() is None:
                    self._insert(db, job, created)
                    return job

    def append(self, job: str, event: Event, texts: Iterable[str] = ()) -> Record:
        """Store an event and the texts that it names, all or nothing."""
        packed = [(sha256(t), _pack(t)) for t in texts]
        with self._transaction() as db:
            db.executemany("INSERT OR IGNORE INTO texts VALUES (?, ?)", packed)
            return self._insert(db, job, event)

    def _insert(self, db: sqlite3.Connection, job: str, event: Event) -> Record:
        (seq,) = db.execute("SELECT coalesce(max(seq) + 1, 0) FROM events WHERE job = ?", (job,)).fetchone()
        now = datetime.now(UTC)
        data = json.dumps(event.model_dump(mode="json"))
        db.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", (job, seq, now.isoformat(), event.kind, data))
        return Record(seq, now, event)

    def records(self, job: str, after: int = -1) -> list[Record]:
        """The events of a job that follow ``after``, in order."""
        with self._failures():
            rows = self._db.execute(
                "SELECT seq, time, data FROM events WHERE job = ? AND seq > ? ORDER BY seq", (job, after)
            ).fetchall()
        try:
            return [Record(seq, datetime.fromisoformat(time), EVENT.validate_json(data)) for seq, time, data in rows]
        except (ValidationError, ValueError, TypeError) as error:
            first = str(error).splitlines()[0]
            raise MachineFailure(f"job store {self.path}: job {job} has an unreadable event ({first})") from None

    def load(self, job: str) -> Job:
        """The state of a job that exists (see :meth:`ids`)."""
        records = self.records(job)
        try:
            return replay(job, records)
        except ValueError as error:
            raise MachineFailure(f"job store {self.path}: {error}") from None

    def ids(self) -> list[str]:
        """Every job, the newest first."""
        with self._failures():
            rows = self._db.execute("SELECT job FROM events WHERE seq = 0 ORDER BY time DESC").fetchall()
        return [job for (job,) in rows]

    def text(self, sha: str) -> str:
        """A stored text; checked against its hash."""
        with self._failures():
            row = self._db.execute("SELECT data FROM texts WHERE sha = ?", (sha,)).fetchone()
        text = _unpack(row[0]) if row else None
        if text is None or sha256(text) != sha:
            raise MachineFailure(f"job store {self.path}: text {sha[:12]} is missing or damaged")
        return text

    def texts(self, shas: Iterable[str]) -> Mapping[str, str]:
        return {sha: self.text(sha) for sha in set(shas)}


def _pack(text: str) -> bytes:
    return zlib.compress(text.encode("utf-8", errors="surrogateescape"), level=6)


def _unpack(data: bytes) -> str | None:
    try:
        return zlib.decompressobj().decompress(data, MAX_TEXT_BYTES).decode("utf-8", errors="surrogateescape")
    except (zlib.error, TypeError):
        return None


JOB_ID = re.compile(r"[a-z0-9_]+-[0-9a-f]{4}")
"""The form of a job id; checked before one becomes part of a path."""
