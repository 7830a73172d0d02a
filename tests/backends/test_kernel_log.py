"""What the kernel's log says of a group that was refused a process, or killed for its memory, and what it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reconciler.backends.kernel_log import fork_was_refused, memory_ran_out

if TYPE_CHECKING:
    from pathlib import Path

NAME = "0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param(
            f"6,1,2,-;cgroup: fork rejected by pids controller in /docker/{NAME}\n", True, id="a group of cgroupfs"
        ),
        pytest.param(
            f"6,1,2,-;cgroup: fork rejected by pids controller in /system.slice/docker-{NAME}.scope\n",
            True,
            id="a scope of systemd's",
        ),
        pytest.param("6,1,2,-;cgroup: fork rejected by pids controller in /docker/other\n", False, id="another group"),
        pytest.param(f"6,1,2,-;oom-kill: task_memcg=/docker/{NAME}\n", False, id="another message of that group"),
        pytest.param("", False, id="an empty log"),
    ],
)
def test_a_record(tmp_path: Path, text: str, found: bool) -> None:
    log = tmp_path / "kmsg"
    log.write_text(text)
    assert fork_was_refused(NAME, str(log)) is found


OOM = "6,1,2,-;oom-kill:constraint={},nodemask=(null),cpuset=/,oom_memcg={},task_memcg={},task=x,pid=1,uid=0"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param(OOM.format("CONSTRAINT_MEMCG", f"/d/{NAME}", f"/d/{NAME}"), True, id="at its limit"),
        pytest.param(OOM.format("CONSTRAINT_MEMCG", "/d/other", "/d/other"), False, id="another group"),
        pytest.param(OOM.format("CONSTRAINT_NONE", "", f"/d/{NAME}"), False, id="a host without memory"),
        pytest.param(
            f"6,1,2,-;cgroup: fork rejected by pids controller in /docker/{NAME}\n", False, id="another limit"
        ),
    ],
)
def test_a_record_of_memory(tmp_path: Path, text: str, found: bool) -> None:
    log = tmp_path / "kmsg"
    log.write_text(text)
    assert memory_ran_out(NAME, str(log)) is found


def test_nothing_is_known_where_there_is_no_log(tmp_path: Path) -> None:
    assert not fork_was_refused(NAME, str(tmp_path / "none"))
    assert not memory_ran_out(NAME, str(tmp_path / "none"))
