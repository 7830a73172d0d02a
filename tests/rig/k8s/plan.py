"""Owns what each part of the cluster is told, as plain data: arguments and configuration; writes and starts nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from tests.rig import addresses
from tests.rig.machine import Program

if TYPE_CHECKING:
    from pathlib import Path

NODE: Final = "node"
"""The node's name."""
NODE_ADDRESS: Final = addresses.HOST_PRIVATE
"""Its InternalIP. It has the rig's other host addresses, too, which the API server does not know."""
PODS: Final = "10.244.0.0/24"
GATEWAY: Final = "10.244.0.1"
"""The node's address on the pods' bridge, `cni0`."""
SERVICES: Final = "10.96.0.0/16"
API_SERVICE: Final = "10.96.0.1"
DNS_SERVICE: Final = "10.96.0.10"
PAUSE: Final = "rig.invalid/pause:test"
CONTAINERD: Final = "/run/containerd/containerd.sock"
ETCD: Final = "http://127.0.0.1:2379"
QUEUE: Final = 98
"""The number of the netfilter queue that `knp` judges."""


class Netpol(StrEnum):
    """What enforces network policies."""

    KUBE_ROUTER = "kube-router"
    """What k3s embeds; a pod's first packets are not judged yet."""
    KNP = "knp"
    """kube-network-policies with NRI: every first packet of a connection is judged."""
    NONE = "none"
    """Nothing: policies are taken without a word and mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The cluster that is wanted."""

    directory: Path
    """Where its files are, seen from outside too."""
    data: Path
    """Where images and containers are."""
    cgroup: str
    netpol: Netpol
    ipv6: bool
    """Whether pods have IPv6 link-local addresses, as on every cluster that is IPv4 alone."""
    cni: Path
    """Where CNI's plugins are."""

    def files(self) -> dict[str, str]:
        """Return the content of each configuration file, by its path below `directory`."""
        return {
            "containerd.toml": self._containerd(),
            "cni/10-rig.conflist": json.dumps(self._network()),
            "kubelet.json": json.dumps(self._kubelet()),
            "proxy.json": json.dumps(self._proxy()),
            "audit.json": json.dumps(
                {
                    "apiVersion": "audit.k8s.io/v1",
                    "kind": "Policy",
                    "omitStages": ["RequestReceived"],
                    "rules": [{"level": "Metadata"}],
                }
            ),
            **{f"sysctl/{path.replace('/', '.')}": f"{value}\n" for path, value in _KERNEL.items()},
        }

    def inside(self) -> list[list[str]]:
        """Return the commands that give the cluster places of its own where it insists on the machine's."""
        mount, mkdir = "/bin/mount", "/bin/mkdir"
        commands = [[mkdir, "/run/netns", "/run/containerd"], [mount, "--make-rshared", "/"]]
        for place in ("/var/lib", "/var/log"):
            private = f"{self.data}{place}"
            commands += [[mkdir, "-p", private], [mount, "--bind", private, place], [mount, "--make-rshared", place]]
        commands.append(["/bin/sh", "-euc", _CGROUPS, "sh", self.cgroup])
        # The kubelet insists on these settings; let it see them, and leave the kernel alone.
        for path in _KERNEL:
            commands.append(
                [mount, "--bind", str(self.directory / "sysctl" / path.replace("/", ".")), f"/proc/sys/{path}"]
            )
        return commands

    def programs(self) -> dict[str, Program]:
        """Return how each part is started, in an order that works."""
        pki, kubeconfig = self.directory / "pki", f"--kubeconfig={self.directory / 'kubeconfig'}"
        argv: dict[str, list[str]] = {
            "etcd": [
                f"--data-dir={self.data}/etcd",
                "--unsafe-no-fsync",
                "--listen-peer-urls=http://127.0.0.1:2380",
                f"--listen-client-urls={ETCD}",
                f"--advertise-client-urls={ETCD}",
            ],
            "kube-apiserver": [
                f"--etcd-servers={ETCD}",
                "--bind-address=0.0.0.0",
                "--secure-port=6443",
                f"--advertise-address={NODE_ADDRESS}",
                f"--service-cluster-ip-range={SERVICES}",
                "--authorization-mode=Node,RBAC",
                f"--client-ca-file={pki}/ca.pem",
                f"--tls-cert-file={pki}/apiserver.pem",
                f"--tls-private-key-file={pki}/apiserver.key",
                "--kubelet-preferred-address-types=InternalIP",
                f"--kubelet-client-certificate={pki}/admin.pem",
                f"--kubelet-client-key={pki}/admin.key",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={pki}/accounts.pem",
                f"--service-account-signing-key-file={pki}/accounts.key",
                "--enable-priority-and-fairness=false",
                "--allow-privileged=true",
                f"--cert-dir={pki}",
                f"--audit-policy-file={self.directory}/audit.json",
                f"--audit-log-path={self.directory}/audit.jsonl",
            ],
            "kube-controller-manager": [
                kubeconfig,
                f"--service-account-private-key-file={pki}/accounts.key",
                f"--root-ca-file={pki}/ca.pem",
                "--use-service-account-credentials=false",
                "--leader-elect=false",
                f"--cluster-cidr={PODS}",
                "--allocate-node-cidrs=false",
                f"--cert-dir={pki}",
            ],
            "kube-scheduler": [kubeconfig, "--leader-elect=false", f"--cert-dir={pki}"],
            "kubelet": [
                f"--config={self.directory}/kubelet.json",
                kubeconfig,
                f"--hostname-override={NODE}",
                f"--node-ip={NODE_ADDRESS}",
                f"--cert-dir={self.data}/kubelet-pki",
                "--root-dir=/var/lib/kubelet",
            ],
            "kube-proxy": [f"--config={self.directory}/proxy.json"],
            "kube-router": [
                kubeconfig,
                f"--hostname-override={NODE}",
                f"--service-cluster-ip-range={SERVICES}",
                "--v=2",
            ],
        }
        return {
            "containerd": Program(
                argv=["containerd", "--config", str(self.directory / "containerd.toml")], appears=CONTAINERD
            ),
            **{name: Program(argv=["kube", name, *arguments]) for name, arguments in argv.items()},
            "knp": Program(argv=["netpol", kubeconfig, f"--hostname-override={NODE}", "-v=2"]),
        }

    def _containerd(self) -> str:
        # The plugin that is off would write to /opt. The last setting is for machines without CAP_SYS_RESOURCE.
        return f"""version = 3
root = "{self.data}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
  address = "{CONTAINERD}"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "{PAUSE}"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ["{self.cni}"]
  conf_dir = "{self.directory}/cni"
[plugins.'io.containerd.cri.v1.runtime'.containerd]
  default_runtime_name = "runc"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runsc]
  runtime_type = "io.containerd.runsc.v1"
"""

    def _network(self) -> dict[str, object]:
        bridge: dict[str, object] = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            # Not masqueraded: what arrives in the rig's internet tells by its address which pod sent it.
            "ipMasq": False,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": PODS}]],
                "routes": [{"dst": "0.0.0.0/0"}],
                "dataDir": f"{self.data}/ipam",
            },
        }
        off = {"type": "tuning", "sysctl": {"net.ipv6.conf.eth0.disable_ipv6": "1"}}
        return {"cniVersion": "0.4.0", "name": "rig", "plugins": [bridge, *([] if self.ipv6 else [off])]}

    def _kubelet(self) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "cgroupsPerQOS": True,
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "containerRuntimeEndpoint": f"unix://{CONTAINERD}",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": False},
                "x509": {"clientCAFile": f"{self.directory}/pki/ca.pem"},
            },
            "authorization": {"mode": "AlwaysAllow"},
            "clusterDomain": "cluster.local",
            "clusterDNS": [DNS_SERVICE],
            "resolvConf": "/dev/null",
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
                "nodefs.inodesFree": "1%",
            },
            "imageGCHighThresholdPercent": 100,
            "oomScoreAdj": 0,
            "maxOpenFiles": 20000,
        }

    def _proxy(self) -> dict[str, object]:
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "clusterCIDR": PODS,
            "hostnameOverride": NODE,
            "oomScoreAdj": 0,
            "clientConnection": {"kubeconfig": f"{self.directory}/kubeconfig"},
            "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        }


_CGROUPS: Final = """
for each in /sys/fs/cgroup /sys/fs/cgroup/*; do
    [ ! -e $each/cgroup.procs ] || mkdir -p $each/$1
done
[ ! -e /sys/fs/cgroup/cpuset ] || for each in cpus mems; do
    cat /sys/fs/cgroup/cpuset/cpuset.$each >/sys/fs/cgroup/cpuset/$1/cpuset.$each
done
"""
"""Makes the parent of all pods' cgroups in every hierarchy, of either version."""
_KERNEL: Final = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/keys/root_maxbytes": 25_000_000,
}
