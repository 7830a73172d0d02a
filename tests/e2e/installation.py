"""A whole ringfence host in a temporary directory, with its daemon where its ground is: in the rig's host namespace."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.e2e import documents, traces
from tests.e2e.grounds import CHECKOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from tests.e2e.grounds import Place

BIN = Path(sys.executable).parent
NAMESPACE = "governance.weaken@ringfence.v1"
DAEMON = (str(BIN / "ringfenced"),)


class Installation:
    """host.yaml, policy, trust with one signer (`alice`), state, spool and runtime below one directory of root's."""

    def __init__(self, place: Place, *, name: str = "prod-1", settings: Mapping[str, object] | None = None) -> None:
        self.on = place
        self.rig = rig = place.rig
        self.root = Path(tempfile.mkdtemp(prefix="ringfence-test-", dir=place.parent))
        self.root.chmod(0o755)
        self.policy = self.root / "policy"
        self.trust = self.root / "trust"
        self.state = self.root / "state"
        self.spool = self.root / "spool"
        self.runtime = self.root / "run"
        self.keys = self.root / "keys"
        for directory in (
            self.policy / "agents",
            self.policy / "egress",
            self.policy / "reasons",
            self.trust,
            self.keys,
        ):
            directory.mkdir(parents=True)
        self.host_config = self.root / "host.yaml"
        # Uids of its own: whatever runs as one of them, wherever it has got to, was started by this installation.
        lot = secrets.randbelow(50_000)
        self.proxy_uid = 1_900_000_000 + lot
        self.uids = range(2_000_000_000 + lot * 16, 2_000_000_000 + lot * 16 + 16)
        self.write_host(
            {
                "version": 1,
                "kind": "host",
                "name": name,
                "policy": str(self.policy),
                "trust": str(self.trust),
                "state": str(self.state),
                "spool": str(self.spool),
                "runtime": str(self.runtime),
                "proxy_user": str(self.proxy_uid),
                "uid_first": self.uids.start,
                "uid_count": len(self.uids),
                "resolvers": [rig.resolver],
                **place.settings,
                **(settings or {}),
            }
        )
        (self.trust / "revoked").touch()
        self.add_signer("alice")
        self.daemon: subprocess.Popen[bytes] | None = None
        self.pid = 0
        """The daemon's own, as this process sees it."""
        self.log = self.root / "daemon.log"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
            if self.traces():
                # A test that killed the daemon and failed before the next one started.
                self.ringfence("reap", expect=None)
        finally:
            shutil.rmtree(self.root, ignore_errors=True)

    def write_host(self, settings: Mapping[str, object]) -> None:
        """Write host.yaml (JSON is YAML)."""
        self.host_config.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")

    def add_signer(self, name: str) -> Path:
        """Make a key for `name` and trust it with `governance.weaken`; returns the private key's path."""
        key = self.keys / name
        subprocess.run(
            ["/usr/bin/ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(key)], check=True, timeout=20
        )
        kind, public = key.with_suffix(".pub").read_text("utf-8").split()[:2]
        with (self.trust / "allowed_signers").open("a", encoding="utf-8") as file:
            file.write(f'{name} namespaces="{NAMESPACE}" {kind} {public}\n')
        return key

    def write(self, document: str, text: str) -> None:
        """Put a document, such as `agents/helper`, into the policy directory by rename, as a checkout does."""
        self.place(self.policy / f"{document}.yaml", text.encode())

    def change(self, document: str, text: str) -> None:
        """Write a document and wait until the running daemon has evaluated the directory with it."""
        before = self.status()["policy"]["seen"]
        self.write(document, text)
        self.eventually(lambda: self.status()["policy"]["seen"] != before, f"the daemon has seen {document}")

    def sign(self, identity: str, text: str, *, signer: str = "alice") -> None:
        """Write the statement `text` as reasons/IDENTITY.yaml and sign it with ssh-keygen itself."""
        self.write(f"reasons/{identity}", text)
        path = self.policy / "reasons" / f"{identity}.yaml"
        self.place(path.with_suffix(f".{signer}.sig"), self.signature(path, signer))

    def signature(self, statement: Path, key: str, *, namespace: str = NAMESPACE) -> bytes:
        """Give the armor of a signature over a statement."""
        argv = ["/usr/bin/ssh-keygen", "-Y", "sign", "-q", "-f", str(self.keys / key), "-n", namespace]
        return subprocess.run(argv, input=statement.read_bytes(), capture_output=True, check=True, timeout=20).stdout

    def place(self, path: Path, data: bytes) -> None:
        """Put a file into the policy directory by rename, as a checkout does."""
        partial = path.with_name(f".{path.name}.tmp")
        partial.write_bytes(data)
        partial.rename(path)

    def sign_missing(self, identity: str, *, why: str = "helper needs it for the invoice sync") -> None:
        """Let `plan` write the statement that is missing as reasons/IDENTITY.yaml, and sign it as alice."""
        statement = self.policy / "reasons" / f"{identity}.yaml"
        self.ringfence("plan", "--emit-reason", str(statement), "--reason", why, expect=3)
        self.sign(identity, statement.read_text("utf-8"))

    def adopt(self, documents: Mapping[str, str], program: Sequence[str] = DAEMON) -> None:
        """Write a policy, sign all that it loosens as CHG-1, start the daemon and wait until sandboxes are on."""
        for document, text in documents.items():
            self.write(document, text)
        self.sign_missing("CHG-1")
        self.start(program)
        self.eventually(lambda: bool(self.status()["policy"]["enabled"]), "the policy is in force")

    def agent(self, name: str = "helper", allow: Sequence[str] = (), **fields: object) -> str:
        """Write the document of an agent that this host's backend may run."""
        own = {"image": self.on.image, "minimum_isolation": self.on.ground.isolation.value}
        return documents.agent(name, allow, **{**own, **fields})

    def ringfence(
        self, *arguments: str, expect: int | None = 0, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run one command of the CLI in the host namespace; checks its exit status unless `expect` is None."""
        done = subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
            env=self.on.environment,
        )
        if expect is not None and done.returncode != expect:
            message = (
                f"ringfence {' '.join(arguments)} exited {done.returncode}, not {expect}\n{done.stdout}\n{done.stderr}"
            )
            raise AssertionError(message)
        return done

    def command(self, *arguments: str) -> list[str]:
        """The argument vector of one CLI command in the host namespace."""
        return [*self.on.enter, str(BIN / "ringfence"), *arguments[:1], *self._config(arguments), *arguments[1:]]

    def _config(self, arguments: Sequence[str]) -> list[str]:
        return [] if arguments[0] in {"reason", "check", "audit"} else ["--host-config", str(self.host_config)]

    def start(self, program: Sequence[str] = DAEMON) -> None:
        """Start `ringfenced`, or a composition root of a test, and wait until it has published its status."""
        before = self.status_time()
        with self.log.open("ab") as log:
            self.daemon = subprocess.Popen(
                [*self.on.enter, *program, "--host-config", str(self.host_config)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=CHECKOUT,
                env=self.on.environment,
            )
        self.pid = self.daemon.pid  # before anything can fail: 0 would be our own process group
        self.eventually(
            lambda: self.alive() and self.status_time() > before, "the daemon publishes its status", timeout=20
        )
        if self.on.engine is not None:
            # nsenter stays in front of what it starts in another pid namespace, and ends as that does.
            (self.pid,) = map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text("ascii").split())

    def alive(self) -> bool:
        """Whether the daemon runs; raises with its log when it ended by itself."""
        if self.daemon is None:
            return False
        if self.daemon.poll() is not None:
            raise AssertionError(
                f"ringfenced exited {self.daemon.returncode}\n{self.log.read_text('utf-8', 'replace')}"
            )
        return True

    def stop(self) -> None:
        """SIGTERM and wait; a daemon that does not end within 60 s is killed and that is a failure."""
        if self.daemon is None or self.daemon.poll() is not None:
            self.daemon = None
            return
        os.kill(self.pid, signal.SIGTERM)
        try:
            self.daemon.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.kill(self.pid, signal.SIGKILL)
            self.daemon.wait(timeout=10)
            raise
        finally:
            self.daemon = None

    def kill(self) -> None:
        """Kill the daemon with SIGKILL."""
        assert self.daemon is not None
        os.kill(self.pid, signal.SIGKILL)
        self.daemon.wait(timeout=10)
        self.daemon = None

    def status_path(self) -> Path:
        """Where status.json is."""
        return self.runtime / "status.json"

    def status(self) -> dict[str, Any]:
        """What the daemon publishes, {} before it does."""
        try:
            value: dict[str, Any] = json.loads(self.status_path().read_text("utf-8"))
        except FileNotFoundError:
            return {}
        return value

    def status_time(self) -> float:
        """When status.json was last replaced, 0 before it was."""
        try:
            return self.status_path().stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def submit(self, stem: str, job: Mapping[str, object]) -> None:
        """Submit a job as root under the file name STEM.yaml."""
        path = self.root / f"{stem}.yaml"
        path.write_text(json.dumps({"version": 1, "kind": "job", **job}), "utf-8")
        self.ringfence("submit", str(path))
        path.unlink()

    def drop(self, stem: str, job: Mapping[str, object]) -> None:
        """Deliver a job as root by hand, as Maildir does: written in tmp/, renamed into new/."""
        directory = self.spool / "in" / "root"
        path = directory / "tmp" / f"{stem}.yaml"
        path.write_text(json.dumps({"version": 1, "kind": "job", **job}), "utf-8")
        path.rename(directory / "new" / path.name)

    def result(self, stem: str, *, timeout: float = 60) -> dict[str, Any]:
        """Wait for the result of the job STEM."""
        path = self.done(stem) / "result.json"
        self.eventually(path.exists, f"a result of {stem}", timeout=timeout)
        value: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return value

    def done(self, stem: str) -> Path:
        """The directory of the result of root's job STEM."""
        return self.spool / "done" / "root" / stem

    def run(self, stem: str, job: Mapping[str, object], *, timeout: float = 60) -> dict[str, Any]:
        """Drop a job, wait for its result and until the daemon is done with it."""
        self.drop(stem, job)
        result = self.result(stem, timeout=timeout)
        self.settled(result["run"])
        return result

    def settled(self, run: str) -> None:
        """Wait until a run that has its result is torn down and forgotten."""
        self.eventually(lambda: not (self.spool / "claimed" / run).exists(), f"run {run} is torn down", timeout=20)

    def live(self, stem: str, state: str = "started") -> dict[str, Any]:
        """Wait until the run of the job STEM is in a state, and give what status.json says of it."""

        def found() -> list[dict[str, Any]]:
            return [one for one in self.status()["runs"] if (one["job"], one["state"]) == (stem, state)]

        self.eventually(lambda: bool(found()), f"the run of {stem} is {state}", timeout=20)
        return found()[0]

    def cancel(self, stem: str) -> dict[str, Any]:
        """Cancel the live run of the job STEM as its submitter, and give its result."""
        run = self.live(stem)["run"]
        self.drop(f"cancel-{stem}", {"kind": "cancel", "run": run})
        result = self.result(stem)
        self.settled(run)
        return result

    def output(self, stem: str) -> bytes:
        """What the result of the job STEM keeps of its output."""
        return (self.done(stem) / "output.log").read_bytes()

    def traces(self) -> list[str]:
        """Whatever there is of runs: processes, control groups, files; empty when no run is alive."""
        return traces.look(self)

    def gone_processes(self, *, timeout: float = 5) -> None:
        """Wait until no process of a run is left, whoever ended it."""
        self.eventually(lambda: not traces.processes(self), "no process of a run is left", timeout=timeout)

    def gone(self, what: str, *, timeout: float = 10) -> None:
        """Wait until there is no trace of a run."""
        try:
            self.eventually(lambda: not self.traces(), what, timeout=timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}\nleft: {self.traces()}") from None

    def decisions(self, stem: str) -> list[dict[str, Any]]:
        """Every decision of the job STEM."""
        return [json.loads(line) for line in (self.done(stem) / "decisions.jsonl").read_text("utf-8").splitlines()]

    def rows(self, event: str | None = None, *, run: str | None = None) -> list[dict[str, Any]]:
        """Audit rows: all, or those of one event (without `agent_sandbox.`) and of one run."""
        path = self.state / "audit" / "audit.jsonl"
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
        return [
            row
            for row in rows
            if event in {None, str(row["event"]).removeprefix("agent_sandbox.")} and run in {None, row["run"]}
        ]

    def eventually(self, holds: Callable[[], bool], what: str, *, timeout: float = 10) -> float:
        """Wait until `holds()`; returns the seconds that it took, raises with the daemon's log when it never does."""
        start = time.monotonic()
        while not holds():
            if time.monotonic() - start > timeout:
                log = self.log.read_text("utf-8", "replace")[-4000:] if self.log.exists() else ""
                raise AssertionError(f"not within {timeout} s: {what}\n{log}")
            if self.daemon is not None:
                self.alive()
            time.sleep(0.02)
        return time.monotonic() - start
