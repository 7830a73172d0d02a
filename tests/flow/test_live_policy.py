"""What policy does to live runs: expiry, revocation and tightening within a second, and isolation that changed."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from reconciler.core.choose import Available
from reconciler.core.policy import BackendName, Effective, Isolation
from tests.flow.house import House, agent, in_force, job, layer, until
from tests.flow.test_daemon import GRANTS, Running, estate, helper, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.estate import Estate

__all__ = ["estate"]

NEW = {"document": "agents/helper", "field": "/allow", "add": "new.vendor.com"}


def _expire(_: Estate) -> None:
    """Its time comes by itself."""


def _revoke_the_statement(estate: Estate) -> None:
    estate.trust("alice", "bob", revoked="id CHG-2.1\n")


def _revoke_the_key(estate: Estate) -> None:
    estate.trust("alice", "bob", revoked=f"key {estate.keys['bob'].fingerprint}\n")


def _dismiss_the_signer(estate: Estate) -> None:
    estate.trust("alice")


def _delete_the_statement(estate: Estate) -> None:
    estate.unreason(2)


def _tighten(estate: Estate) -> None:
    estate.write(helper=helper("api.vendor.com"))


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(_expire, id="the reason expires"),
        pytest.param(_revoke_the_statement, id="its id is revoked"),
        pytest.param(_revoke_the_key, id="its key is revoked"),
        pytest.param(_dismiss_the_signer, id="its signer is no signer any more"),
        pytest.param(_delete_the_statement, id="it is deleted"),
        pytest.param(_tighten, id="the document is tightened"),
    ],
)
def test_what_ends_leaves_the_live_proxy_within_a_second(end: Callable[[Estate], None], estate: Estate) -> None:
    expires = "never"
    if end is _expire:
        # Two seconds from now or a little more, at a whole second.
        expires = (datetime.now(UTC) + timedelta(seconds=3)).strftime("%Y-%m-%dT%H:%M:%SZ")  # noqa: TID251 - the daemon's clock is the real one here
    estate.write(helper=helper("api.vendor.com", "new.vendor.com"))
    estate.reason(2, NEW, by=["bob"], expires=expires)
    took: list[float] = []

    async def main() -> None:
        async with running(estate) as daemon:
            await _started(daemon)
            assert [str(one) for one in daemon.backend.launched[0].proxy.allow] == ["api.vendor.com", "new.vendor.com"]
            end(estate)
            due = anyio.current_time()
            if end is _expire:
                left = datetime.strptime(expires, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC) - datetime.now(UTC)  # noqa: TID251 - see above
                due += left.total_seconds()
            await until(lambda: bool(daemon.backend.updates))
            took.append(anyio.current_time() - due)
            assert [str(one) for one in daemon.backend.updates[-1].allow] == ["api.vendor.com"]

    anyio.run(main)
    assert took[0] < 1.0, took


@contextmanager
def _never_quiet(path: Path) -> Iterator[None]:
    """Touch a file of the directory again and again, so that no look at it comes to an end in time."""
    stop = threading.Event()

    def touch() -> None:
        while not stop.wait(0.003):
            os.utime(path)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(_expire, id="the reason expires"),
        pytest.param(_revoke_the_statement, id="its id is revoked"),
        pytest.param(_revoke_the_key, id="its key is revoked"),
    ],
)
def test_what_ends_does_not_wait_for_a_directory_that_never_rests(
    end: Callable[[Estate], None], estate: Estate
) -> None:
    at = datetime.now(UTC) + timedelta(seconds=4)  # noqa: TID251 - the daemon's clock is the real one here
    expires = at.replace(microsecond=0) if end is _expire else "never"
    estate.write(helper=helper("api.vendor.com", "new.vendor.com"))
    estate.reason(2, NEW, by=["bob"], expires=str(expires).replace(" ", "T").replace("+00:00", "Z"))
    took: list[float] = []

    async def main() -> None:
        async with running(estate) as daemon:
            await _started(daemon)
            with _never_quiet(estate.root / "policy" / "agents" / "helper.yaml"):
                await anyio.sleep(0.5)
                end(estate)
                due = anyio.current_time()
                if isinstance(expires, datetime):
                    due += (expires - datetime.now(UTC)).total_seconds()  # noqa: TID251 - see above
                await until(lambda: bool(daemon.backend.updates))
                took.append(anyio.current_time() - due)
                assert [str(one) for one in daemon.backend.updates[-1].allow] == ["api.vendor.com"]

    anyio.run(main)
    assert took[0] < 1.0, took


async def _started(daemon: Running) -> None:
    daemon.submit("a.yaml", job("sleep 30"))
    await until(lambda: bool(daemon.backend.started))


@pytest.mark.parametrize("signed", [False, True], ids=["unsigned", "signed"])
def test_widening_reaches_the_live_proxy_only_when_it_is_signed(signed: bool, estate: Estate) -> None:
    async def main() -> None:
        async with running(estate) as daemon:
            await _started(daemon)
            if signed:
                estate.reason(2, NEW, by=["bob"], expires="never")
            estate.write(helper=helper("api.vendor.com", "new.vendor.com"))
            if signed:
                await until(lambda: bool(daemon.backend.updates))
                allowed = [str(one) for one in daemon.backend.updates[-1].allow]
                assert allowed == ["api.vendor.com", "new.vendor.com"]
            else:
                await until(lambda: bool(daemon.status()["policy"]["held"]))
                assert daemon.backend.updates == []

    anyio.run(main)
    assert GRANTS[3]["add"] == "api.vendor.com"


HELPER = Effective(agent=agent(), layers=())


def test_isolation_that_differs_from_last_times_is_a_row_before_the_command(house: House) -> None:
    async def run(stem: str, isolation: Isolation) -> None:
        found = Available(backend=BackendName.BUBBLEWRAP, isolation=isolation)
        async with house.daemon(in_force(replace(HELPER)), found=found):
            house.submit(f"{stem}.yaml", job("exit 0"))
            await house.wait_for(stem)

    anyio.run(run, "a", Isolation.NAMESPACE)
    anyio.run(run, "b", Isolation.NAMESPACE)
    assert house.rows("isolation.changed") == []
    anyio.run(run, "c", Isolation.GVISOR)
    anyio.run(run, "d", Isolation.GVISOR)
    (row,) = house.rows("isolation.changed")
    assert row["detail"]["before"] == "bubblewrap/namespace"
    assert row["detail"]["after"] == "bubblewrap/gvisor"
    launched = [one["seq"] for one in house.rows("launch") if one["outcome"] == "launched"]
    assert launched[1] < row["seq"] < launched[2]


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def test_a_required_layer_that_goes_away_stops_the_run(tmp_path: Path) -> None:
    house = House(tmp_path, required_egress=("org",))
    over = replace(HELPER, layers=(layer("org"),))

    async def main() -> dict[str, Any]:
        async with house.daemon(in_force(over)) as (jobs, _):
            house.submit("a.yaml", job("sleep 20"))
            await until(lambda: house.starts() == 1)
            jobs.follow(in_force(HELPER, generation=2))
            return await house.wait_for("a")

    assert anyio.run(main)["code"] == "policy_removed"
