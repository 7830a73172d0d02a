"""What policy lets run, and what it refuses, with which code."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reconciler.core.job import Admitted, Delivered, Job, RefusalCode, Refused, admit, check_delivery, stem_of
from reconciler.core.policy import Effective, InForce, Layer
from tests.flow.house import agent, in_force, layer, limits

JOB = Job(agent="helper", command=("true",))
PLAIN = Delivered(directory="nobody", directory_uid=65534, regular=True, owner_uid=65534, links=1)
HELPER = Effective(agent=agent(), layers=())


@pytest.mark.parametrize(
    ("job", "submitter", "policy", "code"),
    [
        pytest.param(JOB, "nobody", None, "no_policy", id="no policy was ever accepted"),
        pytest.param(JOB, "nobody", in_force(enabled=False), "disabled", id="sandboxes are off"),
        pytest.param(replace(JOB, agent="other"), "nobody", in_force(), "unknown_agent", id="no document names it"),
        pytest.param(JOB, "daemon", in_force(), "not_a_submitter", id="somebody else submits"),
        pytest.param(
            JOB,
            "nobody",
            in_force(replace(HELPER, blocked=("/backend",))),
            "field_held",
            id="a field has no value in force",
        ),
        pytest.param(replace(JOB, env={"PATH": "/"}), "nobody", in_force(), "env_refused", id="a variable not allowed"),
        pytest.param(
            replace(JOB, env={"INVOICE_ID": "1"}),
            "nobody",
            in_force(replace(HELPER, agent=agent(secrets={"INVOICE_ID": "/etc/x"}))),
            "env_refused",
            id="a variable that is a secret",
        ),
        pytest.param(replace(JOB, timeout=61), "nobody", in_force(), "timeout_too_long", id="a timeout that lengthens"),
    ],
)
def test_a_job_is_refused_with_a_code(job: Job, submitter: str, policy: InForce | None, code: str) -> None:
    refused = admit(job, submitter=submitter, in_force=policy, required_egress=())
    assert isinstance(refused, Refused)
    assert refused.code == code
    assert refused.message


@pytest.mark.parametrize(
    ("job", "policy", "says"),
    [
        pytest.param(JOB, in_force(enabled=False), "set `enabled: true` in platform.yaml", id="off"),
        pytest.param(
            JOB,
            replace(in_force(enabled=False), enabling_held=True),
            "`enabled: true` in platform.yaml is held: sign a reason that grants it",
            id="switching on is held",
        ),
        pytest.param(
            replace(JOB, agent="nope"),
            in_force(),
            "no agent 'nope' is in force; there are helper: name one, or add agents/nope.yaml",
            id="unknown",
        ),
        pytest.param(
            replace(JOB, agent="nope"), replace(in_force(), agents={}), "there are none", id="no agent at all"
        ),
        pytest.param(replace(JOB, agent="\x1b[31m"), in_force(), "no agent 'NAME' is in force", id="no name"),
        pytest.param(
            replace(JOB, agent="x"),
            replace(in_force(), agents={f"a{number}": HELPER for number in range(12)}),
            "a0, a1, a10, a11, a2, a3, a4, a5, a6, a7 and 2 more",
            id="many agents",
        ),
        pytest.param(
            replace(JOB, env={"SECRET": "swordfish"}),
            in_force(),
            "/env sets SECRET, and agents/helper lets a job set INVOICE_ID",
            id="a variable",
        ),
        pytest.param(
            replace(JOB, env={"\x1b[31m": "1"}), in_force(), "a variable without a plain name", id="no variable"
        ),
    ],
)
def test_a_refusal_says_what_to_do(job: Job, policy: InForce, says: str) -> None:
    refused = admit(job, submitter="nobody", in_force=policy, required_egress=())
    assert isinstance(refused, Refused)
    assert says in refused.message
    assert "swordfish" not in refused.message


@pytest.mark.parametrize(
    ("layers", "admitted"),
    [
        pytest.param((), False, id="no layer selects the agent"),
        pytest.param((layer("other"),), False, id="only another layer does"),
        pytest.param((layer("org"), layer("other")), True, id="the required layer does"),
    ],
)
def test_a_required_egress_document_must_select_the_agent(layers: tuple[Layer, ...], *, admitted: bool) -> None:
    policy = in_force(replace(HELPER, layers=layers))
    answer = admit(JOB, submitter="nobody", in_force=policy, required_egress=("org",))
    if admitted:
        assert isinstance(answer, Admitted)
    else:
        assert isinstance(answer, Refused)
        assert answer.code is RefusalCode.NO_EGRESS_LAYER
        assert "egress/org" in answer.message


@pytest.mark.parametrize(("asked", "holds"), [(None, 60), (5, 5), (60, 60)], ids=["none", "shorter", "equal"])
def test_the_shorter_timeout_holds(asked: int | None, holds: int) -> None:
    policy = in_force(replace(HELPER, agent=agent(limits=limits(timeout=60))))
    answer = admit(replace(JOB, timeout=asked), submitter="nobody", in_force=policy, required_egress=())
    assert isinstance(answer, Admitted)
    assert answer.timeout == holds


@pytest.mark.parametrize(
    ("delivered", "code"),
    [
        pytest.param(PLAIN, None, id="a plain file of the directory's user"),
        pytest.param(replace(PLAIN, regular=False), "not_a_file", id="no regular file"),
        pytest.param(replace(PLAIN, owner_uid=0), "wrong_owner", id="somebody else's file"),
        pytest.param(replace(PLAIN, links=2), "linked", id="a file with a second name"),
        pytest.param(replace(PLAIN, owner_uid=0, links=2), "wrong_owner", id="a hard link to somebody else's file"),
    ],
)
def test_only_a_plain_file_of_ones_own_is_a_delivery(delivered: Delivered, code: str | None) -> None:
    refused = check_delivery(delivered)
    assert (refused.code if refused else None) == code


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("a.yaml", "a"),
        ("a.yml", "a"),
        ("a.b-c_d.yaml", "a.b-c_d"),
        ("0.yaml", "0"),
        ("x" * 100 + ".yaml", "x" * 100),
        ("x" * 101 + ".yaml", None),
        (".a.yaml", None),
        ("-a.yaml", None),
        ("A.yaml", None),
        ("a.json", None),
        ("a.yaml.bak", None),
        ("a.yaml~", None),
        ("a.yaml\n", None),
        ("a/b.yaml", None),
        ("ä.yaml", None),
        (".yaml", None),
        ("", None),
    ],
)
def test_the_names_of_job_files(name: str, stem: str | None) -> None:
    assert stem_of(name) == stem


def test_a_job_shows_no_values() -> None:
    job = Job(agent="helper", command=("true",), env={"INVOICE_ID": "swordfish"}, input={"a": b"swordfish"})
    assert "swordfish" not in repr(job)
