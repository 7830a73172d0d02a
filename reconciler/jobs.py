"""Owns the job side of the daemon: which job is claimed when, what becomes of it, and which runs are alive."""

from __future__ import annotations

import secrets
from collections import Counter
from typing import TYPE_CHECKING

import anyio
from loguru import logger

from reconciler import settle
from reconciler.core.choose import choose
from reconciler.core.job import ROOT, Cancel, RefusalCode, Refused, State, admit
from reconciler.core.request import read
from reconciler.core.result import MESSAGES, ResultCode
from reconciler.probes import Probes
from reconciler.quota import beyond
from reconciler.run import Run
from reconciler.spool import in_turn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from anyio.abc import TaskGroup

    from reconciler.backends.base import Backend
    from reconciler.claim import Claim
    from reconciler.core.choose import Chosen, Probe
    from reconciler.core.job import Admitted, Job
    from reconciler.core.policy import BackendName, InForce
    from reconciler.prepare import Door
    from reconciler.shell import Shell
    from reconciler.spool import Spool, Waiting

LOOK_INTERVAL = 0.2
"""Seconds between two looks at the spool: a look lists a handful of directories, and no event can be lost."""
_PARALLEL_WITHOUT_POLICY = 4
_REAP_INTERVAL = 60.0
_REFUSED_A_LOOK = 20
"""Jobs beyond their quota that one look has refused: the rest wait, and no flood of them keeps others waiting."""
_LOOK_WHEN_FULL = 2.0
"""Seconds between two looks while no job could be claimed anyway."""
_MOST_NEIGHBOURS = 8


class Jobs:
    """Everything that is alive on the job side. `serve` runs until `stop`, and then until every run has ended."""

    def __init__(self, shell: Shell, spool: Spool, backends: Mapping[BackendName, Backend]) -> None:
        self.runs: dict[str, Run] = {}
        """Live runs by id."""
        self.probes = Probes(shell, backends.values())
        self.in_force: InForce | None = None
        self.waiting = 0
        self.trouble = ""
        """Why nothing is claimed, or what else an operator should see to; empty when all is well."""
        self.unknown: tuple[str, ...] = ()
        """Submitters that policy names and that are no users of this host."""
        self.stopping = False
        self._shell, self._spool, self._backends = shell, spool, backends
        self._busy: dict[str, str] = {}  # by run id the submitter of each claim that is under way
        self._turn = 0
        self._served: dict[str, int] = {}  # by submitter the turn in which a job was last claimed
        self._wake = anyio.Event()
        self._looked = -_LOOK_WHEN_FULL
        self._upkeep = anyio.Lock()
        # Held while backends are probed or reaped. A reaper goes by a list of live runs that was made before: a canary
        # run is not on it, nor is a run that is launched meanwhile.

    def follow(self, in_force: InForce) -> None:
        """Take over what is in force now, for jobs to come and for live runs."""
        self.in_force = in_force
        for run in self.runs.values():
            run.follow(in_force)
        named = {name for effective in in_force.agents.values() for name in effective.agent.submitters}
        try:
            self.unknown = self._spool.prepare({ROOT, *named})
        except OSError as error:
            # Whoever has a directory goes on; for the others the next pass tries again.
            logger.error("directories of submitters cannot be made: {}", error)
        self._wake.set()

    def stop(self) -> None:
        """Claim nothing more; let live runs end within the host's stop_timeout, then stop them."""
        self.stopping = True
        self._wake.set()

    def end_runs(self, code: ResultCode) -> None:
        """End every live run."""
        for run in self.runs.values():
            run.stop(code)

    async def recover(self) -> None:
        """Bring everything that no live run carries to its end: objects of backends, then claims.

        Raises:
            OSError: the spool cannot be read.
        """
        async with self._upkeep:
            await settle.reap(self._shell, self._backends.values(), frozenset(self._busy))
        before = frozenset(self._busy)
        names = await anyio.to_thread.run_sync(self._spool.claims)
        # What was alive before or after this look may have come or gone during it, and is not for us to touch.
        left = [name for name in names if name not in before and name not in self._busy]
        await settle.recover(self._shell, self._spool, left)

    async def keep_clean(self) -> None:
        """Recover every minute, and remove what is beyond what is kept, for ever."""
        while True:
            await anyio.sleep(_REAP_INTERVAL)
            try:
                await self.recover()
                live = frozenset((run.claim.submitter.name, run.claim.job) for run in self.runs.values())
                await settle.tidy(self._shell, self._spool, live)
            except OSError as error:
                logger.error("the spool cannot be read: {}", error.strerror)

    async def serve(self) -> None:
        """Claim jobs and carry their runs, until stopped and done."""
        self._spool.prepare({ROOT})
        async with anyio.create_task_group() as tasks:
            while not self.stopping:
                await self._look(tasks)
                with anyio.move_on_after(LOOK_INTERVAL):
                    await self._wake.wait()
                self._wake = anyio.Event()
            with anyio.move_on_after(self._shell.host.stop_timeout):
                await self._idle()
            self.end_runs(ResultCode.STOPPING)

    async def _idle(self) -> None:
        while self._busy:
            await self._wake.wait()
            self._wake = anyio.Event()

    async def _look(self, tasks: TaskGroup) -> None:
        now = anyio.current_time()
        if len(self._busy) >= self._parallel() and now - self._looked < _LOOK_WHEN_FULL:
            return
        self._looked = now
        try:
            found = await anyio.to_thread.run_sync(self._spool.waiting)
            self.waiting = len(found)
            self.trouble = await self._obstacle() if found else ""
            if self.trouble:
                return
            found = await self._refuse_beyond(found, tasks)
            if len(self._busy) >= self._parallel():
                await self._hurry(found, tasks)
                return
            passed: set[str] = set()
            for waiting in in_turn(found, running=Counter(self._busy.values()), served=self._served):
                if len(self._busy) >= self._parallel() or self.stopping:
                    return
                if waiting.submitter.name in passed:
                    continue  # its names come and go, or cannot be had: one try costs others enough
                if not await self._claim(waiting, tasks):
                    passed.add(waiting.submitter.name)
        except OSError as error:
            self.trouble = f"the spool cannot be used: {error.strerror}"

    async def _refuse_beyond(self, found: Iterable[Waiting], tasks: TaskGroup) -> tuple[Waiting, ...]:
        """Have some of what is beyond quota or depth refused; gives what may wait. A refusal needs no slot."""
        keep = self._shell.host.keep
        running = Counter(self._busy.values())
        waiting, over = beyond(found, running=running, quota=keep.quota, depth=keep.depth)
        for one, refused in over[:_REFUSED_A_LOOK]:
            # A cancel makes room: it is never beyond.
            await self._claim(one, tasks, None if await self._is_cancel(one) else refused)
        return waiting

    async def _hurry(self, found: Iterable[Waiting], tasks: TaskGroup) -> None:
        """Claim the cancels among what waits: they need no slot, and may be what frees one."""
        for waiting in found:
            if await self._is_cancel(waiting):
                await self._claim(waiting, tasks)

    async def _is_cancel(self, waiting: Waiting) -> bool:
        """Say what it looks like now: a hint, for what is claimed is read again, once, and that counts."""
        return isinstance(read(await anyio.to_thread.run_sync(self._spool.peek, waiting)), Cancel)

    async def _claim(self, waiting: Waiting, tasks: TaskGroup, refused: Refused | None = None) -> bool:
        """Claim one job and carry it, or with `refused` have it refused; False when it was not to be had."""
        run = f"{self._shell.clock.now():%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
        self._busy[run] = waiting.submitter.name
        if refused is None:
            self._turn += 1
            self._served[waiting.submitter.name] = self._turn
        try:
            claim = await anyio.to_thread.run_sync(self._spool.claim, waiting, run, self._shell.now())
        except BaseException:
            self._busy.pop(run)
            raise
        self.waiting -= 1
        if claim is None:
            self._busy.pop(run)
            return False
        tasks.start_soon(self._carry, claim, refused)
        return True

    def _parallel(self) -> int:
        return _PARALLEL_WITHOUT_POLICY if self.in_force is None else self.in_force.platform.max_parallel_runs

    async def _obstacle(self) -> str:
        """Say why nothing may be claimed now."""
        failing = await self._shell.audit.failing()
        if failing is not None:
            return f"nothing is launched: {failing}"
        return await anyio.to_thread.run_sync(self._spool.room) or ""

    async def _carry(self, claim: Claim, refused: Refused | None) -> None:
        try:
            await self._settle(claim, refused)
        except OSError as error:
            # What is on disk is whole: the next look for what is left behind takes it from there.
            logger.bind(run=claim.run).error("the spool cannot be written: {}", error.strerror)
        except Exception as error:  # noqa: BLE001 - one job must not take the daemon along, and come back to do it again
            logger.bind(run=claim.run).opt(exception=error).error("job {} failed", claim.run)
            await self._fail(claim)
        finally:
            self.runs.pop(claim.run, None)
            self._busy.pop(claim.run, None)
            self._wake.set()

    async def _fail(self, claim: Claim) -> None:
        """Give a job that broke its result, unless it has one: then the next look for what is left behind ends it."""
        run = self.runs.get(claim.run)
        if run is not None and run.claim.state is State.REPORTED:
            return
        try:
            await settle.refuse(self._shell, claim, Refused(RefusalCode.FAILED, MESSAGES[ResultCode.FAILED]))
        except OSError as error:
            logger.bind(run=claim.run).error("the spool cannot be written: {}", error.strerror)

    async def _settle(self, claim: Claim, refused: Refused | None) -> None:
        request = await anyio.to_thread.run_sync(self._read, claim) if refused is None else refused
        match request:
            case Refused():
                await settle.refuse(self._shell, claim, request)
            case Cancel():
                await self._cancel(claim, request)
            case _:
                decided = await self._decide(claim, request)
                if isinstance(decided, Refused):
                    await settle.refuse(self._shell, claim, decided)
                else:
                    admitted, chosen = decided
                    await self._run(claim, admitted, chosen)

    def _read(self, claim: Claim) -> Job | Cancel | Refused:
        data = claim.read_once()
        if isinstance(data, Refused):
            return data
        if claim.stem_used():
            message = f"a job called {claim.job} was here before: give each job a name of its own"
            return Refused(RefusalCode.STEM_USED, message)
        return read(data)

    async def _cancel(self, claim: Claim, cancel: Cancel) -> None:
        run = self.runs.get(cancel.run)
        # Whose run it is stays unsaid: what is not one's own does not exist.
        if run is None or run.claim.submitter != claim.submitter:
            message = f"{claim.submitter.name} has no live run with this id"
            await settle.refuse(self._shell, claim, Refused(RefusalCode.UNKNOWN_RUN, message))
            return
        run.stop(ResultCode.CANCELLED)
        await settle.cancel_sent(self._shell, claim, cancel.run)

    async def _decide(self, claim: Claim, job: Job) -> tuple[Admitted, Chosen] | Refused:
        """Ask policy, then the host. Nothing is probed for a job that policy refuses."""
        required = self._shell.host.required_egress
        while True:
            in_force = self.in_force
            admitted = admit(job, submitter=claim.submitter.name, in_force=in_force, required_egress=required)
            if isinstance(admitted, Refused):
                return admitted
            probes = await self.probe()
            # A probe takes its time, and policy may have changed meanwhile: then all is asked again.
            if in_force is not None and in_force is self.in_force:
                chosen = choose(in_force.platform, admitted.effective.agent, probes)
                return chosen if isinstance(chosen, Refused) else (admitted, chosen)

    async def _run(self, claim: Claim, admitted: Admitted, chosen: Chosen) -> None:
        if self.stopping or len(self._busy) > self._parallel():
            # Nothing was decided on disk: the next daemon runs it, or we do when there is a slot again.
            await anyio.to_thread.run_sync(self._spool.give_back, claim)
            return
        run = self.runs[claim.run] = Run(
            claim=claim,
            admitted=admitted,
            chosen=chosen,
            backend=self._backends[chosen.backend],
            shell=self._shell,
            neighbours=self._doors,
        )
        if self.in_force is not None:
            run.follow(self.in_force)
        async with self._upkeep:
            pass
        await run.execute()

    def _doors(self) -> tuple[Door, ...]:
        """Give the proxies of live runs that a new sandbox's gate tries: it has no need of a thousand of them."""
        return tuple(run.door for run in self.runs.values() if run.door is not None)[-_MOST_NEIGHBOURS:]

    async def probe(self) -> Mapping[BackendName, Probe]:
        """Say what this host has, probing what is due. No run is launched and nothing reaped meanwhile."""
        async with self._upkeep:
            return await self.probes.look()
