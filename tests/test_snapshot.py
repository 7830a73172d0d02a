"""The settled snapshot: one state or none, whatever moves and whatever lies in the way."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import pytest

from reconciler import snapshot
from reconciler.directory import Opened, open_directory
from reconciler.snapshot import TRUST, Bounds, NotSettled, Snapshot, digest_of, take

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GIT = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
    "PATH": "/usr/bin:/bin",
    "HOME": "/nonexistent",
}
NOBODY = 65534


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    root = tmp_path / "policy"
    (root / "agents").mkdir(parents=True)
    (root / "platform.yaml").write_bytes(b"version: 1\n")
    (root / "agents" / "helper.yaml").write_bytes(b"name: helper\n")
    return root


def look(
    root: Path, *, owner: str = "root", deadline: float = 2.0, bounds: Bounds | None = None
) -> Snapshot | NotSettled:
    return take(root, owner=owner, bounds=bounds or Bounds(), deadline=deadline)


def settled(root: Path) -> Snapshot:
    found = look(root)
    assert isinstance(found, Snapshot), found
    return found


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", "-C", str(root), *arguments]
    return subprocess.run(command, env=GIT, check=True, capture_output=True, text=True, timeout=30).stdout.strip()


def test_a_directory_at_rest_is_read_whole(policy: Path) -> None:
    found = settled(policy)
    assert found.files == {"platform.yaml": b"version: 1\n", "agents/helper.yaml": b"name: helper\n"}
    assert found.digest == digest_of(found.files)
    assert (found.commit, found.ignored, found.refused) == (None, (), ())


def test_the_digest_follows_names_and_contents(policy: Path) -> None:
    first = settled(policy).digest
    (policy / "agents" / "helper.yaml").rename(policy / "agents" / "other.yaml")
    second = settled(policy).digest
    (policy / "agents" / "other.yaml").write_bytes(b"name: HELPER\n")
    assert len({first, second, settled(policy).digest}) == 3


def test_names_that_are_not_ours_are_listed_and_never_read(policy: Path) -> None:
    for name in ("agents/helper.yaml.bak", "agents/.hidden.yaml", "agents/helper.yml", "README.md", "reasons~"):
        (policy / name).write_bytes(b"x")
    (policy / "docs").mkdir()
    os.mkfifo(policy / "notes")
    (policy / "agents" / os.fsdecode(b"\xff.txt")).touch()
    found = settled(policy)
    assert set(found.files) == {"platform.yaml", "agents/helper.yaml"}
    assert found.ignored == tuple(
        sorted(
            [
                *("README.md", "agents/.hidden.yaml", "agents/helper.yaml.bak", "agents/helper.yml", "docs", "notes"),
                *("reasons~", r"agents/\\xff.txt"),
            ]
        )
    )


def _link_out(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def _link_beside(path: Path) -> None:
    path.symlink_to("helper.yaml")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def _device(path: Path) -> None:
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero never ends


def _large(path: Path) -> None:
    path.write_bytes(b"secret" * 100_000)


def _world_writable(path: Path) -> None:
    path.write_bytes(b"secret")
    path.chmod(0o666)


def _of_nobody(path: Path) -> None:
    path.write_bytes(b"secret")
    os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        pytest.param(_link_out, "not_a_file", id="a symbolic link out"),
        pytest.param(_link_beside, "not_a_file", id="a symbolic link within"),
        pytest.param(os.mkfifo, "not_a_file", id="a FIFO"),
        pytest.param(_device, "not_a_file", id="a device"),
        pytest.param(_socket, "not_a_file", id="a socket"),
        pytest.param(os.mkdir, "not_a_file", id="a directory"),
        pytest.param(_large, "too_large", id="a file larger than the bound"),
        pytest.param(_world_writable, "unsafe_mode", id="a file that anybody may write"),
        pytest.param(_of_nobody, "unsafe_owner", id="a file of another user"),
    ],
)
def test_what_is_no_plain_trusted_file_is_refused_by_name_without_its_content(
    policy: Path, make: Callable[[Path], object], code: str
) -> None:
    make(policy / "agents" / "trap.yaml")
    found = settled(policy)
    assert [(one.file, one.code) for one in found.refused] == [("agents/trap.yaml", code)]
    assert "secret" not in found.refused[0].message
    assert "root:" not in found.refused[0].message
    assert set(found.files) == {"platform.yaml", "agents/helper.yaml"}


def test_a_name_of_control_characters_is_refused_and_shown_escaped(policy: Path) -> None:
    (policy / "agents" / "a\x1b[2Jb.yaml").write_bytes(b"x")
    found = settled(policy)
    assert [(one.file, one.code) for one in found.refused] == [(r"agents/a\x1b[2Jb.yaml", "bad_name")]


@pytest.mark.parametrize("part", ["policy", "policy/agents", "."])
def test_a_directory_on_the_way_that_others_can_write_settles_nothing(policy: Path, part: str) -> None:
    (policy.parent / part).chmod(0o775)
    found = look(policy)
    assert isinstance(found, NotSettled)
    assert found.code == "unsafe_mode"
    assert "chmod go-w" in found.message


def test_a_directory_of_another_user_settles_nothing_unless_that_user_is_the_owner(policy: Path) -> None:
    os.chown(policy, NOBODY, NOBODY)
    found = look(policy)
    assert isinstance(found, NotSettled)
    assert found.code == "unsafe_owner"
    assert found.message.endswith(f": chown -h root {policy}")
    assert isinstance(look(policy, owner="nobody"), Snapshot)
    assert isinstance(look(policy, owner=str(NOBODY)), Snapshot)


@pytest.mark.parametrize("part", ["agents", "agents/helper.yaml"])
def test_what_another_user_owns_is_told_with_the_command_that_mends_it(policy: Path, part: str) -> None:
    os.chown(policy / part, NOBODY, NOBODY)
    found = look(policy)
    message = found.message if isinstance(found, NotSettled) else found.refused[0].message
    assert message.endswith(f": chown -h root {policy / part}")


def test_an_owner_that_does_not_exist_settles_nothing(policy: Path) -> None:
    found = look(policy, owner="no-such-user")
    assert isinstance(found, NotSettled)
    assert found.code == "unknown_owner"


def test_a_symlinked_root_is_followed_and_flips_as_git_sync_flips_it(policy: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    shutil.copytree(policy, second)
    (second / "platform.yaml").write_bytes(b"version: 2\n")
    link = tmp_path / "current"
    link.symlink_to("policy")
    assert settled(link).files["platform.yaml"] == b"version: 1\n"
    (tmp_path / "next").symlink_to("./nothing/../second")
    assert isinstance(look(tmp_path / "next"), NotSettled), "every component of a link has to exist"
    (tmp_path / "next").unlink()
    (tmp_path / "next").symlink_to(second)
    (tmp_path / "next").rename(link)
    assert settled(link).files["platform.yaml"] == b"version: 2\n"


def test_a_link_of_another_user_is_not_followed(policy: Path, tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(policy)
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    found = look(link)
    assert isinstance(found, NotSettled)
    assert found.code == "unsafe_owner"


def test_links_that_lead_in_circles_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    found = look(tmp_path / "a")
    assert isinstance(found, NotSettled)
    assert found.code == "too_many_links"


def test_where_a_root_really_is_and_through_which_links(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("policy")
    opened = open_directory(tmp_path / "one", frozenset({0}))
    assert isinstance(opened, Opened)
    opened.close()
    assert opened.path == str(policy)
    assert opened.links == (str(tmp_path / "one"), str(tmp_path / "two"))


def _file_instead(root: Path) -> None:
    shutil.rmtree(root)
    root.write_text("x")


def _emptied(root: Path) -> None:
    shutil.rmtree(root)
    root.mkdir()


@pytest.mark.parametrize(
    ("make", "code"),
    [
        pytest.param(shutil.rmtree, "missing", id="it is missing"),
        pytest.param(_file_instead, "not_a_directory", id="it is a file"),
        pytest.param(_emptied, "empty", id="it is empty"),
        pytest.param(lambda root: os.mkfifo(root / "egress"), "not_a_directory", id="a folder of it is a FIFO"),
        pytest.param(lambda root: (root / "egress").symlink_to("agents"), "not_a_directory", id="a folder is a link"),
    ],
)
def test_a_root_that_says_nothing_settles_nothing(policy: Path, make: Callable[[Path], object], code: str) -> None:
    make(policy)
    found = look(policy)
    assert isinstance(found, NotSettled)
    assert found.code == code


def test_more_files_than_the_bound_settle_nothing_and_the_setting_is_named(policy: Path) -> None:
    assert isinstance(look(policy, bounds=Bounds(files=2)), Snapshot)
    found = look(policy, bounds=Bounds(files=1))
    assert isinstance(found, NotSettled)
    assert "max_files" in found.message


def test_more_bytes_in_all_than_memory_should_hold_settle_nothing(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sum(map(len, settled(policy).files.values()))
    monkeypatch.setattr(snapshot, "_MOST_BYTES", whole)
    assert isinstance(look(policy), Snapshot)
    monkeypatch.setattr(snapshot, "_MOST_BYTES", whole - 1)
    found = look(policy)
    assert isinstance(found, NotSettled)
    assert found.code == "too_large"


def test_a_file_that_is_touched_for_ever_ends_in_never_quiet(policy: Path) -> None:
    stop = threading.Event()

    def touch() -> None:
        while not stop.is_set():
            os.utime(policy / "agents" / "helper.yaml")
            time.sleep(0.005)

    toucher = threading.Thread(target=touch)
    toucher.start()
    try:
        found = look(policy, deadline=0.5)
    finally:
        stop.set()
        toucher.join()
    assert isinstance(found, NotSettled)
    assert found.code == "never_quiet"
    assert "agents/helper.yaml" in found.message


def test_git_at_work_is_waited_for_and_said(policy: Path) -> None:
    git(policy, "init", "-q")
    (policy / ".git" / "index.lock").touch()
    found = look(policy, deadline=0.2)
    assert isinstance(found, NotSettled)
    assert found.code == "git_busy"
    timer = threading.Timer(0.3, (policy / ".git" / "index.lock").unlink)
    timer.start()
    assert isinstance(look(policy, deadline=5), Snapshot)
    timer.join()


def test_the_commit_is_read_as_text_in_every_layout(policy: Path, tmp_path: Path) -> None:
    git(policy, "init", "-q", "-b", "main")
    assert settled(policy).commit is None
    git(policy, "add", "-A")
    git(policy, "commit", "-q", "-m", "one")
    commit = git(policy, "rev-parse", "HEAD")
    assert settled(policy).commit == commit
    assert ".git" not in settled(policy).ignored
    git(policy, "pack-refs", "--all")
    assert settled(policy).commit == commit
    git(policy, "checkout", "-q", "--detach")
    assert settled(policy).commit == commit
    git(policy, "worktree", "add", "-q", str(tmp_path / "linked"), "main")
    assert settled(tmp_path / "linked").commit == commit
    git(policy, "worktree", "add", "-q", "--detach", str(tmp_path / "detached"), "main")
    assert settled(tmp_path / "detached").commit == commit


def test_a_policy_below_the_top_of_a_work_tree_knows_its_commit(tmp_path: Path) -> None:
    (tmp_path / "repo" / "policy").mkdir(parents=True)
    (tmp_path / "repo" / "policy" / "platform.yaml").write_text("x")
    git(tmp_path / "repo", "init", "-q")
    git(tmp_path / "repo", "add", "-A")
    git(tmp_path / "repo", "commit", "-q", "-m", "one")
    assert settled(tmp_path / "repo" / "policy").commit == git(tmp_path / "repo", "rev-parse", "HEAD")


@pytest.mark.parametrize(
    "head", ["ref: refs/../../../../etc/hostname\n", "ref: /etc/hostname\n", "root:x:0:0\n", "\xff"]
)
def test_a_head_that_names_anything_but_a_commit_is_no_commit(policy: Path, head: str) -> None:
    (policy / ".git").mkdir()
    (policy / ".git" / "HEAD").write_text(head, encoding="latin-1")
    assert settled(policy).commit is None


@pytest.mark.parametrize("text", [b"gitdir: /x\0y\n", b"gitdir: \0\n", b"gitdir: /x/../\0/\n"])
def test_a_git_file_that_names_no_path_is_no_work_tree(policy: Path, text: bytes) -> None:
    """What raised here would end every pass, and with them expiry and revocation."""
    (policy / ".git").write_bytes(text)
    assert settled(policy).commit is None


def test_git_is_never_run(policy: Path) -> None:
    """A configuration that would run a program for almost any git command."""
    git(policy, "init", "-q")
    mark = policy.parent / "ran"
    with (policy / ".git" / "config").open("a") as file:
        file.write(f'[core]\n\tfsmonitor = "touch {mark}; false"\n')
    settled(policy)
    assert not mark.exists()


def test_checkouts_that_go_on_meanwhile_are_never_seen_half_done(policy: Path) -> None:
    """Two commits whose files all agree on one word; every accepted snapshot has one word only."""
    git(policy, "init", "-q", "-b", "main")
    for word in ("alpha", "omega"):
        for number in range(40):
            (policy / "agents" / f"a{number}.yaml").write_text(f"{word}\n" * 200)
        (policy / "platform.yaml").write_text(f"{word}\n" * 200)
        (policy / "agents" / "helper.yaml").write_text(f"{word}\n" * 200)
        git(policy, "add", "-A")
        git(policy, "commit", "-q", "-m", word)
        git(policy, "tag", word)
    stop = threading.Event()

    def flip() -> None:
        while not stop.is_set():
            git(policy, "checkout", "-q", "alpha")
            git(policy, "checkout", "-q", "omega")
            time.sleep(0.06)

    flipper = threading.Thread(target=flip)
    flipper.start()
    accepted = 0
    until = time.monotonic() + 4
    try:
        while time.monotonic() < until:
            found = look(policy, deadline=0.3)
            if isinstance(found, Snapshot):
                accepted += 1
                assert len({bytes(data.split(b"\n")[0]) for data in found.files.values()}) == 1
                assert {len(data) for data in found.files.values()} == {1200}
                assert len(found.files) == 42
    finally:
        stop.set()
        flipper.join()
    assert accepted > 0


def test_a_change_right_after_another_is_seen_though_size_and_time_stamp_are_the_same(policy: Path) -> None:
    file = policy / "agents" / "helper.yaml"
    for number in range(30):
        file.write_bytes(b"%013d" % number)
        assert settled(policy).files["agents/helper.yaml"] == b"%013d" % number


def test_nothing_is_written_inside_the_directory(policy: Path) -> None:
    def marks() -> dict[str, tuple[int, int, int]]:
        return {
            str(path): (path.stat().st_mtime_ns, path.stat().st_ctime_ns, path.stat().st_size)
            for path in policy.rglob("*")
        }

    before = marks()
    settled(policy)
    assert marks() == before


def test_the_trust_directory_has_its_own_names(tmp_path: Path) -> None:
    (tmp_path / "allowed_signers").write_text("")
    (tmp_path / "revoked").write_text("")
    (tmp_path / "platform.yaml").write_text("")
    found = take(tmp_path, owner="root", bounds=Bounds(), deadline=2, layout=TRUST)
    assert isinstance(found, Snapshot)
    assert set(found.files) == {"allowed_signers", "revoked"}
    assert found.ignored == ("platform.yaml",)
