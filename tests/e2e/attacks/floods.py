"""Owns the jobs that try to use up what is not theirs; each is a job of its own: it may take its sandbox with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LIMITS: Final = {"memory": "128MiB", "pids": 64, "timeout": "60s"}
"""What the agent that floods has."""
_FORKS = """
import os, sys, time
end = time.monotonic() + 3
while time.monotonic() < end:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""
_MEMORY = """
held = []
while True:
    held.append(bytearray(1 << 24))
"""
_FILES = """
import errno, sys
for place in ("/tmp/x", "/dev/shm/x"):
    try:
        with open(place, "wb") as file:
            for _ in range(1024):
                file.write(bytes(1 << 20))
        sys.exit(1)
    except OSError as refused:
        print(place, errno.errorcode[refused.errno])
"""
_OUTPUT = """
import os
for _ in range(100):
    os.write(1, b"x" * (1 << 20))
    os.write(2, b"y" * (1 << 10))
"""
_CONNECTIONS = """
import os, socket
address, port = os.environ["HTTP_PROXY"].removeprefix("http://").split(":")
held = []
try:
    for _ in range(900):
        held.append(socket.create_connection((address, int(port)), 1))
        held[-1].sendall(b"GET http://example.com/ HTTP/1.1\\r\\n")
except OSError as refused:
    print(len(held), refused)
"""


@dataclass(frozen=True, slots=True)
class Flood:
    """One job, and how it may end: codes of its result."""

    name: str
    script: str
    ends: frozenset[str]

    @property
    def stem(self) -> str:
        """The name of its job."""
        return self.name.lower().replace(" ", "-")


FLOODS: Final = (
    Flood("a fork bomb", _FORKS, frozenset({"exited", "oom", "sandbox_crashed"})),
    Flood("all memory", _MEMORY, frozenset({"oom"})),
    Flood("all of every file system", _FILES, frozenset({"exited", "oom"})),
    Flood("100 MiB of output", _OUTPUT, frozenset({"exited"})),
    Flood("every connection of the proxy", _CONNECTIONS, frozenset({"exited"})),
)
KEPT: Final = 256 * 1024
"""The most bytes that a result may take on disk, whatever the flood."""
