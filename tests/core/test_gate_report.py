"""A gate report proves a fence only when everything in it holds; whatever else it says, it refuses."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import gate
from reconciler.core.gate_report import GateReport, Target, TargetKind, TargetVerdict, judge, verdict
from reconciler.core.schema import load_schema

if TYPE_CHECKING:
    from collections.abc import Callable

CHALLENGE, ANSWER = "ab" * 16, "cd" * 32
CANARY = Target(name="canary", kind=TargetKind.TCP, address="192.0.2.1", port=4711, alive=True)
METADATA = Target(name="metadata", kind=TargetKind.TCP, address="169.254.169.254", port=80, alive=False)
PACKET = Target(name="packet", kind=TargetKind.PACKET, address="", port=None, alive=False)
TARGETS = (CANARY, METADATA, PACKET)


def row(target: Target, seen: str) -> dict[str, Any]:
    """What a gate reports of one target."""
    return {
        "name": target.name,
        "kind": target.kind.value,
        "address": target.address,
        "port": target.port,
        "alive": target.alive,
        "verdict": gate.verdict(target.kind, target.alive, seen),
        "seen": seen,
    }


def report() -> dict[str, Any]:
    """A report in which everything holds."""
    return {
        "version": 1,
        "kind": "gate-report",
        "passed": True,
        "challenge": CHALLENGE,
        "anchor": {"address": "127.0.0.1:3128", "answer": ANSWER, "verdict": "reached", "seen": "answered"},
        "targets": [row(CANARY, "ENETUNREACH"), row(METADATA, "silence"), row(PACKET, "EAFNOSUPPORT")],
        "rounds": 2,
        "runtime": {"interfaces": ["lo"], "kernel": "Linux version 6", "uid": 1000, "python": "3.11.2"},
        "arrivals": [],
        "failures": [],
        "elapsed_ms": 12,
    }


def judged(raw: object, arrivals: frozenset[str] = frozenset()) -> GateReport:
    """The daemon's judgement."""
    return judge(raw, challenge=CHALLENGE, answer=ANSWER, targets=TARGETS, arrivals=arrivals, rounds=2)


def test_a_report_in_which_everything_holds_passes() -> None:
    found = judged(report())
    assert found.passed
    assert found.failures == ()
    load_schema("gate-report").validator.validate(found.to_object())
    load_schema("gate-report").validator.validate(report())


def change(*path: str | int, to: object) -> Callable[[dict[str, Any]], None]:
    """One change to a report."""

    def apply(raw: Any) -> None:
        for step in path[:-1]:
            raw = raw[step]
        raw[path[-1]] = to

    return apply


def drop(*path: str | int) -> Callable[[dict[str, Any]], None]:
    """One thing taken out of a report."""

    def apply(raw: Any) -> None:
        for step in path[:-1]:
            raw = raw[step]
        del raw[path[-1]]

    return apply


STRAY = {"name": "socket:/run/x", "kind": "socket", "address": "/run/x", "port": None, "seen": "present"}


@pytest.mark.parametrize(
    ("altered", "named"),
    [
        pytest.param(change("version", to=2), "report", id="another version is no report"),
        pytest.param(change("challenge", to="00" * 16), "report", id="an answer to another challenge is no report"),
        pytest.param(change("anchor", "answer", to="ef" * 32), "anchor", id="a proxy without the key is no anchor"),
        pytest.param(change("anchor", "answer", to=None), "anchor", id="a silent proxy is no anchor"),
        pytest.param(change("anchor", to="reached"), "anchor", id="an anchor that is only said is none"),
        pytest.param(change("targets", 0, "seen", to="answered"), "canary", id="a canary that answered is named"),
        pytest.param(
            change("targets", 0, "seen", to="ENETUNREACH,answered"), "canary", id="once in many rounds counts"
        ),
        pytest.param(change("targets", 0, "seen", to="EMFILE"), "canary", id="a gate out of descriptors saw nothing"),
        pytest.param(change("targets", 0, "seen", to="not_tried"), "rounds", id="a canary not tried is not denied"),
        pytest.param(change("targets", 0, "seen", to=""), "canary", id="a row without what was seen is not reported"),
        pytest.param(change("targets", 0, "port", to=80), "canary", id="another port is not what was asked"),
        pytest.param(change("targets", 0, "address", to="::1"), "canary", id="another address is not what was asked"),
        pytest.param(drop("targets", 0), "canary", id="a target left out is named"),
        pytest.param(change("targets", to=[]), "metadata", id="no targets at all names each"),
        pytest.param(change("targets", to=None), "packet", id="targets that are no list name each"),
        pytest.param(change("targets", 1, "seen", to="answered"), "metadata", id="an answer from anywhere is named"),
        pytest.param(change("targets", 2, "seen", to="answered"), "packet", id="a packet socket that opened is named"),
        pytest.param(lambda raw: raw["targets"].append(STRAY), "socket:/run/x", id="what was found inside is named"),
        pytest.param(
            lambda raw: raw["targets"].append(raw["targets"][0]), "canary", id="reported twice is not reported"
        ),
        pytest.param(change("rounds", to=1), "rounds", id="fewer rounds than asked are not enough"),
        pytest.param(change("rounds", to=True), "rounds", id="true is no number of rounds"),
        pytest.param(
            change("runtime", "interfaces", to=["lo", "eth0"]), "interface:eth0", id="another interface is named"
        ),
        pytest.param(drop("runtime", "interfaces"), "interfaces", id="interfaces must be told"),
        pytest.param(change("passed", to=False), "gate", id="a gate that refused is believed"),
    ],
)
def test_what_does_not_hold_is_named(altered: Callable[[dict[str, Any]], None], named: str) -> None:
    raw = report()
    altered(raw)
    found = judged(raw)
    assert not found.passed
    assert named in found.failures
    load_schema("gate-report").validator.validate(found.to_object())


@pytest.mark.parametrize("raw", [None, [], "report", 1, {}], ids=repr)
def test_no_report_proves_nothing(raw: object) -> None:
    found = judged(raw)
    assert not found.passed
    assert {"report", "anchor", "canary", "interfaces"} <= set(found.failures)


def test_an_arrival_refuses_whatever_the_gate_saw() -> None:
    found = judged(report(), frozenset({"canary"}))
    assert not found.passed
    assert found.failures == ("canary",)
    assert found.arrivals == ("canary",)


def test_after_a_leak_the_targets_left_out_are_not_named() -> None:
    raw = report()
    raw["targets"][0]["seen"] = "answered"
    raw["targets"][1]["seen"] = "not_tried"
    assert judged(raw).failures == ("canary",)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(JSON, st.lists(st.sampled_from(sorted(report())), max_size=4))
def test_no_value_in_any_field_makes_the_judge_fail_or_pass_more(value: Any, fields: list[str]) -> None:
    raw = copy.deepcopy(report())
    for name in fields:
        raw[name] = value
    found = judged(raw)
    assert found.passed == (not found.failures)
    if found.passed:
        assert found.anchor["answer"] == ANSWER
        assert [target.name for target in found.targets] == [target.name for target in TARGETS]


SEEN = st.lists(
    st.sampled_from([*sorted(gate.DENIALS), "EMFILE", "EOTHER", "answered", "not_tried", "present"]),
    min_size=1,
    max_size=3,
)


@given(st.sampled_from(list(TargetKind)), st.booleans(), SEEN)
def test_gate_and_daemon_judge_by_the_same_table(kind: TargetKind, alive: bool, seen: list[str]) -> None:
    assert verdict(kind, alive, ",".join(seen)) == gate.verdict(kind, alive, ",".join(seen))


@pytest.mark.parametrize(
    ("kind", "alive", "seen", "expected"),
    [
        pytest.param("tcp", True, "ECONNREFUSED", "denied", id="refused where a listener was alive is denied"),
        pytest.param("tcp", False, "ECONNREFUSED", "unproven", id="refused where nobody was known is unproven"),
        pytest.param("tcp", False, "silence", "unproven", id="silence where nobody was known is unproven"),
        pytest.param("tcp", False, "EPERM", "unproven", id="a denied connect is no denied socket"),
        pytest.param("packet", False, "EPERM", "denied", id="a denied packet socket needs no listener"),
        pytest.param("vsock", False, "EAFNOSUPPORT", "denied", id="a denied vsock needs no listener"),
        pytest.param("icmp", False, "EACCES", "denied", id="a denied ping socket needs no listener"),
        pytest.param("icmp", False, "ENETUNREACH", "unproven", id="a ping that went nowhere is unproven"),
        pytest.param("icmp", False, "answered", "reached", id="an echo reply is a leak"),
        pytest.param("tcp", True, "ENOMEM", "unproven", id="no memory is no evidence"),
    ],
)
def test_verdicts(kind: str, alive: bool, seen: str, expected: str) -> None:
    assert verdict(kind, alive, seen) is TargetVerdict(expected)
