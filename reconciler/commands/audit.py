"""Owns `ringfence audit`: proves the chain, and shows its rows; writes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, assert_never

import typer

from reconciler.commands.console import (
    HOST_CONFIG,
    Code,
    HostConfig,
    Json,
    complain,
    host_settings,
    leave,
    say,
    say_json,
)
from reconciler.core.audit import Broken, Head, Verified
from reconciler.core.audit import verify as verify_chain
from reconciler.journal_files import Log, read

Directory = Annotated[
    Path | None, typer.Option("--log", metavar="DIR", help="Directory of the log; else that of the host.")
]


def verify(
    host_config: HostConfig = HOST_CONFIG,
    log: Directory = None,
    head: Annotated[
        str | None,
        typer.Option(metavar="SEQ:HASH", help="A head that was kept elsewhere; else the log's own head.json."),
    ] = None,
    json: Json = False,
) -> None:
    """Check that every audit row is there, unchanged and in order; name the first that is not."""
    known = None if head is None else _head(head)
    opened = _open(host_config, log)
    found = opened if isinstance(opened, Broken) else verify_chain(opened.lines(), known or opened.head)
    match found:
        case Verified():
            if json:
                say_json({"holds": True, "rows": found.rows, "seq": found.head.seq, "hash": found.head.hash})
            else:
                against = "" if known is None else f", and contains row {known.seq} as it was kept"
                say(f"{found.rows} rows, unchanged and in order{against}")
                say(f"head {found.head.seq}:{found.head.hash}")
            leave(Code.FINE)
        case Broken():
            if json:
                say_json({"holds": False, "seq": found.seq, "line": found.line, "message": found.message})
            else:
                complain(f"the chain is broken at {found}")
            leave(Code.PROBLEMS)
        case _:
            assert_never(found)


def tail(
    host_config: HostConfig = HOST_CONFIG,
    log: Directory = None,
    rows: Annotated[int, typer.Option("-n", "--rows", min=1, help="How many of the last rows.")] = 20,
    run: Annotated[str | None, typer.Option(help="Only rows of this run.")] = None,
    event: Annotated[str | None, typer.Option(help="Only rows of this event, such as egress.deny.")] = None,
    json: Json = False,
) -> None:
    """Print the last audit rows, oldest first."""
    opened = _open(host_config, log)
    if isinstance(opened, Broken):
        complain(f"the log cannot be read: {opened}")
        leave(Code.PROBLEMS)
    wanted = None if event is None else f"agent_sandbox.{event.removeprefix('agent_sandbox.')}"
    matching = [
        row
        for row in opened.rows()
        if (run is None or row["run"] == run) and (wanted is None or row["event"] == wanted)
    ]
    for row in matching[-rows:]:
        if json:
            say_json(row)
        else:
            say(line_of(row))


def line_of(row: dict[str, object]) -> str:
    """One audit row for people: number, time, event, object, outcome, what it says, who."""
    event = str(row["event"]).removeprefix("agent_sandbox.")
    code = f" {row['code']}" if row["code"] else ""
    weakening = " WEAKENING" if row["weakening"] else ""
    message = f": {row['message']}" if row["message"] else ""
    when = f"{str(row['time'])[:19]}Z"
    what = f"{row['object']} {row['outcome']}{code}{weakening}"
    return f"{row['seq']:>5} {when} {event:<16} {what} by {row['actor']}{message}"


def _open(host_config: Path, directory: Path | None) -> Log | Broken:
    where = host_settings(host_config).audit if directory is None else directory
    try:
        return read(where)
    except OSError as error:
        complain(f"{where}: the audit log cannot be read: {error.strerror}")
        leave(Code.PROBLEMS)


def _head(text: str) -> Head:
    seq, _, digest = text.partition(":")
    if not seq.isascii() or not seq.isdecimal() or len(digest) != len("0" * 64):
        message = "a head is SEQ:HASH, as `ringfence audit verify` prints it"
        raise typer.BadParameter(message, param_hint="--head")
    return Head(int(seq), digest)
