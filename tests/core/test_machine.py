"""A host that lives through anything keeps the promises of the formula, and no clause of the formula can be left out.

`make check` plays few short histories; HYPOTHESIS_PROFILE=deep plays at least 2,000.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from reconciler.core import findings
from reconciler.core import reconcile as formula
from reconciler.core.grants import NOTHING, Grant
from reconciler.core.order import Walk
from reconciler.core.rules import Covered, Ranked, Unordered
from tests.core.machine import Host, Joining, Life

if TYPE_CHECKING:
    from collections.abc import Callable

DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
HISTORIES = 2000 if DEEP else 25


def play(
    histories: int,
    *,
    life: type[Life] = Host,
    steps: int = 12,
    phases: tuple[Phase, ...] = tuple(Phase),
    seeded: bool = False,
) -> None:
    chosen = settings(
        max_examples=histories,
        stateful_step_count=steps,
        phases=phases,
        deadline=None,
        derandomize=seeded,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    run_state_machine_as_test(life, settings=chosen)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("life", [Host, Joining])
def test_a_host_that_lives_through_anything_keeps_every_promise(life: type[Life]) -> None:
    play(HISTORIES, life=life)


Patch = pytest.MonkeyPatch


def _desired_left_out(patch: Patch) -> None:
    patch.setattr(Walk, "meet", lambda _self, _order, _wanted, limit: limit)


def _ranked_fields_meet_at_the_limit(patch: Patch) -> None:
    patch.setattr(Ranked, "meet", lambda _self, _wanted, limit: limit)


def _limit_left_out(patch: Patch) -> None:
    patch.setattr(Walk, "limit", lambda _self, _order, _baseline, _licence, wanted: wanted)


def _sets_meet_at_what_is_wanted(patch: Patch) -> None:
    patch.setattr(Covered, "meet", lambda _self, wanted, _limit: wanted)


def _no_order_is_every_value(patch: Patch) -> None:
    patch.setattr(Unordered, "meet", lambda _self, wanted, _limit: wanted)


def _the_baseline_follows_what_is_wanted(patch: Patch) -> None:
    patch.setattr(Walk, "tighten", lambda _self, _order, _baseline, wanted: wanted)


def _the_baseline_of_the_floor_is_kept(patch: Patch) -> None:
    patch.setattr(Walk, "tighten", lambda _self, _order, baseline, _wanted: baseline)


def _an_absent_agent_starts_anew(patch: Patch) -> None:
    real = formula._Pass.run

    def run(self: Any) -> Any:
        present = {name: unit for name, unit in self._memory.baseline.items() if f"agents/{name}" in self._documents}
        self._memory = dataclasses.replace(self._memory, baseline=present)
        found = real(self)
        kept = {name: unit for name, unit in found.memory.baseline.items() if name in present or name in found.judged}
        return dataclasses.replace(found, memory=dataclasses.replace(found.memory, baseline=kept))

    patch.setattr(formula._Pass, "run", run)


def _grants_do_not_expire(patch: Patch) -> None:
    real = formula.reconcile

    def reconcile(desired: Any, memory: Any, grants: Any, *, now: float, **more: Any) -> Any:
        del now
        return real(desired, memory, grants, now=0.0, **more)

    patch.setattr("tests.core.machine.reconcile", reconcile)


def _revoked_grants_count_while_the_directory_is_away(patch: Patch) -> None:
    real = formula.reconcile

    def reconcile(desired: Any, memory: Any, grants: Any, *, lapsed: Any, **more: Any) -> Any:
        del lapsed
        return real(desired, memory, grants, **more)

    patch.setattr("tests.core.machine.reconcile", reconcile)


def _one_approval_is_enough(patch: Patch) -> None:
    patch.setattr(Grant, "approved_by", lambda _self, _wanted: True)


def _an_empty_directory_deletes(patch: Patch) -> None:
    patch.setattr(formula, "_documents", lambda desired, _memory: dict(sorted(desired.documents.items())))


def _a_bad_document_is_gone(patch: Patch) -> None:
    def documents(desired: Any, memory: Any) -> Any:
        return dict(memory.last) if desired.empty else dict(sorted(desired.documents.items()))

    patch.setattr(formula, "_documents", documents)


def _nothing_alarms(patch: Patch) -> None:
    patch.setattr(formula, "_alarm", lambda _desired: None)


def _an_alarm_holds_nothing(patch: Patch) -> None:
    real = formula._Pass.run

    def run(self: Any) -> Any:
        alarm, self._alarm = self._alarm, None
        return dataclasses.replace(real(self), alarm=alarm)

    patch.setattr(formula._Pass, "run", run)


def _a_layer_that_is_gone_is_lifted(patch: Patch) -> None:
    real = formula._Pass._start

    def start(self: Any, name: str, selected: Any) -> Any:
        found = real(self, name, selected)
        return {**found, "layers": {layer: tree for layer, tree in found["layers"].items() if layer in selected}}

    patch.setattr(formula._Pass, "_start", start)


def _a_new_layer_starts_as_it_is_wanted(patch: Patch) -> None:
    real = formula._Pass._start

    def start(self: Any, name: str, selected: Any) -> Any:
        found = real(self, name, selected)
        known = self._memory.baseline.get(name)
        known_layers = {} if known is None else known.layers
        return {**found, "layers": {**found["layers"], **{k: v for k, v in selected.items() if k not in known_layers}}}

    patch.setattr(formula._Pass, "_start", start)


def _agents_to_come_start_anew(patch: Patch) -> None:
    real = formula._Pass.__init__

    def start(self: Any, *args: Any) -> None:
        real(self, *args)
        self._for_every = {}

    patch.setattr(formula._Pass, "__init__", start)


def _nothing_is_remembered_of_agents_to_come(patch: Patch) -> None:
    real = formula._Pass.run

    def run(self: Any) -> Any:
        found = real(self)
        baseline = {name: unit for name, unit in found.memory.baseline.items() if name != "*"}
        return dataclasses.replace(found, memory=dataclasses.replace(found.memory, baseline=baseline))

    patch.setattr(formula._Pass, "run", run)


def _who_joins_does_not_get_the_last_content_for_all(patch: Patch) -> None:
    real = formula._Pass.__init__

    def start(self: Any, *args: Any) -> None:
        real(self, *args)
        self._last_for_every = {}

    patch.setattr(formula._Pass, "__init__", start)


def _a_grant_for_one_agent_lifts_from_those_to_come(patch: Patch) -> None:
    real = formula._Pass._licence

    def licence(self: Any, name: str, lifts: Any) -> Any:
        return real(self, name, self._lifts if name == "*" else lifts)

    patch.setattr(formula._Pass, "_licence", licence)


def _a_lift_from_all_leaves_those_to_come(patch: Patch) -> None:
    real = formula._Pass._licence
    patch.setattr(formula._Pass, "_licence", lambda self, name, lifts: real(self, name, () if name == "*" else lifts))


def _nothing_is_reported_as_held(patch: Patch) -> None:
    patch.setattr(findings.Ledger, "all", lambda self: tuple(x for x in _all(self) if not isinstance(x, findings.Held)))


def _grants_of_one_agent_count_for_all(patch: Patch) -> None:
    real = formula._Pass._licence

    def licence(self: Any, name: str, lifts: Any) -> Any:
        found = real(self, name, lifts)
        own = next((one for of, one in self._licences.items() if of.startswith("agents/")), NOTHING)
        return dataclasses.replace(found, below={**found.below, "own": own})

    patch.setattr(formula._Pass, "_licence", licence)


def _what_changed_is_taken_over(patch: Patch) -> None:
    class Same(tuple[Any, ...]):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = tuple.__hash__

    real = dataclasses.replace

    def replace(one: Any, **changes: Any) -> Any:
        if "of" in changes:
            changes["of"] = Same(changes["of"])
        return real(one, **changes)

    patch.setattr("reconciler.core.reconcile.dataclasses.replace", replace)


_all = findings.Ledger.all

BUGS: tuple[Callable[[Patch], None], ...] = (
    _desired_left_out,
    _ranked_fields_meet_at_the_limit,
    _limit_left_out,
    _sets_meet_at_what_is_wanted,
    _no_order_is_every_value,
    _the_baseline_follows_what_is_wanted,
    _the_baseline_of_the_floor_is_kept,
    _an_absent_agent_starts_anew,
    _grants_do_not_expire,
    _revoked_grants_count_while_the_directory_is_away,
    _one_approval_is_enough,
    _an_empty_directory_deletes,
    _a_bad_document_is_gone,
    _nothing_alarms,
    _an_alarm_holds_nothing,
    _a_layer_that_is_gone_is_lifted,
    _a_new_layer_starts_as_it_is_wanted,
    _nothing_is_reported_as_held,
    _grants_of_one_agent_count_for_all,
    _what_changed_is_taken_over,
)

OF_JOINING: tuple[Callable[[Patch], None], ...] = (
    _agents_to_come_start_anew,
    _nothing_is_remembered_of_agents_to_come,
    _who_joins_does_not_get_the_last_content_for_all,
    _a_grant_for_one_agent_lifts_from_those_to_come,
    _a_lift_from_all_leaves_those_to_come,
)
"""These show only where agents come and go while documents change whom they limit."""


def _told(bug: Callable[[Patch], None]) -> str:
    return bug.__name__.strip("_").replace("_", " ")


@pytest.mark.parametrize("bug", BUGS, ids=_told)
@pytest.mark.timeout(600)
def test_a_formula_with_a_bug_in_one_clause_is_caught(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        bug(patch)
        # A secret that no grant names is missed by its key.
        with pytest.raises((AssertionError, KeyError)):
            play(1000, steps=20, phases=(Phase.generate,), seeded=True)


@pytest.mark.parametrize("bug", OF_JOINING, ids=_told)
@pytest.mark.timeout(600)
def test_a_bug_in_what_limits_agents_to_come_is_caught(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        bug(patch)
        with pytest.raises((AssertionError, KeyError)):
            play(1000, life=Joining, steps=20, phases=(Phase.generate,), seeded=True)
