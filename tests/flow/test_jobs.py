"""From a job file to its result: what ends a run, what is recorded of it, and what is not."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
from jsonschema import Draft202012Validator

from reconciler import attend, live
from reconciler.core.audit import Verified, verify
from reconciler.core.choose import Missing
from reconciler.core.policy import BackendChoice, BackendName, Effective
from reconciler.core.result import Result, ResultCode
from reconciler.core.schema import load_schema
from reconciler.journal import Journal, JournalFailed
from reconciler.journal_files import LOG
from tests.flow.house import House, agent, entries, in_force, job, layer, until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from reconciler.core.audit import Event
    from reconciler.core.policy import InForce

HELPER = Effective(agent=agent(), layers=())


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """A house, and after each test: results as their schema says, a chain that holds, nothing left."""
    made = House(tmp_path)
    yield made
    validator = Draft202012Validator(load_schema("result").root)
    for result in made.results():
        validator.validate(result)
    lines = (made.host.audit / LOG).read_bytes().splitlines(keepends=True)
    assert isinstance(verify(lines, None), Verified)
    assert made.leftovers() == []


def one(house: House, data: bytes, policy: InForce | None, **options: Any) -> dict[str, Any]:
    """The result of one job on a daemon."""

    async def main() -> dict[str, Any]:
        async with house.daemon(policy, **options):
            house.submit("a.yaml", data)
            return await house.wait_for("a")

    return anyio.run(main)


@pytest.mark.parametrize(
    ("actions", "code", "status", "oom_killed"),
    [
        pytest.param(["exit 7"], "exited", 7, False, id="exit 7 comes back as 7"),
        pytest.param([], "exited", 0, False, id="exit 0"),
        pytest.param(["sleep 30"], "timeout", None, False, id="past its deadline"),
        pytest.param(["oom"], "oom", None, True, id="at its memory limit"),
        pytest.param(["command_not_found"], "command_not_found", None, False, id="no such command"),
        pytest.param(["command_not_executable"], "command_not_executable", None, False, id="not executable"),
        pytest.param(["sandbox_crashed"], "sandbox_crashed", None, False, id="the sandbox died"),
        pytest.param(["proxy_died"], "proxy_died", None, False, id="the proxy died"),
    ],
)
def test_endings_are_told_apart(
    house: House, actions: list[str], code: str, status: int | None, *, oom_killed: bool
) -> None:
    result = one(house, job(*actions, timeout="1s"), in_force())
    assert (result["code"], result["status"], result["oom_killed"]) == (code, status, oom_killed)
    assert [row["code"] for row in house.rows("fail")] == ([] if code == "exited" else [code])
    assert [(row["outcome"], row["code"]) for row in house.rows("teardown")] == [("done", code)]


@pytest.mark.parametrize(
    ("data", "policy", "options", "code"),
    [
        pytest.param(job("x"), None, {}, "no_policy", id="no policy"),
        pytest.param(job("x"), in_force(enabled=False), {}, "disabled", id="off by default"),
        pytest.param(job("x", agent="other"), in_force(), {}, "unknown_agent", id="an agent that is not named"),
        pytest.param(job("x", env={"A": "1"}), in_force(), {}, "env_refused", id="a variable that is not allowed"),
        pytest.param(b"version: 1\nki", in_force(), {}, "bad_job", id="a half-written file"),
        *(
            pytest.param(job("x"), in_force(backend=BackendChoice(name)), {}, "backend_missing", id=f"{name} is named")
            for name in ("k8s", "firecracker", "docker")
        ),
        pytest.param(
            job("x"),
            in_force(),
            {"found": Missing(backend=BackendName.BUBBLEWRAP, code="no_cgroup", message="mount cgroups")},
            "backend_missing",
            id="a probe that found nothing",
        ),
        pytest.param(job("x"), in_force(), {"gate_holds": False}, "gate_failed", id="a fence that does not hold"),
    ],
)
def test_what_is_refused_starts_nothing_and_leaves_a_row(
    house: House, data: bytes, policy: InForce | None, options: Mapping[str, Any], code: str
) -> None:
    result = one(house, data, policy, **options)
    assert result["code"] == "refused"
    assert result["status"] is None
    assert result["refusal"]["code"] == code
    (row,) = house.rows("refuse")
    assert (row["code"], row["actor"], row["run"]) == (code, "nobody", result["run"])
    assert house.starts() == 0
    launches = [row["outcome"] for row in house.rows("launch")]
    assert launches == (["intended"] if code == "gate_failed" else [])
    if code == "gate_failed":
        assert result["gate"]["failures"] == ["canary-v4"]


def test_a_required_egress_document_that_is_missing_refuses(house: House) -> None:
    house.required_egress = ("org",)
    assert one(house, job("x"), in_force())["refusal"]["code"] == "no_egress_layer"


def test_what_a_run_says_of_itself(house: House) -> None:
    policy = in_force(replace(HELPER, reasons=("CHG-1",), layers=(layer("org"),)))
    result = one(
        house, job("print out", "connect api.vendor.com:443", "connect evil.com:80", "late evil.com:81"), policy
    )
    assert (result["agent"], result["submitter"], result["image"]) == ("helper", "nobody", "host")
    assert (result["revision"], result["generations"]) == (policy.revision, [1])
    assert result["reasons"] == ["CHG-1"]
    assert result["gate"]["passed"] is True
    assert result["backend"]["name"] == "bubblewrap"
    assert len(result["backend"]["why"]) == 3
    assert result["decisions"]["allowed"] == 1
    assert result["decisions"]["denied"] == 2
    times = result["times"]
    assert sorted(times.values()) == [
        times[name] for name in ("claimed", "intent", "gated", "started", "exited", "reported")
    ]
    intended, launched = house.rows("launch")
    assert (intended["outcome"], launched["outcome"]) == ("intended", "launched")
    assert launched["detail"]["gate"] == result["gate"]
    own = [row for row in house.rows() if row["run"] == result["run"]]
    assert result["audit"]["first"] == own[0]["seq"]
    assert result["audit"]["last"] == own[-2]["seq"]
    assert own[-1]["event"] == "agent_sandbox.teardown"
    assert house.rows()[result["audit"]["head"] - 1]["hash"] == result["audit"]["hash"]


def test_every_decision_is_in_the_result_and_every_denial_in_the_log(house: House) -> None:
    actions = ["connect api.vendor.com:443"] * 3 + ["connect evil.com:443"] * 2 + ["late evil.com:444"]
    result = one(house, job(*actions), in_force())
    lines = (house.host.spool / "done" / "nobody" / "a" / "decisions.jsonl").read_bytes().splitlines()
    assert Counter(json.loads(line)["verdict"] for line in lines) == {"allow": 3, "deny": 3}
    assert len(house.rows("egress.allow")) == 1
    assert [row["object"] for row in house.rows("egress.deny")] == ["evil.com:443", "evil.com:443", "evil.com:444"]
    rows = {seq for first, last in result["decisions"]["rows"] for seq in range(first, last + 1)}
    assert rows == {row["seq"] for row in house.rows() if ".egress." in row["event"]}


def test_decisions_that_never_arrived_are_a_row(house: House) -> None:
    result = one(house, job("connect evil.com:443", "lose 3", "connect evil.com:443"), in_force())
    assert result["decisions"]["missing"] == 3
    (row,) = house.rows("fail")
    assert (row["code"], row["message"]) == ("decisions_missing", "decisions 2 to 4 of the proxy did not arrive")


def test_decisions_that_are_missing_at_the_end_are_a_row(house: House) -> None:
    result = one(house, job("connect evil.com:443", "lose 2"), in_force())
    assert (result["decisions"]["missing"], result["decisions"]["cut"]) == (2, False)
    (row,) = house.rows("fail")
    assert (row["code"], row["message"]) == ("decisions_missing", "decisions 2 to 3 of the proxy did not arrive")


def test_a_proxy_that_does_not_say_how_many_it_decided_leaves_a_row(house: House) -> None:
    result = one(house, job("connect evil.com:443", "mute"), in_force())
    assert result["decisions"]["cut"] is True
    (row,) = house.rows("fail")
    assert row["code"] == "decisions_cut"
    assert row["run"] == result["run"]
    assert "after 1 is unknown" in row["message"]


def test_a_run_that_made_no_decision_is_whole(house: House) -> None:
    result = one(house, job("exit 0"), in_force())
    assert (result["decisions"]["missing"], result["decisions"]["cut"]) == (0, False)
    assert house.rows("fail") == []


def test_decisions_beyond_the_bound_are_counted(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "KEPT_DECISIONS", 5)
    result = one(house, job(*["connect evil.com:443"] * 20), in_force())
    assert (result["decisions"]["denied"], result["decisions"]["coalesced"]) == (20, 15)
    assert [row["detail"]["count"] for row in house.rows("egress.deny")] == [1] * 5 + [15]


def test_noise_does_not_hide_where_something_went(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "KEPT_DECISIONS", 5)
    noise = [*["connect evil.com:443"] * 10, *["connect api.vendor.com:443"] * 10]
    result = one(house, job(*noise, "connect api.vendor.com:80"), in_force())
    assert (result["decisions"]["denied"], result["decisions"]["allowed"]) == (10, 11)
    named = [row["object"] for row in house.rows("egress.allow")]
    assert named == ["api.vendor.com:443", "api.vendor.com:80", "*"]
    lines = (house.host.spool / "done" / "nobody" / "a" / "decisions.jsonl").read_bytes().splitlines()
    assert json.loads(lines[-1])["port"] == 80


def test_each_of_many_gaps_is_counted_but_not_a_row(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "KEPT_GAPS", 2)
    result = one(house, job(*["lose 3", "connect evil.com:443"] * 5), in_force())
    assert result["decisions"]["missing"] == 15
    assert [row["message"] for row in house.rows("fail")] == [
        "decisions 1 to 3 of the proxy did not arrive",
        "decisions 5 to 7 of the proxy did not arrive",
        "9 more decisions did not arrive",
    ]


@pytest.mark.parametrize("size", [4000, 200_000, 10_000_000], ids=["less than the limit", "more", "10 MB"])
def test_output_is_a_bounded_tail(house: House, size: int) -> None:
    result = one(house, job(f"flood {size}", "print end"), in_force())
    output = (house.host.spool / "done" / "nobody" / "a" / "output.log").read_bytes()
    assert len(output) == min(size + 4, 4096)
    assert output.endswith(b"\nend\n")
    assert result["output"]["bytes"] == size + 4
    assert result["output"]["truncated"] == (size > 4096)
    assert output.decode().endswith(result["output"]["tail"])


def test_live_output_keeps_its_offsets_and_gives_back_the_disk(house: House) -> None:
    async def main() -> None:
        async with house.daemon(in_force()) as (jobs, _):
            house.submit("a.yaml", job("flood 30000000", "print end", "sleep 1"))
            await until(lambda: house.starts() == 1)
            (name,) = jobs.runs
            path = house.host.runtime / "runs" / name / "output.log"
            await until(lambda: path.stat().st_size == 30_000_004)
            assert path.stat().st_blocks * 512 < 4_000_000
            with path.open("rb") as file:
                file.seek(30_000_000)
                assert file.read() == b"end\n"

    anyio.run(main)


def test_an_undecodable_tail_is_text_all_the_same() -> None:
    assert live.output_of(b"a\xffb", 3).tail == "a\\xffb"
    # The cut is inside the three bytes of a euro sign.
    assert live.output_of(b"\x82\xacx", 100).tail == "x"


def test_secrets_and_values_of_variables_are_nowhere(house: House, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("swordfish-secret\n")
    secret.chmod(0o600)
    policy = in_force(replace(HELPER, agent=agent(secrets={"API_KEY": str(secret)})))
    seen: list[tuple[str, str]] = []

    async def main() -> None:
        async with house.daemon(policy) as (_, backend):
            for name in ("a", "b"):
                actions = ["env API_KEY", "env INVOICE_ID", "sleep 0.4", "exit 0" if name == "a" else "nonsense"]
                house.submit(f"{name}.yaml", job(*actions, env={"INVOICE_ID": "swordfish-env"}))
            await until(lambda: house.starts() == 2)
            assert "swordfish" not in repr(backend.launched)
            assert dict(backend.launched[0].environment) == {
                "API_KEY": "swordfish-secret",
                "INVOICE_ID": "swordfish-env",
            }
            for path, data in house.every_file():
                # The claimed job file itself is there until the end; root alone can read it.
                if path != secret and path.suffix != ".yaml":
                    seen.extend(
                        (str(path), text) for text in ("swordfish-secret", "swordfish-env") if text.encode() in data
                    )
            result = await house.wait_for("a")
            assert result["output"]["tail"] == "set\nset\n"
            assert (await house.wait_for("b"))["code"] == "failed"

    anyio.run(main)
    for path, data in house.every_file():
        if path != secret:
            assert b"swordfish" not in data, path
    assert seen == []


@pytest.mark.parametrize(
    ("mode", "content"),
    [(0o644, b"x"), (0o660, b"x"), (0o600, b"\xff"), (0o600, b"a\0b"), (0o600, None), (0o600, b"x" * 70_000)],
    ids=["others may read it", "a group may write it", "it is not text", "it holds a NUL", "it is gone", "too large"],
)
def test_a_secret_that_is_not_kept_well_refuses(house: House, tmp_path: Path, mode: int, content: bytes | None) -> None:
    secret = tmp_path / "secret"
    if content is not None:
        secret.write_bytes(content)
        secret.chmod(mode)
    policy = in_force(replace(HELPER, agent=agent(secrets={"API_KEY": str(secret)})))
    result = one(house, job("x"), policy)
    assert result["refusal"]["code"] == "secret_unreadable"
    assert "API_KEY" in result["refusal"]["message"]
    assert house.starts() == 0


NARROW = in_force(replace(HELPER, agent=agent(allow=entries("other.vendor.com"))), generation=2)


def test_newer_policy_reaches_the_live_proxy(house: House) -> None:
    async def main() -> dict[str, Any]:
        async with house.daemon(in_force()) as (jobs, backend):
            house.submit("a.yaml", job("connect api.vendor.com:443", "sleep 0.5", "connect api.vendor.com:443"))
            await until(lambda: house.starts() == 1)
            jobs.follow(NARROW)
            await until(lambda: bool(backend.updates))
            assert [run.generation for run in jobs.runs.values()] == [2]
            # Nothing of its reach changes here, so nothing is sent.
            jobs.follow(replace(NARROW, generation=3))
            result = await house.wait_for("a")
            assert [policy.generation for policy in backend.updates] == [2]
            return result

    result = anyio.run(main)
    assert result["generations"] == [1, 2]
    assert (result["decisions"]["allowed"], result["decisions"]["denied"]) == (1, 1)


def test_a_proxy_that_does_not_acknowledge_costs_the_run(house: House) -> None:
    async def main() -> dict[str, Any]:
        async with house.daemon(in_force(), acknowledges=False) as (jobs, _):
            house.submit("a.yaml", job("sleep 20"))
            await until(lambda: house.starts() == 1)
            jobs.follow(NARROW)
            return await house.wait_for("a")

    assert anyio.run(main)["code"] == "policy_not_acknowledged"


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(in_force(generation=2, enabled=False), id="sandboxes are switched off"),
        pytest.param(
            in_force(Effective(agent=agent(name="other"), layers=()), generation=2), id="its document is gone"
        ),
        pytest.param(in_force(replace(HELPER, blocked=("/image",)), generation=2), id="a field of it is held"),
    ],
)
def test_a_live_run_that_policy_no_longer_lets_run_is_stopped(house: House, policy: InForce) -> None:
    async def main() -> dict[str, Any]:
        async with house.daemon(in_force()) as (jobs, _):
            house.submit("a.yaml", job("sleep 20"))
            await until(lambda: house.starts() == 1)
            jobs.follow(policy)
            return await house.wait_for("a")

    assert anyio.run(main)["code"] == "policy_removed"


def test_policy_that_changes_during_the_launch_holds_before_the_command_starts(house: House) -> None:
    changed: list[str] = []

    async def main() -> dict[str, Any]:
        async with house.daemon(in_force()) as (jobs, backend):

            def hook(step: str, run: str) -> None:
                if step == "gate":
                    changed.append(run)
                    jobs.follow(in_force(generation=2, enabled=False))

            backend.hook = hook
            house.submit("a.yaml", job("exit 0"))
            return await house.wait_for("a")

    result = anyio.run(main)
    assert (result["code"], result["refusal"]["code"]) == ("refused", "policy_removed")
    assert len(changed) == 1
    assert house.starts() == 0


@pytest.mark.parametrize("when", ["during", "after"])
def test_a_fence_that_drifts_is_found(house: House, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    if when == "during":
        monkeypatch.setattr(attend, "DRIFT_INTERVAL", 0.05)
    result = one(house, job("sleep 20" if when == "during" else "exit 7"), in_force(), drifted=("a second interface",))
    assert result["code"] == "fence_drift"
    assert result["status"] == (None if when == "during" else 7)
    assert house.rows("fence.drift")[0]["detail"] == {"drift": ["a second interface"]}


class BrokenAudit:
    """Makes the log take no rows from the `after`-th append on, until told otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, event: str) -> None:
        self.broken = True
        real = Journal.append

        async def append(journal: Journal, *events: Event) -> int:
            if self.broken and any(one.name.endswith(event) for one in events):
                raise JournalFailed("the audit row was not written: No space left on device")
            return await real(journal, *events)

        monkeypatch.setattr(Journal, "append", append)


def test_nothing_is_launched_that_cannot_be_audited(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = BrokenAudit(monkeypatch, "")

    async def main() -> None:
        async with house.daemon(in_force()) as (jobs, backend):
            house.submit("a.yaml", job("exit 3"))
            await until(lambda: house.result("a") is not None)
            assert backend.launched == []
            house.submit("b.yaml", job("exit 4"))
            await until(lambda: "audit row" in jobs.trouble)
            assert house.waiting() == ["b.yaml"]
            audit.broken = False
            await until(lambda: house.result("b") is not None)
            await jobs.recover()

    anyio.run(main)
    first, second = house.result("a"), house.result("b")
    assert first is not None
    assert second is not None
    assert (first["code"], first["refusal"]["code"], first["audit"]) == ("refused", "audit_failed", None)
    assert second["status"] == 4
    assert house.rows("fail")[0]["outcome"] == "resumed"


def test_a_command_does_not_start_before_its_row(house: House) -> None:
    seen: list[int] = []

    async def main() -> dict[str, Any]:
        async with house.daemon(in_force()) as (_, backend):

            def hook(step: str, run: str) -> None:
                if step == "start":
                    seen.append(len([row for row in house.rows("launch") if row["run"] == run]))

            backend.hook = hook
            house.submit("a.yaml", job("exit 3"))
            return await house.wait_for("a")

    assert anyio.run(main)["status"] == 3
    assert seen == [2]


def test_a_run_whose_decisions_cannot_be_audited_is_stopped(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    BrokenAudit(monkeypatch, "egress.deny")
    assert one(house, job("connect evil.com:443", "sleep 20"), in_force())["code"] == "audit_failed"


def test_a_failure_of_the_backend_is_a_result(house: House) -> None:
    result = one(house, job("no such action"), in_force())
    assert (result["code"], result["status"]) == ("failed", None)


def test_max_parallel_runs_and_oldest_first(house: House) -> None:
    async def main() -> None:
        async with house.daemon(in_force(max_parallel_runs=2)) as (jobs, _):
            for name in "abcde":
                house.submit(f"{name}.yaml", job("sleep 0.3"))
            most = 0
            with anyio.fail_after(20):
                while len(house.results()) < 5:
                    most = max(most, len(jobs.runs))
                    await anyio.sleep(0.01)
            assert most == 2
            await until(lambda: not house.claimed())

    anyio.run(main)
    starts = sorted((result["times"]["claimed"], result["job"]) for result in house.results())
    assert [name for _, name in starts] == list("abcde")


def test_a_gate_is_told_where_the_proxies_of_live_neighbours_are(house: House) -> None:
    """Not those inside a sandbox's own network, nor of runs that have ended; and no more than a gate has time for."""
    proxies = ["127.0.0.1:3128", "10.0.0.9:3128", "[fd00::1]:3128", "nowhere", *(f"10.0.1.{n}:3128" for n in range(8))]

    async def main() -> None:
        async with house.daemon(in_force(max_parallel_runs=16), proxies=proxies) as (_, backend):
            for number in range(len(proxies)):
                house.submit(f"live-{number:02}.yaml", job("sleep 20"))
                await until(lambda wanted=number: len(backend.started) > wanted)  # type: ignore[misc]  # mypy: no default
            house.submit("short.yaml", job())
            await house_has(house, "short")
            house.submit("last.yaml", job())
            await house_has(house, "last")
        assert [launch.neighbours for launch in backend.launched[:5]] == [
            (),
            (),
            (("10.0.0.9", 3128),),
            (("10.0.0.9", 3128), ("fd00::1", 3128)),
            (("10.0.0.9", 3128), ("fd00::1", 3128)),
        ]
        assert backend.launched[-1].neighbours == tuple((f"10.0.1.{number}", 3128) for number in range(8))

    anyio.run(main)


async def house_has(house: House, stem: str) -> None:
    """Wait for a result while others go on."""
    await until(lambda: house.result(stem) is not None)


def cancel(run: str) -> bytes:
    """The bytes of a cancel."""
    return f"version: 1\nkind: cancel\nrun: {run}\n".encode()


def test_a_submitter_cancels_its_own_runs_and_no_others(house: House) -> None:
    policy = in_force(replace(HELPER, agent=agent(submitters=("nobody", "daemon"))))

    async def main() -> None:
        async with house.daemon(policy) as (jobs, _):
            house.submit("a.yaml", job("sleep 20"))
            await until(lambda: house.starts() == 1)
            (run,) = jobs.runs
            house.submit("theirs.yaml", cancel(run), submitter="daemon")
            await until(lambda: house.result("theirs", submitter="daemon") is not None)
            house.submit("ours.yaml", cancel(run))
            await house.wait_for("a")

    anyio.run(main)
    theirs, ours, ended = house.result("theirs", submitter="daemon"), house.result("ours"), house.result("a")
    assert theirs is not None
    assert ours is not None
    assert ended is not None
    assert theirs["refusal"]["code"] == "unknown_run"
    assert ours["code"] == "cancel_sent"
    assert ended["code"] == "cancelled"


def test_a_cancel_needs_no_slot(house: House) -> None:
    policy = in_force(max_parallel_runs=1)

    async def main() -> None:
        async with house.daemon(policy) as (jobs, _):
            house.submit("a.yaml", job("sleep 20"))
            await until(lambda: house.starts() == 1)
            for name in "bcd":
                house.submit(f"{name}.yaml", job("sleep 20"))
            (run,) = jobs.runs
            house.submit("z.yaml", cancel(run))
            await until(lambda: house.result("a") is not None)
            assert len(jobs.runs) <= 1

    anyio.run(main)
    ended = house.result("a")
    assert ended is not None
    assert ended["code"] == "cancelled"


def test_stopping_lets_short_runs_end_and_stops_long_ones(house: House) -> None:
    async def main() -> None:
        async with house.daemon(in_force(max_parallel_runs=2)) as (jobs, _):
            house.submit("short.yaml", job("sleep 0.3", "exit 3"))
            house.submit("long.yaml", job("sleep 20"))
            await until(lambda: house.starts() == 2)
            house.submit("late.yaml", job("exit 0"))
            jobs.stop()

    anyio.run(main)
    short, long = house.result("short"), house.result("long")
    assert short is not None
    assert long is not None
    assert (short["code"], short["status"]) == ("exited", 3)
    assert long["code"] == "stopping"
    assert house.waiting() == ["late.yaml"]


def test_a_launch_that_takes_too_long_is_refused(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reconciler.run.LAUNCH_BUDGET", 0.0)
    assert one(house, job("exit 0"), in_force())["refusal"]["code"] == "launch_timeout"
    assert house.starts() == 0


def test_cleaning_up_while_jobs_come_and_go_touches_none_of_them(house: House) -> None:
    count = 40

    async def main() -> None:
        async with house.daemon(in_force(max_parallel_runs=4)) as (jobs, _):

            async def clean() -> None:
                while True:
                    await jobs.recover()
                    await anyio.lowlevel.checkpoint()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(clean)
                for number in range(count):
                    house.submit(f"{number}.yaml", job("print x", "exit 7"))
                await until(lambda: len(house.results()) == count and not house.claimed())
                tasks.cancel_scope.cancel()

    anyio.run(main)
    assert Counter((result["code"], result["status"]) for result in house.results()) == {("exited", 7): count}
    assert house.starts() == count
    assert {row["outcome"] for row in house.rows("teardown")} == {"done"}


def test_leftovers_of_nobody_are_reaped_with_a_row(house: House) -> None:
    (house.root / "world" / "house-00000000.20250101T000000-00000001.proxy").touch()
    other = house.root / "world" / "another-host.20250101T000000-00000001.proxy"
    other.touch()

    async def main() -> None:
        async with house.daemon(None):
            pass

    anyio.run(main)
    assert other.exists()
    other.unlink()
    (row,) = house.rows("teardown")
    assert row["outcome"] == "reaped"
    assert row["detail"]["reaped"][0]["run"] == "20250101T000000-00000001"


def test_the_schema_and_the_value_of_a_result_agree() -> None:
    schema = load_schema("result").root
    assert set(schema["properties"]) == {"version", "kind", *Result.__dataclass_fields__}
    assert set(schema["properties"]["code"]["enum"]) == {code.value for code in ResultCode}
    assert set(schema["required"]) == set(schema["properties"])
