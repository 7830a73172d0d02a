"""Every rule of the proxy, accepting and refusing, on both loops: status, code, layer, and how far it got."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.proxy import examples
from tests.proxy.conformance.columns import changes, ours
from tests.proxy.conformance.run import judge, prepared, scripted, send
from tests.proxy.conformance.table import ALLOW, Case, load
from tests.proxy.harness import LOOPS, Proxy
from tests.proxy.pythons import found
from tests.rig.origin import HELLO_RETRY_REQUEST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.rig import Rig

CASES = load()
PLAIN = examples.policy(allow=ALLOW)


@pytest.fixture(scope="module")
def origin(rig_session: Rig) -> Iterator[None]:
    with scripted(rig_session):
        yield


@pytest.fixture(scope="module", params=LOOPS)
def running(rig_session: Rig, origin: None, request: pytest.FixtureRequest) -> Iterator[Proxy]:
    del origin
    with Proxy(rig_session, PLAIN, arguments=["--loop", request.param]) as proxy:
        yield proxy


def test_the_table_is_large_its_ids_are_one_each_and_every_rule_has_both_sides() -> None:
    assert len(CASES) >= 140
    assert [name for name, count in Counter(case.id for case in CASES).items() if count > 1] == []
    sides = {(case.rule, case.accept) for case in CASES}
    assert (
        {rule for rule, _ in sides}
        == {rule for rule, accept in sides if accept}
        == {rule for rule, accept in sides if not accept}
    )


@pytest.mark.rig
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(rig: Rig, running: Proxy, case: Case) -> None:
    assert running.replace(**changes(case.row))["accepted"]
    with prepared(rig, case):
        rig.clear()
        seen = send(rig, running.port, case)
    assert judge(case, seen, strict=True) == [], seen
    row = case.row
    if "code" in row:
        decided = running.decided(row["code"])
        assert decided.verdict == "deny"
        if "layer" in row:
            assert decided.layer == row["layer"]
        if seen.statuses[-1] >= 400:
            assert seen.reasons[-1] == row["code"]
            assert seen.heads[-1]["connection"] == "close"
            assert "proxy-status" in seen.heads[-1]
            assert seen.heads[-1]["content-type"] == "text/plain"
            assert seen.bodies[-1].startswith(b"ringfence: ") or row.get("send", "").startswith("HEAD")
            assert seen.closed or row.get("occupied")
        elif "tunnel" in row:
            heard = HELLO_RETRY_REQUEST if "second" in row else b""
            assert heard.startswith(seen.rest), "an open tunnel hears nothing of ours"
    if not case.accept and row.get("dns", 0) == 0 and "tunnel" not in row and 200 not in case.statuses:
        assert rig.queries() == []
    if not (case.accept or row.get("dns") or {"tunnel", "twice", "occupied"} & row.keys()):
        # one decision a request, and no more; what is allowed may break later, which is another
        assert sum(record.count for record in running.decisions()) <= max(len(seen.statuses), 1)
    for flow in seen.flows:
        assert not flow.startswith(("10.", "127.", "169.254.", "172.16.", "192.168.", "100.64.", "fd", "fe80", "::"))


@pytest.mark.rig
@pytest.mark.timeout(240)
def test_every_other_python_passes_every_case_that_waits_for_no_deadline() -> None:
    cases = [case for case in CASES if not case.slow]
    others = [(python, loop) for python in found() if python.program is not None for loop in python.loops]
    if not others:
        pytest.skip("there is no other Python that is new enough")
    with ThreadPoolExecutor(len(others)) as pool:
        # they wait more than they work
        columns = {f"{one.version} {loop}": pool.submit(ours, one, loop, cases) for one, loop in others}
        wrong = {name: [(case, what) for case, what in run.result().items() if what] for name, run in columns.items()}
    assert wrong == {name: [] for name in columns}
