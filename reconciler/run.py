"""Owns one run from its intent to its teardown: the order of its steps, and what ends it; builds no fence itself."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from loguru import logger

from reconciler.attend import Attendance, Following, Stop
from reconciler.backends.base import ExitCode, LaunchRefused
from reconciler.core.audit import EventName
from reconciler.core.job import RefusalCode, Refused, State
from reconciler.core.result import MESSAGES, BackendUsed, Output, Refusal, Result, ResultCode, Times
from reconciler.isolation import LastIsolations, told
from reconciler.journal import JournalFailed
from reconciler.live import Live
from reconciler.live_files import forget
from reconciler.prepare import LAUNCH_BUDGET, ProxySettings, door_of, expiry, launch_of, read_secrets, resolvers_of
from reconciler.trail import Trail

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reconciler.backends.base import Backend, Exit, Launch, Sandbox
    from reconciler.claim import Claim
    from reconciler.core.choose import Chosen
    from reconciler.core.job import Admitted
    from reconciler.core.policy import InForce
    from reconciler.prepare import Door
    from reconciler.shell import Shell

RESOLV_CONF = Path("/etc/resolv.conf")
_DRAIN_BUDGET = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """How a run ended, before it is a result."""

    code: ResultCode
    exit: Exit | None = None
    refused: Refused | None = None
    message: str = ""


_CODES = {
    ExitCode.EXITED: ResultCode.EXITED,
    ExitCode.TIMEOUT: ResultCode.TIMEOUT,
    ExitCode.OOM: ResultCode.OOM,
    ExitCode.NOT_FOUND: ResultCode.COMMAND_NOT_FOUND,
    ExitCode.NOT_EXECUTABLE: ResultCode.COMMAND_NOT_EXECUTABLE,
    ExitCode.SANDBOX_CRASHED: ResultCode.SANDBOX_CRASHED,
    ExitCode.PROXY_DIED: ResultCode.PROXY_DIED,
}


class Run:
    """One run. `execute` carries it; `stop` and `follow` may be called at any time meanwhile and return at once."""

    def __init__(
        self,
        *,
        claim: Claim,
        admitted: Admitted,
        chosen: Chosen,
        backend: Backend,
        shell: Shell,
        neighbours: Callable[[], Sequence[Door]],
    ) -> None:
        """Take over what was decided; `neighbours` gives the doors of other live runs when this one is launched."""
        agent = admitted.effective.agent
        self.claim = claim
        self.door: Door | None = None
        """Where its proxy is, once its gate has found it there."""
        self.agent = agent.name
        self.backend = backend
        self._admitted = admitted
        self._effective = admitted.effective
        self._shell = shell
        self._neighbours = neighbours
        self._trail = Trail(shell.audit, claim, agent=agent.name, revision=admitted.revision)
        self._stop = Stop()
        self._following = Following(agent.name, self._effective, admitted.generation, shell.host.required_egress)
        self._launching: anyio.CancelScope | None = None
        self._live: Live | None = None
        self._recording = anyio.Lock()
        self._result = Result(
            run=claim.run,
            job=claim.job,
            submitter=claim.submitter.name,
            code=ResultCode.INTERRUPTED,
            message=MESSAGES[ResultCode.INTERRUPTED],
            agent=agent.name,
            revision=admitted.revision,
            generations=(admitted.generation,),
            reasons=admitted.effective.reasons,
            backend=BackendUsed(
                name=chosen.backend, isolation=chosen.isolation, versions=dict(chosen.versions), why=chosen.why
            ),
            image=agent.image,
            times=Times(claimed=claim.claimed),
        )

    def stop(self, code: ResultCode) -> None:
        """End the run, whatever it is doing. The first code counts."""
        self._stop.ask(code)
        if self._launching is not None:
            self._launching.cancel()

    def follow(self, in_force: InForce) -> None:
        """Take over newer policy."""
        self._following.want(in_force)

    @property
    def generation(self) -> int:
        """Give the newest generation of policy that holds for this run."""
        return self._following.generation

    async def execute(self) -> None:
        """Carry the run to its result and its teardown.

        Whatever breaks in between ends in a result with code `failed`. When not even that can be written, or when
        this is cancelled, what is on disk is what a later look at it recovers from.

        Raises:
            OSError: the spool cannot be written.
        """
        try:
            await self._advance(State.INTENT, intent=True)
            await self._launch()
        except Exception as error:  # noqa: BLE001 - the boundary of one run: what broke here must not take others along
            logger.bind(run=self.claim.run).opt(exception=error).error("run {} failed", self.claim.run)
            if self.claim.state is not State.REPORTED:
                await self._report(_Outcome(code=ResultCode.FAILED))
        await self._forget()

    async def _launch(self) -> None:
        """From the intent to the result; leaving the backend's context is the teardown."""
        launch = await self._prepare()
        if isinstance(launch, Refused):
            await self._refuse(launch)
            return
        try:
            # The first row comes before anything is created: what cannot be audited is not launched.
            message = f"job {self.claim.job} is to run on {self.backend.name}"
            await self._trail.add(EventName.LAUNCH, "intended", message=message, detail=self._facts(launch))
        except JournalFailed as error:
            await self._refuse(Refused(RefusalCode.AUDIT_FAILED, str(error)))
            return
        live = self._live = self._watch()
        await anyio.to_thread.run_sync(self.claim.keep_live, live.files())
        scope = anyio.CancelScope(deadline=anyio.current_time() + LAUNCH_BUDGET)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._note_created, live)
            with scope:
                self._launching = scope
                if self._stop.code is not None:
                    scope.cancel()
                async with self.backend.launch(launch, live) as sandbox:
                    self._launching, scope.deadline = None, math.inf
                    await self._judge(sandbox, live)
            self._launching = None
            tasks.cancel_scope.cancel()
        if scope.cancelled_caught:
            budget = f"the fence was not built and proven within {LAUNCH_BUDGET:.0f} s"
            await self._refuse(self._refused_by_stop() or Refused(RefusalCode.LAUNCH_TIMEOUT, budget))

    async def _prepare(self) -> Launch | Refused:
        resolvers = await anyio.to_thread.run_sync(resolvers_of, self._shell.host, RESOLV_CONF)
        if isinstance(resolvers, Refused):
            return resolvers
        values = await anyio.to_thread.run_sync(read_secrets, self._effective.agent.secrets)
        if isinstance(values, Refused):
            return values
        self._proxy = ProxySettings(
            run=self.claim.run,
            resolvers=resolvers,
            nat64_prefixes=self._shell.host.nat64_prefixes,
            proof_key=secrets.token_bytes(32),
            expires_at=expiry(self._admitted, self._shell.clock.now().timestamp()),
        )
        return launch_of(
            self._admitted,
            run=self.claim.run,
            owner=self._shell.owner,
            environment={**self._admitted.job.env, **values},
            proxy=self._proxy.policy(self._effective, self._admitted.revision, self._admitted.generation),
            neighbours=self._neighbours(),
        )

    def _facts(self, launch: Launch) -> dict[str, object]:
        """Give what a launch row says of a run. Arguments may hold anything: only the program is named."""
        return {
            "job": self.claim.job,
            "backend": self._result.to_json()["backend"],
            "image": launch.image,
            "program": launch.command[0],
            "arguments": len(launch.command) - 1,
            "variables": sorted(launch.environment),
            "reasons": list(self._effective.reasons),
            "generation": self._admitted.generation,
            "timeout": self._admitted.timeout,
        }

    def _watch(self) -> Live:
        return Live(
            self._shell.live(self.claim.run),
            run=self.claim.run,
            agent=self.agent,
            revision=self._admitted.revision,
            submitter=self.claim.submitter,
            limit=self._effective.agent.limits.output,
        )

    async def _note_created(self, live: Live) -> None:
        await live.created.wait()
        await self._advance(State.CREATED)

    async def _judge(self, sandbox: Sandbox | LaunchRefused, live: Live) -> None:
        if isinstance(sandbox, LaunchRefused):
            if sandbox.report is not None:
                self._result = replace(self._result, gate=sandbox.report.to_object())
            await self._refuse(Refused(sandbox.code, sandbox.message))
            return
        backend = self._result.backend
        if backend is not None:
            backend = replace(backend, isolation=sandbox.isolation, evidence=sandbox.evidence)
        self._result = replace(self._result, gate=sandbox.report.to_object(), backend=backend)
        self.door = door_of(sandbox.report)
        live.created.set()
        await self._advance(State.CREATED)
        await self._advance(State.GATED, gated=True)
        removed = await self._following.catch_up(sandbox, self._proxy)
        if removed is not None:
            self._stop.ask(removed)
        refused = self._refused_by_stop() or await self._witness(told(self.backend.name, sandbox.isolation))
        if refused is not None:
            await self._refuse(refused)
            return
        attendance = Attendance(
            sandbox, stop=self._stop, following=self._following, proxy=self._proxy, live=live, trail=self._trail
        )
        await self._advance(State.STARTED, started=True)
        await sandbox.start()
        await self._report(await self._attend(sandbox, live, attendance))

    async def _witness(self, isolation: str) -> Refused | None:
        """Write the rows that the command waits for: that it is isolated otherwise than last time, and the proof."""
        isolations = LastIsolations(self._shell.host.state)
        before = isolations.of(self.agent)
        result = self._result.to_json()
        detail = {"gate": result["gate"], "backend": result["backend"]}
        try:
            if before not in (None, isolation):
                message = f"agents/{self.agent} is isolated by {isolation}, and its last run was by {before}"
                changed = {"before": before, "after": isolation}
                await self._trail.add(EventName.ISOLATION_CHANGED, "changed", message=message, detail=changed)
            await self._trail.add(EventName.LAUNCH, "launched", message="the gate proved the fence", detail=detail)
        except JournalFailed as error:
            return Refused(RefusalCode.AUDIT_FAILED, str(error))
        isolations.note(self.agent, isolation)
        return None

    async def _attend(self, sandbox: Sandbox, live: Live, attendance: Attendance) -> _Outcome:
        """From the start of the command to the second reading of the proof."""
        ended = await attendance.attend(self._admitted.timeout)
        code = _CODES.get(ended.code) or self._stop.code or ResultCode.FAILED
        self._result = replace(
            self._result, code=code, message=MESSAGES[code], status=ended.status, oom_killed=ended.oom_killed
        )
        await self._advance(State.EXITED, exited=True)
        with anyio.move_on_after(_DRAIN_BUDGET):
            await sandbox.drain()
        try:
            await live.flush(self._trail, final=True)
            drifted = await attendance.drifted()
        except JournalFailed:
            return _Outcome(code=ResultCode.AUDIT_FAILED, exit=ended)
        return _Outcome(code=ResultCode.FENCE_DRIFT if drifted else code, exit=ended)

    def _refused_by_stop(self) -> Refused | None:
        """Say why a run was stopped that had not started."""
        code = self._stop.code
        return None if code is None else Refused(code, f"{MESSAGES[code]}; nothing ran")

    async def _refuse(self, refused: Refused) -> None:
        await self._report(_Outcome(code=ResultCode.REFUSED, refused=refused))

    async def _advance(
        self, state: State, *, intent: bool = False, gated: bool = False, started: bool = False, exited: bool = False
    ) -> None:
        """Put the next state on disk, with the time of those that results name."""
        times, now = self._result.times, self._shell.now()
        times = replace(
            times,
            intent=now if intent else times.intent,
            gated=now if gated else times.gated,
            started=now if started else times.started,
            exited=now if exited else times.exited,
        )
        async with self._recording:
            if state is State.CREATED and self.claim.state is not State.INTENT:
                return
            self._result = replace(self._result, times=times)
            self.claim = await anyio.to_thread.run_sync(self.claim.record, state, self._result.to_json())

    async def _report(self, outcome: _Outcome) -> None:
        refused, code, ended = outcome.refused, outcome.code, outcome.exit
        message = refused.message if refused is not None else MESSAGES[code]
        try:
            if refused is not None:
                await self._trail.add(EventName.REFUSE, "refused", code=refused.code, message=message)
            elif code is not ResultCode.EXITED:
                await self._trail.add(EventName.FAIL, "failed", code=code, message=message)
        except JournalFailed:
            # What the log could not take, the result says all the same; nothing is launched until it takes rows again.
            logger.bind(run=self.claim.run).error("the end of run {} is not in the audit log", self.claim.run)
        live = self._live
        self._result = replace(
            self._result,
            code=code,
            message=message,
            status=ended.status if ended is not None else None,
            oom_killed=ended is not None and ended.oom_killed,
            generations=self._following.generations,
            refusal=None if refused is None else Refusal(code=refused.code, message=refused.message),
            times=replace(self._result.times, reported=self._shell.now()),
            output=Output() if live is None else live.written(),
            decisions=self._result.decisions if live is None else live.decisions(),
            audit=self._trail.range(),
        )
        tail, lines = (b"", b"") if live is None else (live.tail(), live.lines())
        async with self._recording:
            self.claim = await anyio.to_thread.run_sync(
                lambda: self.claim.report(self._result.to_json(), output=tail, decisions=lines)
            )

    async def _forget(self) -> None:
        """Say in the log that nothing is left, and let nothing be left of the claim."""
        undone = list(self._live.undone) if self._live is not None else []
        try:
            await self._trail.add(
                EventName.TEARDOWN,
                "incomplete" if undone else "done",
                code=self._result.code,
                message="a step of the teardown failed: the reaper removes what it left" if undone else "",
                detail={"status": self._result.status, "undone": undone},
            )
        except JournalFailed:
            # The claim stays as it is: a later look finds it reported, writes this row and removes it.
            logger.bind(run=self.claim.run).error("the teardown of run {} is not in the audit log", self.claim.run)
            return
        finally:
            if self._live is not None:
                self._live.close()
            forget(self._shell.live(self.claim.run))
        await anyio.to_thread.run_sync(self.claim.forget)
