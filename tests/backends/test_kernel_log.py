"""What the kernel's log says of a group that was refused a process, and what it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reconciler.backends.kernel_log import fork_was_refused

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


def test_nothing_is_known_where_there_is_no_log(tmp_path: Path) -> None:
    assert not fork_was_refused(NAME, str(tmp_path / "none"))
