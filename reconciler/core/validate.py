"""Owns what the policy directory wants: which files are documents, and whether each is valid; compares nothing.

Every other kind of document is checked by the same `resolve`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from reconciler.core import formats
from reconciler.core.load import Problem, load
from reconciler.core.memory import Pool
from reconciler.core.problem import fewer
from reconciler.core.resolve import Resolved, resolve
from reconciler.core.schema import Schema, load_schema

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from reconciler.core.load import Bounds, Position, Tree

__all__ = ["Desired", "Schema", "desired", "document_of", "load_schema", "misnamed", "resolve", "validate"]

PLATFORM = "platform"
_FOLDERS = {"agents": "agent", "egress": "egress"}
_MOST_IN_ALL = 1000
"""Problems of all files after which only the first of each further file is told."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What came of one document by itself: its resolved value, or why it is bad. So the next pass reads only changes.

    `digest` is the SHA-256 of its bytes, `image` where the host's files are named as image.
    """

    digest: str
    value: Tree
    problems: tuple[Problem, ...] = ()
    image: Position | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """What one snapshot of the directory wants. Documents are named `platform`, `agents/NAME`, `egress/NAME`."""

    documents: Mapping[str, Tree] = field(default_factory=dict)
    """The resolved value of each valid document."""
    bad: frozenset[str] = frozenset()
    """Documents that are there and not valid, and `platform` where it is missing beside others."""
    problems: tuple[Problem, ...] = ()
    """Of all documents, sorted; of files with very many the first, and a count."""
    ignored: tuple[str, ...] = ()
    """Files that are no document, statement or signature; they are never read."""
    statements: tuple[str, ...] = ()
    """Files below reasons/, for whoever verifies signatures; they are not read here."""
    judged: Mapping[str, Judged] = field(default_factory=dict, repr=False)
    """Each document that is there, good or bad."""

    @property
    def empty(self) -> bool:
        """Whether there is no document at all: a directory that is empty or missing, never "all deleted"."""
        return not self.documents and not self.bad


def desired(files: Mapping[str, bytes], *, bounds: Bounds | None = None, previous: Desired | None = None) -> Desired:
    """Read every policy document of a snapshot.

    `files` maps each path relative to the directory, with `/`, to its bytes. With `previous` a document whose bytes did
    not change is taken over from it, and so is what was wrong with it. Never raises for
    any bytes; what is wrong is in `problems`.
    """
    judged: dict[str, Judged] = {}
    sources: dict[str, str] = {}
    pool = Pool()
    for file in sorted(files):
        name = document_of(file)
        if name is None:
            continue
        sources[name] = file
        digest = hashlib.sha256(files[file]).hexdigest()
        known = None if previous is None else previous.judged.get(name)
        if known is None or known.digest != digest:
            known = _judged(digest, validate(file, files[file], bounds=bounds), pool)
        judged[name] = known
    bad = {name for name, one in judged.items() if one.problems}
    problems: set[Problem] = set()
    if sources and PLATFORM not in sources:
        bad.add(PLATFORM)
        problems.add(Problem("platform.yaml", 1, 1, "", "is missing; write it, with `enabled` to switch sandboxes on"))
    platform = judged[PLATFORM].value if PLATFORM not in bad and PLATFORM in judged else None
    for name, one in judged.items():
        problems.update(one.problems if len(problems) < _MOST_IN_ALL else fewer(one.problems))
        if one.image is not None and (message := _image_against_platform(platform)):
            bad.add(name)
            problems.add(Problem(sources[name], *one.image, "/image", message))
    return Desired(
        documents={name: one.value for name, one in judged.items() if name not in bad},
        bad=frozenset(bad),
        problems=tuple(sorted(problems)),
        ignored=tuple(file for file in sorted(files) if document_of(file) is None and not _of_a_reason(file)),
        statements=tuple(file for file in sorted(files) if _of_a_reason(file)),
        judged=judged,
    )


def _judged(digest: str, resolved: Resolved | tuple[Problem, ...], pool: Pool) -> Judged:
    if not isinstance(resolved, Resolved):
        return Judged(digest, None, resolved)
    value = pool.put(resolved.value)
    of_the_host = resolved.kind == "agent" and value["image"] == "host"
    return Judged(digest, value, image=resolved.positions.get("/image", (1, 1)) if of_the_host else None)


def document_of(file: str) -> str | None:
    """Give the document's name that a path stands for; None when it stands for none."""
    if file == "platform.yaml":
        return PLATFORM
    folder, _, rest = file.partition("/")
    stem = rest.removesuffix(".yaml")
    if folder not in _FOLDERS or stem == rest or not stem or "/" in stem or stem.startswith("."):
        return None
    return f"{folder}/{stem}"


def misnamed(ignored: Iterable[str], files: Container[str]) -> tuple[Problem, ...]:
    """Say which names that are not ours look like documents, beside the `files` that are ours.

    A daemon never reads them and reports them; for whoever writes policy they are mistakes: an `egress/org.yml` denies
    nothing, and nobody would be told.
    """
    problems = []
    for file in ignored:
        path = PurePosixPath(file)
        if path.name.startswith(".") or path.suffix.lower() not in (".yaml", ".yml"):
            continue
        folder = "" if path.parent == PurePosixPath() else f"{path.parent}/"
        right = f"{folder}{path.stem if folder else path.stem.lower()}.yaml"
        if right in files:
            advice = f"{right} is; delete one of the two"
        elif document_of(right) is not None or _of_a_reason(right):
            advice = f"rename it {right}"
        else:
            advice = "move it into agents/, egress/ or reasons/, or out of the policy directory"
        problems.append(Problem(file, 1, 1, "", f"is not read: {advice}"))
    return tuple(problems)


def _of_a_reason(file: str) -> bool:
    folder, _, rest = file.partition("/")
    return folder == "reasons" and rest.endswith((".yaml", ".sig")) and "/" not in rest and not rest.startswith(".")


def validate(file: str, data: bytes, *, bounds: Bounds | None = None) -> Resolved | tuple[Problem, ...]:
    """Read and check one policy document by itself. `file` is its path in the directory: it settles kind and name."""
    document = load(file, data, bounds=bounds)
    if isinstance(document, tuple):
        return document
    folder, slash, name = (document_of(file) or PLATFORM).partition("/")
    resolved = resolve(document, load_schema(_FOLDERS[folder] if slash else PLATFORM))
    if isinstance(resolved, tuple) or not slash:
        return resolved
    problems = []
    if isinstance(formats.parse("name", name), formats.Bad):
        advice = f"name the file with small letters, digits and '-', such as {folder}/helper.yaml"
        problems.append(document.problem("", f"has a file name that is no document's; {advice}"))
    elif resolved.value["name"] != name:
        problems.append(document.problem("/name", f"is not the name of its file; write {name}, or rename the file"))
    if folder == "agents" and resolved.value["image"] == "host" and resolved.value["minimum_isolation"] != "namespace":
        message = "is host, which only bubblewrap can run; write minimum_isolation: namespace, or an image by digest"
        problems.append(document.problem("/image", message))
    return tuple(sorted(problems)) or resolved


def _image_against_platform(platform: Tree) -> str | None:
    if platform is None or platform["backend"] in ("auto", "bubblewrap"):
        return None
    named = platform["backend"]
    return f"is host, which only bubblewrap can run, and platform.yaml names {named}; write an image by digest"
