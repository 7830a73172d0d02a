"""Runs the demo: policy, signed reason, daemon, job, result, a weakening held and then signed. Cleans up."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests.e2e.grounds import bubblewrap
from tests.e2e.installation import Installation
from tests.rig import Rig

PLATFORM = """\
version: 1
kind: platform
enabled: true
backend: auto
"""
AGENT = """\
version: 1
kind: agent
name: helper
description: syncs invoices
image: host                       # bubblewrap: the host's /usr, read-only
minimum_isolation: namespace      # below the default: needs a signed reason
allow:
  - api.vendor.com
  - metadata.example.com          # its owner points it at 169.254.169.254
"""
EGRESS = """\
version: 1
kind: egress
name: org
agents: ["*"]
allow: ["*.vendor.com", "*.example.com", "*.pypi.org"]
"""


def title(text: str) -> None:
    """Say what comes next."""
    print(f"\n\033[1m── {text}\033[0m", flush=True)


def show(installation: Installation, *arguments: str) -> int:
    """Run one command of the CLI as an operator would, output as it comes; returns its exit status."""
    print(f"\033[2m$ ringfence {' '.join(arguments)}\033[0m", flush=True)
    command = installation.command(*arguments)
    return subprocess.run(command, check=False, timeout=60, stdin=subprocess.DEVNULL, cwd=installation.root).returncode


def sign_what_is_missing(installation: Installation, identity: str) -> None:
    """Let `plan` write the statement that is missing, and sign it as alice."""
    path = Path("policy", "reasons", f"{identity}.yaml")
    why = "helper syncs invoices with the vendor"
    status = show(installation, "plan", "policy", "--emit-reason", str(path), "--reason", why)
    print(f"(exit status {status}: weakenings that nobody signed)")
    statement = installation.root / path
    text = statement.read_text("utf-8")
    print(text)
    show(installation, "reason", "sign", str(path), "--key", "keys/alice", "--signer", "alice")


def demo(installation: Installation) -> None:
    """The main job, top to bottom."""
    root = installation.root
    (root / "ca.pem").write_bytes(installation.rig.ca.read_bytes())
    (root / "attempts.py").write_bytes((Path(__file__).parent / "workload.py").read_bytes())

    title("what this host can really do, by a canary run")
    show(installation, "probe")

    title("a policy: one platform, one agent, the organisation's egress over it")
    for name, text in (("platform", PLATFORM), ("agents/helper", AGENT), ("egress/org", EGRESS)):
        installation.write(name, text)
        print(f"policy/{name}.yaml\n{text}")
    show(installation, "check", "policy")

    title("everything is off until somebody with governance.weaken has signed why")
    sign_what_is_missing(installation, "CHG-1")

    title("the daemon")
    print("\033[2m$ ringfenced &\033[0m")
    installation.start()
    installation.eventually(lambda: installation.status()["policy"]["enabled"], "the policy is in force")
    show(installation, "status")

    title("a job, behind a fence that is proven before it starts")
    job = ("--input", "attempts.py", "--input", "ca.pem", "--", "/usr/bin/python3", "attempts.py")
    installation.rig.clear()
    show(installation, "run", "helper", *job)
    asked = ", ".join(sorted(installation.rig.asked()))
    print(f"names that the resolver was asked for: {asked} (evil.com was refused before any lookup)")

    title("its result and its gate report")
    stem = max((installation.spool / "done" / "root").iterdir(), key=lambda path: path.stat().st_mtime).name
    summary(installation, stem)

    title("a host joins the list, and nobody signed for it: held")
    installation.write("agents/helper", AGENT + '  - "*.pypi.org"\n')
    installation.eventually(lambda: bool(installation.status()["policy"]["held"]), "the weakening is held")
    for line in installation.status()["policy"]["held"]:
        print(f"held: {line}")

    title("signed: the running daemon applies it")
    sign_what_is_missing(installation, "CHG-2")
    took = installation.eventually(lambda: not installation.status()["policy"]["held"], "the weakening is in force")
    print(f"in force {took * 1000:.0f} ms after the signature")
    show(installation, "effective", "helper")

    title("the audit log")
    show(installation, "audit", "tail", "-n", "12", "--log", "state/audit")
    show(installation, "audit", "verify", "--log", "state/audit")


def summary(installation: Installation, stem: str) -> None:
    """Print what matters of result.json."""
    result = installation.result(stem)
    print(f"{installation.done(stem)}/result.json")
    print(
        f"  code {result['code']}, status {result['status']}, backend {result['backend']['name']}"
        f" ({result['backend']['isolation']}), reasons {', '.join(result['reasons'])}"
    )
    gate = result["gate"]
    print(f"  gate passed: {gate['passed']}, {len(gate['targets'])} forbidden targets tried from inside:")
    for target in gate["targets"]:
        alive = "alive, " if target["alive"] else ""
        port = "" if target["port"] is None else f":{target['port']}"
        print(f"    {target['verdict']:<9} {target['name']:<28} {target['address']}{port} ({alive}{target['seen']})")


def main() -> int:
    """Bring up the rig and a temporary host, run the demo, leave nothing."""
    started = time.monotonic()
    with Rig() as rig, Installation(bubblewrap(rig), name="demo-1") as installation:
        demo(installation)
        title("stopping")
        installation.stop()
    print(f"everything is gone again; {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
