"""Owns what a bubblewrap fence is made of, as data: its files and mounts, and bwrap's arguments for them.

Pure: starts nothing and reads no file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reconciler.backends.mountinfo import Mount, below

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROXY_ADDRESS = ("127.0.0.1", 3128)
LAUNCHER = "/run/ringfence/launcher.py"
GATE = "/run/ringfence/gate.py"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
WORKING_DIRECTORY = "/job"
HOSTNAME = "sandbox"
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
"""What `bwrap --dev` binds from the host's /dev."""
_MOST_SHM = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRoot:
    """What a sandbox sees of the host: directories bound read-only, links made anew, certificates copied."""

    directories: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    """Path in the sandbox, and what the link there says."""
    certificates: bytes | None = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file that is made in the sandbox's own read-only root."""

    path: str
    content: bytes = field(repr=False)
    mode: str = "0444"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """Everything that decides what a sandbox's process can see. Sizes in bytes."""

    user: int
    host: HostRoot
    files: tuple[File, ...]
    tmp_size: int
    shm_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptors:
    """Numbers of the open files that bwrap is started with; `files` in the order of the fence's."""

    status: int
    seccomp: int
    files: tuple[int, ...]


def fence(*, user: int, memory: int, host: HostRoot, files: Mapping[str, bytes], launcher: bytes, gate: bytes) -> Fence:
    """Put together the fence of one run; `files` are the job's input by their names below the working directory."""
    own = {
        "/etc/passwd": f"agent:x:{user}:{user}:agent:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
        "/etc/group": f"agent:x:{user}:\nnogroup:x:65534:\n",
        "/etc/hosts": f"127.0.0.1 localhost {HOSTNAME}\n::1 localhost\n",
        # No name is looked up from inside: the proxy does that.
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }
    made = [File(path=path, content=text.encode("ascii")) for path, text in own.items()]
    if host.certificates is not None:
        made.append(File(path=CERTIFICATES, content=host.certificates))
    made += [File(path=LAUNCHER, content=launcher), File(path=GATE, content=gate)]
    made += [File(path=f"{WORKING_DIRECTORY}/{name}", content=content) for name, content in sorted(files.items())]
    # Both live in memory and count against its limit: half of it, so that a full disk is an error and not a kill.
    return Fence(user=user, host=host, files=tuple(made), tmp_size=memory // 2, shm_size=min(_MOST_SHM, memory // 4))


def arguments(made: Fence, descriptors: Descriptors) -> tuple[str, ...]:
    """Give bwrap's arguments, without the command. Each namespace by name: `--unshare-all` only tries some of them."""
    result = ["--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup"]
    result += ["--disable-userns", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    result += ["--uid", str(made.user), "--gid", str(made.user), "--hostname", HOSTNAME]
    for directory in made.host.directories:
        result += ["--ro-bind", directory, directory]
    for path, target in made.host.links:
        result += ["--symlink", target, path]
    result += ["--proc", "/proc", "--dev", "/dev"]
    for path, size in (("/dev/shm", made.shm_size), ("/tmp", made.tmp_size)):  # noqa: S108 - the sandbox's own
        result += ["--size", str(size), "--perms", "1777", "--tmpfs", path]
    result += ["--perms", "0555", "--dir", WORKING_DIRECTORY]
    for file, descriptor in zip(made.files, descriptors.files, strict=True):
        result += ["--perms", file.mode, "--file", str(descriptor), file.path]
    # The root is a tmpfs without a bound and belongs to the sandbox's own uid: nothing may be written there.
    result += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    result += ["--json-status-fd", str(descriptors.status), "--seccomp", str(descriptors.seccomp)]
    return tuple(result)


def launcher_command(python: str, *, handoff: int, words: int, report: int) -> tuple[str, ...]:
    """Give the command that bwrap starts; numbers of the three descriptors that it keeps."""
    return (python, "-I", "-S", LAUNCHER, str(handoff), str(words), str(report), GATE)


def environment(made: Fence, given: Mapping[str, str]) -> dict[str, str]:
    """Give the command's whole environment: what finds the proxy, over the job's, over a few defaults."""
    proxy = f"http://{PROXY_ADDRESS[0]}:{PROXY_ADDRESS[1]}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    defaults = {
        "HOME": "/tmp",  # noqa: S108 - the sandbox's own
        "LANG": "C.UTF-8",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "USER": "agent",
    }
    if made.host.certificates is not None:
        defaults["SSL_CERT_FILE"] = CERTIFICATES
    return {
        **defaults,
        **given,
        **{variant: proxy for name in names for variant in (name, name.lower())},
        "NO_PROXY": "",
        "no_proxy": "",
        "NODE_USE_ENV_PROXY": "1",
    }


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PlannedMount:
    """One mount that must be there. `device` and `root` None where the kernel makes them up; `flags` must be set."""

    point: str
    kind: str
    device: str | None
    root: str | None
    flags: frozenset[str] = field(compare=False)


def mounts(made: Fence, host: Sequence[Mount]) -> tuple[PlannedMount, ...]:
    """Say which mounts the fence has, all of them; `host` is the daemon's own mountinfo."""
    hard = frozenset({"nosuid", "nodev"})
    planned = [
        PlannedMount(point="/", kind="tmpfs", device=None, root=None, flags=hard | {"ro"}),
        PlannedMount(point="/proc", kind="proc", device=None, root="/", flags=hard | {"noexec"}),
        PlannedMount(point="/dev", kind="tmpfs", device=None, root="/", flags=hard | {"ro"}),
        PlannedMount(point="/dev/pts", kind="devpts", device=None, root="/", flags=frozenset({"nosuid", "noexec"})),
        PlannedMount(point="/dev/shm", kind="tmpfs", device=None, root="/", flags=hard),  # noqa: S108 - as above
        PlannedMount(point="/tmp", kind="tmpfs", device=None, root="/", flags=hard),  # noqa: S108 - as above
    ]
    for device in _DEVICES:
        planned += [_bound(mount, frozenset({"nosuid"})) for mount in below(host, f"/dev/{device}")]
    for directory in made.host.directories:
        planned += [_bound(mount, hard | {"ro"}) for mount in below(host, directory)]
    return tuple(sorted(planned))


def _bound(mount: Mount, flags: frozenset[str]) -> PlannedMount:
    return PlannedMount(point=mount.point, kind=mount.kind, device=mount.device, root=mount.root, flags=flags)


def mount_differences(planned: Sequence[PlannedMount], actual: Sequence[Mount]) -> tuple[str, ...]:
    """Compare the whole of both; each line names one mount that is missing, strange or not as hard as planned."""
    left = list(actual)
    lines = []
    for plan in planned:
        found = next((mount for mount in left if _matches(plan, mount)), None)
        if found is None:
            lines.append(f"mount {plan.point} is not there as planned")
        else:
            left.remove(found)
    return (*lines, *(f"mount {mount.point} ({mount.kind} {mount.root}) was not planned" for mount in left))


def _matches(plan: PlannedMount, mount: Mount) -> bool:
    return (
        (plan.point, plan.kind) == (mount.point, mount.kind)
        and plan.device in (None, mount.device)
        and plan.root in (None, mount.root)
        and plan.flags <= mount.options
    )
