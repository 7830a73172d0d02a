"""Every file of examples/ is what it says: policy without problems, a statement that covers it, jobs that load."""

from __future__ import annotations

from pathlib import Path

import pytest

from reconciler.core import request
from reconciler.core.grants import Approval
from reconciler.core.job import Job
from reconciler.core.load import Document, load
from reconciler.core.memory import Memory
from reconciler.core.reconcile import reconcile
from reconciler.core.schema import load_schema
from reconciler.core.statement import Statement
from reconciler.core.statement import read as read_statement
from reconciler.core.validate import desired
from reconciler.host import load_host, parse_host

EXAMPLES = Path(__file__).parents[1] / "examples"
POLICY = EXAMPLES / "policy"


def files() -> dict[str, bytes]:
    return {str(path.relative_to(POLICY)): path.read_bytes() for path in POLICY.rglob("*.yaml")}


def test_the_policy_has_no_problems_and_nothing_in_it_is_ignored() -> None:
    wanted = desired(files())
    assert wanted.problems == ()
    assert wanted.ignored == ()
    assert sorted(wanted.documents) == ["agents/helper", "agents/reporter", "agents/reviewer", "egress/org", "platform"]


def test_its_statement_covers_every_weakening_and_nothing_more() -> None:
    statement = read_statement("CHG-1042.yaml", (POLICY / "reasons" / "CHG-1042.yaml").read_bytes())
    assert isinstance(statement, Statement)
    grants = statement.approved((Approval("alice", "SHA256:" + "A" * 43),))
    assert reconcile(desired(files()), Memory(), grants, now=0).held == ()
    for index, spare in enumerate(grants):
        without = (*grants[:index], *grants[index + 1 :])
        assert reconcile(desired(files()), Memory(), without, now=0).held, f"nothing needs {spare.field} {spare.item}"


@pytest.mark.parametrize("path", sorted((EXAMPLES / "jobs").iterdir()), ids=lambda path: path.name)
def test_each_job_loads(path: Path) -> None:
    assert isinstance(request.read(path.read_bytes()), Job)


def test_the_host_settings_are_all_there_and_have_the_defaults_that_are_shown() -> None:
    host = load_host(EXAMPLES / "host.yaml")
    assert host == parse_host("host.yaml", b"version: 1\nkind: host\nname: prod-1\n")
    shown = load("host.yaml", (EXAMPLES / "host.yaml").read_bytes())
    assert isinstance(shown, Document)
    properties = load_schema("host").root["properties"]
    assert set(shown.value) == set(properties)
    for section in ("keep", "docker", "k8s"):
        assert set(shown.value[section]) == set(properties[section]["properties"]), section
