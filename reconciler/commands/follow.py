"""Owns following one job from its delivery to its result by the files that the daemon publishes; prints nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reconciler.commands.status import read_status
from reconciler.host import Host
from reconciler.live_files import DECISIONS, OUTPUT

_INTERVAL = 0.05
_PIECE = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """One thing that was seen of a run; exactly one of the three is set, `result` last."""

    output: bytes | None = None
    decision: dict[str, Any] | None = None
    result: dict[str, Any] | None = None


def follow(host: Host, *, submitter: str, stem: str, pause: Callable[[float], None]) -> Iterator[Followed]:
    """Give output and decisions as they come, then the result. `pause` is called between two looks, with seconds.

    A run that was over before the first look is given from its result's own files. Where more was written than they
    keep, the older part is left out.
    """
    done = host.spool / "done" / submitter / stem
    run = None
    seen, decided = 0, 0
    while not (done / "result.json").exists():
        run = run or _run_of(host, submitter, stem)
        if run is not None:
            live = host.runtime / "runs" / run
            for piece in _output(live / OUTPUT, seen):
                seen += len(piece)
                yield Followed(output=piece)
            for decision in _decisions(live / DECISIONS, decided):
                decided += 1
                yield Followed(decision=decision)
        pause(_INTERVAL)
    result: dict[str, Any] = json.loads((done / "result.json").read_bytes())
    rest = result["output"]["bytes"] - seen
    if rest > 0:
        yield Followed(output=_tail(done / OUTPUT, rest))
    for decision in _decisions(done / DECISIONS, decided):
        yield Followed(decision=decision)
    yield Followed(result=result)


def _run_of(host: Host, submitter: str, stem: str) -> str | None:
    runs: list[dict[str, str]] = (read_status(host) or {}).get("runs", [])
    return next((one["run"] for one in runs if (one["submitter"], one["job"]) == (submitter, stem)), None)


def _output(path: Path, start: int) -> Iterator[bytes]:
    """Give what the file has from byte `start` on. It is append-only, with holes where it was too far behind."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            while piece := file.read(_PIECE):
                yield piece
    except FileNotFoundError:
        return


def _tail(path: Path, size: int) -> bytes:
    try:
        return path.read_bytes()[-size:]
    except FileNotFoundError:
        return b""


def _decisions(path: Path, start: int) -> Iterator[dict[str, Any]]:
    """Give every whole line after the first `start`."""
    try:
        lines = path.read_bytes().split(b"\n")[start:-1]
    except FileNotFoundError:
        return
    for line in lines:
        yield json.loads(line)
