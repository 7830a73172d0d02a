"""Owns the config pipeline: reads, has a pass evaluated and applies it, keeps to the clock while that takes long."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from loguru import logger

from reconciler.core.load import Problem
from reconciler.core.policy import InForce, in_force
from reconciler.core.trust import Trust, TrustBroken
from reconciler.evaluate import Evaluated, evaluate
from reconciler.reason import Verifier, read_trust
from reconciler.snapshot import Bounds, NotSettled, Snapshot, take

if TYPE_CHECKING:
    from reconciler.clock import Clock
    from reconciler.host import Host
    from reconciler.journal import Journal
    from reconciler.state import State, StateFile

SETTLE_S = 5.0
"""How long a pass waits for a directory to come to rest."""
_MEANWHILE_S = 0.2
"""How long the trust directory may take to come to rest while a pass is under way: then the last one counts on."""
_BATCH = 1000
"""Rows that are written at once: the first pass over a large estate has tens of thousands."""


class ConfigPass:
    """Runs passes for a daemon: reads both directories at rest, evaluates and applies, and remembers the last."""

    def __init__(self, host: Host, state: State, file: StateFile, journal: Journal, clock: Clock) -> None:
        self._host = host
        self._state = state
        self._file = file
        self._journal = journal
        self._clock = clock
        self._verifier = Verifier()
        self._turn = anyio.Lock()  # whoever writes rows or the state; a long list of rows is written in many turns
        self._last: Evaluated | None = None
        self._known: Evaluated | None = None
        self.overdue = False
        """Whether something should have been taken out of force and was not, because the pass could not be applied."""

    @property
    def in_force(self) -> InForce | None:
        """What is in force; None before any policy was ever accepted. Before the first pass: as it was stored."""
        state = self._state
        if state.memory.in_force is None or not state.revision:
            return None
        if self._last is not None:
            return self._last.in_force
        return in_force(state.memory.in_force, state.memory.last, revision=state.revision, generation=state.generation)

    @property
    def last(self) -> Evaluated | None:
        """The last pass that was applied."""
        return self._last

    async def run(self) -> Evaluated:
        """Do one whole pass.

        Raises:
            JournalFailed: nothing was applied, because its audit rows could not be written.
            OSError: nothing was applied, because the state could not be stored.
        """
        base = self._state
        evaluated = await anyio.to_thread.run_sync(self._evaluate)
        while not await self._apply(evaluated, base):
            # Something lapsed meanwhile: what was found is judged anew by what is in force and trusted since.
            base = self._state
            evaluated = await anyio.to_thread.run_sync(self._once_more, evaluated)
        return evaluated

    async def keep_time(self) -> bool:
        """Take out of force what expired or was revoked while a pass is under way; say whether anything had to be done.

        Goes by the policy directory as the last pass saw it, and by the trust directory as it is, where that can be
        read at once. Admits nothing that was not admitted before.

        Raises:
            JournalFailed: nothing was applied, because its audit rows could not be written.
            OSError: nothing was applied, because the state could not be stored.
        """
        base, last = self._state, self._last
        if last is None:
            return False
        trust = await self._trust_now() or last.trust
        if trust == last.trust and (last.expiry is None or self._clock.now() < last.expiry):
            return False
        verifier = self._verifier.knowing()
        evaluated = await anyio.to_thread.run_sync(lambda: self._over(last.snapshot, trust, self._known, verifier))
        with anyio.CancelScope(shield=True):  # rows without the state would be written again
            return await self._apply(evaluated, base)
        raise AssertionError("unreachable: nothing above swallows what it raises")

    async def _trust_now(self) -> Trust | None:
        """Read the trust directory; None where that takes too long, or does not give signers."""
        with anyio.move_on_after(2 * _MEANWHILE_S):
            read = lambda: trust_of(self._host, deadline=_MEANWHILE_S)  # noqa: E731
            found = await anyio.to_thread.run_sync(read, abandon_on_cancel=True)
            return found if isinstance(found, Trust) else None
        return None

    async def _apply(self, evaluated: Evaluated, base: State) -> bool:
        """Make one pass true: first its audit rows, then the state. The caller then tells live proxies.

        False, and nothing was made true, when `base`, which it goes by, is not what is in force any more. Then, and cut
        off between the two or between two batches of rows, the next pass decides the same again, and writes the same
        rows again.
        """
        self.overdue = any(not change.weakening for change in evaluated.outcome.changes)
        rows = iter(evaluated.events)
        while batch := tuple(itertools.islice(rows, _BATCH)):
            async with self._turn:
                if self._state is not base:
                    return False
                await self._journal.append(*batch)
        async with self._turn:
            if self._state is not base:
                return False
            if evaluated.stale:
                await anyio.to_thread.run_sync(self._file.save, evaluated.state)
            self._take_over(evaluated)
            self.overdue = False
        return True

    def _take_over(self, evaluated: Evaluated) -> None:
        # What is not stored is equal to what is; the time that was seen counts from when it was stored.
        last_seen = evaluated.state.last_seen if evaluated.stale else self._state.last_seen
        self._state = dataclasses.replace(evaluated.state, last_seen=last_seen)
        self._last = evaluated
        if evaluated.desired.empty and self._known is not None:
            # Nothing was read: what was before is still what the next pass compares files with.
            read = self._known
            self._known = dataclasses.replace(evaluated, desired=read.desired, admissions=read.admissions)
        else:
            self._known = evaluated

    def _evaluate(self) -> Evaluated:
        """Evaluate what is there; over nothing where that breaks, for then too all that ended has to go."""
        trust = trust_of(self._host)
        try:
            return self._over(snapshot_of(self._host), trust, self._known)
        except Exception as error:  # noqa: BLE001 - no content of a directory may keep an expired grant in force
            logger.opt(exception=error).error("the policy directory could not be evaluated")
            message = f"{self._host.policy} could not be evaluated ({type(error).__name__}): the log says where"
            return self._over(NotSettled("failed", message), trust, self._known)

    def _once_more(self, found: Evaluated) -> Evaluated:
        return self._over(found.snapshot, trust_of(self._host), found)

    def _over(
        self,
        snapshot: Snapshot | NotSettled,
        trust: Trust | TrustBroken,
        previous: Evaluated | None,
        verifier: Verifier | None = None,
    ) -> Evaluated:
        return evaluate(
            snapshot,
            trust,
            self._state,
            now=self._clock.now(),
            host=self._host,
            verifier=verifier or self._verifier,
            previous=previous,
        )


def snapshot_of(host: Host) -> Snapshot | NotSettled:
    """Read the policy directory of a host, at rest. Blocks."""
    bounds = Bounds(files=host.max_files, bytes=host.max_bytes)
    return take(host.policy, owner=host.policy_owner, bounds=bounds, deadline=SETTLE_S)


def trust_of(host: Host, *, deadline: float = SETTLE_S) -> Trust | TrustBroken:
    """Read the trust directory of a host, at rest; broken where anything keeps it from being read in time. Blocks."""

    def broken(message: str) -> TrustBroken:
        return TrustBroken(problems=(Problem(str(host.trust), 1, 1, "", message),))

    try:
        if Path(os.path.realpath(host.trust)).is_relative_to(os.path.realpath(host.policy)):
            # Whoever may commit policy would choose the signers.
            return broken("lies in the policy directory: move it out, and name it as `trust` in host.yaml")
        return read_trust(host.trust, deadline=deadline)
    except Exception as error:  # noqa: BLE001 - nobody's signature is admitted, and the pass goes on without
        logger.opt(exception=error).error("the trust directory could not be read")
        return broken(f"could not be read ({type(error).__name__}): the log says where")
