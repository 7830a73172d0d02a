"""Owns how ringfenced is put together, starts, and stops; decides nothing about policy or jobs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import anyio
from loguru import logger

from reconciler.backends.bubblewrap import Bubblewrap
from reconciler.backends.docker import Docker
from reconciler.backends.k8s import K8s
from reconciler.clock import SystemClock
from reconciler.config_pass import ConfigPass
from reconciler.core.audit import Broken, Event, EventName
from reconciler.core.job import Refused
from reconciler.core.policy import BackendName
from reconciler.core.result import ResultCode
from reconciler.core.trust import TrustBroken
from reconciler.directory import uid_of
from reconciler.host import DEFAULT_PATH, PATH_VARIABLE, load_host
from reconciler.jobs import Jobs
from reconciler.journal import Journal, JournalFailed
from reconciler.prepare import owner_of, resolvers_of
from reconciler.publish import Publisher, View
from reconciler.reason import read_trust
from reconciler.run import RESOLV_CONF
from reconciler.shell import Shell
from reconciler.spool import Spool
from reconciler.state import StateBroken, StateFile
from reconciler.trail import AuditLog
from reconciler.watch import watching

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from anyio.abc import TaskStatus

    from reconciler.backends.base import Backend
    from reconciler.core.policy import InForce
    from reconciler.host import Host
    from reconciler.watch import Watch

FINE, PROBLEMS, USAGE = 0, 1, 64
"""Exit statuses."""
_MEANWHILE = 0.2
"""Seconds between two looks at the clock and at the trust directory while a pass is under way."""
_RETRY = 1.0
"""Seconds after which a pass that could not be applied is tried again."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the daemon is made of. Whoever opened it closes `closing`."""

    shell: Shell
    config: ConfigPass
    jobs: Jobs
    view: View
    closing: ExitStack


def built_in(host: Host, owner: str) -> Mapping[BackendName, Backend]:
    """Every backend that this version has."""
    return {
        BackendName.K8S: K8s(host, owner),
        BackendName.DOCKER: Docker(host, owner),
        BackendName.BUBBLEWRAP: Bubblewrap(host, owner),
    }


def open_parts(host: Host, backends: Callable[[Host, str], Mapping[BackendName, Backend]] = built_in) -> Parts | str:
    """Take the locks and open everything, or say why not.

    Raises:
        JournalFailed: the audit log cannot be written.
        OSError: a directory cannot be made.
    """
    state_file = StateFile(host.state)
    state = state_file.load()
    if isinstance(state, StateBroken):
        return state.message
    clock = SystemClock(state.last_seen)
    with ExitStack() as closing:
        spool = Spool.open(host.spool)
        if isinstance(spool, Refused):
            return spool.message
        closing.callback(spool.close)
        journal = Journal.open(host.audit, clock, most=host.keep.audit_file)
        if isinstance(journal, Broken):
            return (
                f"the audit log does not hold: {journal}; it is left as it is, as evidence: move it away to start anew"
            )
        closing.callback(journal.close)
        for directory in (host.runtime, host.runtime / "runs"):
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            directory.chmod(0o755)
        owner = owner_of(host)
        shell = Shell(host=host, owner=owner, clock=clock, audit=AuditLog(journal))
        jobs = Jobs(shell, spool, backends(host, owner))
        config = ConfigPass(host, state, state_file, journal, clock)
        return Parts(shell, config, jobs, View(), closing.pop_all())
    raise AssertionError("unreachable: nothing above swallows what it raises")


class Daemon:
    """The two pipelines side by side, over one set of parts."""

    def __init__(self, parts: Parts) -> None:
        self._shell, self._config, self._jobs, self._view = parts.shell, parts.config, parts.jobs, parts.view
        self._look = anyio.Event()

    async def serve(self) -> None:
        """Run until SIGTERM or SIGINT, then stop in order.

        Raises:
            JournalFailed: not even the start could be audited.
        """
        await self._note(EventName.DAEMON_START, "started")
        publisher = Publisher(self._shell, self._jobs, self._view)
        await self._jobs.recover()
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._signals)
            await tasks.start(self._follow_policy)
            tasks.start_soon(publisher.publish_changes)
            tasks.start_soon(self._jobs.keep_clean)
            await self._jobs.serve()
            tasks.cancel_scope.cancel()
        await self._jobs.recover()
        self._view.state = "stopped"
        try:
            await self._note(EventName.DAEMON_STOP, "stopped")
        except JournalFailed as error:
            logger.error("the stop is not in the audit log: {}", error)
        await publisher.publish()

    async def _note(self, name: EventName, outcome: str) -> None:
        detail = {"version": version("ringfence"), "pid": os.getpid(), "owner": self._shell.owner}
        host = self._shell.host.name
        event = Event(name=name, actor="ringfenced", object=f"hosts/{host}", outcome=outcome, detail=detail)
        await self._shell.audit.append(event)

    async def _signals(self, *, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            task_status.started()
            async for received in signals:
                if received is signal.SIGHUP:
                    self._jobs.probes.forget()
                    self._look.set()
                else:
                    logger.info("stopping: {}", received.name)
                    self._view.state = "stopping"
                    self._jobs.stop()

    async def _follow_policy(self, *, task_status: TaskStatus[None]) -> None:
        """Do a pass at each hint, SIGHUP and scan, and at the next expiry. The first comes before any job."""
        host = self._shell.host
        async with (
            watching((host.policy, host.trust), owner=host.policy_owner, scan_interval=host.scan_interval) as watch,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(self._take_hints, watch)
            first = True
            while True:
                self._look = anyio.Event()
                pause = await self._pass()
                self._view.watch = watch.troubles
                if first:
                    first = False
                    task_status.started()
                with anyio.move_on_after(pause):
                    await self._look.wait()

    async def _take_hints(self, watch: Watch) -> None:
        async for _ in watch:
            self._look.set()

    async def _pass(self) -> float:
        """Do one pass; gives the seconds after which the next is due whatever happens.

        A pass that breaks leaves what is in force as it is: the live runs and the jobs to come go on under that.
        """
        pause = self._shell.host.scan_interval
        async with anyio.create_task_group() as meanwhile:
            meanwhile.start_soon(self._keep_time)
            try:
                evaluated = await self._config.run()
            except (JournalFailed, OSError) as error:
                self._not_applied(error)
                pause = _RETRY
            except Exception as error:  # noqa: BLE001 - a document must not be able to end the daemon and every live run
                self._failed(error)
            else:
                self._view.last, self._view.trouble = evaluated, None
                if evaluated.wake is not None:
                    due = (evaluated.wake - self._shell.clock.now()).total_seconds()
                    pause = min(pause, max(due, 0.0) + 0.01)
            meanwhile.cancel_scope.cancel()
        self._follow()
        return pause

    async def _keep_time(self) -> None:
        """See to it that what expires or is revoked does not wait for a pass that takes long. Does nothing in most."""
        while True:
            await anyio.sleep(_MEANWHILE)
            try:
                if await self._config.keep_time():
                    self._follow()
            except (JournalFailed, OSError) as error:
                self._not_applied(error)
            except Exception as error:  # noqa: BLE001 - see above
                self._failed(error)

    def _follow(self) -> None:
        in_force = _accepted(self._config.in_force)
        self._view.in_force = in_force
        if in_force is not None:
            self._jobs.follow(in_force)

    def _not_applied(self, error: Exception) -> None:
        self._trouble(f"the last pass was not applied: {error}")
        if self._config.overdue:
            # A full disk must not be a way to keep what was revoked: whoever could use it ends.
            self._jobs.end_runs(ResultCode.AUDIT_FAILED)

    def _failed(self, error: Exception) -> None:
        logger.opt(exception=error).error("a config pass failed")
        self._trouble(f"the last pass failed ({type(error).__name__}); the log of ringfenced says where")

    def _trouble(self, message: str) -> None:
        if self._view.trouble != message:
            logger.error("{}", message)
        self._view.trouble = message


def _accepted(in_force: InForce | None) -> InForce | None:
    """What is in force, or None on a host that never accepted a policy: its floor says so of nobody."""
    return in_force if in_force is not None and in_force.revision else None


def users(host: Host) -> tuple[str, ...]:
    """Say which users that the settings name this host does not have, or must not use."""
    found = []
    for setting, user in (("proxy_user", host.proxy_user), ("policy_owner", host.policy_owner)):
        uid = uid_of(user)
        if uid is None:
            found.append(f"{setting}: there is no user {user}: create it (useradd --system {user})")
        elif uid == 0 and setting == "proxy_user":
            found.append(f"{setting}: is root; name a user without rights")
    return tuple(found)


def check(host: Host) -> tuple[str, ...]:
    """Say what of these settings this host does not bear out."""
    found = list(users(host))
    resolvers = resolvers_of(host, RESOLV_CONF)
    if isinstance(resolvers, Refused):
        found.append(resolvers.message)
    if not os.access(host.python, os.X_OK):
        found.append(f"python: {host.python} is not there; install it or name another")
    trust = read_trust(host.trust)
    if isinstance(trust, TrustBroken):
        found.extend(str(problem) for problem in trust.problems)
    return tuple(found)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def main() -> None:
    """Run `ringfenced`. Exits 0 when stopped or fine, 1 with problems, 64 when called wrongly."""
    parser = _Parser(prog="ringfenced", description="Watches policy and a spool of jobs, and runs them behind a fence.")
    parser.add_argument(
        "--host-config",
        type=Path,
        default=Path(os.environ.get(PATH_VARIABLE) or DEFAULT_PATH),
        metavar="FILE",
        help=f"settings of the host; else what {PATH_VARIABLE} names, else {DEFAULT_PATH}",
    )
    parser.add_argument("--check", action="store_true", help="check the settings, users and trust files, and exit")
    arguments = parser.parse_args()
    host = load_host(arguments.host_config)
    if isinstance(host, tuple):
        _leave("\n".join(map(str, host)))
    if arguments.check:
        problems = check(host)
        if problems:
            _leave("\n".join(problems))
        sys.stdout.write(f"{arguments.host_config}: fine\n")
        return
    # What may come right while the daemon runs (trust files, resolvers) is told by `status`; a user is looked up once.
    if problems := users(host):
        _leave("\n".join(problems))
    if os.geteuid() != 0:
        _leave("ringfenced must run as root: namespaces, cgroups and the ownership of the spool need it")
    os.umask(0o022)
    # The log must show no values: a frame of a run holds an environment, and the library prints frames by default.
    logger.remove()
    logger.add(sys.stderr, level="INFO", format="{level: <8} {message}", backtrace=False, diagnose=False)
    try:
        parts = open_parts(host)
        if isinstance(parts, str):
            _leave(parts)
        with parts.closing:
            anyio.run(Daemon(parts).serve)
    except (JournalFailed, OSError) as error:
        _leave(f"ringfenced cannot run: {error}")


def _leave(message: str) -> NoReturn:
    sys.stderr.write(message + "\n")
    sys.exit(PROBLEMS)
