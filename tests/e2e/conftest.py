"""Owns what every end-to-end test stands on: a host that really has bubblewrap, and an installation for each module."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.e2e.installation import Installation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.rig import Rig


@pytest.fixture(scope="session")
def fenced_rig(rig_session: Rig) -> Rig:
    """The rig, on a machine whose bubblewrap passed a canary run; skips with the probe's own words where there is none."""
    with Installation(rig_session) as installation:
        found = json.loads(installation.ringfence("probe", "--json").stdout)["backends"]
    (bubblewrap,) = [one for one in found if one["name"] == "bubblewrap"]
    if bubblewrap["state"] != "available":
        said = f"bubblewrap: {bubblewrap['code']}: {bubblewrap['message']}"
        # A machine may lack bubblewrap; one on which a fence is built and does not hold has found a bug.
        if bubblewrap["code"] in {"gate_failed", "canary_failed", "proxy_failed"}:
            pytest.fail(said)
        pytest.skip(said)
    return rig_session


@pytest.fixture(scope="module")
def bare(fenced_rig: Rig) -> Iterator[Installation]:
    """A host without a policy and without a daemon, for one module; nothing of a run may be left at its end."""
    fenced_rig.reset()
    with Installation(fenced_rig) as installation:
        yield installation
        installation.stop()
        assert installation.traces() == []


@pytest.fixture
def fresh(fenced_rig: Rig) -> Iterator[Installation]:
    """A host without a policy and without a daemon, for one test; nothing of a run may be left at its end."""
    fenced_rig.reset()
    with Installation(fenced_rig) as installation:
        yield installation
        installation.stop()
        assert installation.traces() == []
