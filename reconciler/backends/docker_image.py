"""Owns finding an image by digest on an engine, whichever way that engine keeps images; pulls none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reconciler.backends.docker_engine import Engine


@dataclass(frozen=True, slots=True)
class FoundImage:
    """An image that the engine has, and the volumes that it declares."""

    id: str
    volumes: tuple[str, ...]


async def find_image(engine: Engine, reference: str) -> FoundImage | None:
    """Find an image by digest: by the reference itself, or by its digest as an id that has a tag of this repository.

    A digest covers every byte of an image, whichever of the two it is of; an engine knows that of the manifest only of
    what it pulled.
    """
    repository, at, digest = reference.rpartition("@")
    repository = _untagged(repository)
    found = await engine.image(f"{repository}@{digest}" if at else digest)
    if found is None and at:
        by_id = await engine.image(digest)
        if by_id is None or repository not in {_untagged(tag) for tag in by_id.get("RepoTags") or ()}:
            return None
        found = by_id
    if found is None:
        return None
    return FoundImage(str(found["Id"]), tuple(sorted((found.get("Config") or {}).get("Volumes") or ())))


def _untagged(reference: str) -> str:
    name, colon, tag = reference.rpartition(":")
    return name if colon and "/" not in tag else reference
