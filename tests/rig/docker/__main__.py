"""Owns the Docker rig's command line: build, up, table, down. README.md beside this file says how to use it."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.rig import Rig
from tests.rig import sweep as sweep_rigs
from tests.rig.docker import Engine, Firewall, Store, Which, agent_image_tar, cache, networks
from tests.rig.machine import sweep

if TYPE_CHECKING:
    from types import FrameType


def _engine(rig: Rig, arguments: argparse.Namespace) -> Engine:
    return Engine(
        rig,
        which=Which(arguments.which),
        firewall=Firewall(arguments.firewall),
        store=None if arguments.store is None else Store(arguments.store),
        rp_filter=arguments.rp_filter,
        bridge_nf=arguments.bridge_nf,
        local_resolver=arguments.local_resolver,
    )


def _table(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as place, Rig() as rig, _engine(rig, arguments) as engine:
        engine.load(agent_image_tar(Path(place) / "agent.tar").archive)
        sys.stdout.write(networks.table(networks.measure(engine)) + "\n")
    return 0


def _up(arguments: argparse.Namespace) -> int:
    def stop(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    with Rig() as rig, _engine(rig, arguments) as engine:
        told = {
            **rig.describe(),
            "docker_host": engine.base_url,
            "docker": str(cache.packages().path / "debian/usr/bin/docker"),
            "beside_dockerd": list(engine.enter),
            "version": engine.get("/version")["Version"],
        }
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
        while True:
            select.select([sys.stdin], [], [])
            if not os.read(sys.stdin.fileno(), 65536):
                return 0


def main() -> int:
    """Run one subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.rig.docker", description="a Docker engine without an uplink")
    commands = parser.add_subparsers(dest="do", required=True)
    commands.add_parser("build", help="build what is not in the cache, and say where it is")
    up = commands.add_parser("up", help="print the engine as JSON, keep it until SIGTERM, SIGINT or the end of input")
    table = commands.add_parser("table", help="measure what a container reaches on each kind of network, as Markdown")
    for each in (up, table):
        each.add_argument("--which", choices=list(Which), default=Which.CURRENT)
        each.add_argument("--firewall", choices=list(Firewall), default=Firewall.IPTABLES)
        each.add_argument("--store", choices=list(Store))
        each.add_argument("--rp-filter", type=int, choices=[0, 1, 2], default=2)
        each.add_argument("--bridge-nf", action="store_true", help="bridged frames pass the firewall")
        each.add_argument("--local-resolver", action="store_true", help="the host's resolver is on its loopback")
    commands.add_parser("down", help="remove what engines and rigs of dead processes left, and print their names")
    arguments = parser.parse_args()
    match arguments.do:
        case "build":
            began = time.monotonic()
            cache.build(*cache.everything())
            sys.stderr.write(f"built in {time.monotonic() - began:.0f} s\n")
            sys.stdout.writelines(f"{part.path}\n" for part in cache.everything())
            return 0
        case "up":
            cache.build(*cache.everything())
            return _up(arguments)
        case "table":
            cache.build(*cache.everything())
            return _table(arguments)
        case _:
            sys.stdout.writelines(f"{name}\n" for name in (*sweep_rigs(), *sweep()))
            return 0


if __name__ == "__main__":
    sys.exit(main())
