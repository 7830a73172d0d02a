"""Owns the rig's command line: up, run, down. README.md beside this file says how to use it."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
from typing import TYPE_CHECKING

from tests.rig import Rig, sweep

if TYPE_CHECKING:
    from types import FrameType


def _up() -> int:
    rig = Rig()

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    with rig:
        sys.stdout.write(json.dumps(rig.describe()) + "\n")
        sys.stdout.flush()
        while True:
            select.select([sys.stdin], [], [])
            if not os.read(sys.stdin.fileno(), 65536):
                return 0


def _run(command: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    with Rig() as rig:
        process = rig.spawn(command, env=rig.environment(), stdin=sys.stdin, stdout=sys.stdout.fileno())
        try:
            return process.wait()
        except KeyboardInterrupt:
            return 130


def main() -> int:
    """Run one subcommand; returns the exit status, for `run` the command's own."""
    parser = argparse.ArgumentParser(prog="python -m tests.rig", description="a network without an uplink, for tests")
    commands = parser.add_subparsers(dest="do", required=True)
    commands.add_parser("up", help="print the rig as JSON, keep it until SIGTERM, SIGINT or the end of standard input")
    run = commands.add_parser("run", help="run a command in the host namespace of a rig of its own")
    run.add_argument("command", nargs="+")
    commands.add_parser("down", help="remove what rigs of dead processes left, and print their names")
    arguments = parser.parse_args()
    match arguments.do:
        case "up":
            return _up()
        case "run":
            return _run(arguments.command)
        case _:
            sys.stdout.writelines(f"{name}\n" for name in sweep())
            return 0


if __name__ == "__main__":
    sys.exit(main())
