"""Owns which parts of this host's file system a sandbox with `image: host` sees; binds nothing itself."""

from __future__ import annotations

import os
from pathlib import Path

from reconciler.backends.bwrap_args import HostRoot

_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_CERTIFICATES = (
    Path("/etc/ssl/certs/ca-certificates.crt"),
    Path("/etc/pki/tls/certs/ca-bundle.crt"),
    Path("/etc/ssl/ca-bundle.pem"),
    Path("/etc/ssl/cert.pem"),
)
_MOST_CERTIFICATES = 4 * 1024 * 1024


def read() -> HostRoot:
    """Look at this host: /usr, what stands beside it in /, Debian's alternatives as links, and its CA bundle."""
    directories = ["/usr"]
    links = []
    for name in _MERGED:
        path = Path("/", name)
        if path.is_symlink():
            links.append((str(path), str(path.readlink())))
        elif path.is_dir():
            directories.append(str(path))
    alternatives = Path("/etc/alternatives")
    if alternatives.is_dir():
        # Names such as awk lead through these; of /etc only the links are made again, no file is shown.
        links += [
            (entry.path, str(Path(entry.path).readlink())) for entry in _sorted(alternatives) if entry.is_symlink()
        ]
    certificates = next((path for path in _CERTIFICATES if path.is_file()), None)
    content = None
    if certificates is not None:
        with certificates.open("rb") as file:
            content = file.read(_MOST_CERTIFICATES)
    return HostRoot(directories=tuple(directories), links=tuple(links), certificates=content)


def _sorted(folder: Path) -> list[os.DirEntry[str]]:
    return sorted(os.scandir(folder), key=lambda entry: entry.name)
