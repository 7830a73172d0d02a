"""Owns how a job ends that no run of this daemon carries: refused, a cancel, or left behind by an earlier daemon."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, assert_never

import anyio
from loguru import logger

from proxy.record import Record, Verdict
from reconciler.claim import Claim
from reconciler.core.audit import Event, EventName
from reconciler.core.job import RECOVERY, Recovery, RefusalCode, Refused, State
from reconciler.core.result import MESSAGES, Decisions, Refusal, Result, ResultCode, Times
from reconciler.journal import JournalFailed
from reconciler.live import output_of
from reconciler.live_files import forget, recovered
from reconciler.retention import Kept, due, quarantined, remove_quarantined, remove_result, results
from reconciler.trail import Trail

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reconciler.backends.base import Backend
    from reconciler.shell import Shell
    from reconciler.spool import Spool

_OUTPUT = 64 * 1024
"""Bytes of output that are taken over from a run of an earlier daemon."""
_SUSPECT = frozenset({RefusalCode.BAD_NAME, RefusalCode.NOT_A_FILE, RefusalCode.LINKED, RefusalCode.WRONG_OWNER})
"""Refusals of what no submitter delivers by the book: what was delivered is kept in quarantine for the operator."""


async def refuse(shell: Shell, claim: Claim, refused: Refused, *, agent: str | None = None) -> None:
    """Give a job that does not run its result, and its row.

    Raises:
        OSError: the spool cannot be written; the claim stays for a later look.
    """
    trail = Trail(shell.audit, claim, agent=agent, revision=None)
    try:
        detail = {"job": claim.job, "file": claim.shown}
        await trail.add(EventName.REFUSE, "refused", code=refused.code, message=refused.message, detail=detail)
    except JournalFailed:
        logger.bind(run=claim.run).error("the refusal of {} is not in the audit log", claim.run)
    result = Result(
        run=claim.run,
        job=claim.job,
        submitter=claim.submitter.name,
        code=ResultCode.REFUSED,
        message=refused.message,
        refusal=Refusal(code=refused.code, message=refused.message),
        agent=agent,
        times=Times(claimed=claim.claimed, reported=shell.now()),
        audit=trail.range(),
    )
    await _close(claim, result, quarantine=refused.code in _SUSPECT)


async def cancel_sent(shell: Shell, claim: Claim, run: str) -> None:
    """Give a cancel that was honoured its result.

    Raises:
        OSError: the spool cannot be written; the claim stays for a later look.
    """
    result = Result(
        run=claim.run,
        job=claim.job,
        submitter=claim.submitter.name,
        code=ResultCode.CANCEL_SENT,
        message=f"{run}: {MESSAGES[ResultCode.CANCEL_SENT]}",
        times=Times(claimed=claim.claimed, reported=shell.now()),
    )
    await _close(claim, result)


async def _close(claim: Claim, result: Result, *, quarantine: bool = False) -> None:
    def close() -> None:
        claim.report(result.to_json(), output=b"", decisions=b"", quarantine=quarantine).forget()

    await anyio.to_thread.run_sync(close)


async def reap(shell: Shell, backends: Iterable[Backend], live: frozenset[str]) -> None:
    """Remove what is ours and belongs to no live run, and leave a row for whatever that was."""
    for backend in backends:
        try:
            found = await backend.reap(live)
        except Exception as error:  # noqa: BLE001 - one broken backend must not keep others from being cleaned up
            logger.opt(exception=error).error("reaping on {} failed", backend.name)
            continue
        if not found:
            continue
        things = [{"kind": one.kind, "name": one.name, "run": one.run} for one in found]
        logger.warning("reaped {} leftovers on {}", len(things), backend.name)
        try:
            await shell.audit.append(
                Event(
                    name=EventName.TEARDOWN,
                    actor="ringfenced",
                    object=f"backends/{backend.name}",
                    outcome="reaped",
                    message=f"removed {len(things)} leftovers of runs that are not alive",
                    detail={"reaped": things},
                )
            )
        except JournalFailed:
            logger.error("what was reaped on {} is not in the audit log", backend.name)


async def tidy(shell: Shell, spool: Spool, live: frozenset[tuple[str, str]]) -> None:
    """Remove results and quarantined deliveries beyond what the host keeps: first the row, then what it tells of.

    `live` are submitter and job of each live run, of which nothing is removed.

    Raises:
        OSError: the spool cannot be read or written.
    """
    now = time.time_ns()

    def look() -> tuple[tuple[Kept, ...], tuple[Kept, ...]]:
        found = [one for one in results(spool.root / "done") if (one.owner, one.name) not in live]
        keep = shell.host.keep
        return due(found, keep, now_ns=now), due(quarantined(spool.root / "quarantine"), keep, now_ns=now)

    old, aside = await anyio.to_thread.run_sync(look)
    if not old and not aside:
        return
    events = []
    for place, found in (("done", old), ("quarantine", aside)):
        for owner in sorted({one.owner for one in found}):
            own = [one for one in found if one.owner == owner]
            events.append(
                Event(
                    name=EventName.SPOOL_REMOVED,
                    actor="ringfenced",
                    object=f"{place}/{owner}",
                    outcome="removed",
                    message=f"{len(own)} beyond what is kept (keep in host.yaml)",
                    detail={"names": [one.name for one in own], "bytes": sum(one.bytes for one in own)},
                )
            )
    try:
        await shell.audit.append(*events)
    except JournalFailed:
        logger.error("nothing is removed from the spool: that cannot be audited")
        return

    def remove() -> None:
        for one in old:
            remove_result(spool.root / "done", one)
        for one in aside:
            remove_quarantined(spool.root / "quarantine", one)

    await anyio.to_thread.run_sync(remove)


async def recover(shell: Shell, spool: Spool, runs: Iterable[str]) -> None:
    """Bring these claims, which no live run carries, to their one result each.

    Call after `reap`: then nothing of them runs any more. A claim that cannot be brought to its end stays for a later
    look: what is on disk of it comes from its submitter too, who must not keep others waiting, or the daemon from
    starting.
    """
    for run in runs:
        try:
            claim = await anyio.to_thread.run_sync(Claim.read, spool.root, run)
            if claim is not None:
                await _recover(shell, spool, claim)
        except OSError as error:
            logger.bind(run=run).error("the claim of {} stays: {}", run, error.strerror)
        except Exception as error:  # noqa: BLE001 - the boundary of one claim, as the docstring says
            logger.bind(run=run).opt(exception=error).error("the claim of {} stays", run)


async def _recover(shell: Shell, spool: Spool, claim: Claim) -> None:
    match RECOVERY[claim.state]:
        case Recovery.RETURN:
            if await anyio.to_thread.run_sync(spool.give_back, claim):
                logger.info("job {} of {} goes back to new: nothing was decided of it", claim.job, claim.submitter.name)
                return
            await _interrupted(shell, claim)
        case Recovery.INTERRUPT:
            await _interrupted(shell, claim)
        case Recovery.REPORT:
            await _interrupted(shell, claim, ended=claim.result)
        case Recovery.FINISH:
            await anyio.to_thread.run_sync(claim.hand_over)
            await _finish(shell, claim, claim.result or {})
        case unreachable:
            assert_never(unreachable)


async def _interrupted(shell: Shell, claim: Claim, *, ended: Mapping[str, object] | None = None) -> None:
    """Report a run that an earlier daemon left: how it ended when that is on disk, else `interrupted`."""
    known = claim.result or {}
    trail = Trail(shell.audit, claim, agent=_text(known.get("agent")), revision=_text(known.get("revision")))
    tail, written, lines = await anyio.to_thread.run_sync(recovered, shell.live(claim.run), claim.live_files(), _OUTPUT)
    code = ResultCode.INTERRUPTED if ended is None else ResultCode(str(ended["code"]))
    message = MESSAGES[code]
    if code is not ResultCode.EXITED:
        try:
            detail = {"state": claim.state.value, "decisions": lines.count(b"\n")}
            await trail.add(EventName.FAIL, "failed", code=code, message=message, detail=detail)
        except JournalFailed:
            logger.bind(run=claim.run).error("the end of run {} is not in the audit log", claim.run)
    blank = Result(
        run=claim.run,
        job=claim.job,
        submitter=claim.submitter.name,
        code=code,
        message=message,
        times=Times(claimed=claim.claimed or shell.now(), reported=shell.now()),
        output=output_of(tail, written),
        decisions=_counted(lines, cut=claim.state not in {State.CLAIMED, State.INTENT}),
        audit=trail.range(),
    ).to_json()
    result = {**blank, **known}
    times = known.get("times", blank["times"])
    result["times"] = {**(times if isinstance(times, dict) else {}), "reported": shell.now()}
    for field in ("output", "decisions", "audit", "code", "message"):
        result[field] = blank[field]
    after = await anyio.to_thread.run_sync(lambda: claim.report(result, output=tail, decisions=lines))
    await _finish(shell, after, result)


async def _finish(shell: Shell, claim: Claim, result: Mapping[str, object]) -> None:
    trail = Trail(shell.audit, claim, agent=_text(result.get("agent")), revision=_text(result.get("revision")))
    message = "left behind by an earlier daemon; nothing of it is there any more"
    try:
        await trail.add(EventName.TEARDOWN, "recovered", code=_text(result.get("code")), message=message)
    except JournalFailed:
        logger.bind(run=claim.run).error("the teardown of run {} is not in the audit log", claim.run)
        return
    await anyio.to_thread.run_sync(forget, shell.live(claim.run))
    await anyio.to_thread.run_sync(claim.forget)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _counted(lines: bytes, *, cut: bool) -> Decisions:
    allowed = denied = missing = last = 0
    for line in lines.splitlines():
        try:
            record = Record.parse(json.loads(line))
        except (ValueError, RecursionError):
            continue  # a power cut leaves anything; what is not there shows as missing
        if record is None:
            continue
        missing += max(0, record.seq - last - 1)
        last = record.seq
        if record.verdict is Verdict.ALLOW:
            allowed += record.count
        else:
            denied += record.count
    return Decisions(allowed=allowed, denied=denied, missing=missing, cut=cut)
