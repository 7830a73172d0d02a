"""Owns the images that tests use, written as archives for `docker load` without a registry; loads none.

An archive carries both an OCI layout and the older manifest.json, so that every engine and image store reads it, and
its bytes follow from its content: the same content has the same digests everywhere.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.rig.docker import cache
from tests.rig.docker.engine import Store
from tests.rig.rig import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

AGENT: Final = "agents.invalid/python:test"
"""python3, coreutils, dash, busybox, the untrusted workload as /workload.py, and a set-uid copy of `sleep`."""
PROXY: Final = "ringfence.invalid/proxy:test"
_PACKAGE: Final = "usr/lib/ringfence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An archive for `docker load` and what its image is called."""

    archive: Path
    name: str
    """Repository and tag."""
    configuration: str
    """`sha256:...` of the configuration: the image's id in the classic store."""
    manifest: str
    """`sha256:...` of the manifest: the image's id in containerd's store, and what a registry would call it."""

    def pinned(self, store: Store) -> str:
        """Return the reference by digest, `repository@sha256:...`, as an engine with this store knows it once loaded.

        The classic store knows the digest of a manifest only of what it pulled; README.md says what follows.
        """
        digest = {Store.CONTAINERD: self.manifest, Store.CLASSIC: self.configuration}[store]
        return f"{self.name.rpartition(':')[0]}@{digest}"


def agent_image_tar(archive: Path, *, name: str = AGENT) -> Image:
    """Write the agent's test image. Builds its root file system where the cache lacks it."""
    cache.build(part := cache.agent())
    workload = ROOT / "tests" / "e2e" / "workload.py"
    with tarfile.open(part.path / "layer.tar") as root:
        sleep = next(entry for entry in root if entry.name.endswith("bin/sleep"))
        content = root.extractfile(sleep)
        if content is None:
            raise RuntimeError(f"{sleep.name} of the agent's image is no file")
        layer = layer_of({"workload.py": (workload.read_bytes(), 0o644), "set-uid-sleep": (content.read(), 0o4755)})
    config = {"Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"], "Cmd": ["/usr/bin/python3"], "WorkingDir": "/"}
    return write(archive, name=name, architecture="amd64", layers=(part.path / "layer.tar", layer), config=config)


def proxy_image_tar(archive: Path, *, architecture: str = "amd64", name: str = PROXY) -> Image:
    """Write the image that deploy/images/proxy/Containerfile describes, from this checkout's `proxy`.

    Builds its root file system where the cache lacks it. `architecture` as Debian calls it: amd64, arm64.
    """
    cache.build(part := cache.proxy(architecture))
    scripts = cache.IMAGES / "proxy"
    files = {
        f"usr/bin/{each}": ((scripts / each).read_bytes(), 0o755) for each in ("ringfence-proxy", "ringfence-gate")
    }
    files |= {
        f"{_PACKAGE}/proxy/{path.name}": (path.read_bytes(), 0o644) for path in sorted((ROOT / "proxy").glob("*.py"))
    }
    files |= _byte_code()
    config = {
        "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"],
        "User": "65532:65532",
        "Entrypoint": ["/usr/bin/ringfence-proxy"],
        "WorkingDir": "/",
    }
    layers = (part.path / "layer.tar", layer_of(files))
    return write(archive, name=name, architecture=architecture, layers=layers, config=config)


def _byte_code() -> dict[str, tuple[bytes, int]]:
    """Compile our package with the image's own Python, run where it was unpacked; it fits any architecture."""
    cache.build(native := cache.proxy(_debian_architecture()))
    root = native.path / "root"
    multiarch = f"{platform.machine()}-linux-gnu"
    (loader,) = (root / "usr/lib" / multiarch).glob("ld-linux-*.so.*")
    with tempfile.TemporaryDirectory() as place:
        package = Path(place) / "proxy"
        package.mkdir()
        for path in (ROOT / "proxy").glob("*.py"):
            (package / path.name).write_bytes(path.read_bytes())
        argv = [str(loader), "--library-path", str(loader.parent), str(root / "usr/bin/python3.11"), "-m", "compileall"]
        argv += ["-q", "-s", place, "-p", f"/{_PACKAGE}", "--invalidation-mode", "unchecked-hash", str(package)]
        environment = {"PYTHONHOME": str(root / "usr"), "SOURCE_DATE_EPOCH": "0"}
        subprocess.run(argv, check=True, timeout=120, env=environment)
        return {
            f"{_PACKAGE}/proxy/__pycache__/{path.name}": (path.read_bytes(), 0o644)
            for path in sorted((package / "__pycache__").glob("*.pyc"))
        }


def _debian_architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]


def write(
    archive: Path,
    *,
    name: str,
    architecture: str,
    layers: Sequence[Path | bytes],
    config: Mapping[str, object],
) -> Image:
    """Write an archive of an image.

    Args:
        archive: where; an existing file is replaced.
        name: repository and tag.
        architecture: as OCI calls it: amd64, arm64.
        layers: tar files without compression, the lowest first.
        config: `config` of the OCI image configuration: Env, User, Entrypoint, Cmd.
    """
    digests = [_digest(layer) for layer in layers]
    configuration = _json(
        {
            "architecture": architecture,
            "os": "linux",
            "created": "1970-01-01T00:00:00Z",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [digest for digest, _size in digests]},
            "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "ringfence rig"} for _each in layers],
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _descriptor("application/vnd.oci.image.config.v1+json", *_digest(configuration)),
            "layers": [_descriptor("application/vnd.oci.image.layer.v1.tar", *each) for each in digests],
        }
    )
    named = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name.rpartition(":")[2]}
    index = _json(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [
                {
                    **_descriptor("application/vnd.oci.image.manifest.v1+json", *_digest(manifest)),
                    "platform": {"architecture": architecture, "os": "linux"},
                    "annotations": named,
                }
            ],
        }
    )
    older = _json(
        [
            {
                "Config": _blob(_digest(configuration)[0]),
                "RepoTags": [name],
                "Layers": [_blob(digest) for digest, _size in digests],
            }
        ]
    )
    with tarfile.open(archive, "w") as tar:
        for (digest, _size), layer in zip(digests, layers, strict=True):
            _add(tar, _blob(digest), layer)
        for content in (configuration, manifest):
            _add(tar, _blob(_digest(content)[0]), content)
        _add(tar, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _add(tar, "index.json", index)
        _add(tar, "manifest.json", older)
    return Image(archive=archive, name=name, configuration=_digest(configuration)[0], manifest=_digest(manifest)[0])


def layer_of(files: Mapping[str, tuple[bytes, int]]) -> bytes:
    """Return a tar of these files (content and mode by path) and the directories above them, owned by root, of 1970."""
    above = {str(parent) for path in files for parent in Path(path).parents} - {"."}
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for directory in sorted(above - {"usr", "usr/bin", "usr/lib"}):
            entry = tarfile.TarInfo(directory)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for path, (content, mode) in sorted(files.items()):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: Path | bytes) -> None:
    entry = tarfile.TarInfo(name)
    if isinstance(content, bytes):
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
        return
    entry.size = content.stat().st_size
    with content.open("rb") as file:
        tar.addfile(entry, file)


def _digest(content: Path | bytes) -> tuple[str, int]:
    if isinstance(content, bytes):
        return f"sha256:{hashlib.sha256(content).hexdigest()}", len(content)
    with content.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}", content.stat().st_size


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _descriptor(media: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": media, "digest": digest, "size": size}


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
