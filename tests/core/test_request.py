"""From the bytes of a job file to a job, and nothing of the bytes into a message."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.core.job import Cancel, Job, Refused
from reconciler.core.request import MAX_INPUT, read

WHOLE = b"""\
version: 1
kind: job
agent: helper
command: ["python3", "job.py"]
env: {INVOICE_ID: "42"}
timeout: 5m
input: {job.py: "print(1)"}
"""


def test_a_whole_job() -> None:
    assert read(WHOLE) == Job(
        agent="helper",
        command=("python3", "job.py"),
        env={"INVOICE_ID": "42"},
        timeout=300,
        input={"job.py": b"print(1)"},
    )


def test_what_is_left_out_has_its_default() -> None:
    assert read(b"version: 1\nkind: job\nagent: helper\ncommand: [id]\n") == Job(agent="helper", command=("id",))


def test_a_cancel() -> None:
    run = "20250131T120000-0badcafe"
    assert read(f"version: 1\nkind: cancel\nrun: {run}\n".encode()) == Cancel(run=run)


def variant(**fields: object) -> bytes:
    """A job as JSON, with other fields."""
    value = {"version": 1, "kind": "job", "agent": "helper", "command": ["id"], **fields}
    return json.dumps({key: field for key, field in value.items() if field != "-"}).encode()


BAD = {
    "nothing": b"",
    "not YAML": b"\x00\x01",
    "a password file": b"root:x:0:0:swordfish:/root:/bin/sh\ndaemon:*:1:1::/:/swordfish\n",
    "an unknown field": variant(swordfish=1),
    "no agent": variant(agent="-"),
    "no command": variant(command="-"),
    "an empty command": variant(command=[]),
    "an empty program": variant(command=[""]),
    "a command that is text": variant(command="id; swordfish"),
    "a NUL in an argument": variant(command=["id", "swordfish\0"]),
    "a variable that is none": variant(env={"swordfish=": "x"}),
    "a variable's value that is none": variant(env={"A": 7}),
    "an input name with a slash": variant(input={"../swordfish": "x"}),
    "a hidden input": variant(input={".swordfish": "x"}),
    "input that is too large": variant(input={"a": "x" * (MAX_INPUT // 2 + 1), "b": "x" * (MAX_INPUT // 2)}),
    "a timeout of zero": variant(timeout="0s"),
    "a timeout without unit": variant(timeout=5),
    "another kind": variant(kind="swordfish"),
    "another version": variant(version=2),
    "two documents": WHOLE + b"---\n" + WHOLE,
    "an anchor": WHOLE.replace(b"helper", b"&swordfish helper"),
    "a duplicate key": WHOLE + b"agent: swordfish\n",
    "a cancel of no run": b"version: 1\nkind: cancel\nrun: 20250131T120000-swordfis\n",
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_what_is_not_a_job_is_refused_without_being_read_out(data: bytes) -> None:
    refused = read(data)
    assert isinstance(refused, Refused)
    assert refused.code == "bad_job"
    assert "swordf" not in refused.message


def test_no_prefix_of_a_job_file_is_taken_for_another_job() -> None:
    # What is cut off inside its last value is still YAML; renaming into place is what keeps it from being seen.
    for end in range(len(WHOLE)):
        found = read(WHOLE[:end])
        assert isinstance(found, Refused | Job)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(data: bytes) -> None:
    assert isinstance(read(data), Refused)
