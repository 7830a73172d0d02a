"""Owns what commands do with statements before anybody signs them: checks those there are, writes a new one."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from reconciler.admission import Admissions
from reconciler.commands.console import Code, complain, leave
from reconciler.core.load import Document, Problem, load
from reconciler.core.memory import canonical_json
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
        other = next(one for one in others if not os.path.lexists(one))
        advice = f"its grants end when it is overwritten: name another file, such as {other}"
        complain(f"{path} is there already, and {advice}")
        leave(Code.PROBLEMS)
    except FileNotFoundError:
        complain(f"{path}: cannot be written: there is no directory {folder}: make it, or name a file in another")
        leave(Code.PROBLEMS)
    except OSError as error:
        complain(f"{path}: cannot be written: {error.strerror}")
        leave(Code.PROBLEMS)


def rows(admissions: Admissions, found: Checked, *, host: str, directory: Path) -> Iterator[str]:
    """Tell for people which statements count on `host` and which do not, and what to do. `directory` is their policy's.

    Of one that nobody signed its problems are told: whoever plans may read what a daemon would not.
    """
    for refusal in admissions.refused:
        if refusal.code != "no_signature":
            yield f"refused  {refusal}"
        elif refusal.file not in found.sound:
            yield from (f"refused  {problem}" for problem in found.problems if problem.file == refusal.file)
        elif refusal.file in found.expired:
            yield f"unsigned {refusal.file}: has expired: set a later expires and a new id, then sign"
        elif not found.sound[refusal.file].addresses(host):
            yield f"unsigned {refusal.file}: {other_host(found.sound[refusal.file], host)}"
        else:
            yield f"unsigned {refusal.file}: sign it: ringfence reason sign {directory / refusal.file} --key KEY"
    for file in admissions.elsewhere:
        if file in found.sound:
            yield f"not here {file}: {other_host(found.sound[file], host)} again"
    for one in admissions.admitted:
        signers = ", ".join(approval.signer for approval in one.approvals)
        yield f"admitted {one.statement.id} ({one.statement.ticket}), signed by {signers}"


def waiting(admissions: Admissions, found: Checked, needed: bytes, *, host: str) -> str | None:
    """Give the file of a statement that only lacks its signature to grant here all that `needed`, another one, does."""
    wanted = read_statement("needed", needed)
    if isinstance(wanted, tuple):
        return None
    for refusal in admissions.refused:
        one = found.sound.get(refusal.file) if refusal.code == "no_signature" else None
        if one is None or refusal.file in found.expired or not one.addresses(host):
            continue
        if _granted(wanted) <= _granted(one):
            return refusal.file
    return None


def _granted(statement: Statement) -> set[tuple[str, str, str, str]]:
    return {(one.document, one.field, str(one.action), canonical_json(one.item)) for one in statement.grants}


def other_host(statement: Statement, host: str) -> str:
    """Say that a statement is for other hosts than this one, and how it becomes this one's too."""
    audience = ", ".join(statement.audience)
    return f"its audience {audience} does not have this host, {host}: add {host} and sign"
