"""Owns `ringfence submit` and `ringfence run`: drop a job, follow it, exit as it did; runs nothing itself."""

from __future__ import annotations

import json as json_module
import os
import pwd
import secrets
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from reconciler.commands.console import (
    HOST_CONFIG,
    Code,
    HostConfig,
    Json,
    complain,
    host_settings,
    leave,
    leave_with_problems,
    printable,
    say,
    say_json,
)
from reconciler.commands.dry_run import show_plan
from reconciler.commands.follow import Followed, follow
from reconciler.commands.status import read_status
from reconciler.core import request
from reconciler.core.job import Refused
from reconciler.core.load import Bounds, load
from reconciler.core.resolve import resolve
from reconciler.core.result import ResultCode
from reconciler.core.schema import load_schema
from reconciler.host import Host
from reconciler.spool import deliver

_OURS = "cyan"
"""How decisions look on a terminal: what the command writes cannot look so, for its control characters are escaped."""
_STATUS_OF = {
    ResultCode.TIMEOUT: Code.TIMEOUT,
    ResultCode.OOM: Code.OOM,
    ResultCode.COMMAND_NOT_FOUND: Code.NOT_FOUND,
    ResultCode.COMMAND_NOT_EXECUTABLE: Code.NOT_EXECUTABLE,
}


def submit(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file; its name becomes the result's.")],
    host_config: HostConfig = HOST_CONFIG,
) -> None:
    """Check a job file and drop it into the spool as the user who calls this."""
    host = host_settings(host_config)
    try:
        data = job.read_bytes()
    except OSError as error:
        complain(f"{job}: cannot be read: {error.strerror}")
        leave(Code.PROBLEMS)
    _check(job, data)
    submitter = _submitter()
    delivered = deliver(host.spool, submitter=submitter, name=job.name, data=data)
    if isinstance(delivered, Refused):
        complain(f"{job}: {delivered.message}")
        leave(Code.PROBLEMS)
    say(f"submitted {job.stem}; its result will be in {host.spool / 'done' / submitter / job.stem}")
    if (read_status(host) or {}).get("running") is not True:
        complain("ringfenced does not run on this host: the job waits until it is started (`ringfenced`)")


def run(
    agent: Annotated[str, typer.Argument(help="The agent whose policy the run has.")],
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="An argument vector; there is no shell.")
    ],
    host_config: HostConfig = HOST_CONFIG,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable that the agent allows.")
    ] = None,
    input: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="A small file, read-only in /job.")] = None,
    timeout: Annotated[str | None, typer.Option(help="May only shorten the agent's, such as 30s.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be created; create nothing.")] = False,
    json: Json = False,
) -> None:
    """Run a command as an agent: output on this terminal, decisions on standard error, the command's exit status.

    Exits 124 at the deadline, 125 when it was refused or ringfence failed, 126, 127 and 137 (memory) as a shell does.
    """
    host = host_settings(host_config)
    document = _document(agent, command, env or [], input or [], timeout)
    data = json_module.dumps(document).encode()
    _check(Path("the job"), data)
    if dry_run:
        leave(show_plan(host, data, submitter=_submitter(), json=json))
    if (read_status(host) or {}).get("running") is not True:
        complain("ringfenced does not run on this host: start it (`ringfenced`), then try again")
        leave(Code.REFUSED)
    stem = f"run-{secrets.token_hex(6)}"
    submitter = _submitter()
    delivered = deliver(host.spool, submitter=submitter, name=f"{stem}.yaml", data=data)
    if isinstance(delivered, Refused):
        complain(delivered.message)
        leave(Code.REFUSED)
    leave(_finish(_follow(host, submitter, stem, json=json), json=json))


def _follow(host: Host, submitter: str, stem: str, *, json: bool) -> dict[str, Any]:
    """Stream until there is a result, and give it. Interrupting this leaves the run to the daemon."""
    plain = not sys.stdout.isatty()
    for seen in follow(host, submitter=submitter, stem=stem, pause=time.sleep):
        match seen:
            case Followed(result=dict() as result):
                return result
            case Followed(decision=dict() as decision) if not json:
                complain(_decision(decision), style=_OURS)
            case Followed(output=bytes() as output) if not json:
                if plain:
                    sys.stdout.buffer.write(output)
                else:
                    sys.stdout.write(printable(output.decode("utf-8", "backslashreplace")))
                sys.stdout.flush()
            case _:
                pass
    raise AssertionError("following a run ends with its result")


def _decision(decision: dict[str, Any]) -> str:
    target = decision["host"] if decision["port"] is None else f"{decision['host']}:{decision['port']}"
    layer = f" by {decision['layer']}" if decision["layer"] else ""
    times = f" x{decision['count']}" if decision["count"] > 1 else ""
    return f"[{decision['verdict']}] {target} {decision['code']}{layer}{times}"


def _finish(result: dict[str, Any], *, json: bool) -> int:
    code = ResultCode(result["code"])
    if json:
        say_json(result)
    elif code is not ResultCode.EXITED:
        refusal = result["refusal"]
        complain(f"{code}: {result['message'] if refusal is None else refusal['code'] + ': ' + refusal['message']}")
    match code:
        case ResultCode.EXITED if result["status"] is not None:
            return int(result["status"])
        case _:
            return _STATUS_OF.get(code, Code.REFUSED)


def _document(
    agent: str, command: list[str], env: list[str], files: list[Path], timeout: str | None
) -> dict[str, object]:
    variables = {}
    for pair in env:
        name, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter("write NAME=VALUE", param_hint="--env")
        variables[name] = value
    content = {}
    for path in files:
        try:
            content[path.name] = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"{path}: {error}", param_hint="--input") from error
    document: dict[str, object] = {"version": 1, "kind": "job", "agent": agent, "command": command}
    document |= {"env": variables} if variables else {}
    document |= {"input": content} if content else {}
    document |= {"timeout": timeout} if timeout else {}
    return document


def _check(path: Path, data: bytes) -> None:
    """End with every problem of the job, in words that may quote it: it is the caller's own file."""
    document = load(str(path), data, bounds=Bounds(bytes=request.MAX_BYTES))
    if isinstance(document, tuple):
        leave_with_problems(document)
    kind = "cancel" if document.value.get("kind") == "cancel" else "job"
    resolved = resolve(document, load_schema(kind))
    if isinstance(resolved, tuple):
        leave_with_problems(resolved)
    read = request.read(data)
    if isinstance(read, Refused):
        complain(f"{path}: {read.message}")
        leave(Code.PROBLEMS)


def _submitter() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        complain(f"uid {os.geteuid()} has no name on this host: only a named user can submit")
        leave(Code.PROBLEMS)
