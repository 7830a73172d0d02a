"""Owns one claimed job on disk: how far it has come, its result, and handing that over; does not claim, judge or run.

`claimed/<run>/` holds `<submitter>/<file>` (the job file, read once), `.record.json` (state and the result so far,
from the intent on), `.reserve` (room for the result) and, for a moment, `.result/`, which becomes
`done/<submitter>/<job>/` by one rename. Only root can reach any of it until that rename.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from reconciler import durable
from reconciler.core.job import RUN_ID, TRANSITIONS, Delivered, RefusalCode, Refused, State, check_delivery, stem_of
from reconciler.core.request import MAX_BYTES
from reconciler.submitter import Submitter, account, make_own

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

RESERVE = 512 * 1024
"""Bytes set aside at the claim for a result, so that a full disk does not cost a job its result."""
_LEASE_S = 1.0
RECORD = ".record.json"
RESULT = ".result"
_RESERVE = ".reserve"
_LIVE = ".live"
# No user name starts with a dot, so none of these is ever a submitter's directory.
_UNPRINTABLE = re.compile(r"[^a-zA-Z0-9._-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One claimed job. Its submitter alone may read its result; `claimed` is when, as text."""

    root: Path
    run: str
    submitter: Submitter
    name: bytes
    claimed: str
    state: State = State.CLAIMED
    quarantine: bool = False
    """Whether what was delivered is kept for the operator to look at, instead of being removed at the end."""
    result: Mapping[str, object] | None = None

    @property
    def directory(self) -> Path:
        """Where everything of this claim is."""
        return self.root / "claimed" / self.run

    @property
    def file(self) -> Path:
        """The claimed job file."""
        return self.directory / self.submitter.name / os.fsdecode(self.name)

    @property
    def stem(self) -> str | None:
        """The job's name, or None when the file's name is not one of a job file."""
        return stem_of(os.fsdecode(self.name))

    @property
    def job(self) -> str:
        """What the job is called in its result and in audit rows: its stem, else the run id."""
        return self.stem or self.run

    @property
    def shown(self) -> str:
        """The file's name for messages, with whatever a name should not hold replaced."""
        return _UNPRINTABLE.sub("?", os.fsdecode(self.name))[:120]

    @classmethod
    def make(cls, root: Path, *, run: str, submitter: Submitter, name: bytes, claimed: str) -> Self:
        """Make the directory that a file is about to be claimed into, with room for its result.

        Raises:
            OSError: there is no room, or the spool cannot be written.
        """
        claim = cls(root=root, run=run, submitter=submitter, name=name, claimed=claimed)
        claim.directory.mkdir(mode=0o700)
        try:
            claim.file.parent.mkdir(mode=0o700)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(claim.directory / _RESERVE, flags, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, RESERVE)
            finally:
                os.close(descriptor)
            durable.sync(claim.directory)
            durable.sync(claim.directory.parent)
        except OSError:
            shutil.rmtree(claim.directory, ignore_errors=True)
            raise
        return claim

    @classmethod
    def read(cls, root: Path, run: str) -> Self | None:
        """The claim that an earlier daemon left in `claimed/<run>`; None when there is nothing of a job in it."""
        directory = root / "claimed" / run
        if not RUN_ID.fullmatch(run) or not directory.is_dir():
            return None
        try:
            record = json.loads((directory / RECORD).read_bytes())
            return cls(
                root=root,
                run=run,
                submitter=Submitter(record["submitter"], record["uid"], record["gid"]),
                name=bytes.fromhex(record["name"]),
                claimed=record["claimed"],
                state=State(record["state"]),
                quarantine=record["quarantine"],
                result=record["result"],
            )
        except FileNotFoundError:
            state = State.CLAIMED
        except (ValueError, KeyError, TypeError):
            state = State.INTENT  # a record is there and cannot be read: assume the worst, never run it again
        for owner in (entry for entry in directory.iterdir() if not entry.name.startswith(".")):
            for file in owner.iterdir():
                submitter = account(owner.name) or Submitter(owner.name, 0, 0)
                name = os.fsencode(file.name)
                return cls(root=root, run=run, submitter=submitter, name=name, claimed="", state=state)
        shutil.rmtree(directory)
        return None

    def read_once(self) -> bytes | Refused:
        """The bytes of the job file. No submitter can reach its name here, so what is checked is what is read.

        Raises:
            OSError: the spool cannot be read.
        """
        if self.stem is None:
            return Refused(RefusalCode.BAD_NAME, "name the job file [a-z0-9][a-z0-9._-]*.yaml, at most 100 characters")
        facts = self.file.lstat()
        refused = check_delivery(
            Delivered(
                directory=self.submitter.name,
                directory_uid=self.submitter.uid,
                regular=stat.S_ISREG(facts.st_mode),
                owner_uid=facts.st_uid,
                links=facts.st_nlink,
            )
        )
        if refused is not None:
            return refused
        descriptor = _open(self.file)
        if descriptor is None:
            return Refused(
                RefusalCode.BAD_JOB, "is under a lease (fcntl F_SETLEASE): give that up before delivering it"
            )
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            return Refused(RefusalCode.BAD_JOB, f"is larger than {MAX_BYTES // 1024} KiB")
        return data

    def stem_used(self) -> bool:
        """Whether a job of this submitter has or had this stem: its result is there, or its run is."""
        if os.path.lexists(self.root / "done" / self.submitter.name / self.job):
            return True
        for other in self.directory.parent.iterdir():
            if other.name != self.run and (other / self.submitter.name).is_dir():
                names = (file.name for file in (other / self.submitter.name).iterdir())
                if any(stem_of(name) == self.stem for name in names):
                    return True
        return False

    def record(self, state: State, result: Mapping[str, object], *, quarantine: bool | None = None) -> Self:
        """Put the next state on disk, and the result so far; gives the claim as it now is.

        Raises:
            OSError: it is not on disk.
            ValueError: the state does not follow the one before.
        """
        if state is not self.state and state not in TRANSITIONS[self.state]:
            raise ValueError(f"{state} does not follow {self.state}")
        kept = self.quarantine if quarantine is None else quarantine
        value = {
            "submitter": self.submitter.name,
            "uid": self.submitter.uid,
            "gid": self.submitter.gid,
            "name": self.name.hex(),
            "claimed": self.claimed,
            "state": state.value,
            "quarantine": kept,
            "result": result,
        }
        durable.replace(self.directory / RECORD, json.dumps(value, sort_keys=True).encode())
        return replace(self, state=state, result=result, quarantine=kept)

    def keep_live(self, files: Mapping[str, tuple[int, int]]) -> None:
        """Remember which files are the run's live ones: what is read back is what was made, whatever has their names.

        Raises:
            OSError: it is not on disk.
        """
        durable.write(self.directory / _LIVE, json.dumps(files).encode())

    def live_files(self) -> dict[str, tuple[int, int]]:
        """Give device and inode of each live file that the run had, by name."""
        try:
            found = json.loads((self.directory / _LIVE).read_bytes())
            return {name: (device, inode) for name, (device, inode) in found.items()}
        except (FileNotFoundError, ValueError):
            return {}

    def report(
        self, result: Mapping[str, object], *, output: bytes, decisions: bytes, quarantine: bool = False
    ) -> Self:
        """Write the result whole, say on disk that it is, and hand it over: a crash anywhere leaves exactly one.

        Raises:
            OSError: the spool cannot be written.
        """
        staged = self.directory / RESULT
        shutil.rmtree(staged, ignore_errors=True)
        (self.directory / _RESERVE).unlink(missing_ok=True)
        staged.mkdir(mode=0o700)
        text = json.dumps(result, sort_keys=True, indent=1).encode() + b"\n"
        for name, data in (("result.json", text), ("output.log", output), ("decisions.jsonl", decisions)):
            durable.write(staged / name, data, mode=0o400)
            os.chown(staged / name, self.submitter.uid, self.submitter.gid)
        os.chown(staged, self.submitter.uid, self.submitter.gid)
        durable.sync(staged)
        after = self.record(State.REPORTED, result, quarantine=quarantine)
        after.hand_over()
        return after

    def hand_over(self) -> None:
        """Move a whole result to `done/<submitter>/<job>`, or `<job>.<run>` where that is taken. Idempotent.

        Raises:
            OSError: the spool cannot be written.
        """
        if not (self.directory / RESULT).exists():
            return
        done = self.root / "done"
        make_own(done, self.submitter)
        source = os.open(self.directory, durable.DIRECTORY)
        try:
            target = os.open(done / self.submitter.name, durable.DIRECTORY)
            try:
                # The directory is its submitter's, who may have put anything there: replace nothing, follow nothing.
                name, attempt = self.job, 0
                while not _move(RESULT, name, source_fd=source, target_fd=target):
                    attempt += 1
                    name = f"{self.job}.{self.run}" + (f".{attempt}" if attempt > 1 else "")
                os.fsync(target)
            finally:
                os.close(target)
            os.fsync(source)
        finally:
            os.close(source)

    def forget(self) -> None:
        """Remove what is left of the claim; what is in quarantine moves there. Its result must have been handed over.

        A tree that was delivered as a job is never walked: it may be deep or large without end, and grow meanwhile.

        Raises:
            OSError: the spool cannot be written.
        """
        if (self.quarantine or _is_directory(self.file)) and self.file.parent.exists():
            self.file.parent.rename(self.root / "quarantine" / self.run)
        shutil.rmtree(self.directory)
        durable.sync(self.directory.parent)


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _open(file: Path) -> int | None:
    """Open a claimed job file; None when a lease of its owner's keeps it closed, which is waited for only shortly."""
    until = time.monotonic() + _LEASE_S
    while True:
        try:
            return os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except BlockingIOError:
            if time.monotonic() > until:
                return None
            time.sleep(_LEASE_S / 10)


def _move(source: str, target: str, *, source_fd: int, target_fd: int) -> bool:
    try:
        durable.rename_new(source, target, source_fd=source_fd, target_fd=target_fd)
    except FileExistsError:
        return False
    return True
