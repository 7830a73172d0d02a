"""Owns what happens inside a bubblewrap fence until the command: listener handed out, gate run, word awaited, exec.

One file, standard library only, kept to what Python 3.8 can run; trusts only its three descriptors and knows no policy.

    python3 -I -S launcher.py HANDOFF WORDS REPORT GATE

HANDOFF is a Unix socket whose other end the proxy holds. WORDS is a pipe from the daemon: one line with the gate's
input, then one line `{"command": [...], "environment": {...}, "directory": "..."}`; its end instead of that line means
"do not start". REPORT is a pipe to the daemon: one line with what the gate said, then its end when the exec succeeded
(which closes it) or one line `{"exec": "ENOENT"}` when it did not. GATE is the path of the gate program.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import socket
import sys
from typing import Any

ADDRESS = ("127.0.0.1", 3128)
NOT_EXECUTABLE = 126
NOT_FOUND = 127
NO_WORD = 125
OPEN_FILES = (1024, 4096)
"""Soft and hard limit of the command's open files, as service managers set them; the hard one bounds what the kernel
holds for descriptors that no control group is charged for."""


def hand_out_listener(handoff: int) -> None:
    """Listen on the fence's loopback and pass the descriptor to the proxy; no copy of it stays inside."""
    with socket.socket(fileno=handoff) as channel, socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        # Connections that have ended would hold the port for a minute; a socket that listens is never shared by this.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(ADDRESS)
        listener.listen(1024)
        socket.send_fds(channel, [b"listener"], [listener.fileno()])


def run_gate(path: str, given: bytes) -> dict[str, Any]:
    """Run the gate with an empty environment and `given` on its stdin; what it reported, and its exit status.

    A descriptor that came in by mistake is left open for it on purpose: the gate is what finds it.
    """
    input_read, input_write = os.pipe()
    output_read, output_write = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, input_read, 0), (os.POSIX_SPAWN_DUP2, output_write, 1)]
    pid = os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", path], {}, file_actions=actions)
    os.close(input_read)
    os.close(output_write)
    with os.fdopen(output_read, "rb") as output:
        # When it ended early, its status says so.
        with contextlib.suppress(BrokenPipeError), os.fdopen(input_write, "wb") as file:
            file.write(given)
        data = output.read(1 << 20)
    _, status = os.waitpid(pid, 0)
    try:
        report = json.loads(data)
    except ValueError:
        report = None
    return {"gate": report, "exit": -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)}


def execute(command: list[str], environment: dict[str, str]) -> str:
    """Exec the command as a shell would find it; returns only when that failed, with an errno's name.

    A file that is there but whose interpreter is not is ENOEXEC, not ENOENT: the command was found.
    """
    name = command[0]
    folders = [""] if "/" in name else environment.get("PATH", "").split(":")
    worst = errno.ENOENT
    for folder in folders:
        path = os.path.join(folder, name) if folder else name  # noqa: PTH118 - pathlib is 5 ms of start-up
        try:
            os.execve(path, command, environment)  # noqa: S606 - no shell on purpose
        except OSError as error:
            missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
            if missing and os.path.lexists(path):
                worst = errno.ENOEXEC
            elif not missing:
                worst = error.errno or errno.EACCES
        except ValueError:
            return "EINVAL"
    return errno.errorcode.get(worst, "EACCES")


def open_files(had: tuple[int, int]) -> tuple[int, int]:
    """Give the command's soft and hard limit of open files: never more than this process was given."""
    bounded = [OPEN_FILES[at] if had[at] == resource.RLIM_INFINITY else min(had[at], OPEN_FILES[at]) for at in (0, 1)]
    return bounded[0], bounded[1]


def become(word: dict[str, Any], report: int) -> int:
    """Undo what this interpreter set up, then become the command; returns only when that failed."""
    os.chdir(word["directory"])
    # Python ignores these two, and an ignored signal stays ignored across exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    # One byte, not zero: with zero a core_pattern that is a pipe still starts the host's dump handler (core(5)).
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    os.closerange(3, report)
    os.closerange(report + 1, os.sysconf("SC_OPEN_MAX"))
    # After the closing, which goes as far as the limit that was.
    resource.setrlimit(resource.RLIMIT_NOFILE, open_files(resource.getrlimit(resource.RLIMIT_NOFILE)))
    failure = execute(word["command"], word["environment"])
    os.write(report, json.dumps({"exec": failure}).encode("ascii") + b"\n")
    return NOT_FOUND if failure == "ENOENT" else NOT_EXECUTABLE


def main() -> int:
    """Do the steps in their order; the exit status only matters when no command was started."""
    handoff, words_fd, report = (int(argument) for argument in sys.argv[1:4])
    for descriptor in (handoff, words_fd, report):
        os.set_inheritable(descriptor, False)
    hand_out_listener(handoff)
    with os.fdopen(words_fd, "rb") as words:
        given = words.readline(1 << 20)
        if not given.endswith(b"\n"):
            return NO_WORD
        line = json.dumps(run_gate(sys.argv[4], given), separators=(",", ":")).encode("ascii") + b"\n"
        while line:
            line = line[os.write(report, line) :]
        word = words.readline(8 << 20)
    if not word.endswith(b"\n"):
        return NO_WORD
    return become(json.loads(word), report)


if __name__ == "__main__":
    sys.exit(main())
