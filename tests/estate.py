"""Owns a small estate on disk for tests of the config pipeline: policy, trust, keys and state; asserts little."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeAlias

import anyio

from reconciler.config_pass import ConfigPass
from reconciler.core.audit import Broken, Verified, verify
from reconciler.host import Host, parse_host
from reconciler.journal import Journal
from reconciler.journal_files import read
from reconciler.state import State, StateFile
from tests.signing import Key, line, make_key, trust_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from reconciler.evaluate import Evaluated

PLATFORM = "version: 1\nkind: platform\nenabled: true\nbackend: bubblewrap\n"
Grant: TypeAlias = "Mapping[str, object]"


class Hands:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.time = datetime(2026, 6, 1, 12, 0, tzinfo=UTC)

    def now(self) -> datetime:
        """Give the time that was set."""
        return self.time

    def turn(self, **by: float) -> None:
        """Move, forwards or back."""
        self.time += timedelta(**by)


def agent(name: str = "helper", allow: Iterable[str] = (), **more: str) -> str:
    """Write an agent's document."""
    fields = {"image": "host", "minimum_isolation": "namespace", "allow": json.dumps(list(allow)), **more}
    return f"version: 1\nkind: agent\nname: {name}\n" + "".join(f"{key}: {value}\n" for key, value in fields.items())


@dataclass
class Estate:
    """One host with its directories below `root`."""

    root: Path
    clock: Hands = field(default_factory=Hands)
    keys: dict[str, Key] = field(default_factory=dict)
    name: str = "prod-1"
    settings: str = ""
    made: bool = False
    """Whether an earlier process made everything below `root`."""

    @classmethod
    def at(cls, root: Path, settings: str = "") -> Estate:
        """Open an estate that an earlier process made."""
        return cls(root, settings=settings, made=True)

    def __post_init__(self) -> None:
        """Make the directories and two signers."""
        if self.made:
            self.keys = {name: Key(self.root / name) for name in ("alice", "bob")}
            self._open()
            return
        (self.root / "policy" / "agents").mkdir(parents=True)
        (self.root / "policy" / "reasons").mkdir()
        for name in ("alice", "bob"):
            self.keys[name] = make_key(self.root, name)
        self.trust("alice", "bob")
        self._open()

    @property
    def host(self) -> Host:
        """The settings."""
        text = f"version: 1\nkind: host\nname: {self.name}\npolicy: {self.root}/policy\ntrust: {self.root}/trust\n"
        found = parse_host("host.yaml", f"{text}state: {self.root}/state\n{self.settings}".encode())
        assert isinstance(found, Host), found
        return found

    def trust(self, *names: str, revoked: str = "", options: str | None = None) -> None:
        """Say who may sign."""
        lines = [line(n, self.keys[n]) if options is None else line(n, self.keys[n], options) for n in names]
        trust_directory(self.root / "trust", *lines, revoked=revoked)

    def write(self, **files: str | None) -> None:
        """Write or (None) remove documents: `platform`, or agents by name."""
        for name, text in files.items():
            path = self.root / "policy" / ("platform.yaml" if name == "platform" else f"agents/{name}.yaml")
            if text is None:
                path.unlink()
            else:
                path.write_text(text)

    def reason(self, number: int, *grants: Grant, by: Iterable[str] = ("alice",), **fields: str) -> Path:
        """Write and sign a statement; give its path."""
        whole: Mapping[str, object] = {
            "version": 1,
            "kind": "signed-reason",
            "id": f"CHG-{number}.1",
            "audience": ["prod-*"],
            "expires": "2026-12-31T00:00:00Z",
            "ticket": f"CHG-{number}",
            "reason": "helper needs it for the invoice sync",
            "grants": list(grants),
            **fields,
        }
        path = self.root / "policy" / "reasons" / f"CHG-{number}.yaml"
        path.write_text(json.dumps(whole, indent=1))
        for name in by:
            path.with_suffix(f".{name}.sig").write_bytes(self.keys[name].sign(path.read_bytes()))
        return path

    def unreason(self, number: int) -> None:
        """Remove a statement and its signatures."""
        for path in (self.root / "policy" / "reasons").glob(f"CHG-{number}.*"):
            path.unlink()

    def _open(self) -> None:
        self._file = StateFile(self.root / "state")
        state = self._file.load()
        assert isinstance(state, State), state
        journal = Journal.open(self.root / "state" / "audit", self.clock)
        assert isinstance(journal, Journal), journal
        self.journal = journal
        self.config = ConfigPass(self.host, state, self._file, journal, self.clock)

    def restart(self) -> None:
        """Stop the daemon's half, and start it anew from what is on disk."""
        self.journal.close()
        self._open()

    def run(self) -> Evaluated:
        """Do one pass."""
        return anyio.run(self.config.run)

    def allows(self, name: str = "helper") -> list[str]:
        """Say what is in force on an agent's own list."""
        in_force = self.config.in_force
        if in_force is None or name not in in_force.agents:
            return []
        return [str(entry) for entry in in_force.agents[name].agent.allow]

    def enabled(self) -> bool:
        """Say whether sandboxes are on."""
        return self.config.in_force is not None and self.config.in_force.platform.enabled

    def rows(self, event: str = "") -> list[dict[str, object]]:
        """Give the audit rows of one event (its last part), and check the chain on the way."""
        log = read(self.root / "state" / "audit")
        assert not isinstance(log, Broken)
        assert isinstance(verify(log.lines(), log.head), Verified)
        return [row for row in log.rows() if str(row["event"]).removeprefix("agent_sandbox.").startswith(event)]
