"""Without a policy that somebody signed for, nothing runs and nothing is created; what is named and missing refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from reconciler.core.schema import load_schema
from tests.e2e import documents

if TYPE_CHECKING:
    from tests.e2e.installation import Installation

pytestmark = [pytest.mark.bubblewrap, pytest.mark.rig]

TRUE = documents.job("/usr/bin/true")


def refused(installation: Installation, stem: str, job: dict[str, object]) -> dict[str, Any]:
    """Run a job that must be refused with nothing created for it, and give its result."""
    installation.rig.clear()
    result = installation.run(stem, job)
    load_schema("result").validator.validate(result)
    assert (result["code"], result["status"], result["gate"]) == ("refused", None, None)
    assert (result["times"]["intent"], result["times"]["started"]) == (None, None)
    assert installation.traces() == []
    assert installation.rig.packets() == []
    (row,) = installation.rows(run=result["run"])
    assert (row["event"], row["outcome"]) == ("agent_sandbox.refuse", "refused")
    assert (row["code"], row["message"]) == (result["refusal"]["code"], result["refusal"]["message"])
    return result


def nothing_was_created(installation: Installation) -> None:
    """Not even a probe was made: no row of one, no launch, and every backend unprobed."""
    assert [row for row in installation.rows() if row["event"] in {"agent_sandbox.probe", "agent_sandbox.launch"}] == []
    assert {one["state"] for one in installation.status()["backends"]} == {"not_probed"}


def test_without_a_policy_every_job_is_refused(fresh: Installation) -> None:
    fresh.start()
    result = refused(fresh, "job", TRUE)
    assert result["refusal"]["code"] == "no_policy"
    assert "ringfence plan" in result["refusal"]["message"]
    nothing_was_created(fresh)
    assert fresh.status()["policy"]["revision"] is None


@pytest.mark.parametrize(
    ("platform", "why"),
    [
        pytest.param({"enabled": False}, "a policy that does not enable sandboxes", id="not enabled"),
        pytest.param({"enabled": True}, "a policy that enables them, which nobody signed", id="enabled, unsigned"),
    ],
)
def test_sandboxes_are_off_until_somebody_signed(fresh: Installation, platform: dict[str, bool], why: str) -> None:
    fresh.write("platform", documents.platform(**platform))
    fresh.write("agents/helper", documents.agent(allow=["example.com"]))
    fresh.start()
    assert refused(fresh, "job", TRUE)["refusal"]["code"] == "disabled", why
    nothing_was_created(fresh)
    assert fresh.status()["policy"]["enabled"] is False


def test_off_again_is_off_at_once_and_stops_what_runs(fresh: Installation) -> None:
    fresh.adopt({"platform": documents.platform(), "agents/helper": documents.agent()})
    fresh.drop("long", documents.job("/usr/bin/sleep", "60"))
    run = fresh.live("long")["run"]
    fresh.change("platform", documents.platform(enabled=False))
    result = fresh.result("long", timeout=15)
    assert (result["code"], result["status"]) == ("policy_removed", None)
    fresh.settled(run)
    assert refused(fresh, "later", TRUE)["refusal"]["code"] == "disabled"


@pytest.fixture(scope="module")
def enabled(bare: Installation) -> Installation:
    """Sandboxes are on, and one agent is there. Whoever names a backend may go back to `auto`."""
    grant = {"document": "platform", "field": "/backend", "value": "auto"}
    bare.sign("CHG-2", documents.statement("CHG-2", grant))
    bare.adopt({"platform": documents.platform(), "agents/helper": documents.agent(allow=["example.com"])})
    return bare


def test_an_agent_that_no_document_names_is_refused(enabled: Installation) -> None:
    result = refused(enabled, "nobody", documents.job("/usr/bin/true", agent="somebody-else"))
    assert result["refusal"]["code"] == "unknown_agent"
    assert "agents/somebody-else.yaml" in result["refusal"]["message"]


@pytest.mark.parametrize("name", ["k8s", "docker", "firecracker"])
def test_a_backend_that_is_named_and_missing_refuses_and_never_falls_back(enabled: Installation, name: str) -> None:
    enabled.change("platform", documents.platform(backend=name))
    try:
        result = refused(enabled, f"on-{name}", TRUE)
    finally:
        enabled.change("platform", documents.platform())
    assert result["refusal"]["code"] == "backend_missing"
    message = result["refusal"]["message"]
    assert "never replaced by another" in message
    assert "bubblewrap" not in message
    assert result["backend"] is None
    (found,) = [one for one in enabled.status()["backends"] if one["name"] == name]
    assert found["state"] == "missing"
    assert f"{name}: missing ({found['code']}): {found['message']}" in message


def test_isolation_that_nobody_signed_for_is_refused(enabled: Installation) -> None:
    enabled.change("agents/strict", documents.agent("strict"))
    result = refused(enabled, "strict", documents.job("/usr/bin/true", agent="strict"))
    assert result["refusal"]["code"] == "isolation_too_low"
    assert "minimum_isolation: container" in result["refusal"]["message"]
    assert 'agents/strict /minimum_isolation: value "namespace"' in enabled.status()["policy"]["held"]


def test_what_is_not_refused_does_run(enabled: Installation) -> None:
    result = enabled.run("control", TRUE)
    assert (result["code"], result["status"], result["gate"]["passed"]) == ("exited", 0, True)


@pytest.mark.parametrize(
    ("job", "code"),
    [
        pytest.param({"command": ["/usr/bin/true"]}, "bad_job", id="a job without an agent"),
        pytest.param({"agent": "helper", "command": []}, "bad_job", id="a job without a command"),
        pytest.param({**TRUE, "privileged": True}, "bad_job", id="an unknown field"),
        pytest.param({**TRUE, "env": {"INVOICE_ID": "42"}}, "env_refused", id="a variable that the agent does not let"),
        pytest.param({**TRUE, "env": {"LD_PRELOAD": "x.so"}}, "env_refused", id="a loader's variable"),
        pytest.param({**TRUE, "timeout": "2h"}, "timeout_too_long", id="a longer timeout than the agent's"),
    ],
)
def test_a_job_that_asks_for_more_is_refused(enabled: Installation, job: dict[str, object], code: str) -> None:
    assert refused(enabled, f"more-{len(list(enabled.done('x').parent.iterdir()))}", job)["refusal"]["code"] == code


def test_a_document_that_the_host_requires_and_that_is_missing_refuses(fresh: Installation) -> None:
    settings = fresh.host_config.read_text("utf-8").replace('"version": 1', '"version": 1, "required_egress": ["org"]')
    fresh.host_config.write_text(settings, "utf-8")
    fresh.adopt({"platform": documents.platform(), "agents/helper": documents.agent(allow=["example.com"])})
    result = refused(fresh, "job", TRUE)
    assert result["refusal"]["code"] == "no_egress_layer"
    assert "egress/org" in result["refusal"]["message"]
