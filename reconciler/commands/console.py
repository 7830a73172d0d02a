"""Owns how commands print and exit; knows nothing of what they print."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reconciler.core.load import Problem
from reconciler.host import DEFAULT_PATH, PATH_VARIABLE, Host, load_host


class Code(IntEnum):
    """Exit statuses that are part of the contract; `run` also passes on its command's own."""

    FINE = 0
    PROBLEMS = 1
    CHANGES = 2
    WEAKENINGS = 3
    USAGE = 64
    TIMEOUT = 124
    REFUSED = 125
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127
    OOM = 137


HostConfig = Annotated[
    Path, typer.Option("--host-config", metavar="FILE", help="Settings of the host.", envvar=PATH_VARIABLE)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")]
HOST_CONFIG = DEFAULT_PATH


def printable(text: str) -> str:
    """`text` with every control character escaped, so that what a workload wrote cannot drive the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def say(text: str = "") -> None:
    """Print a line for people; never markup, never control characters."""
    Console(soft_wrap=True).print(Text(printable(text)))


def complain(text: str, *, style: str = "") -> None:
    """Print a line on standard error. A terminal shows `style`, which no text that is printed here can imitate."""
    Console(stderr=True, soft_wrap=True).print(Text(printable(text), style=style))


def say_json(value: Mapping[str, object]) -> None:
    """Print one JSON object on one line, keys sorted."""
    typer.echo(json.dumps(value, sort_keys=True, ensure_ascii=True))


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print rows under columns."""
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    Console().print(grid)


def leave(code: int) -> NoReturn:
    """End the command with `code`."""
    raise typer.Exit(int(code))


def leave_with_problems(problems: Iterable[Problem]) -> NoReturn:
    """Print every problem, one a line, sorted, and end with `Code.PROBLEMS`."""
    for problem in sorted(problems):
        complain(str(problem))
    leave(Code.PROBLEMS)


def host_settings(path: Path) -> Host:
    """The settings in `path`; ends the command with their problems when it has any."""
    host = load_host(path)
    if isinstance(host, tuple):
        leave_with_problems(host)
    return host
