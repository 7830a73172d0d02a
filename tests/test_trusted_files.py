"""Files that decide something are believed only where nobody else could have put them: the host's settings, secrets."""

from __future__ import annotations

import os
import pwd
from typing import TYPE_CHECKING

import pytest

from reconciler.core.job import Refused
from reconciler.host import Host, load_host
from reconciler.prepare import read_secrets

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NOBODY = pwd.getpwnam("nobody").pw_uid


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file two directories down, kept as it should be."""
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    made = tmp_path / "outer" / "inner" / "file"
    made.write_text("version: 1\nkind: host\nname: prod-1\n")
    made.chmod(0o600)
    return made


def _fine(_: Path) -> None:
    pass


def _reached_through_roots_link(file: Path) -> None:
    inner = file.parent
    inner.rename(inner.with_name("real"))
    inner.symlink_to("real")


def _others_may_write_the_directory(file: Path) -> None:
    file.parent.chmod(0o777)


def _a_group_may_write_the_directory_above(file: Path) -> None:
    file.parent.parent.chmod(0o775)


def _the_directory_is_anothers(file: Path) -> None:
    os.chown(file.parent, NOBODY, -1)


def _the_directory_above_is_anothers(file: Path) -> None:
    os.chown(file.parent.parent, NOBODY, -1)


def _the_file_is_anothers(file: Path) -> None:
    os.chown(file, NOBODY, -1)


def _a_group_may_write_the_file(file: Path) -> None:
    file.chmod(0o660)


def _the_file_is_a_link(file: Path) -> None:
    file.rename(file.with_name("real"))
    file.symlink_to("real")


def _anothers_link_leads_there(file: Path) -> None:
    _reached_through_roots_link(file)
    os.chown(file.parent, NOBODY, -1, follow_symlinks=False)


def _the_file_is_a_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


def _the_file_is_gone(file: Path) -> None:
    file.unlink()


REFUSED = (
    _others_may_write_the_directory,
    _a_group_may_write_the_directory_above,
    _the_directory_is_anothers,
    _the_directory_above_is_anothers,
    _the_file_is_anothers,
    _a_group_may_write_the_file,
    _the_file_is_a_link,
    _anothers_link_leads_there,
    _the_file_is_a_fifo,
    _the_file_is_gone,
)
KEPT = (_fine, _reached_through_roots_link)


@pytest.mark.parametrize("done", KEPT)
def test_what_is_well_kept_is_read(done: Callable[[Path], None], file: Path) -> None:
    done(file)
    assert isinstance(load_host(file), Host)
    assert read_secrets({"KEY": str(file)}) == {"KEY": file.read_text().removesuffix("\n")}


@pytest.mark.parametrize("done", REFUSED)
def test_what_others_could_have_put_there_is_refused(done: Callable[[Path], None], file: Path) -> None:
    done(file)
    host, secret = load_host(file), read_secrets({"KEY": str(file)})
    assert isinstance(host, tuple)
    assert "cannot be used" in host[0].message
    assert isinstance(secret, Refused)
    assert secret.code == "secret_unreadable"
    assert "KEY" in secret.message


def test_a_secret_that_others_may_read_is_none(file: Path) -> None:
    file.chmod(0o604)
    assert isinstance(read_secrets({"KEY": str(file)}), Refused)
    assert isinstance(load_host(file), Host)
