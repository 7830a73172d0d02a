"""Owns the rig's two network namespaces, from making them to removing what a dead rig left; runs no service in them.

Everything is found again by the instance's name, which holds the owner's pid and start time: nothing else is touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.rig import addresses as a

NETNS: Final = Path("/run/netns")
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NAME: Final = re.compile(r"(?P<instance>rfrig-(?P<pid>[0-9]+)-(?P<start>[0-9]+)-[0-9a-f]{6})(?:-host|-internet)?\Z")


@dataclass(frozen=True, slots=True)
class Instance:
    """The name of one rig, and the names that follow from it."""

    name: str

    @property
    def host(self) -> str:
        """Name of the namespace that plays the host."""
        return f"{self.name}-host"

    @property
    def internet(self) -> str:
        """Name of the namespace that plays the internet."""
        return f"{self.name}-internet"

    @property
    def directory(self) -> Path:
        """Where the rig's files are."""
        return Path(tempfile.gettempdir()) / self.name

    def enter(self, namespace: str) -> tuple[str, ...]:
        """Return the argv prefix that runs a program in `namespace` and changes nothing else (/sys stays)."""
        return (program("nsenter"), f"--net={NETNS / namespace}", "--")


def program(name: str) -> str:
    """Find a program of the system; raises FileNotFoundError that says what the rig needs it for."""
    found = shutil.which(name, path=_PATH)
    if found is None:
        raise FileNotFoundError(f"the rig needs `{name}` (Debian packages iproute2, util-linux, procps)")
    return found


def fresh() -> Instance:
    """Name an instance that belongs to this process."""
    pid = os.getpid()
    return Instance(f"rfrig-{pid}-{started(pid)}-{secrets.token_hex(3)}")


def make(instance: Instance) -> None:
    """Make both namespaces and the link, with no uplink; needs root. Raises RuntimeError with ip's own words."""
    host, internet = instance.host, instance.internet
    _ip("", [f"netns add {host}", f"netns add {internet}"])
    for namespace in (host, internet):
        # Duplicate address detection would hold the link-local addresses back for a second. Datagram ICMP is open to
        # every group, as Debian has it. No reverse path filter: a packet that gets out wrongly should be seen.
        settings = ["net.ipv6.conf.default.accept_dad=0", "net.ipv6.conf.all.accept_dad=0"]
        settings += ["net.ipv4.ping_group_range=0 2147483647", "net.ipv4.conf.all.rp_filter=0"]
        settings += ["net.ipv4.conf.default.rp_filter=0", "net.ipv6.conf.all.disable_ipv6=0"]
        _run([*instance.enter(namespace), program("sysctl"), "-qw", *settings])
    _ip(
        host,
        [
            "link set lo up",
            f"link add {a.HOST_LINK} type veth peer name {a.INTERNET_LINK} netns {internet}",
            f"link set {a.HOST_LINK} addrgenmode none",
            f"addr add {a.HOST_V4}/24 dev {a.HOST_LINK}",
            f"addr add {a.HOST_PRIVATE}/24 dev {a.HOST_LINK}",
            f"addr add {a.HOST_V6}/64 dev {a.HOST_LINK} nodad",
            f"addr add {a.HOST_LINK_LOCAL}/64 dev {a.HOST_LINK} nodad",
            f"link set {a.HOST_LINK} up",
            f"route add default via {a.INTERNET_V4}",
        ],
    )
    carried = [*a.ORIGINS, *a.FORBIDDEN]
    _ip(
        internet,
        [
            "link set lo up",
            f"link set {a.INTERNET_LINK} addrgenmode none",
            f"addr add {a.INTERNET_V4}/24 dev {a.INTERNET_LINK}",
            f"addr add {a.INTERNET_PRIVATE}/24 dev {a.INTERNET_LINK}",
            f"addr add {a.INTERNET_V6}/64 dev {a.INTERNET_LINK} nodad",
            f"addr add {a.INTERNET_LINK_LOCAL}/64 dev {a.INTERNET_LINK} nodad",
            *[f"addr add {each}/128 dev lo nodad" if ":" in each else f"addr add {each}/32 dev lo" for each in carried],
            f"link set {a.INTERNET_LINK} up",
            f"route add default via {a.HOST_V4}",
            f"-6 route add default via {a.HOST_V6}",
        ],
    )
    _ip(host, [f"-6 route add default via {a.INTERNET_V6}"])


def await_link(instance: Instance) -> None:
    """Wait until both ends have seen their carrier, which the kernel reports late; raises RuntimeError after 5 s."""
    end = time.monotonic() + 5
    waiting = [(instance.host, a.HOST_LINK), (instance.internet, a.INTERNET_LINK)]
    while waiting:
        waiting = [
            each
            for each in waiting
            if " state UP " not in _run([program("ip"), "-n", each[0], "link", "show", each[1]])
        ]
        if waiting and time.monotonic() > end:
            raise RuntimeError(f"the rig's link does not come up in {waiting[0][0]}")
        time.sleep(0.005 if waiting else 0)


def inside(namespace: str) -> frozenset[int]:
    """Return the pids of the processes whose network namespace has this name."""
    with contextlib.suppress(OSError), (NETNS / namespace).open("rb") as held:
        # Held open, so that its inode number cannot become another namespace's while we look.
        wanted = os.fstat(held.fileno()).st_ino
        return frozenset(pid for pid in pids() if namespace_of(pid) == wanted)
    return frozenset()


def namespace_of(pid: int) -> int | None:
    """Return the inode of a process's network namespace; None when it is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return None


def pids() -> tuple[int, ...]:
    """Return every pid of the machine."""
    names = (path.name for path in Path("/proc").iterdir())
    return tuple(int(name) for name in names if name.isdigit())


def remove(instance: Instance) -> None:
    """End what runs in the namespaces (but not the caller), then remove them and the files. Idempotent."""
    for _ in range(100):
        ours = (inside(instance.host) | inside(instance.internet)) - {os.getpid()}
        if not ours:
            break
        for pid in ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for namespace in (instance.host, instance.internet):
        if (NETNS / namespace).exists():
            subprocess.run([program("ip"), "netns", "del", namespace], capture_output=True, check=False, timeout=20)
    shutil.rmtree(instance.directory, ignore_errors=True)


def leftovers() -> frozenset[Instance]:
    """Return the instances that exist in part or whole though their owner is dead."""
    return frozenset(
        Instance(parts["instance"]) for parts in _present() if started(int(parts["pid"])) != int(parts["start"])
    )


def owned_by(pid: int) -> frozenset[Instance]:
    """Return the instances that exist in part or whole and that belong to the live process `pid`."""
    owner = (str(pid), str(started(pid)))
    return frozenset(Instance(parts["instance"]) for parts in _present() if (parts["pid"], parts["start"]) == owner)


def _present() -> list[re.Match[str]]:
    places = [place for place in (NETNS, Path(tempfile.gettempdir())) if place.is_dir()]
    matches = [_NAME.match(path.name) for place in places for path in place.iterdir()]
    return [parts for parts in matches if parts is not None]


def started(pid: int) -> int | None:
    """Return a process's start time in ticks since boot (proc(5), field 22); None when it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def _ip(namespace: str, commands: list[str]) -> None:
    where = ["-n", namespace] if namespace else []
    if any(command.startswith("-6 ") for command in commands):
        for command in commands:
            _run([program("ip"), *where, *command.split()])
    else:
        _run([program("ip"), *where, "-batch", "-"], "\n".join(commands) + "\n")


def _run(argv: list[str], text: str = "") -> str:
    done = subprocess.run(argv, input=text, text=True, capture_output=True, check=False, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)} failed: {done.stderr.strip()} {text}")
    return done.stdout
