"""Owns what a host must have before bubblewrap can be tried at all, and what to install where it does not.

Builds no fence: that all of this is there proves nothing yet.
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reconciler.backends.cgroup import NoCgroup, Root, find
from reconciler.backends.seccomp import NoSeccomp, compile_filter
from reconciler.core.choose import Missing
from reconciler.core.policy import BackendName
from reconciler.directory import uid_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reconciler.host import Host

_VERSION_S = 5.0
_USER_NAMESPACES = (
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=10000"),
)
_APPARMOR = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
_APPARMOR_PROFILE = Path("/etc/apparmor.d/bwrap-userns-restrict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What was found: the program, where control groups are, the compiled filter, and versions for the cache."""

    bwrap: str
    roots: Mapping[str, Root]
    seccomp: bytes
    versions: Mapping[str, str]


def look(host: Host) -> Surroundings | Missing:
    """Look for everything that is needed, in the order in which it is needed."""
    if os.geteuid() != 0:
        return _missing("not_root", "run ringfenced as root: each sandbox gets a uid and control groups of its own")
    bwrap = shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")
    if bwrap is None:
        return _missing("no_bwrap", "bwrap is not installed (Debian: apt-get install bubblewrap)")
    if Path(bwrap).stat().st_mode & stat.S_ISUID:
        return _missing("bwrap_setuid", f"{bwrap} is setuid root, which ringfence does not use: chmod u-s {bwrap}")
    if not host.python.startswith("/usr/") or not os.access(host.python, os.X_OK):
        return _missing(
            "no_interpreter",
            f"{host.python} is not an interpreter below /usr, where a sandbox can see it: install python3 (Debian:"
            " apt-get install python3-minimal) or set `python` in host.yaml",
        )
    for file, closed, advice in _USER_NAMESPACES:
        if Path(file).exists() and Path(file).read_text("ascii").strip() == closed:
            return _missing("no_user_namespaces", f"{file} is {closed}: unprivileged user namespaces are off; {advice}")
    if _APPARMOR.exists() and _APPARMOR.read_text("ascii").strip() != "0" and not _APPARMOR_PROFILE.exists():
        return _missing(
            "no_user_namespaces",
            "AppArmor denies unprivileged user namespaces: load the profile bwrap-userns-restrict (Ubuntu:"
            " apparmor-profiles), or sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        )
    if not uid_of(host.proxy_user):
        return _missing(
            "no_proxy_user",
            f"proxies cannot run as {host.proxy_user}: useradd --system ringfence, and name that in host.yaml",
        )
    roots = control_groups()
    if isinstance(roots, NoCgroup):
        return _missing("no_cgroup", roots.message)
    program = compile_filter()
    if isinstance(program, NoSeccomp):
        return _missing("no_seccomp", program.message)
    versions = {"bubblewrap": _version(bwrap), "kernel": platform.release(), "python": _version(host.python)}
    return Surroundings(bwrap=bwrap, roots=roots, seccomp=program, versions=versions)


def control_groups() -> Mapping[str, Root] | NoCgroup:
    """Find this host's control groups."""
    return find(Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape"))


def _version(program: str) -> str:
    shown = subprocess.run([program, "--version"], capture_output=True, check=False, timeout=_VERSION_S, env={})
    words = shown.stdout.decode("ascii", "replace").split()
    return words[-1] if words else "unknown"


def _missing(code: str, message: str) -> Missing:
    return Missing(backend=BackendName.BUBBLEWRAP, code=code, message=message)
