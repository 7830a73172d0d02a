"""Owns the policy documents and jobs that end-to-end tests write; decides nothing.

JSON is YAML, so that a test says a document in the words of Python.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e import workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tests.e2e.installation import Installation

PYTHON = "/usr/bin/python3"
"""What a sandbox has."""
SCRIPT = Path(workload.__file__)


def platform(**fields: object) -> str:
    """Write platform.yaml with sandboxes on."""
    return _text({"version": 1, "kind": "platform", "enabled": True, **fields})


def agent(name: str = "helper", allow: Iterable[str] = (), **fields: object) -> str:
    """Write the document of an agent: one that bubblewrap may run, unless `fields` say another image and isolation."""
    head = {"version": 1, "kind": "agent", "name": name, "image": "host", "minimum_isolation": "namespace"}
    return _text({**head, "allow": list(allow), **fields})


def egress(name: str = "org", allow: Iterable[str] = (), **fields: object) -> str:
    """Write an egress document that selects every agent."""
    return _text({"version": 1, "kind": "egress", "name": name, "agents": ["*"], "allow": list(allow), **fields})


def statement(identity: str, *grants: Mapping[str, object], **fields: object) -> str:
    """Write a signed reason's statement."""
    head = {"version": 1, "kind": "signed-reason", "id": f"{identity}.1", "audience": ["prod-*"], "expires": "never"}
    reason = {"ticket": identity, "reason": "helper needs it for the invoice sync"}
    return _text({**head, **reason, "grants": list(grants), **fields})


def _text(document: Mapping[str, object]) -> str:
    return json.dumps(document, indent=1) + "\n"


def job(*command: str, agent: str = "helper", **fields: object) -> dict[str, object]:
    """Write a job."""
    return {"agent": agent, "command": list(command), **fields}


def attempts(
    *orders: Mapping[str, object], agent: str = "helper", ca: str | None = None, wait_s: float = 2.0
) -> dict[str, object]:
    """Write a job that runs the workload with these attempts."""
    given = json.dumps({"attempts": orders, "timeout": wait_s, "ca": ca})
    files = {"workload.py": SCRIPT.read_text("utf-8"), "job.json": given}
    return job(PYTHON, "-I", "workload.py", agent=agent, input=files)


def script(text: str, agent: str = "helper", **fields: object) -> dict[str, object]:
    """Write a job that runs a Python script."""
    return job(PYTHON, "-I", "job.py", agent=agent, input={"job.py": text}, **fields)


def lines(installation: Installation, stem: str) -> dict[str, dict[str, Any]]:
    """Read what the workload of the job STEM said, by the name of each attempt."""
    found = [json.loads(line) for line in installation.output(stem).splitlines()]
    assert len({line["attempt"] for line in found}) == len(found), "two attempts have one name"
    return {line["attempt"]: line for line in found}
