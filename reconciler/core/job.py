"""Owns what a job is, the states of its run, and whether policy lets it run; reads no document, clock or account.

A run's states and what a crash in each of them means are two tables; whoever changes one changes the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reconciler.core.policy import Effective, InForce


class State(StrEnum):
    """How far a claimed job has come. Each is on disk before the next step begins."""

    CLAIMED = "claimed"
    INTENT = "intent"
    CREATED = "created"
    GATED = "gated"
    STARTED = "started"
    EXITED = "exited"
    REPORTED = "reported"
    TORN_DOWN = "torn_down"


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.CLAIMED: frozenset({State.INTENT, State.REPORTED}),
    State.INTENT: frozenset({State.CREATED, State.REPORTED}),
    State.CREATED: frozenset({State.GATED, State.REPORTED}),
    State.GATED: frozenset({State.STARTED, State.REPORTED}),
    State.STARTED: frozenset({State.EXITED, State.REPORTED}),
    State.EXITED: frozenset({State.REPORTED}),
    State.REPORTED: frozenset({State.TORN_DOWN}),
    State.TORN_DOWN: frozenset(),
}
"""Only forward; every state before `reported` may end in a result, and nothing may follow one but the teardown."""


class Recovery(StrEnum):
    """What a new daemon does with a run that an earlier one left behind."""

    RETURN = "return"
    """Nothing was decided: the job goes back to `new`, as if it had never been claimed."""
    INTERRUPT = "interrupt"
    """Something may have happened: tear down what is found, report `interrupted`, never run it again."""
    REPORT = "report"
    """The command had ended: tear down what is found, report how it ended."""
    FINISH = "finish"
    """The result exists: hand it over where that is still to do, tear down, forget."""


RECOVERY: Mapping[State, Recovery] = {
    State.CLAIMED: Recovery.RETURN,
    State.INTENT: Recovery.INTERRUPT,
    State.CREATED: Recovery.INTERRUPT,
    State.GATED: Recovery.INTERRUPT,
    State.STARTED: Recovery.INTERRUPT,
    State.EXITED: Recovery.REPORT,
    State.REPORTED: Recovery.FINISH,
    State.TORN_DOWN: Recovery.FINISH,
}


class RefusalCode(StrEnum):
    """Why a job did not run. A backend's own codes (such as `gate_failed`) come beside these."""

    BAD_NAME = "bad_name"
    NOT_A_FILE = "not_a_file"
    LINKED = "linked"
    WRONG_OWNER = "wrong_owner"
    NOT_A_SUBMITTER = "not_a_submitter"
    STEM_USED = "stem_used"
    BAD_JOB = "bad_job"
    NO_POLICY = "no_policy"
    DISABLED = "disabled"
    UNKNOWN_AGENT = "unknown_agent"
    FIELD_HELD = "field_held"
    NO_EGRESS_LAYER = "no_egress_layer"
    ENV_REFUSED = "env_refused"
    TIMEOUT_TOO_LONG = "timeout_too_long"
    SECRET_UNREADABLE = "secret_unreadable"  # noqa: S105 - a code, not a secret
    BACKEND_MISSING = "backend_missing"
    ISOLATION_TOO_LOW = "isolation_too_low"
    IMAGE_NEEDS_BACKEND = "image_needs_backend"
    NO_RESOLVER = "no_resolver"
    LAUNCH_TIMEOUT = "launch_timeout"
    AUDIT_FAILED = "audit_failed"
    UNKNOWN_RUN = "unknown_run"
    OVER_QUOTA = "over_quota"
    SPOOL_FULL = "spool_full"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Refused:
    """A job, or its launch, that was refused: `code` for machines, `message` says what to do about it."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """What the kernel says of one delivered job file; `directory` is the submitter in whose directory it was."""

    directory: str
    directory_uid: int
    regular: bool
    owner_uid: int
    links: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job document. `timeout` in seconds, None for the agent's own. Values of `env` are secret: never log them."""

    agent: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout: int | None = None
    input: Mapping[str, bytes] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """A cancel document: the run that its submitter wants stopped."""

    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A job that policy lets run, with what is effective for its agent and its deadline in seconds."""

    job: Job
    effective: Effective
    revision: str
    generation: int
    timeout: int


ROOT = "root"
"""May submit for every agent: it could become any other submitter anyway."""
_FEW = 10
"""Names of a list that a message tells."""
FILE_NAME = re.compile(r"(?P<stem>[a-z0-9][a-z0-9._-]{0,99})\.ya?ml")
RUN_ID = re.compile(r"[0-9]{8}T[0-9]{6}-[0-9a-f]{8}")


def stem_of(name: str) -> str | None:
    """The stem of a job file's name, or None when the name is not one of a job file."""
    match = FILE_NAME.fullmatch(name)
    return match["stem"] if match else None


def check_delivery(delivered: Delivered) -> Refused | None:
    """Refuse what is not a plain file that the directory's own user wrote there.

    The submitter is the directory and the owner and a single link: a hard link to somebody else's file keeps
    that somebody as its owner, and a second name would let its bytes change after they were read.
    """
    if not delivered.regular:
        return Refused(RefusalCode.NOT_A_FILE, "is not a regular file: write a plain file in tmp/, rename it into new/")
    if delivered.owner_uid != delivered.directory_uid:
        message = f"is not owned by {delivered.directory}, whose directory it is in: let that user write it"
        return Refused(RefusalCode.WRONG_OWNER, message)
    if delivered.links != 1:
        return Refused(RefusalCode.LINKED, "has other names (hard links): write a file of its own")
    return None


def admit(
    job: Job, *, submitter: str, in_force: InForce | None, required_egress: tuple[str, ...]
) -> Admitted | Refused:
    """Whether what is in force lets `submitter` run `job`. Every way but the last one refuses."""
    if in_force is None:
        return _NO_POLICY
    effective = lets_run(job.agent, in_force=in_force, required_egress=required_egress)
    if isinstance(effective, Refused):
        return effective
    agent = effective.agent
    if submitter != ROOT and submitter not in agent.submitters:
        message = f"{submitter} is not among the submitters of agents/{agent.name}: add it there, with a signed reason"
        return Refused(RefusalCode.NOT_A_SUBMITTER, message)
    if others := set(job.env) - set(agent.env_allow):
        allowed = ", ".join(sorted(agent.env_allow)) or "nothing"
        message = f"/env sets {_variables(others)}, and agents/{agent.name} lets a job set {allowed}"
        return Refused(RefusalCode.ENV_REFUSED, message)
    if secret := set(job.env) & set(agent.secrets):
        message = f"/env sets {_variables(secret)}, and agents/{agent.name} has that as a secret: leave it out"
        return Refused(RefusalCode.ENV_REFUSED, message)
    timeout = agent.limits.timeout if job.timeout is None else job.timeout
    if timeout > agent.limits.timeout:
        message = f"/timeout may only shorten the agent's, which is {agent.limits.timeout}s"
        return Refused(RefusalCode.TIMEOUT_TOO_LONG, message)
    return Admitted(
        job=job, effective=effective, revision=in_force.revision, generation=in_force.generation, timeout=timeout
    )


def lets_run(agent: str, *, in_force: InForce, required_egress: tuple[str, ...]) -> Effective | Refused:
    """What is in force for `agent`, where that lets anybody run it at all; asked again for each live run."""
    if not in_force.platform.enabled:
        message = "sandboxes are off: set `enabled: true` in platform.yaml, with a signed reason"
        if in_force.enabling_held:
            message = "`enabled: true` in platform.yaml is held: sign a reason that grants it (`ringfence plan`)"
        return Refused(RefusalCode.DISABLED, message)
    effective = in_force.agents.get(agent)
    if effective is None:
        named = _named(agent)
        message = (
            f"no agent {named!r} is in force; there are {_few(in_force.agents)}: name one, or add agents/{named}.yaml"
        )
        return Refused(RefusalCode.UNKNOWN_AGENT, message)
    if effective.blocked:
        held = ", ".join(effective.blocked)
        message = f"no value is in force for {held} of agents/{agent}: sign a reason that names one (`ringfence plan`)"
        return Refused(RefusalCode.FIELD_HELD, message)
    missing = sorted(set(required_egress) - {layer.name for layer in effective.layers})
    if missing:
        documents = ", ".join(f"egress/{name}" for name in missing)
        message = f"this host requires {documents} to select agents/{agent}, and in force it does not"
        return Refused(RefusalCode.NO_EGRESS_LAYER, message)
    return effective


_NO_POLICY = Refused(
    RefusalCode.NO_POLICY, "no policy was ever accepted on this host: commit one, and see `ringfence plan`"
)


def _few(names: Iterable[str]) -> str:
    """The first of many names, sorted, and how many more there are; `none` of none."""
    found = sorted(names)
    more = len(found) - _FEW
    return ", ".join(found[:_FEW]) + (f" and {more} more" if more > 0 else "") or "none"


def _variables(names: Iterable[str]) -> str:
    """Variables for a message: those with a plain name; the others' bytes are not echoed."""
    plain = [name for name in names if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,127}", name)]
    return _few(plain) if plain else "a variable without a plain name"


def _named(agent: str) -> str:
    """The agent's name for a message, when it is one that a document could have; else its bytes are not echoed."""
    return agent if re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", agent) else "NAME"
