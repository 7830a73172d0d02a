"""Owns the one file of what this host remembers, replaced whole; does not decide what is remembered."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from reconciler import durable
from reconciler.admission import Admission
from reconciler.core.memory import Memory
from reconciler.core.trust import Trust, TrustBroken, read_trust_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from reconciler.core.load import Tree

FILE = "state.json"
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """All that is remembered between passes and restarts. A new host has `State()`."""

    revision: str = ""
    """Digest of the last snapshot that was accepted; empty before the first."""
    commit: str | None = None
    generation: int = 0
    """Counts what was in force; proxies take only a newer one."""
    last_seen: datetime | None = None
    """Time never goes back behind this, whatever the clock says."""
    memory: Memory = field(default_factory=Memory)
    admissions: tuple[Admission, ...] = ()
    refused: tuple[str, ...] = ()
    """Refused reasons that an audit row tells of already, so that none is told of twice."""
    held: Mapping[str, str] = field(default_factory=dict)
    """Digest of what is held of each document."""
    trust: Trust | None = None
    """The trust files as they were last read without a flaw, to tell what a change of them widens."""
    alarm: str | None = None

    def to_json(self) -> dict[str, Tree]:
        """Give plain JSON."""
        trust = self.trust
        return {
            "version": _VERSION,
            "revision": self.revision,
            "commit": self.commit,
            "generation": self.generation,
            "last_seen": None if self.last_seen is None else self.last_seen.astimezone(UTC).isoformat(),
            "memory": self.memory.to_json(),
            "admissions": [admission.to_json() for admission in self.admissions],
            "refused": list(self.refused),
            "held": dict(self.held),
            "trust": None
            if trust is None
            else {
                "signers": trust.text.decode("utf-8"),
                "keys": sorted(trust.revoked_keys),
                "ids": sorted(trust.revoked_ids),
            },
            "alarm": self.alarm,
        }

    @classmethod
    def from_json(cls, value: Tree) -> State:
        """Read what `to_json` wrote. ValueError when it is something else."""
        try:
            if value["version"] != _VERSION:
                raise ValueError(f"has version {value['version']}, and this program reads {_VERSION}")
            last_seen = value["last_seen"]
            return cls(
                revision=str(value["revision"]),
                commit=value["commit"],
                generation=int(value["generation"]),
                last_seen=None if last_seen is None else datetime.fromisoformat(last_seen).astimezone(UTC),
                memory=Memory.from_json(value["memory"]),
                admissions=tuple(Admission.from_json(one) for one in value["admissions"]),
                refused=tuple(str(one) for one in value["refused"]),
                held={str(name): str(digest) for name, digest in value["held"].items()},
                trust=_trust(value["trust"]),
                alarm=value["alarm"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"is not one that ringfence wrote: {error!r}") from error


def _trust(value: Tree) -> Trust | None:
    if value is None:
        return None
    revoked = "".join([f"key {key}\n" for key in value["keys"]] + [f"id {name}\n" for name in value["ids"]])
    found = read_trust_files("signers", value["signers"].encode(), "revoked", revoked.encode())
    # A stricter version of this program may not like what an older one took: then there is nothing to compare with.
    return None if isinstance(found, TrustBroken) else found


@dataclass(frozen=True, slots=True)
class StateBroken:
    """The state file cannot be read. Going on without it would forget what was tightened, so nobody does."""

    message: str


class StateFile:
    """The state below a host's state directory."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE

    def load(self) -> State | StateBroken:
        """Read it; `State()` when there is none."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return State()
        except OSError as error:
            return StateBroken(f"{self.path}: {error.strerror}")
        try:
            return State.from_json(json.loads(data))
        except (ValueError, RecursionError) as error:
            advice = "restore it, or move it away: the host then starts at the floor, and signed reasons still count"
            return StateBroken(f"{self.path} {error}: {advice}")

    def save(self, state: State) -> None:
        """Replace it, durable when this returns.

        Raises:
            OSError: the old state is still there.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        durable.replace(self.path, json.dumps(state.to_json(), sort_keys=True, separators=(",", ":")).encode())
