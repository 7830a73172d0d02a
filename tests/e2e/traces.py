"""Owns the census of what the runs of one installation leave on the machine; removes nothing."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from reconciler.host import Host, load_host
from reconciler.prepare import owner_of
from tests.backends import k8s_world

if TYPE_CHECKING:
    from tests.e2e.installation import Installation

_CGROUPS = Path("/sys/fs/cgroup")
_OWNER, _ROLE = "ringfence.owner", "ringfence.role"
"""Labels that everything on an engine carries; their names are a promise to operators."""
_FILES = (
    *("run/runs/*", "run/bubblewrap/*/*", "run/docker/*/*", "run/k8s/*/*"),
    *("spool/claimed/*", "spool/quarantine/*", "spool/in/*/*/*"),
)


def look(installation: Installation) -> list[str]:
    """Name every process, control group and file of a run that there is."""
    found = [f"process {pid} uid {uid}: {command}" for pid, uid, command in processes(installation)]
    found += [f"control group {path}" for path in cgroups(installation)]
    found += [f"on the engine: {thing}" for thing in engine(installation)]
    found += [f"in the cluster: {thing}" for thing in cluster(installation)]
    found += [f"file {path}" for pattern in _FILES for path in sorted(installation.root.glob(pattern))]
    return found


def processes(installation: Installation) -> list[tuple[int, int, str]]:
    """List pid, uid and command of what runs as one of the installation's uids, in whatever namespace."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            lines = Path(entry.path, "status").read_text("utf-8", "replace").splitlines()
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            # The dead that nobody has waited for are process 1's to clear away, not ours.
            if status["State"][0] in "ZX":
                continue
            uids = {int(each) for each in status["Uid"].split()}
            command = Path(entry.path, "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
            found += [
                (int(entry.name), uid, command)
                for uid in uids
                if uid in installation.uids or uid == installation.proxy_uid
            ]
    return found


def engine(installation: Installation) -> list[str]:
    """List the containers, networks, volumes and links of this installation's daemon on its Docker engine."""
    on = installation.on.engine
    if on is None:
        return []
    mine = owner(installation)
    rows = [
        *(("container", row["Names"][0], row["Labels"]) for row in on.get("/containers/json?all=1")),
        *(("network", row["Name"], row["Labels"]) for row in on.get("/networks")),
        *(("volume", row["Name"], row["Labels"]) for row in on.get("/volumes")["Volumes"] or ()),
    ]
    found = [f"{kind} {name}" for kind, name, labels in rows if (labels or {}).get(_OWNER) == mine]
    links = json.loads(on.rig.run(["ip", "-json", "link"]).stdout)
    # An engine has one daemon of ours at a time: what looks like a fence of anybody's is this one's.
    return found + [f"link {link['ifname']}" for link in links if link["ifname"].startswith(("rf", "rx"))]


def cluster(installation: Installation) -> list[str]:
    """List the objects of this installation's daemon in the namespace of sandboxes."""
    on = installation.on.cluster
    if on is None:
        return []
    asked = (f"--namespace={k8s_world.NAMESPACE}", f"--selector={_OWNER}={owner(installation)}", "--output=name")
    return on.kubectl("get", "pods,jobs,networkpolicies,configmaps", *asked, check=True).stdout.split()


def owner(installation: Installation) -> str:
    """Say what the daemon of this installation calls what is its own."""
    host = load_host(installation.host_config)
    assert isinstance(host, Host), host
    return owner_of(host)


def containers(installation: Installation, role: str) -> dict[str, int]:
    """Give name and process of each container of this role that runs, the process as the engine numbers it."""
    on, mine = installation.on.engine, owner(installation)
    rows = [] if on is None else on.get("/containers/json")
    found: dict[str, int] = {}
    for row in rows:
        if (row["Labels"].get(_OWNER), row["Labels"].get(_ROLE)) == (mine, role) and on is not None:
            name = row["Names"][0].lstrip("/")
            # It may be gone by now.
            with contextlib.suppress(RuntimeError):
                state = on.get(f"/containers/{name}/json")["State"]
                found |= {name: int(state["Pid"])} if state["Running"] else {}
    return found


def sandboxes(installation: Installation) -> list[int]:
    """Pids of what runs inside sandboxes, or holds them together."""
    if installation.on.engine is not None:
        return list(containers(installation, "agent").values())
    return [pid for pid, uid, _ in processes(installation) if uid != installation.proxy_uid]


def proxies(installation: Installation) -> list[int]:
    """Pids of live proxies."""
    if installation.on.engine is not None:
        return list(containers(installation, "proxy").values())
    return [pid for pid, uid, _ in processes(installation) if uid == installation.proxy_uid]


def cgroups(installation: Installation) -> list[str]:
    """List the control groups below the one of this installation's daemon, in every hierarchy."""
    name = f"ringfence.{owner(installation)}"
    return [root for root, _directories, _files in os.walk(_CGROUPS) if f"/{name}/" in f"{root}/"]
