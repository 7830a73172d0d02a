"""Owns how a policy directory is read at a git revision: objects and refs only, by plumbing; applies nothing.

The repository's own configuration, hooks and attributes are code that its authors chose. None of it is read here: git
works on an empty repository of ours that borrows the other one's objects and names.
"""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reconciler.git import Repository
from reconciler.snapshot import POLICY, FileRefused, NotSettled, Snapshot, digest_of

if TYPE_CHECKING:
    from reconciler.snapshot import Bounds

GIT = "/usr/bin/git"
TIMEOUT = 60.0
"""Seconds for one command of git."""
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LC_ALL": "C",
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_ALLOW_PROTOCOL": "",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
}
_CONFIG = ("core.hooksPath=/dev/null", "core.fsmonitor=false", "protocol.allow=never", "gc.auto=0")


@dataclass(frozen=True, slots=True)
class _Failed:
    message: str


class _Borrowed:
    """A repository without configuration over the objects and refs of another. It lasts as long as its directory."""

    def __init__(self, home: Path, repository: Repository) -> None:
        self._home = home
        self._objects = repository.common / "objects"
        (home / "objects").mkdir()
        (home / "refs").mkdir()
        (home / "config").write_text("[core]\n\trepositoryformatversion = 0\n\tbare = true\n", "ascii")
        for name, source in (("HEAD", repository.directory), ("packed-refs", repository.common)):
            if (source / name).is_file():
                (home / name).write_bytes((source / name).read_bytes())
        (home / "refs").rmdir()
        (home / "refs").symlink_to(repository.common / "refs")
        if (repository.common / "shallow").is_file():
            (home / "shallow").write_bytes((repository.common / "shallow").read_bytes())

    def run(self, *arguments: str, data: bytes = b"") -> bytes | _Failed:
        """Run one command of git and give what it prints."""
        options = [word for setting in _CONFIG for word in ("-c", setting)]
        try:
            done = subprocess.run(
                [GIT, "--git-dir", str(self._home), "--no-pager", *options, *arguments],
                input=data,
                capture_output=True,
                env={**_ENVIRONMENT, "GIT_OBJECT_DIRECTORY": str(self._objects)},
                cwd=self._home,
                timeout=TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return _Failed(f"git did not answer within {TIMEOUT:g} s")
        except OSError as error:
            return _Failed(f"{GIT}: {error.strerror}: install git")
        if done.returncode != 0:
            lines = done.stderr.decode("utf-8", "backslashreplace").strip().splitlines()
            return _Failed(lines[-1] if lines else f"git exited with {done.returncode}")
        return done.stdout


def at_revision(directory: Path, revision: str, *, bounds: Bounds) -> Snapshot | NotSettled:
    """Give the policy directory as it was at `revision` (anything that `git rev-parse` takes). Blocks.

    Runs git, and no hook, filter or helper of the repository's; fetches nothing; writes only in a temporary directory.
    """
    root = directory.resolve()
    repository = Repository.find(str(root), None)
    if repository is None:
        return NotSettled(
            "no_repository", f"{directory} is in no git work tree: name a directory instead of {revision}"
        )
    top = next(parent for parent in (root, *root.parents) if (parent / ".git").exists())
    with tempfile.TemporaryDirectory(prefix="ringfence-git-") as home:
        try:
            borrowed = _Borrowed(Path(home), repository)
        except OSError as error:
            return NotSettled("no_repository", f"{repository.common} cannot be read: {error.strerror}")
        return _read(borrowed, revision, root.relative_to(top).as_posix(), bounds)


def _read(borrowed: _Borrowed, revision: str, folder: str, bounds: Bounds) -> Snapshot | NotSettled:
    def broken(failed: _Failed) -> NotSettled:
        return NotSettled("no_revision", f"{revision!a} is no revision that can be read here: {failed.message}")

    found = borrowed.run("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if isinstance(found, _Failed):
        return broken(_Failed("git knows no commit of that name"))
    commit = found.decode("ascii").strip()
    tree = commit if folder == "." else f"{commit}:{folder}"
    listed = borrowed.run("ls-tree", "-r", "-z", "-l", "--full-tree", tree)
    if isinstance(listed, _Failed):
        return broken(listed)
    wanted, ignored, refused = _listed(listed, bounds)
    if isinstance(wanted, NotSettled):
        return wanted
    names = list(wanted)
    data = borrowed.run("cat-file", "--batch", data="".join(f"{wanted[name]}\n" for name in names).encode())
    if isinstance(data, _Failed):
        return broken(data)
    files: dict[str, bytes] = {}
    position = 0
    for name in names:
        end = data.index(b"\n", position)
        header = data[position:end].split(b" ")
        if len(header) != 3 or header[1] != b"blob":  # noqa: PLR2004 — object, type, size (git-cat-file(1))
            return broken(_Failed(f"{name} is missing from the repository"))
        size = int(header[2])
        files[name] = data[end + 1 : end + 1 + size]
        position = end + 1 + size + 1
    if not files and not refused:
        return NotSettled("empty", f"{folder} holds no policy document at {revision}")
    return Snapshot(
        files=files, digest=digest_of(files), commit=commit, ignored=tuple(sorted(ignored)), refused=tuple(refused)
    )


def _listed(listed: bytes, bounds: Bounds) -> tuple[dict[str, str] | NotSettled, list[str], list[FileRefused]]:
    """Read what `ls-tree -z -l` printed: the objects of our files, names that are not ours, files that are not read."""
    wanted: dict[str, str] = {}
    ignored: list[str] = []
    refused: list[FileRefused] = []
    for line in listed.split(b"\0")[:-1]:
        facts, _, raw = line.partition(b"\t")
        mode, kind, name_of_object, size = facts.split()
        path = raw.decode("ascii", "backslashreplace")
        folder, _, name = path.rpartition("/")
        known = folder in POLICY.folders or not folder
        if not known or not POLICY.takes(folder, name):
            ignored.append(path)
        elif not raw.isascii() or not path.isprintable():
            refused.append(FileRefused(path, "bad_name", "has a name that is not printable ASCII: rename it"))
        elif kind != b"blob" or mode == b"120000":
            refused.append(
                FileRefused(path, "not_a_file", "is a symbolic link or a submodule: put the file itself here")
            )
        elif int(size) > bounds.bytes:
            refused.append(FileRefused(path, "too_large", f"is larger than {bounds.bytes} bytes: split it"))
        elif len(wanted) >= bounds.files:
            return NotSettled("too_many_files", f"more than {bounds.files} files"), ignored, refused
        else:
            wanted[path] = name_of_object.decode("ascii")
    return wanted, ignored, refused
