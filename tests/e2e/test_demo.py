"""The demo is the README's promise: it runs, shows what it says, and leaves nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.bubblewrap, pytest.mark.rig]

ROOT = Path(__file__).parents[2]


def test_the_demo_shows_the_main_job_from_policy_to_audit() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.demo"], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    said = re.sub(r"\x1b\[\d*m", "", done.stdout)
    assert done.returncode == 0, done.stderr
    for line in (
        r"bubblewrap +available",
        r"exit status 3: weakenings that nobody signed",
        r"a listed host, TLS +200",
        r"a listed host, plain HTTP +200",
        r"a host that is not listed +403 not_listed",
        r"a name of the metadata service +403 address_private",
        r"names that the resolver was asked for: api\.vendor\.com, metadata\.example\.com ",
        r"gate passed: True",
        r'held: agents/helper /allow: add "\*\.pypi\.org"',
        r"in force \d+ ms after the signature",
        r"rows, unchanged and in order",
        r"everything is gone again",
    ):
        assert re.search(line, said), f"the demo does not say {line!r}\n{said}"
    (host,) = set(re.findall(r"^(/run/ringfence-test-\w+)/spool/done/\S+/result\.json$", said, re.MULTILINE))
    assert not Path(host).exists()
