"""Owns the life of programs that believe the rig's host to be theirs: own mounts, pids, a cgroup; knows no program."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.rig import network
from tests.rig.keeper import CGROUPS, remove_cgroups

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.rig.rig import Rig

_HERE: Final = Path(__file__).parent
_CGROUP: Final = "ringfence-"
_NESTED: Final = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What one program is started with."""

    argv: Sequence[str]
    stale: Sequence[str] = ()
    """Files that a killed one leaves and a new one trips over."""
    appears: str | None = None
    """The socket that it makes, waited for at its start."""


@dataclass(slots=True)
class Machine:
    """Mount and pid namespaces in the host namespace of a rig that is up, and the programs in them.

    Nothing of it outlives `stop`, nor this process, `kill -9` included. Its directory, `rig.directory / name`, is there
    between `prepare` and `stop`, and so is a tmpfs in it, `data`, seen from inside alone.
    """

    rig: Rig
    name: str
    environment: Mapping[str, str]
    _keeper: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _pid: int | None = field(default=None, init=False)
    _links: frozenset[str] = field(default=frozenset(), init=False)

    @property
    def directory(self) -> Path:
        """Where its files are."""
        return self.rig.directory / self.name

    @property
    def data(self) -> Path:
        """Where its tmpfs is, inside."""
        return self.directory / "data"

    @property
    def cgroup(self) -> str:
        """The parent of its containers' cgroups, in every hierarchy."""
        return f"{_CGROUP}{self.rig.instance.name}-{self.name}"

    def prepare(self, sysctls: Mapping[str, int], *, resolver: str) -> None:
        """Make its directory, and set what the root namespace of such a host has."""
        sweep()
        self.directory.mkdir()
        self.data.mkdir()
        (self.directory / "resolv.conf").write_text(f"nameserver {resolver}\n")
        self._links = self._links_now()
        # Those of br_netfilter are there where the kernel has it.
        known = {key: value for key, value in sysctls.items() if Path("/proc/sys", key.replace(".", "/")).exists()}
        done = self.rig.run([network.program("sysctl"), "-qw", *(f"{key}={value}" for key, value in known.items())])
        if done.returncode:
            raise RuntimeError(f"sysctl: {done.stderr.decode().strip()}")

    def start(self, programs: Mapping[str, Program], *, data_size: str, inside: Sequence[Sequence[str]] = ()) -> None:
        """Make the namespaces; no program runs yet. `inside`: commands that process 1 runs first, in this order."""
        mount = network.program("mount")
        settings = {
            "directory": str(self.directory),
            "environment": dict(self.environment),
            "programs": {name: asdict(program) for name, program in programs.items()},
            "prepare": [
                [mount, "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"],
                [mount, "-t", "tmpfs", "-o", f"mode=755,size={data_size}", "tmpfs", str(self.data)],
                [mount, "--bind", str(self.directory / "resolv.conf"), str(Path("/etc/resolv.conf").resolve())],
                *map(list, inside),
            ],
        }
        entered = [*self.rig.enter, network.program("unshare"), *_NESTED, "--", sys.executable]
        keeper = [sys.executable, str(_HERE / "keeper.py"), self.cgroup]
        with (self.directory / "host.log").open("wb") as log:
            self._keeper = subprocess.Popen(
                [*keeper, *entered, str(_HERE / "process_one.py"), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a Ctrl-C at the terminal ends the parent, and that ends the machine
            )

    def stop(self) -> None:
        """End all that runs in it at once, and bring the host namespace back to how it was found.

        The sysctls stay. Raises RuntimeError when something of it is left.
        """
        keeper, self._keeper, self._pid = self._keeper, None, None
        if keeper is not None and keeper.stdin is not None and keeper.stdout is not None:
            keeper.stdin.close()
            keeper.stdout.close()
            keeper.wait(timeout=60)
        if not self.directory.exists():
            return
        for link in self._links_now() - self._links:
            self.rig.run([network.program("ip"), "link", "delete", link])
        self.tool("nft", "flush", "ruleset")
        logs = self.logs()
        shutil.rmtree(self.directory)
        if keeper is not None and keeper.returncode:
            raise RuntimeError(f"the {self.name} machine left something behind:\n{logs}")

    def order(self, verb: str, name: str) -> None:
        """Have a program started (`start`), ended (`kill`, `stop`: SIGTERM), held (`pause`) or let go (`resume`)."""
        keeper = self._keeper
        if keeper is None or keeper.stdin is None or keeper.stdout is None:
            raise RuntimeError(f"the {self.name} machine is not up")
        with contextlib.suppress(BrokenPipeError):
            keeper.stdin.write(f"{verb} {name}\n".encode())
            keeper.stdin.flush()
        if keeper.stdout.readline() != b"done\n":
            raise RuntimeError(f"the {self.name} machine ended at `{verb} {name}`:\n{self.logs()}")

    @property
    def enter(self) -> tuple[str, ...]:
        """The argv prefix that runs a program beside the others: same network, mounts, pids."""
        return (network.program("nsenter"), f"--target={self.pid}", "--net", "--mount", "--pid", "--")

    @property
    def pid(self) -> int:
        """The pid, seen from here, of process 1."""
        if self._pid is None:
            if self._keeper is None:
                raise RuntimeError(f"the {self.name} machine is not up")
            pid = self._keeper.pid
            # keeper -> unshare (nsenter became it) -> process 1
            for _ in range(2):
                (pid,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            self._pid = pid
        return self._pid

    def tool(self, name: str, *arguments: str, stdin: str = "") -> str:
        """Run nft, iptables or the like in the host namespace and return its output; raises RuntimeError."""
        done = self.rig.run([name, *arguments], env=self.environment, stdin=stdin.encode())
        if done.returncode:
            raise RuntimeError(f"{name} {' '.join(arguments)}: {done.stderr.decode().strip()}")
        return done.stdout.decode()

    def logs(self, lines: int = 15) -> str:
        """Return the last lines of what each program wrote."""
        return "\n".join(
            f"--- {path.stem}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
            for path in sorted(self.directory.glob("*.log"))
        )

    def _links_now(self) -> frozenset[str]:
        listed = json.loads(self.rig.run([network.program("ip"), "-json", "link"]).stdout)
        return frozenset(link["ifname"] for link in listed)


def sweep() -> tuple[str, ...]:
    """Remove the cgroups of machines whose owner and keeper are both dead; returns their names."""
    present = {path.name for pattern in (f"{_CGROUP}rfrig-*", f"*/{_CGROUP}rfrig-*") for path in CGROUPS.glob(pattern)}
    dead = sorted(name for name in present if _abandoned(name.removeprefix(_CGROUP)))
    for name in dead:
        remove_cgroups(name)
    return tuple(dead)


def _abandoned(name: str) -> bool:
    _rfrig, pid, start, _random, _name = name.split("-")
    return network.started(int(pid)) != int(start)
