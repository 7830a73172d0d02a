"""Owns finding the Pythons of this machine that can run the proxy, and how it is started by each; installs nothing.

uvloop is there for the Python that runs the tests where it is installed for that, and for the others where
`uvloop_for` was built into the rig's cache, as `python -m tests.proxy.conformance` does.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.proxy.harness import PROGRAM
from tests.rig.docker.cache import DESTINATION, Part
from tests.rig.rig import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

OLDEST: Final = (3, 11)
_MAIN: Final = "import sys; from proxy.main import main; sys.exit(main())"
_ASK: Final = "import platform; print(platform.python_implementation(), platform.python_version())"
_NAME: Final = re.compile(r"python3\.[0-9]+")


@dataclass(frozen=True, slots=True)
class Python:
    """One interpreter; `program` is None for the one that runs the tests."""

    version: str
    program: Path | None

    @property
    def uvloop(self) -> Part | None:
        """Where its uvloop is or would be; None for the one that runs the tests, which has its own."""
        return None if self.program is None else uvloop_for(self.program, self.version)

    @property
    def loops(self) -> tuple[str, ...]:
        """Name the loops that it has."""
        part = self.uvloop
        there = importlib.util.find_spec("uvloop") is not None if part is None else part.built
        return ("asyncio", "uvloop") if there else ("asyncio",)

    @property
    def proxy(self) -> tuple[str, ...]:
        """Say how the proxy is started by it."""
        if self.program is None:
            return (PROGRAM,)
        path = [str(ROOT), *([str(self.uvloop.path)] if self.uvloop is not None else [])]
        return ("/usr/bin/env", f"PYTHONPATH={os.pathsep.join(path)}", str(self.program), "-s", "-c", _MAIN)


def uvloop_for(program: Path, version: str) -> Part:
    """Return uvloop for an interpreter, of the version that the tests have themselves."""
    wanted = f"uvloop=={importlib.metadata.version('uvloop')}"
    command = (str(program), "-m", "pip", "install", "--quiet", "--target", DESTINATION, "--no-deps", wanted)
    return Part(name=f"uvloop-{version}", inputs=(), command=command)


def found() -> list[Python]:
    """Find every interpreter that is new enough, one of each version, this one first."""
    pythons = {platform.python_version(): Python(platform.python_version(), None)}
    for program in _programs():
        asked = [
            str(program),
            "-c",
            "import platform; print(platform.python_implementation(), platform.python_version())",
        ]
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=20)
        kind, _, version = done.stdout.strip().partition(" ")
        if kind == "CPython" and tuple(map(int, version.split(".")[:2])) >= OLDEST:
            pythons.setdefault(version, Python(version, program))
    return list(pythons.values())


def _programs() -> Iterator[Path]:
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    folders = [*sorted(versions.glob("3.*/bin")), *map(Path, os.environ.get("PATH", "").split(os.pathsep))]
    for folder in folders:
        # a virtual environment's is its parent's, which is found by itself
        if folder.is_dir() and folder != Path(sys.executable).parent:
            yield from sorted(one for one in folder.iterdir() if _NAME.fullmatch(one.name) and os.access(one, os.X_OK))
