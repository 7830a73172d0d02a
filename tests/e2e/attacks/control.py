"""Owns the control run: the same attacks where nothing fences them in, as root in a guest of a rig of its own.

The guest is wired as Docker wires an ordinary container: a bridge on the host, an address and a default route, a
neighbour beside it. What lives in the host's own namespace alone is tried there. An attack that comes to nothing here
would prove nothing behind a fence.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.e2e import workload
from tests.e2e.attacks import neighbour
from tests.e2e.attacks.table import PORT, Attack, Open, Scene, attacks
from tests.e2e.listeners import Listeners
from tests.rig import Rig, addresses, network

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_BRIDGE: Final = "open0"
_PYTHON: Final = "/usr/bin/python3"
_MORTAL: Final = ("/usr/bin/setpriv", "--pdeathsig", "KILL", "--")
"""Ends with this process, however that ends."""
_GATEWAY, _GUEST, _PEER = "10.99.0.1", "10.99.0.2", "10.99.0.3"
_WAIT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Shown:
    """What an attack came to in the open: what the workload said, and what arrived because of it."""

    outcome: str
    arrivals: tuple[str, ...]

    def holds(self, attack: Attack) -> bool:
        """Say whether the attack came to what it must."""
        match attack.opens:
            case Open.ARRIVES:
                return bool(self.arrivals) or self.outcome == "reached"
            case Open.WORKS:
                return self.outcome == "reached"
            case Open.FENCED:
                return True


@contextlib.contextmanager
def _guest(rig: Rig) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Wire a guest and a neighbour to the host; gives the argv prefixes that enter them."""

    def host(*argv: str) -> None:
        done = rig.run(argv)
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)}: {done.stderr.decode()}")

    def inside(prefix: tuple[str, ...], *argv: str) -> None:
        subprocess.run([*prefix, *argv], check=True, capture_output=True, timeout=20)

    host("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1", "net.ipv4.conf.all.rp_filter=0")
    host("sysctl", "-qw", "net.ipv4.conf.default.rp_filter=0", "net.ipv4.icmp_echo_ignore_broadcasts=0")
    host("ip", "link", "add", _BRIDGE, "type", "bridge")
    host("ip", "link", "set", _BRIDGE, "up")
    for address in (f"{_GATEWAY}/29", "fd99::1/64", f"{addresses.HOST_LINK_LOCAL}/64"):
        host("ip", "address", "add", address, "dev", _BRIDGE, *(("nodad",) if ":" in address else ()))
    with contextlib.ExitStack() as stack:
        found = []
        for number, where in enumerate(("guest", "peer"), start=2):
            pid, prefix = stack.enter_context(_namespace())
            found.append(prefix)
            host("ip", "link", "add", f"v-{where}", "type", "veth", "peer", "name", "eth0", "netns", str(pid))
            host("ip", "link", "set", f"v-{where}", "master", _BRIDGE, "up")
            inside(prefix, "ip", "link", "set", "lo", "up")
            inside(prefix, "ip", "address", "add", f"10.99.0.{number}/29", "broadcast", "+", "dev", "eth0")
            inside(prefix, "ip", "address", "add", f"fd99::{number}/64", "dev", "eth0", "nodad")
            inside(prefix, "ip", "link", "set", "eth0", "up")
            inside(prefix, "ip", "route", "add", "default", "via", _GATEWAY)
            inside(prefix, "ip", "-6", "route", "add", "default", "via", "fd99::1")
            inside(prefix, "sysctl", "-qw", "net.ipv4.ping_group_range=0 2147483647")
        internet = rig.instance.enter(rig.internet)
        inside(internet, "ip", "route", "add", "10.99.0.0/29", "via", addresses.HOST_V4)
        inside(internet, "ip", "-6", "route", "add", "fd99::/64", "via", addresses.HOST_V6)
        yield found[0], found[1]


@contextlib.contextmanager
def _namespace() -> Iterator[tuple[int, tuple[str, ...]]]:
    """Hold a network namespace by a process that ends with this one; gives its pid and the prefix that enters."""
    argv = [network.program("unshare"), "--net", "--", "/bin/sh", "-c", "echo ready; exec cat"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holding:
        if holding.stdout is None or holding.stdout.readline() != b"ready\n":
            raise RuntimeError("no network namespace can be made")
        yield holding.pid, (network.program("nsenter"), f"--net=/proc/{holding.pid}/ns/net", "--")


def run() -> dict[str, Shown]:
    """Try everything in the open, one by one; by the name of the attack. Raises RuntimeError for a dead listener."""
    with contextlib.ExitStack() as stack:
        rig = stack.enter_context(Rig())
        guest, peer = stack.enter_context(_guest(rig))
        listening = stack.enter_context(Listeners(rig))
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place.chmod(0o755)
        shutil.copy("/usr/bin/sleep", place / "sleep")
        (place / "sleep").chmod(0o4755)
        names = ("in-the-host", "in-the-peer")
        records = [place / each for each in names]
        for name, prefix, ports, record in (
            (names[0], rig.enter, (), records[0]),
            (names[1], peer, (str(PORT), "3128", "3129"), records[1]),
        ):
            stack.enter_context(_living([*prefix, *_MORTAL, _PYTHON, "-I", neighbour.__file__, name, *ports], record))
        scene = Scene(
            listeners=listening.targets,
            neighbour=(_PEER,),
            proxies=(_PEER,),
            pool="10.99.0.0/29",
            abstract=names[0],
            set_uid=(str(place / "sleep"), "5"),
            host_file=str(records[0]),
            scan_s=1.0,
        )
        trial = _Trial(rig=rig, listening=listening, records=tuple(records))
        return {
            attack.name: trial.show(attack, (guest, rig.enter))
            for attack in attacks(scene)
            if attack.opens is not Open.FENCED
        }


@contextlib.contextmanager
def _living(argv: list[str], record: Path) -> Iterator[None]:
    """Have a neighbour live, its output recorded."""
    with (
        record.open("wb") as output,
        subprocess.Popen(argv, stdout=output, stdin=subprocess.DEVNULL, env={}) as process,
    ):
        try:
            while b"listening" not in record.read_bytes():
                if process.poll() is not None:
                    raise RuntimeError(f"the neighbour ended with {process.returncode}")
            yield
        finally:
            process.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """Where arrivals are seen."""

    rig: Rig
    listening: Listeners
    records: tuple[Path, ...]

    def show(self, attack: Attack, places: tuple[tuple[str, ...], ...]) -> Shown:
        """Try an attack in one place after the other, until it comes to something."""
        shown = Shown("", ())
        for prefix in places:
            self.rig.clear()
            self.listening.clear()
            before = sum(self._told())
            said = self._try(attack, prefix)
            if attack.opens is Open.ARRIVES:
                self._await(before, 0.1 if said["outcome"] == "failed" else _WAIT_S)
            shown = Shown(said["outcome"], tuple(self._arrivals(before)))
            if shown.holds(attack):
                return shown
        return shown

    def _try(self, attack: Attack, prefix: tuple[str, ...]) -> dict[str, Any]:
        job = {"attempts": [attack.attempt()], "timeout": 0.5, "proxy": f"http://{_PEER}:1"}
        argv = [*prefix, _PYTHON, "-I", workload.__file__, json.dumps(job)]
        done = subprocess.run(argv, capture_output=True, check=True, timeout=60, env={"PATH": "/usr/bin:/bin"})
        said: dict[str, Any] = json.loads(done.stdout)
        return said

    def _await(self, before: int, patience_s: float) -> None:
        self.rig.until(lambda: bool(self._arrivals(before)), timeout_s=patience_s)

    def _told(self) -> list[int]:
        return [record.read_bytes().count(b"arrival") for record in self.records]

    def _arrivals(self, before: int) -> list[str]:
        found = [f"{packet.kind} to {packet.address}" for packet in self.rig.packets()]
        found += [f"{arrival.kind} at the host" for arrival in self.listening.arrivals()]
        return found + ["a connection or datagram at the neighbour"] * (sum(self._told()) - before)


def lacking(shown: Mapping[str, Shown], table: tuple[Attack, ...]) -> list[str]:
    """Name what came to nothing in the open."""
    return [
        f"{each.name}: {shown[each.name]}"
        for each in table
        if each.opens is not Open.FENCED and not shown[each.name].holds(each)
    ]
