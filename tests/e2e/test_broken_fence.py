"""A fence that was broken on purpose refuses the run: the gate names what it found, and the command never starts."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from reconciler.core.schema import load_schema
from tests.e2e import documents
from tests.e2e.broken_daemon import BOUND, BREAKS
from tests.e2e.listeners import Listeners
from tests.rig import addresses

if TYPE_CHECKING:
    from tests.e2e.installation import Installation

pytestmark = [pytest.mark.bubblewrap, pytest.mark.rig]

CASES = [
    pytest.param("shared-network", f"canary tcp:{addresses.HOST_PRIVATE}:", id="the host's network is shared"),
    pytest.param("bound-socket", f"socket:{BOUND}", id="a socket of the host is bound in"),
    pytest.param("bound-runtime", "canary unix-path:", id="the directory of the canary's socket is bound in"),
    pytest.param("wrong-key", "anchor", id="the proxy does not hold the proof key"),
    pytest.param("open-descriptor", "descriptor:", id="a directory of the host is inherited as a descriptor"),
    pytest.param("lying-gate", "anchor", id="the gate lies"),
    pytest.param("no-filter", "no system call filter is loaded", id="the system call filter is left out"),
]


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one job, and what reached listeners of the host meanwhile."""

    result: dict[str, Any]
    rows: dict[str, dict[str, Any]]
    traces: list[str]
    arrivals: list[str]


@pytest.fixture(scope="module")
def runs(bare: Installation) -> dict[str, Run]:
    """One job of each agent, one after the other: those of the broken fences, and `whole`."""
    names = [*BREAKS, "whole"]
    agents = {f"agents/{name}": documents.agent(name, allow=["example.com"]) for name in names}
    with Listeners(bare.rig) as listening, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        path = bare.root / "somebody.sock"
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen()
        program = [sys.executable, "-m", "tests.e2e.broken_daemon"]
        bare.adopt({"platform": documents.platform(max_parallel_runs=1), **agents}, program)
        work = [target.attempt() for target in listening.targets]
        found = {}
        for name in names:
            listening.clear()
            result = bare.run(name, documents.attempts(*work, agent=name, wait_s=0.5))
            found[name] = Run(
                result=result,
                rows={row["event"].removeprefix("agent_sandbox."): row for row in bare.rows(run=result["run"])},
                traces=bare.traces(),
                arrivals=[f"{arrival}" for arrival in listening.arrivals()],
            )
        return found


@pytest.mark.parametrize(("name", "target"), CASES)
def test_the_run_is_refused_and_the_target_named(runs: dict[str, Run], name: str, target: str) -> None:
    run = runs[name]
    result, gate = run.result, run.result["gate"]
    assert (result["code"], result["status"]) == ("refused", None)
    assert result["refusal"]["code"] == "gate_failed"
    assert gate["passed"] is False
    assert [failure for failure in gate["failures"] if failure.startswith(target)], gate["failures"]
    load_schema("result").validator.validate(result)
    load_schema("gate-report").validator.validate(gate)

    refusal = run.rows["refuse"]
    assert (refusal["outcome"], refusal["code"]) == ("refused", "gate_failed")
    assert [failure for failure in gate["failures"] if failure in refusal["message"]], refusal["message"]
    assert run.rows["launch"]["outcome"] == "intended", "it was never launched"
    assert (run.rows["teardown"]["outcome"], run.rows["teardown"]["detail"]["undone"]) == ("done", [])

    assert result["times"]["started"] is None
    assert result["output"]["bytes"] == 0
    assert run.arrivals == [], "the command ran"
    assert run.traces == []


def test_every_way_to_break_it_is_tried() -> None:
    assert {case.values[0] for case in CASES} == set(BREAKS)


def test_the_same_job_runs_where_the_fence_is_whole(runs: dict[str, Run]) -> None:
    result = runs["whole"].result
    assert (result["code"], result["status"], result["gate"]["passed"]) == ("exited", 0, True)
    assert result["output"]["bytes"] > 0
    assert runs["whole"].arrivals == []
