"""Owns what each agent's last run was isolated by, on disk, so that a change of it is seen; decides nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from reconciler import durable

if TYPE_CHECKING:
    from pathlib import Path

    from reconciler.core.policy import BackendName, Isolation

FILE = "isolation.json"


class LastIsolations:
    """The file of one host. Its calls are short, and are not given to threads: two runs must not lose each other's."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE

    def of(self, agent: str) -> str | None:
        """Say what isolated the agent's last run, as BACKEND/ISOLATION; None before its first."""
        return self._read().get(agent)

    def note(self, agent: str, by: str) -> None:
        """Remember it.

        Raises:
            OSError: it cannot be written.
        """
        known = self._read()
        if known.get(agent) != by:
            durable.replace(self._path, json.dumps({**known, agent: by}, sort_keys=True).encode())

    def _read(self) -> dict[str, str]:
        try:
            value = json.loads(self._path.read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return {str(name): str(by) for name, by in value.items()} if isinstance(value, dict) else {}


def told(backend: BackendName, isolation: Isolation) -> str:
    """Spell what isolates a run."""
    return f"{backend.value}/{isolation.value}"
