"""Every unit of systemd that we ship is one that systemd understands."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = sorted((Path(__file__).parents[1] / "deploy" / "systemd").glob("*.service"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_has_nothing_to_say_against_a_unit(unit: Path, tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed (Debian: systemd)")
    # Programs that the unit starts need not be installed here.
    text = re.sub(r"^(Exec\w+=)/\S+", r"\1/bin/true", unit.read_text("utf-8"), flags=re.MULTILINE)
    copy = tmp_path / unit.name
    copy.write_text(text, "utf-8")
    done = subprocess.run(
        [program, "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_there_are_units() -> None:
    assert UNITS
