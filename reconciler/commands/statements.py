"""Owns what commands do with statements before anybody signs them: checks those there are, writes a new one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from reconciler.commands.console import Code, complain, leave
from reconciler.core.load import Document, Problem, load
from reconciler.core.statement import MAX_BYTES, Statement
from reconciler.core.statement import read as read_statement

FOLDER = "reasons"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What the statements of a directory say, signed or not."""

    sound: Mapping[str, Statement]
    """By file, those without a problem."""
    problems: tuple[Problem, ...]
    expired: tuple[str, ...]
    """Files of sound ones that grant nothing any more. That is no problem: most statements end so."""


def checked(files: Mapping[str, bytes], statements: Iterable[str], *, now: datetime) -> Checked:
    """Read every statement; `statements` are the files below reasons/, signatures too, and `now` is the time."""
    sound: dict[str, Statement] = {}
    problems: list[Problem] = []
    ids: dict[str, str] = {}
    for file in statements:
        if not file.endswith(".yaml"):
            continue
        found = read_statement(file, files[file])
        if isinstance(found, tuple):
            problems += found
            continue
        sound[file] = found
        first = ids.setdefault(found.id, file)
        if first != file:
            problems.append(Problem(file, 1, 1, "/id", f"is that of {first}: neither counts; give it an id of its own"))
    ended = (file for file, one in sound.items() if one.expires is not None and one.expires <= now.timestamp())
    return Checked(sound=sound, problems=tuple(sorted(problems)), expired=tuple(ended))


def ids_of(files: Mapping[str, bytes]) -> frozenset[str]:
    """Give the ids that statements in a directory have, those with problems too."""
    found = set()
    for file, data in files.items():
        document = load(file, data[:MAX_BYTES]) if file.startswith(f"{FOLDER}/") and file.endswith(".yaml") else None
        if isinstance(document, Document) and isinstance(document.value.get("id"), str):
            found.add(document.value["id"])
    return frozenset(found)


def fresh_id(name: str, taken: Collection[str]) -> str:
    """Mint the first id of this name that nobody has: NAME.1, NAME.2 and so on."""
    return next(one for number in count(1) if (one := f"{name}.{number}") not in taken)


def write_new(path: Path, text: str) -> None:
    """Write a new statement, and `reasons/` where a policy directory has none yet; ends the command where it cannot.

    A statement that is there is never overwritten: it may be signed, and what it grants would end.
    """
    folder = path.parent
    try:
        if folder.name == FOLDER and (folder.parent / "platform.yaml").is_file():
            folder.mkdir(mode=0o755, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        others = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(2))
        other = next(one for one in others if not one.exists())
        advice = f"its grants end when it is overwritten: name another file, such as {other}"
        complain(f"{path} is there already, and {advice}")
        leave(Code.PROBLEMS)
    except FileNotFoundError:
        complain(f"{path}: cannot be written: there is no directory {folder}: make it, or name a file in another")
        leave(Code.PROBLEMS)
    except OSError as error:
        complain(f"{path}: cannot be written: {error.strerror}")
        leave(Code.PROBLEMS)


def since(statement: Statement) -> str:
    """Say when a statement that ends does so."""
    return f"{datetime.fromtimestamp(statement.expires or 0, UTC):%Y-%m-%dT%H:%M:%SZ}"
