"""Owns the way from the bytes of a job file to a job or a cancel; does not decide whether it may run.

No message holds anything that the file holds: the daemon is root, and must not read files out to anyone.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from reconciler.core.job import RUN_ID, Cancel, Job, RefusalCode, Refused
from reconciler.core.load import Bounds, load, split
from reconciler.core.resolve import resolve
from reconciler.core.schema import load_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reconciler.core.load import Problem
    from reconciler.core.schema import Schema

MAX_BYTES = 256 * 1024
"""Largest job file."""
MAX_INPUT = 128 * 1024
"""Bytes that all input files of a job may have together."""
MAX_COMMAND = 64 * 1024
"""Bytes that the argument vector may have together."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_INPUT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_INDEX = re.compile(r"[0-9]{1,5}")
_SHOWN = 5


def read(data: bytes) -> Job | Cancel | Refused:
    """Read the bytes of one job file."""
    document = load("job", data, bounds=Bounds(bytes=MAX_BYTES))
    if isinstance(document, tuple):
        return _bad(document, None)
    schema = load_schema("cancel" if document.value.get("kind") == "cancel" else "job")
    resolved = resolve(document, schema)
    if isinstance(resolved, tuple):
        return _bad(resolved, schema)
    value = resolved.value
    if resolved.kind == "cancel":
        return _cancel(value["run"])
    return _job(value["agent"], value["command"], value["env"], value["timeout"], value["input"])


def _bad(problems: tuple[Problem, ...], schema: Schema | None) -> Refused:
    """Say where the first few problems are, in words that are ours."""
    shown = problems[:_SHOWN]
    places = "; ".join(f"line {one.line}, column {one.column}{_field(one, schema)}" for one in shown)
    more = f" and {len(problems) - _SHOWN} more places" if len(problems) > _SHOWN else ""
    form = "YAML as strict as that of policy" if schema is None else f"what schema/{schema.kind}.v1.json describes"
    return Refused(RefusalCode.BAD_JOB, f"is not {form}: {places}{more}")


def _field(problem: Problem, schema: Schema | None) -> str:
    """The field in which a problem is, as far as its name is one of the schema's own and not one of the file's."""
    known: list[str] = []
    node = schema.root if schema is not None else {}
    for token in split(problem.where):
        fields = node.get("properties", {})
        if token in fields:
            node = fields[token]
        elif "items" in node and _INDEX.fullmatch(token):
            node = node["items"]
        else:
            break
        known.append(token)
    return f" (/{'/'.join(known)})" if known else ""


def _cancel(run: str) -> Cancel | Refused:
    if not RUN_ID.fullmatch(run):
        return Refused(RefusalCode.BAD_JOB, "/run is not a run id, such as 20250131T120000-0badcafe")
    return Cancel(run=run)


def _job(
    agent: str, command: list[str], env: Mapping[str, str], timeout: int | None, files: Mapping[str, str]
) -> Job | Refused:
    content = {name: text.encode() for name, text in files.items()}
    if not command[0]:
        problem = "/command/0 is empty: name the program to run"
    elif any("\0" in word for word in command):
        problem = "/command holds a NUL"
    elif sum(len(word.encode()) for word in command) > MAX_COMMAND:
        problem = f"/command is larger than {MAX_COMMAND // 1024} KiB in all: put what is large into /input"
    elif not all(_VARIABLE.fullmatch(name) for name in env):
        problem = "a key of /env is not a variable's name: use letters, digits and _"
    elif any("\0" in text for text in env.values()):
        problem = "a value of /env holds a NUL"
    elif not all(_INPUT_NAME.fullmatch(name) for name in files):
        problem = "a key of /input is not a plain file name: use letters, digits, `.`, `_` and `-`, no directories"
    elif sum(map(len, content.values())) > MAX_INPUT:
        problem = f"/input is larger than {MAX_INPUT // 1024} KiB in all"
    elif timeout is not None and timeout < 1:
        problem = "/timeout must be at least 1s"
    else:
        return Job(agent=agent, command=tuple(command), env=env, timeout=timeout, input=content)
    return Refused(RefusalCode.BAD_JOB, problem)
