"""The fence as data: what bwrap is told, and which mounts must then be there and no others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.backends import bwrap_args, input_files, mountinfo
from reconciler.backends.bwrap_args import Descriptors, HostRoot

HOST = HostRoot(directories=("/usr",), links=(("/bin", "usr/bin"), ("/lib", "usr/lib")), certificates=b"CA")
FENCE = bwrap_args.fence(
    user=1000, memory=64 << 20, host=HOST, files={"job.py": b"print(1)"}, launcher=b"launcher", gate=b"gate"
)
ARGUMENTS = bwrap_args.arguments(
    FENCE, Descriptors(status=10, seccomp=12, files=tuple(range(20, 20 + len(FENCE.files))))
)

GOLDEN = """
--unshare-user --unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup
--disable-userns --die-with-parent --new-session --clearenv --cap-drop ALL
--uid 1000 --gid 1000 --hostname sandbox
--ro-bind /usr /usr
--symlink usr/bin /bin --symlink usr/lib /lib
--proc /proc --dev /dev
--size 16777216 --perms 1777 --tmpfs /dev/shm
--size 33554432 --perms 1777 --tmpfs /tmp
--perms 0555 --dir /job
--perms 0444 --file 20 /etc/passwd
--perms 0444 --file 21 /etc/group
--perms 0444 --file 22 /etc/hosts
--perms 0444 --file 23 /etc/nsswitch.conf
--perms 0444 --file 24 /etc/ssl/certs/ca-certificates.crt
--perms 0444 --file 25 /run/ringfence/launcher.py
--perms 0444 --file 26 /run/ringfence/gate.py
--perms 0444 --file 27 /job/job.py
--remount-ro /dev --remount-ro / --chdir /
--json-status-fd 10 --seccomp 12
"""


def test_the_arguments_are_these_and_no_others() -> None:
    assert list(ARGUMENTS) == GOLDEN.split()


def test_no_path_of_the_host_is_bound_but_its_directories_and_those_read_only() -> None:
    binds = [n for n, word in enumerate(ARGUMENTS) if "bind" in word]
    assert [ARGUMENTS[n : n + 3] for n in binds] == [("--ro-bind", "/usr", "/usr")]


def test_the_command_is_not_among_the_launchers_arguments() -> None:
    assert bwrap_args.launcher_command("/usr/bin/python3", handoff=3, words=4, report=5) == (
        "/usr/bin/python3",
        "-I",
        "-S",
        "/run/ringfence/launcher.py",
        "3",
        "4",
        "5",
        "/run/ringfence/gate.py",
    )


@given(st.dictionaries(st.text(min_size=1), st.text()))
def test_no_job_can_take_the_proxy_out_of_its_environment(given_variables: dict[str, str]) -> None:
    tried = {**given_variables, "HTTPS_PROXY": "", "no_proxy": "*", "NO_PROXY": "example.com"}
    found = bwrap_args.environment(FENCE, tried)
    assert {found[name] for name in ("HTTP_PROXY", "https_proxy", "ALL_PROXY")} == {"http://127.0.0.1:3128"}
    assert found["NO_PROXY"] == found["no_proxy"] == ""


HOST_MOUNTS = mountinfo.parse("""\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:6 / /dev rw,nosuid - devtmpfs devtmpfs rw
24 22 254:1 / /usr/local rw - ext4 /dev/vdb rw
25 22 254:2 / /home rw - ext4 /dev/vdc rw
26 22 254:3 / /usr/with\\040space ro - ext4 /dev/vdd ro
27 22 254:4 / /usrlocal rw - ext4 /dev/vde rw
""")
INSIDE = """\
65 42 0:40 /newroot / ro,nosuid,nodev,relatime - tmpfs tmpfs rw
66 65 254:0 /usr /usr ro,nosuid,nodev,relatime - ext4 /dev/vda rw
70 66 254:1 / /usr/local ro,nosuid,nodev - ext4 /dev/vdb rw
71 66 254:3 / /usr/with\\040space ro,nosuid,nodev - ext4 /dev/vdd ro
67 65 0:41 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
68 65 0:42 / /dev ro,nosuid,nodev,relatime - tmpfs tmpfs rw,mode=755
69 68 0:6 /null /dev/null rw,nosuid,relatime - devtmpfs devtmpfs rw
69 68 0:6 /zero /dev/zero rw,nosuid,relatime - devtmpfs devtmpfs rw
69 68 0:6 /full /dev/full rw,nosuid,relatime - devtmpfs devtmpfs rw
69 68 0:6 /random /dev/random rw,nosuid,relatime - devtmpfs devtmpfs rw
69 68 0:6 /urandom /dev/urandom rw,nosuid,relatime - devtmpfs devtmpfs rw
69 68 0:6 /tty /dev/tty rw,nosuid,relatime - devtmpfs devtmpfs rw
75 68 0:43 / /dev/pts rw,nosuid,noexec,relatime - devpts devpts rw
76 68 0:44 / /dev/shm rw,nosuid,nodev,relatime - tmpfs tmpfs rw
77 65 0:45 / /tmp rw,nosuid,nodev,relatime - tmpfs tmpfs rw
"""


def differences(text: str) -> tuple[str, ...]:
    """Compare a mountinfo with the plan."""
    return bwrap_args.mount_differences(bwrap_args.mounts(FENCE, HOST_MOUNTS), mountinfo.parse(text))


def test_the_mounts_of_the_plan_are_as_planned() -> None:
    assert differences(INSIDE) == ()


@pytest.mark.parametrize("line", range(len(INSIDE.splitlines())))
def test_each_mount_that_is_missing_is_named(line: int) -> None:
    lines = INSIDE.splitlines()
    point = lines.pop(line).split(" ")[4].replace("\\040", " ")
    assert differences("\n".join(lines)) == (f"mount {point} is not there as planned",)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        pytest.param("/usr ro,nosuid", "/usr rw,nosuid", "mount /usr is", id="a writable /usr"),
        pytest.param("/newroot / ro", "/newroot / rw", "mount / is", id="a writable root"),
        pytest.param("254:0 /usr /usr", "254:0 /etc /usr", "mount /usr is", id="another directory at /usr"),
        pytest.param("254:1 / /usr/local", "254:2 / /usr/local", "mount /usr/local is", id="another disk"),
        pytest.param("shm rw,nosuid,nodev", "shm rw,nosuid", "mount /dev/shm is", id="device files in memory"),
        pytest.param("0:6 /null /dev/null", "0:6 /mem /dev/null", "mount /dev/null is", id="memory for a null device"),
        pytest.param("/proc rw,nosuid", "/proc rw", "mount /proc is", id="a softer /proc"),
    ],
)
def test_a_mount_that_is_another_or_softer_is_named(old: str, new: str, named: str) -> None:
    assert old in INSIDE
    assert differences(INSIDE.replace(old, new))[0].startswith(named)


@pytest.mark.parametrize(
    "line",
    [
        "78 65 254:0 /run/docker.sock /srv/x ro - ext4 /dev/vda rw",
        "78 65 254:2 / /home ro - ext4 /dev/vdc rw",
        "78 77 0:45 / /tmp rw,nosuid,nodev,relatime - tmpfs tmpfs rw",
    ],
    ids=["a socket", "a directory", "a second mount over the first"],
)
def test_a_mount_more_is_named(line: str) -> None:
    assert [text for text in differences(f"{INSIDE}{line}\n") if text.endswith("was not planned")]


@pytest.mark.parametrize(
    ("name", "unusable"),
    [
        ("job.py", False),
        ("a/b.txt", False),
        (".hidden", False),
        ("", True),
        (".", True),
        ("/etc/passwd", True),
        ("../x", True),
        ("a/../x", True),
        ("a//b", True),
        ("a/", True),
        ("./a", True),
        ("a\0b", True),
        ("a\nb", True),
    ],
    ids=ascii,
)
def test_names_of_input_files(name: str, unusable: bool) -> None:
    assert input_files.unusable_name(name) is unusable
