"""A daemon's job side that kills itself with SIGKILL at one step: `python -m tests.flow.killed ROOT STEP`."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio

from tests.flow.fake_backend import kill_at
from tests.flow.house import House, in_force


async def main(root: Path, step: str) -> None:
    """Serve until killed."""
    async with House(root, hook=kill_at(step)).daemon(in_force()):
        await anyio.sleep(30)


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), sys.argv[2])
