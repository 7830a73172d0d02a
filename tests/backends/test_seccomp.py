"""Each call that the filter denies is tried for real, in a sandbox; what agents need goes on working."""

from __future__ import annotations

import errno
import json
import platform
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pyseccomp
import pytest

from reconciler.backends.seccomp import LAST_REVIEWED, NEW_NAMESPACES, compile_filter, newer_calls, table
from tests.backends.world import Recorder, inside, launch, run

if TYPE_CHECKING:
    from reconciler.backends.bubblewrap import Bubblewrap

pytestmark = [pytest.mark.bubblewrap, pytest.mark.rig]

TRY = """
import ctypes, json, mmap, os, signal, subprocess, threading

library = ctypes.CDLL(None, use_errno=True)


def call(number, arguments):
    ctypes.set_errno(0)
    library.syscall.restype = ctypes.c_long
    answer = library.syscall(ctypes.c_long(number), *(ctypes.c_ulong(argument) for argument in arguments))
    return 0 if answer >= 0 else ctypes.get_errno()


def ending(body):
    child = os.fork()
    if child == 0:
        body()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def old_architecture():
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # mov eax, 20 (getpid); int 0x80; ret
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.CFUNCTYPE(ctypes.c_int)(address)()


attempts = json.load(open("attempts.json"))
answers = {name: call(number, arguments) for name, (number, arguments) in attempts.items()}
answers["x32"] = ending(lambda: call(0x40000000 | 39, []))
answers["i386"] = ending(old_architecture)
thread = threading.Thread(target=lambda: answers.__setitem__("thread", 0))
thread.start()
thread.join()
answers["subprocess"] = subprocess.run(["true"]).returncode
print(json.dumps(answers))
"""


def number(name: str) -> int:
    """A system call's number here; negative where this architecture does not have it."""
    found: int = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
    return found


def attempts() -> dict[str, tuple[int, list[int], int]]:
    """Each attempt: number, arguments, and the errno to expect (0: it works)."""
    found: dict[str, tuple[int, list[int], int]] = {}
    for row in table():
        if not row.conditions and number(row.call) >= 0:
            found[row.call] = (number(row.call), [0] * 6, row.error)
    for bit in range(32):
        if NEW_NAMESPACES & (1 << bit):
            found[f"unshare bit {bit}"] = (number("unshare"), [1 << bit], errno.EPERM)
            if bit != 7:
                flags = 1 << bit | signal.SIGCHLD
                found[f"clone bit {bit}"] = (number("clone"), [flags, 0, 0, 0, 0], errno.EPERM)
    found["unshare with high bits"] = (number("unshare"), [1 << 32 | 0x10000000], errno.EPERM)
    for name, command in (("TIOCSTI", 0x5412), ("TIOCLINUX", 0x541C)):
        found[name] = (number("ioctl"), [0, command, 0], errno.EPERM)
        found[f"{name} with high bits"] = (number("ioctl"), [0, 1 << 32 | command, 0], errno.EPERM)
    for family in range(48):
        allowed = family in {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6}
        expected = 0 if allowed else errno.EAFNOSUPPORT
        found[f"socket family {family}"] = (number("socket"), [family, socket.SOCK_STREAM, 0], expected)
    found["socket family 40 with high bits"] = (number("socket"), [1 << 32 | 40, 1, 0], errno.EAFNOSUPPORT)
    # Denied whole: what waits in such a socket is charged to no control group.
    for protocol in (0, 2, 9, 15, 16):
        name = f"netlink protocol {protocol}"
        found[name] = (number("socket"), [socket.AF_NETLINK, socket.SOCK_DGRAM, protocol], errno.EAFNOSUPPORT)
    found["socketpair inet"] = (number("socketpair"), [socket.AF_INET, 1, 0, 0], errno.EAFNOSUPPORT)
    found["raw socket"] = (number("socket"), [socket.AF_INET, socket.SOCK_RAW, 1], errno.EPERM)
    for newer in range(LAST_REVIEWED + 1, LAST_REVIEWED + 12):
        found[f"newer call {newer}"] = (newer, [0] * 6, errno.ENOSYS)
    return found


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> dict[str, int]:
    """What each attempt came to, all in one sandbox."""
    backend: Bubblewrap = request.getfixturevalue("bubblewrap_session")
    rig = request.getfixturevalue("rig_session")
    recorder = Recorder()
    files = {
        "try.py": TRY.encode(),
        "attempts.json": json.dumps({name: made[:2] for name, made in attempts().items()}).encode(),
    }

    async def main() -> None:
        async with backend.launch(launch("python3", "try.py", files=files), recorder) as sandbox:
            end = await run(sandbox)
            assert end.status == 0, recorder.stderr

    with inside(Path("/run/netns", rig.host)):
        anyio.run(main)
    found: dict[str, int] = json.loads(recorder.stdout)
    return found


@pytest.mark.parametrize("name", list(attempts()))
def test_each_call_is_answered_as_the_table_says(answers: dict[str, int], name: str) -> None:
    assert errno.errorcode.get(answers[name], answers[name]) == errno.errorcode.get(attempts()[name][2], 0)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 has these other architectures")
@pytest.mark.parametrize("name", ["x32", "i386"])
def test_another_architecture_is_killed(answers: dict[str, int], name: str) -> None:
    assert answers[name] & 0x7F == signal.SIGSYS


@pytest.mark.parametrize("name", ["thread", "subprocess"])
def test_threads_and_children_work(answers: dict[str, int], name: str) -> None:
    assert answers[name] == 0


def test_the_compiled_filter_begins_with_the_newer_calls_and_is_short() -> None:
    program = compile_filter()
    assert isinstance(program, bytes)
    assert program.startswith(newer_calls())
    assert len(program) % 8 == 0
    assert len(program) // 8 < 4096
