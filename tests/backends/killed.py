"""Owns a process that holds the bubblewrap backend and is killed at one step of a launch: the reaper's test.

    python -m tests.backends.killed RUNTIME OWNER RUN UID_FIRST STEP

STEP is a step's name, `started` (the command runs) or `teardown` (the first undo was done). It kills itself: SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import anyio

from reconciler.backends.bubblewrap import Bubblewrap
from tests.backends.world import Recorder, built, host, launch


def die() -> None:
    """End as a daemon ends under kill -9: nothing is undone."""
    os.kill(os.getpid(), signal.SIGKILL)


class Killer(Recorder):
    """An observer that kills its process at one step."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def step(self, name: str) -> None:
        """Die at the step."""
        if name == self.at or (self.at == "teardown" and name.startswith("undo ")):
            die()


async def main(*given: str) -> None:
    """Launch, start, and get killed on the way."""
    runtime, owner, run, uid_first, at = given
    backend = Bubblewrap(host(Path(runtime), uid_first=int(uid_first)), owner)
    async with backend.launch(launch("sleep", "300", run=run), Killer(at)) as sandbox:
        await built(sandbox).start()
        if at == "started":
            await anyio.sleep(0.1)
            die()


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
