"""Owns the daemon's image for a test's cluster: what its Containerfile describes, of this checkout."""

from __future__ import annotations

import importlib.util
import re
import struct
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.rig.docker import cache, images
from tests.rig.rig import ROOT

if TYPE_CHECKING:
    from tests.rig.docker import Image

NAME: Final = "registry.example.com/ringfenced:test"
_PLACE: Final = "usr/lib/ringfence"
_PYTHON: Final = (3, 11)
"""Debian 12's, for which the compiled parts of what is installed here must be made."""


def daemon_image_tar(archive: Path) -> Image:
    """Write the image; its libraries are those of the running interpreter, which must be of Debian's version."""
    if sys.version_info[:2] != _PYTHON:
        pytest.skip(f"the image's libraries come from this interpreter, which must be Python {_PYTHON[0]}.{_PYTHON[1]}")
    folder = cache.IMAGES / "daemon"
    part = cache.rootfs("daemon", "amd64", folder / "packages")
    cache.build(part)
    files = {f"usr/bin/{name}": ((folder / name).read_bytes(), 0o755) for name in ("ringfence", "ringfenced")}
    for package in ("reconciler", "proxy", "schema"):
        for path in (ROOT / package).rglob("*"):
            if path.suffix in {".py", ".json"}:
                files |= _with_byte_code(str(path.relative_to(ROOT)), path)
    for name in sorted({"ringfence", *_needed("ringfence")}):
        for each in metadata.distribution(name).files or ():
            inside = name != "ringfence" or ".dist-info" in str(each)
            wanted = inside and ".." not in each.parts and each.suffix != ".pyc"
            if wanted and (path := Path(str(each.locate()))).is_file():
                files |= _with_byte_code(str(each), path)
    config = {"User": "0:0", "Entrypoint": ["/usr/bin/ringfenced"], "Env": ["PATH=/usr/sbin:/usr/bin"]}
    layers = (part.path / "layer.tar", images.layer_of(files))
    return images.write(archive, name=NAME, architecture="amd64", layers=layers, config=config)


def _with_byte_code(name: str, path: Path) -> dict[str, tuple[bytes, int]]:
    """Give a file, and beside a module the byte code that is here for it; a read-only image never makes it."""
    content = path.read_bytes()
    files = {f"{_PLACE}/{name}": (content, 0o644)}
    compiled = Path(importlib.util.cache_from_source(str(path))) if path.suffix == ".py" else path
    if compiled != path and compiled.is_file():
        code = compiled.read_bytes()
        # PEP 552: magic number, flags, then time and size of the source.
        made = (0, int(path.stat().st_mtime) & 0xFFFFFFFF, len(content))
        if code[:4] == importlib.util.MAGIC_NUMBER and struct.unpack("<III", code[4:16]) == made:
            # The same, said to be good without a look at the source, whose time an image does not keep.
            code = code[:4] + struct.pack("<IQ", 1, 0) + code[16:]
            files[str(Path(_PLACE, name).parent / "__pycache__" / compiled.name)] = (code, 0o644)
    return files


def _needed(name: str) -> set[str]:
    """Name every distribution that one needs here, extras left out."""
    found: set[str] = set()
    todo = [name]
    while todo:
        for line in metadata.requires(todo.pop()) or ():
            wanted = re.match(r"[A-Za-z0-9._-]+", line)
            if wanted is None or "extra ==" in line or wanted[0] in found:
                continue
            try:
                metadata.distribution(wanted[0])
            except metadata.PackageNotFoundError:
                # For another platform or version of Python.
                continue
            found.add(wanted[0])
            todo.append(wanted[0])
    return found
