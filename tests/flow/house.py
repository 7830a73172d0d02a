"""Owns a daemon's job side in a temporary directory: real spool, real audit log, real runs, fake backend."""

from __future__ import annotations

import json
import os
import pwd
import stat
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from proxy.entry import Entry, parse
from reconciler.clock import SystemClock
from reconciler.core.policy import (
    Agent,
    BackendChoice,
    BackendName,
    Effective,
    InForce,
    Isolation,
    Layer,
    Limits,
    Platform,
)
from reconciler.host import Host, Keep
from reconciler.jobs import Jobs
from reconciler.journal import Journal
from reconciler.journal_files import LOG
from reconciler.shell import Shell
from reconciler.spool import Spool
from reconciler.trail import AuditLog
from tests.flow.fake_backend import FakeBackend, nothing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from pathlib import Path

SUBMITTER = "nobody"
OWNER = "house-00000000"


def entries(*texts: str) -> tuple[Entry, ...]:
    """Entries from their texts."""
    found = []
    for text in texts:
        entry = parse(text)
        assert isinstance(entry, Entry)
        found.append(entry)
    return tuple(found)


def limits(**changes: Any) -> Limits:
    """Limits of an agent."""
    values = {"cpus": 1.0, "memory": 2**28, "pids": 64, "timeout": 60, "output": 4096, "connections": 16}
    return Limits(**{**values, **changes})


def agent(**changes: Any) -> Agent:
    """An agent's document."""
    values: dict[str, Any] = {
        "name": "helper",
        "description": "",
        "image": "host",
        "minimum_isolation": Isolation.NAMESPACE,
        "user": 65534,
        "allow": entries("api.vendor.com"),
        "deny": (),
        "submitters": (SUBMITTER,),
        "env_allow": ("INVOICE_ID",),
        "limits": limits(),
    }
    return Agent(**{**values, **changes})


def platform(**changes: Any) -> Platform:
    """The platform's document."""
    values: dict[str, Any] = {
        "enabled": True,
        "backend": BackendChoice.AUTO,
        "require_runtime_class": False,
        "max_parallel_runs": 4,
        "tolerate_icmp": False,
    }
    return Platform(**{**values, **changes})


def layer(name: str) -> Layer:
    """An organisation layer that allows everything public."""
    return Layer(name=name, default_allow=True, allow=(), deny=(), deny_ranges=())


def in_force(*effectives: Effective, generation: int = 1, **changes: Any) -> InForce:
    """What is in force: one agent `helper`, unless others are named."""
    found = effectives or (Effective(agent=agent(), layers=()),)
    return InForce(
        revision=f"sha256:{generation:064x}",
        generation=generation,
        platform=platform(**changes),
        agents={one.agent.name: one for one in found},
    )


def job(*actions: str, agent: str = "helper", **fields: object) -> bytes:
    """The bytes of a job file."""
    return json.dumps({"version": 1, "kind": "job", "agent": agent, "command": ["do", *actions], **fields}).encode()


@dataclass(slots=True)
class House:
    """One set of directories, and daemons that come and go in it."""

    root: Path
    hook: Callable[[str, str], None] = nothing
    options: Mapping[str, Any] = field(default_factory=dict)
    required_egress: tuple[str, ...] = ()
    keep: Keep = field(default_factory=Keep)

    def __post_init__(self) -> None:
        """Make the directories that a package would have made."""
        self.root.chmod(0o755)
        for name in ("world", "state", "runtime"):
            (self.root / name).mkdir(exist_ok=True)
        (self.root / "runtime" / "runs").mkdir(exist_ok=True)

    @property
    def host(self) -> Host:
        """Settings of this host."""
        return Host(
            name="house",
            policy=self.root / "policy",
            trust=self.root / "trust",
            state=self.root / "state",
            spool=self.root / "spool",
            runtime=self.root / "runtime",
            policy_owner="root",
            proxy_user="nobody",
            resolvers=("192.0.2.53:53",),
            nat64_prefixes=(),
            required_egress=self.required_egress,
            ticket_pattern="[A-Z]+-[0-9]+",
            max_age=None,
            uid_first=2_000_000_000,
            uid_count=8,
            scan_interval=30.0,
            stop_timeout=0.5,
            python="/usr/bin/python3",
            max_files=100,
            max_bytes=65536,
            keep=self.keep,
        )

    @asynccontextmanager
    async def daemon(self, policy: InForce | None, **options: Any) -> AsyncIterator[tuple[Jobs, FakeBackend]]:
        """A daemon's job side: recovered, then serving while the context lasts, then stopped."""
        clock = SystemClock()
        journal = Journal.open(self.host.audit, clock)
        assert isinstance(journal, Journal)
        spool = Spool.open(self.host.spool)
        assert isinstance(spool, Spool)
        backend = FakeBackend(self.root / "world", OWNER, hook=self.hook, **{**self.options, **options})
        shell = Shell(host=self.host, owner=OWNER, clock=clock, audit=AuditLog(journal))
        jobs = Jobs(shell, spool, {BackendName.BUBBLEWRAP: backend})
        try:
            await jobs.recover()
            if policy is not None:
                jobs.follow(policy)
            else:
                spool.prepare([SUBMITTER])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(jobs.serve)
                try:
                    yield jobs, backend
                finally:
                    jobs.stop()
        finally:
            spool.close()
            journal.close()

    def submit(self, name: str, data: bytes, *, submitter: str = SUBMITTER) -> Path:
        """Deliver a job file by hand, as Maildir does: written in tmp/, then renamed into new/."""
        own_directory = self.host.spool / "in" / submitter
        path = own_directory / "tmp" / name
        path.write_bytes(data)
        own(path, submitter)
        return path.rename(own_directory / "new" / name)

    def result(self, stem: str, *, submitter: str = SUBMITTER) -> dict[str, Any] | None:
        """The result of a job, or None while there is none."""
        path = self.host.spool / "done" / submitter / stem / "result.json"
        try:
            value: dict[str, Any] = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        return value

    async def wait_for(self, stem: str, *, submitter: str = SUBMITTER) -> dict[str, Any]:
        """Wait for the result of a job, and until nothing of its claim is left."""
        await until(lambda: self.result(stem, submitter=submitter) is not None and not self.claimed())
        result = self.result(stem, submitter=submitter)
        assert result is not None
        return result

    def results(self) -> list[dict[str, Any]]:
        """Every result that there is."""
        return [json.loads(path.read_bytes()) for path in sorted((self.host.spool / "done").glob("*/*/result.json"))]

    def claimed(self) -> list[str]:
        """Claims that are left."""
        return sorted(path.name for path in (self.host.spool / "claimed").iterdir())

    def waiting(self, submitter: str = SUBMITTER) -> list[str]:
        """Names that wait."""
        return sorted(path.name for path in (self.host.spool / "in" / submitter / "new").iterdir())

    def leftovers(self) -> list[str]:
        """Whatever should not be there when no run is alive."""
        found = [f"world/{path.name}" for path in (self.root / "world").iterdir()]
        found += [f"runs/{path.name}" for path in (self.root / "runtime" / "runs").iterdir()]
        return found + [f"claimed/{name}" for name in self.claimed()]

    def starts(self) -> int:
        """How often a command was let go, over all daemons."""
        try:
            return len((self.root / "started").read_text().splitlines())
        except FileNotFoundError:
            return 0

    def rows(self, event: str | None = None) -> list[dict[str, Any]]:
        """Audit rows, or those of one event."""
        rows = [json.loads(line) for line in (self.host.audit / LOG).read_bytes().splitlines()]
        return [row for row in rows if event is None or row["event"] == f"agent_sandbox.{event}"]

    def every_file(self) -> list[tuple[Path, bytes]]:
        """Every regular file below the root, with its bytes."""
        files = [path for path in self.root.rglob("*") if stat.S_ISREG(path.lstat().st_mode)]
        return [(path, path.read_bytes()) for path in files]


def own(path: Path, user: str) -> None:
    """Give a file to a user."""
    os.chown(path, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid, follow_symlinks=False)


async def until(true: Callable[[], bool]) -> None:
    """Wait until something is so; 20 s at most."""
    with anyio.fail_after(20):
        while not true():  # noqa: ASYNC110 - what is waited for is on disk, and nobody sets an event for it
            await anyio.sleep(0.02)
