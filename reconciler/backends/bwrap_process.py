"""Owns the process of one bubblewrap sandbox: how bwrap is started, what it and the launcher say, how it ends.

Does not decide what the fence is made of, and proves nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from reconciler.backends import bwrap_args
from reconciler.backends.base import Stream
from reconciler.backends.process_io import Descriptor, Lines, ended, memory_file, read_some, write

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from anyio.abc import TaskGroup

    from reconciler.backends.cgroup import Cgroup

_LONGEST_LINE = 2 * 1024 * 1024
_KEPT_DIAGNOSTICS = 2000
_KILL_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class ExecFailed:
    """The command could not be executed: an errno's name."""

    error: str


class BwrapProcess:
    """One bwrap that was started and goes on word by word. Made by `start`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        *,
        status: Descriptor,
        words: Descriptor,
        report: Descriptor,
        cgroup: Cgroup,
        output: Callable[[Stream, bytes], None],
    ) -> None:
        self._process = process
        self._cgroup = cgroup
        self._status, self._words, self._report = status, words, report
        self._output = output
        self._pidfd = Descriptor(os.pidfd_open(process.pid))
        self._reports = Lines(report.number, most=_LONGEST_LINE)
        self._started = False
        self._diagnostics = b""
        self._news = anyio.Event()
        self.init: int | None = None
        """The first process inside, by its number outside; None until bwrap said it."""
        self.exit_status: int | None = None
        """What bwrap said of the command's end, 128 + signal when killed."""
        self.ended = anyio.Event()
        """Set once bwrap is gone and everything that the sandbox wrote was handed on."""

    @property
    def pid(self) -> int:
        """The number of bwrap's outer process, which waits for the sandbox and is not inside."""
        return self._process.pid

    @property
    def diagnostics(self) -> str:
        """What was written to stderr before the command started: by bwrap, or by an interpreter that failed."""
        return self._diagnostics.decode("utf-8", "replace").strip()

    async def until_inside(self, limit: float) -> int | None:
        """Wait for the first process inside; its number, None when bwrap failed or took too long."""
        with anyio.move_on_after(limit):
            while self.init is None and not self.ended.is_set():
                await self._news.wait()
        return self.init

    async def say(self, word: Mapping[str, object]) -> bool:
        """Send the launcher one line; False when it is gone."""
        return await write(self._words.number, json.dumps(word, separators=(",", ":")).encode("ascii") + b"\n")

    async def gate_answer(self, limit: float) -> object:
        """Wait for the launcher's line about the gate; None when none came."""
        line = None
        with anyio.move_on_after(limit):
            line = await self._reports.next()
        with contextlib.suppress(ValueError):
            return json.loads(line or b"null")
        return None

    async def exec_answer(self) -> ExecFailed | None:
        """Wait until the launcher became the command (None) or said why it could not."""
        line = await self._reports.next()
        if line is None:
            return None
        with contextlib.suppress(ValueError):
            match json.loads(line):
                case {"exec": str(error)}:
                    return ExecFailed(error)
                case _:
                    pass
        return ExecFailed("EIO")

    def started(self) -> None:
        """From now on what comes on stdout and stderr is the command's."""
        self._started = True

    def close_words(self) -> None:
        """End the launcher's input: one that still waits gives up."""
        self._words.close()

    async def watch(self) -> None:
        """Hand on output and status until bwrap has ended; runs beside everything else.

        Not to be cancelled: it ends when the process does, and whoever starts one kills it.
        """
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch_output, Stream.STDOUT)
                tasks.start_soon(self._watch_output, Stream.STDERR)
                tasks.start_soon(self._watch_status)
                await ended(self._pidfd.number)
                self._process.wait()
        self._pidfd.close()
        self.ended.set()
        self._wake()

    async def _watch_output(self, stream: Stream) -> None:
        pipe = self._process.stdout if stream is Stream.STDOUT else self._process.stderr
        assert pipe is not None  # noqa: S101 - `start` makes both
        with pipe:
            while data := await read_some(pipe.fileno()):
                if self._started:
                    self._output(stream, data)
                else:
                    self._diagnostics = (self._diagnostics + data)[-_KEPT_DIAGNOSTICS:]

    async def _watch_status(self) -> None:
        said = Lines(self._status.number, most=_LONGEST_LINE)
        while (line := await said.next()) is not None:
            with contextlib.suppress(ValueError):
                match json.loads(line):
                    case {"child-pid": int(pid)}:
                        self.init = pid
                    case {"exit-code": int(status)}:
                        self.exit_status = status
                    case _:
                        pass
            self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    async def kill(self) -> None:
        """Kill everything in the sandbox's control group, until bwrap has ended.

        By the group and not by bwrap's outer process: a child that was not yet told to die with it would live on.
        """
        while not self.ended.is_set():
            self._cgroup.send(signal.SIGKILL)
            with anyio.move_on_after(_KILL_AGAIN_S):
                await self.ended.wait()


@contextlib.asynccontextmanager
async def start(
    made: bwrap_args.Fence,
    *,
    program: str,
    python: str,
    uid: int,
    seccomp: bytes,
    cgroup: Cgroup,
    handoff: socket.socket,
    tasks: TaskGroup,
    output: Callable[[Stream, bytes], None],
) -> AsyncIterator[BwrapProcess]:
    """Start bwrap as `uid` in `cgroup`; at the end of the context its processes are gone.

    It is started from the calling thread, and dies with that thread (PR_SET_PDEATHSIG): call it from the loop's own.

    Raises:
        OSError: bwrap could not be executed.
    """
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as passed:
        passed.callback(handoff.close)
        (status, status_write), (report, report_write) = _pipe(ours, passed), _pipe(ours, passed)
        words_read, words = _pipe(passed, ours)
        files = tuple(passed.enter_context(memory_file(file.content)) for file in made.files)
        descriptors = bwrap_args.Descriptors(
            status=status_write.number,
            seccomp=passed.enter_context(memory_file(seccomp)),
            files=files,
        )
        text = b"".join(os.fsencode(argument) + b"\0" for argument in bwrap_args.arguments(made, descriptors))
        arguments = passed.enter_context(memory_file(text))
        kept = (handoff.fileno(), words_read.number, report_write.number)
        launcher = bwrap_args.launcher_command(python, handoff=kept[0], words=kept[1], report=kept[2])
        process = _spawn(
            [program, "--args", str(arguments), "--", *launcher],
            uid=uid,
            passed=(arguments, descriptors.seccomp, descriptors.status, *kept, *files),
        )
        passed.close()
        started = BwrapProcess(process, status=status, words=words, report=report, cgroup=cgroup, output=output)
        tasks.start_soon(started.watch)
        try:
            _let_go(process, cgroup)
            yield started
        finally:
            with anyio.CancelScope(shield=True):
                await started.kill()


def _pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[Descriptor, Descriptor]:
    """Make a pipe whose two ends are closed by one stack each."""
    read, write_ = (Descriptor(number) for number in os.pipe2(os.O_CLOEXEC))
    reader.callback(read.close)
    writer.callback(write_.close)
    return read, write_


def _spawn(command: Sequence[str], *, uid: int, passed: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a shell that becomes the command at one line on its stdin, and ends when that ends without one."""
    process = subprocess.Popen(
        ["/bin/sh", "-c", 'read -r go && exec "$@" < /dev/null', "sh", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=passed,
        user=uid,
        group=uid,
        extra_groups=[],
        env={},
        cwd="/",
    )
    for stream in (process.stdout, process.stderr):
        assert stream is not None  # noqa: S101 - both are pipes
        # A pipe belongs to who made it: without this, opening /dev/stderr inside is denied.
        os.fchown(stream.fileno(), uid, uid)
    return process


def _let_go(process: subprocess.Popen[bytes], cgroup: Cgroup) -> None:
    """Put the process into its control group before it becomes bwrap, so that no child is ever outside."""
    assert process.stdin is not None  # noqa: S101 - it is a pipe
    with process.stdin as words:
        cgroup.add(process.pid)
        words.write(b"go\n")
