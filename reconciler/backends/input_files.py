"""Owns a job's input files on their way into a sandbox: which names are usable, and how they are packed.

Pure; writes nowhere.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def unusable_name(name: str) -> bool:
    """Say whether an input file's name is something else than a plain relative path."""
    path = PurePosixPath(name)
    return not path.parts or path.is_absolute() or ".." in path.parts or str(path) != name or not name.isprintable()


def archive(files: Mapping[str, bytes]) -> bytes:
    """Pack files as tar, root's, readable and not writable, with the directories above them."""
    made = io.BytesIO()
    above = {str(parent) for name in files for parent in PurePosixPath(name).parents} - {"."}
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name in sorted(above):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o555
            tar.addfile(entry)
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.mode, entry.size = 0o444, len(content)
            tar.addfile(entry, io.BytesIO(content))
    return made.getvalue()
