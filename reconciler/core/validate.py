"""Owns what the policy directory wants: which files are documents, and whether each is valid; compares nothing.

Every other kind of document is checked by the same `resolve`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reconciler.core import formats
from reconciler.core.load import Document, Problem, load
from reconciler.core.memory import Pool
from reconciler.core.resolve import Resolved, resolve
from reconciler.core.schema import Schema, load_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reconciler.core.load import Bounds, Tree

__all__ = ["Desired", "Schema", "desired", "document_of", "load_schema", "resolve", "validate"]

PLATFORM = "platform"
_FOLDERS = {"agents": "agent", "egress": "egress"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """What one snapshot of the directory wants. Documents are named `platform`, `agents/NAME`, `egress/NAME`."""

    documents: Mapping[str, Tree] = field(default_factory=dict)
    """The resolved value of each valid document."""
    bad: frozenset[str] = frozenset()
    """Documents that are there and not valid, and `platform` where it is missing beside others."""
    problems: tuple[Problem, ...] = ()
    """Of all documents, sorted."""
    ignored: tuple[str, ...] = ()
    """Files that are no document, statement or signature; they are never read."""
    statements: tuple[str, ...] = ()
    """Files below reasons/, for whoever verifies signatures; they are not read here."""
    digests: Mapping[str, str] = field(default_factory=dict, repr=False)
    """SHA-256 of each valid document's bytes, so that the next pass reads only what changed."""

    @property
    def empty(self) -> bool:
        """Whether there is no document at all: a directory that is empty or missing, never "all deleted"."""
        return not self.documents and not self.bad


def desired(files: Mapping[str, bytes], *, bounds: Bounds | None = None, previous: Desired | None = None) -> Desired:
    """Read every policy document of a snapshot.

    `files` maps each path relative to the directory, with `/`, to its bytes. With `previous` a document whose bytes did
    not change is taken over from it. Never raises for any bytes; what is wrong is in `problems`.
    """
    documents: dict[str, Tree] = {}
    digests: dict[str, str] = {}
    bad: set[str] = set()
    problems: list[Problem] = []
    sources: dict[str, str] = {}
    pool = Pool()
    for file in sorted(files):
        name = document_of(file)
        if name is None:
            continue
        sources[name] = file
        digest = hashlib.sha256(files[file]).hexdigest()
        if previous is not None and previous.digests.get(name) == digest:
            documents[name], digests[name] = previous.documents[name], digest
            continue
        resolved = validate(file, files[file], bounds=bounds)
        if isinstance(resolved, Resolved):
            documents[name], digests[name] = pool.put(resolved.value), digest
        else:
            bad.add(name)
            problems.extend(resolved)
    if sources and PLATFORM not in sources:
        bad.add(PLATFORM)
        problems.append(
            Problem("platform.yaml", 1, 1, "", "is missing; write it, with `enabled` to switch sandboxes on")
        )
    for name in sorted(documents):
        if message := _image_against_platform(name, documents):
            document = load(sources[name], files[sources[name]], bounds=bounds)
            if isinstance(document, Document):
                problems.append(document.problem("/image", message))
            bad.add(name)
    return Desired(
        documents={name: value for name, value in documents.items() if name not in bad},
        bad=frozenset(bad),
        problems=tuple(sorted(set(problems))),
        ignored=tuple(file for file in sorted(files) if document_of(file) is None and not _of_a_reason(file)),
        statements=tuple(file for file in sorted(files) if _of_a_reason(file)),
        digests={name: digest for name, digest in digests.items() if name not in bad},
    )


def document_of(file: str) -> str | None:
    """Give the document's name that a path stands for; None when it stands for none."""
    if file == "platform.yaml":
        return PLATFORM
    folder, _, rest = file.partition("/")
    stem = rest.removesuffix(".yaml")
    if folder not in _FOLDERS or stem == rest or not stem or "/" in stem or stem.startswith("."):
        return None
    return f"{folder}/{stem}"


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


def _image_against_platform(name: str, documents: Mapping[str, Tree]) -> str | None:
    platform = documents.get(PLATFORM)
    if platform is None or not name.startswith("agents/") or documents[name]["image"] != "host":
        return None
    if platform["backend"] in ("auto", "bubblewrap"):
        return None
    named = platform["backend"]
    return f"is host, which only bubblewrap can run, and platform.yaml names {named}; write an image by digest"
