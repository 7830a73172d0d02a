"""Owns docs/benchmarks.md: each benchmark has a part of it, written by itself alone; measures nothing."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
_MARK: Final = "\n<!-- written by `python -m tests.bench run` from here on -->\n\n"


class Part(StrEnum):
    """Whose part."""

    PROXY = "proxy"
    RUN = "run"


def put(part: Part, text: str, page: Path = PAGE) -> None:
    """Write one benchmark's part anew; the other's stays as it is."""
    proxy, _, run = (page.read_text("utf-8") if page.exists() else "").partition(_MARK)
    match part:
        case Part.PROXY:
            proxy = text.rstrip("\n") + "\n"
        case Part.RUN:
            run = text.rstrip("\n") + "\n"
    page.write_text(proxy + (_MARK + run if run else ""), "utf-8")
