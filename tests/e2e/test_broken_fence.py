"""A fence that was broken on purpose refuses the run: the gate names what it found, and the command never starts."""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest

from reconciler.core.schema import load_schema
from tests.e2e import documents
from tests.e2e.broken_daemon import BOUND, BREAKS
from tests.e2e.listeners import Listeners
from tests.rig import addresses

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.installation import Installation

pytestmark = [pytest.mark.bubblewrap, pytest.mark.rig]

CASES = [
    pytest.param("shared_network", f"canary tcp:{addresses.HOST_PRIVATE}:", id="the host's network is shared"),
    pytest.param("bound_socket", f"socket:{BOUND}", id="a socket of the host is bound in"),
    pytest.param("bound_runtime", "canary unix-path:", id="the directory of the canary's socket is bound in"),
    pytest.param("wrong_key", "anchor", id="the proxy does not hold the proof key"),
    pytest.param("open_descriptor", "descriptor:", id="a directory of the host is inherited as a descriptor"),
    pytest.param("lying_gate", "anchor", id="the gate lies"),
    pytest.param("no_filter", "no system call filter is loaded", id="the system call filter is left out"),
]


@pytest.fixture(scope="module")
def adopted(bare: Installation) -> Iterator[Installation]:
    """A policy in force, a live socket to bind in, and no daemon."""
    bare.adopt({"platform": documents.platform(), "agents/helper": documents.agent(allow=["example.com"])})
    bare.stop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        path = bare.root / "somebody.sock"
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen()
        yield bare


@pytest.fixture
def refused(adopted: Installation, request: pytest.FixtureRequest) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """The result of a job under a daemon that breaks its fence, and what arrived at listeners of the host."""
    how = request.param
    with Listeners(adopted.rig) as listening:
        orders = [target.attempt() for target in listening.targets]
        adopted.start([sys.executable, "-m", "tests.e2e.broken_daemon", how])
        result = adopted.run(f"broken-{how.replace('_', '-')}", documents.attempts(*orders, wait_s=0.5))
        traces = adopted.traces()
        adopted.stop()
        assert traces == []
        yield result, [f"{arrival}" for arrival in listening.arrivals()]


@pytest.mark.parametrize(("refused", "target"), CASES, indirect=["refused"])
def test_the_run_is_refused_and_the_target_named(
    adopted: Installation, refused: tuple[dict[str, Any], list[str]], target: str
) -> None:
    result, arrivals = refused
    assert (result["code"], result["status"]) == ("refused", None)
    assert result["refusal"]["code"] == "gate_failed"
    gate = result["gate"]
    assert gate["passed"] is False
    assert [failure for failure in gate["failures"] if failure.startswith(target)], gate["failures"]
    load_schema("result").validator.validate(result)
    load_schema("gate-report").validator.validate(gate)

    rows = {row["event"].removeprefix("agent_sandbox."): row for row in adopted.rows(run=result["run"])}
    refusal = rows["refuse"]
    assert (refusal["outcome"], refusal["code"]) == ("refused", "gate_failed")
    named = [failure for failure in gate["failures"] if failure in refusal["message"]]
    assert named, refusal["message"]
    assert rows["launch"]["outcome"] == "intended", "it was never launched"
    assert (rows["teardown"]["outcome"], rows["teardown"]["detail"]["undone"]) == ("done", [])

    assert result["times"]["started"] is None
    assert result["output"]["bytes"] == 0
    assert arrivals == [], "the command ran"


def test_every_way_to_break_it_is_tried() -> None:
    assert {case.values[0] for case in CASES} == set(BREAKS)


def test_the_same_job_runs_once_the_fence_is_whole(adopted: Installation) -> None:
    adopted.start()
    result = adopted.run("whole", documents.job("/usr/bin/true"))
    adopted.stop()
    assert (result["code"], result["status"], result["gate"]["passed"]) == ("exited", 0, True)
