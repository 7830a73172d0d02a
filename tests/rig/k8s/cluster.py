"""Owns the life of one Kubernetes cluster in a rig's host namespace, and what a test asks of it; builds nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from tests.rig.docker import agent_image_tar, images
from tests.rig.docker import cache as docker_cache
from tests.rig.k8s import cache, keys, objects
from tests.rig.k8s.plan import NODE, NODE_ADDRESS, PAUSE, QUEUE, Netpol, Plan
from tests.rig.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    from tests.rig.docker import Image
    from tests.rig.rig import Rig

_START_S: Final = 90.0
_JSON: Final = {"Content-Type": "application/json"}
_SYSCTLS: Final = {
    "net.ipv4.ip_forward": 1,
    # Without it policies are not asked about what one pod of a node sends to another.
    "net.bridge.bridge-nf-call-iptables": 1,
    "net.bridge.bridge-nf-call-ip6tables": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request that the API server answered, from its audit log; `resource` like `pods` or `pods/log`."""

    user: str
    agent: str
    verb: str
    resource: str
    namespace: str
    name: str
    uri: str
    status: int


class Cluster:
    """A context manager: inside it a cluster of one node runs in the host namespace of a rig that is up. One a rig.

    Its data lie on a tmpfs of its own mount namespace, its processes in a pid namespace: nothing of it outlives `stop`,
    nor this process, `kill -9` included. Raises RuntimeError with its parts' logs when it does not start.
    """

    def __init__(
        self,
        rig: Rig,
        *,
        netpol: Netpol = Netpol.KUBE_ROUTER,
        ipv6: bool = True,
        gvisor: bool = True,
        data_size: str = "6g",
    ) -> None:
        """Name the cluster; nothing exists before `start` or `with`.

        Args:
            rig: a rig that is up.
            netpol: what enforces network policies.
            ipv6: whether pods have link-local addresses.
            gvisor: whether there is a RuntimeClass `gvisor` (its handler `runsc` is always there).
            data_size: the most that images and containers may take, as tmpfs reads it.
        """
        self.rig: Rig = rig
        self.netpol: Netpol = netpol
        self.gvisor: bool = gvisor
        self._machine = Machine(rig=rig, name="k8s", environment=cache.environment())
        self.directory: Path = self._machine.directory
        self.cgroup: str = self._machine.cgroup
        self.kubeconfig: Path = self.directory / "kubeconfig"
        self._data_size = data_size
        self._plan = Plan(
            directory=self.directory,
            data=self._machine.data,
            cgroup=self.cgroup,
            netpol=netpol,
            ipv6=ipv6,
            cni=cache.kubernetes().path / "debian/usr/lib/cni",
        )
        self._context: ssl.SSLContext | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all parts; wait until the node is ready, names resolve and policies are enforced (6 to 9 s)."""
        self._machine.prepare(_SYSCTLS, resolver=self._resolver)
        try:
            keys.make(self.directory / "pki")
            self.kubeconfig.write_text(keys.kubeconfig(self.directory / "pki"))
            self._context = ssl.create_default_context(cafile=self.directory / "pki/ca.pem")
            self._context.load_cert_chain(self.directory / "pki/admin.pem", self.directory / "pki/admin.key")
            for path, content in self._plan.files().items():
                (self.directory / path).parent.mkdir(exist_ok=True)
                (self.directory / path).write_text(content)
            self._machine.start(self._plan.programs(), data_size=self._data_size, inside=self._plan.inside())
            self._start_parts()
        except BaseException:
            self.stop()
            raise

    def _start_parts(self) -> None:
        for name in ("etcd", "kube-apiserver", "containerd"):
            self.start_program(name)
        with tempfile.TemporaryDirectory() as place:
            self.load(_pause(Path(place) / "pause.tar"))
            agent = self.load(agent_image_tar(Path(place) / "agent.tar"))
        self._wait("the API server serves", lambda: self._answers("/readyz"))
        for name in ("kube-controller-manager", "kube-scheduler", "kubelet"):
            self.start_program(name)
        self._wait("the node is known", lambda: self._answers(f"/api/v1/nodes/{NODE}"))
        self.start_program("kube-proxy")
        match self.netpol:
            case Netpol.KUBE_ROUTER:
                self.start_program("kube-router")
            case Netpol.KNP:
                self._queue()
                self.start_program("knp")
            case Netpol.NONE:
                pass
        for namespace in ("default", "kube-system"):
            account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
            self._wait(f"{namespace} has a service account", lambda account=account: self._answers(account))  # type: ignore[misc]
        self.apply(*objects.standing(agent, self._resolver, gvisor=self.gvisor))
        self._wait("the node is ready", lambda: _true(self.get(f"/api/v1/nodes/{NODE}"), "Ready"))
        dns = "/api/v1/namespaces/kube-system/pods/dns"
        self._wait("the cluster's DNS is up", lambda: _true(self.get(dns), "Ready"))
        self._wait("policies are enforced", self._enforced)

    def stop(self) -> None:
        """End the cluster with all its pods at once, and bring the host namespace back to how it was found.

        The sysctls stay. Raises RuntimeError when something of it is left.
        """
        self._machine.stop()
        self.tool("ipset", "destroy")

    def start_program(self, name: str) -> None:
        """Start a part again, by its name in `Plan.programs`; returns when it runs, which is before it serves."""
        self._machine.order("start", name)

    def kill_program(self, name: str) -> None:
        """End a part by SIGKILL; the pods live on."""
        self._machine.order("kill", name)

    @contextlib.contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """Hold a part for a while, as on a node that is too busy for it."""
        self._machine.order("pause", name)
        try:
            yield
        finally:
            self._machine.order("resume", name)

    # --- what a test asks of it ---------------------------------------------------------------------------------------

    def load(self, image: Image) -> str:
        """Load an image; returns its reference by digest, which a pod may name (`imagePullPolicy: Never`)."""
        reference = f"{image.name.rpartition(':')[0]}@{image.manifest}"
        for arguments in (("import", str(image.archive)), ("tag", "--force", image.name, reference)):
            done = subprocess.run(
                [*self.enter, self._program("ctr"), "--namespace", "k8s.io", "images", *arguments],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"ctr images {' '.join(arguments)}: {done.stderr.strip()}")
        return reference

    def kubectl(
        self, *arguments: str | Path, stdin: str = "", timeout_s: float = 60.0, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl as the administrator, from the node's network.

        Raises RuntimeError with its words when `check` and it fails; TimeoutExpired.
        """
        done = subprocess.run(
            [*self.rig.enter, self._program("kubectl"), *map(str, arguments)],
            env={"KUBECONFIG": str(self.kubeconfig), "HOME": str(self.directory), "PATH": "/usr/bin:/bin"},
            input=stdin,
            text=True,
            errors="replace",
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode:
            raise RuntimeError(f"kubectl {' '.join(map(str, arguments))}: {done.stderr.strip()}")
        return done

    def apply(self, *objects: Mapping[str, object]) -> None:
        """Have these objects exist; raises RuntimeError with kubectl's words."""
        listed = {"apiVersion": "v1", "kind": "List", "items": objects}
        self.kubectl("apply", "--filename=-", stdin=json.dumps(listed), check=True)

    def get(self, path: str) -> Any:
        """Ask the API server as the administrator (`/api/v1/pods`); returns JSON; raises OSError, RuntimeError."""
        return self.call("GET", path)

    def call(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        """Have the API server do something, without the price of a kubectl; raises OSError, RuntimeError."""
        if self._context is None:
            raise RuntimeError("the cluster is not up")
        connection = http.client.HTTPSConnection(NODE_ADDRESS, 6443, timeout=30, context=self._context)
        plain = self.rig.connect(NODE_ADDRESS, 6443)
        try:
            connection.sock = self._context.wrap_socket(plain, server_hostname=NODE_ADDRESS)
            connection.request(method, path, None if body is None else json.dumps(body), _JSON)
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
            plain.close()
        if response.status not in {http.client.OK, http.client.CREATED, http.client.ACCEPTED}:
            raise RuntimeError(f"{method} {path}: {response.status} {answer.decode(errors='replace').strip()}")
        return json.loads(answer) if answer.startswith(b"{") else answer.decode()

    def kubeconfig_of(self, namespace: str, account: str) -> Path:
        """Write a kubeconfig with a service account's token (an hour), for a program that has that account's rights."""
        token = self.kubectl("create", "token", account, f"--namespace={namespace}", check=True).stdout.strip()
        path = self.directory / f"{namespace}-{account}.kubeconfig"
        path.write_text(keys.kubeconfig(self.directory / "pki", user={"token": token}))
        return path

    def requests(self, *, user: str | None = None) -> list[Request]:
        """Return what the API server answered so far, of one user (`system:serviceaccount:NAMESPACE:NAME`) or of all.

        A watch that still goes on is among them.
        """
        rows: dict[str, Request] = {}
        for line in (self.directory / "audit.jsonl").read_text().splitlines():
            row = json.loads(line)
            about = row.get("objectRef", {})
            rows[row["auditID"]] = Request(
                user=row["user"]["username"],
                agent=row.get("userAgent", ""),
                verb=row["verb"],
                resource="/".join(filter(None, (about.get("resource"), about.get("subresource")))),
                namespace=about.get("namespace", ""),
                name=about.get("name", ""),
                uri=row["requestURI"],
                status=row.get("responseStatus", {}).get("code", 0),
            )
        return [row for row in rows.values() if user in {None, row.user}]

    @property
    def enter(self) -> tuple[str, ...]:
        """The argv prefix that runs a program on the node: its network, mounts, pids; `rig.enter`: network alone."""
        return self._machine.enter

    @property
    def pid(self) -> int:
        """The pid, seen from here, of process 1 of the node's pid namespace."""
        return self._machine.pid

    @property
    def environment(self) -> Mapping[str, str]:
        """What a program on the node finds nft, iptables and the like by."""
        return self._machine.environment

    def tool(self, name: str, *arguments: str, stdin: str = "") -> str:
        """Run nft, iptables, ipset or the like in the node's network and return its output; raises RuntimeError."""
        return self._machine.tool(name, *arguments, stdin=stdin)

    def logs(self, lines: int = 15) -> str:
        """Return the last lines of what each part wrote."""
        return self._machine.logs(lines)

    # --- how it is set up ---------------------------------------------------------------------------------------------

    @property
    def _resolver(self) -> str:
        return self.rig.resolver.rpartition(":")[0]

    def _program(self, name: str) -> str:
        return str(cache.kubernetes().path / "bin" / name)

    def _queue(self) -> None:
        """Hand every new connection to kube-network-policies.

        Its own nftables rules need CONFIG_NFT_QUEUE; these do the same on any kernel, and drop while nobody judges. In
        mangle: in filter, kube-proxy would accept what comes to a node port before them.
        """
        for chain in (["FORWARD"], ["INPUT", "-i", "cni0"]):
            match = ["-m", "conntrack", "--ctstate", "NEW", "-j", "NFQUEUE", "--queue-num", str(QUEUE)]
            self.tool("iptables", "-t", "mangle", "-I", *chain, *match)

    def _enforced(self) -> bool:
        match self.netpol:
            case Netpol.KUBE_ROUTER:
                return "KUBE-ROUTER-FORWARD" in self.tool("iptables-save", "-t", "filter")
            case Netpol.KNP:
                listed = self.rig.run(["/bin/cat", "/proc/net/netfilter/nfnetlink_queue"]).stdout.decode()
                return any(line.split()[0] == str(QUEUE) for line in listed.splitlines())
            case Netpol.NONE:
                return True

    def _answers(self, path: str) -> bool:
        try:
            self.get(path)
        except (OSError, RuntimeError, http.client.HTTPException):
            return False
        return True

    def _wait(self, what: str, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_S
        while not until():
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited for {_START_S:.0f} s in vain until {what}:\n{self.logs()}")
            time.sleep(0.05)


def _true(seen: Any, condition: str) -> bool:
    """Say whether an object's status has a condition that is true."""
    conditions = seen.get("status", {}).get("conditions", [])
    return any(each["type"] == condition and each["status"] == "True" for each in conditions)


def _pause(archive: Path) -> Image:
    """Write the image that holds a pod's namespaces: a process that sleeps."""
    busybox = docker_cache.packages().path / "tools/bin/busybox"
    layer = images.layer_of({"bin/busybox": (busybox.read_bytes(), 0o755)})
    config = {"Entrypoint": ["/bin/busybox", "sleep", "100000000"]}
    return images.write(archive, name=PAUSE, architecture="amd64", layers=(layer,), config=config)
