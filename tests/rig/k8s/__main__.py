"""Owns the command line of the Kubernetes rig: build, up, table, kubectl, down. README.md beside this file says how."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.rig import Rig
from tests.rig import sweep as sweep_rigs
from tests.rig.docker import agent_image_tar, proxy_image_tar
from tests.rig.docker.cache import build
from tests.rig.k8s import Cluster, Netpol, cache, reach
from tests.rig.machine import sweep
from tests.rig.network import NETNS, program

if TYPE_CHECKING:
    from types import FrameType


def _up(arguments: argparse.Namespace) -> int:
    def stop(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as place,
        Rig() as rig,
        Cluster(
            rig, netpol=Netpol(arguments.netpol), ipv6=not arguments.no_ipv6, gvisor=not arguments.no_gvisor
        ) as cluster,
    ):
        took = time.monotonic() - began
        kubectl = [str(cache.kubernetes().path / "bin/kubectl"), f"--kubeconfig={cluster.kubeconfig}"]
        told = {
            **rig.describe(),
            "kubeconfig": str(cluster.kubeconfig),
            "kubectl": [*rig.enter, *kubectl],
            "on_node": list(cluster.enter),
            "agent": cluster.load(agent_image_tar(Path(place) / "agent.tar")),
            "proxy": cluster.load(proxy_image_tar(Path(place) / "proxy.tar")),
            "up_s": round(took, 1),
        }
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
        while True:
            select.select([sys.stdin], [], [])
            if not os.read(sys.stdin.fileno(), 65536):
                return 0


def _table(arguments: argparse.Namespace) -> int:
    seen: dict[str, reach.Reach] = {}
    for netpol in (Netpol.KUBE_ROUTER, Netpol.KNP):
        with tempfile.TemporaryDirectory() as place, Rig() as rig, Cluster(rig, netpol=netpol) as cluster:
            image = cluster.load(agent_image_tar(Path(place) / "agent.tar"))
            for runtime in (None, "gvisor"):
                name = f"{netpol}, {runtime or 'runc'}"
                seen[name] = reach.measure(cluster, image, runtime=runtime, pods=arguments.pods)
    sys.stdout.write(reach.table(seen) + "\n")
    return 0


def _kubectl(words: list[str]) -> int:
    """Run kubectl of the only cluster that is up."""
    found = sorted(Path(tempfile.gettempdir()).glob("rfrig-*/k8s/kubeconfig"))
    if len(found) != 1:
        sys.stderr.write(f"{len(found)} clusters are up: `up` printed the kubectl of each\n")
        return 2
    namespace = NETNS / f"{found[0].parents[1].name}-host"
    kubectl = [str(cache.kubernetes().path / "bin/kubectl"), f"--kubeconfig={found[0]}"]
    return subprocess.run([program("nsenter"), f"--net={namespace}", "--", *kubectl, *words], check=False).returncode


def main() -> int:
    """Run one subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.rig.k8s", description="a Kubernetes without an uplink")
    commands = parser.add_subparsers(dest="do", required=True)
    commands.add_parser("build", help="build what is not in the cache, and say where it is")
    up = commands.add_parser("up", help="print the cluster as JSON, keep it until SIGTERM, SIGINT or the end of input")
    up.add_argument("--netpol", choices=list(Netpol), default=Netpol.KUBE_ROUTER)
    up.add_argument("--no-ipv6", action="store_true", help="pods have no link-local addresses")
    up.add_argument("--no-gvisor", action="store_true", help="there is no RuntimeClass")
    table = commands.add_parser("table", help="measure what a fenced pod reaches, as Markdown")
    table.add_argument("--pods", type=int, default=20, help="how many for each enforcer and runtime")
    kubectl = commands.add_parser("kubectl", help="kubectl of the only cluster that is up", add_help=False)
    kubectl.add_argument("words", nargs=argparse.REMAINDER)
    commands.add_parser("down", help="remove what clusters and rigs of dead processes left, and print their names")
    arguments = parser.parse_args()
    match arguments.do:
        case "build":
            began = time.monotonic()
            build(*cache.everything())
            sys.stderr.write(f"built in {time.monotonic() - began:.0f} s\n")
            sys.stdout.writelines(f"{part.path}\n" for part in cache.everything())
            return 0
        case "up":
            build(*cache.everything())
            return _up(arguments)
        case "table":
            build(*cache.everything())
            return _table(arguments)
        case "kubectl":
            return _kubectl(arguments.words)
        case _:
            sys.stdout.writelines(f"{name}\n" for name in (*sweep_rigs(), *sweep()))
            return 0


if __name__ == "__main__":
    sys.exit(main())
