"""What a run is made of in a cluster: golden files of all of it, and each field that the fence depends on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.entry import Entry, parse
from reconciler.backends import k8s_objects
from reconciler.backends.base import Launch
from reconciler.backends.k8s_place import Role, Where
from reconciler.backends.k8s_proxy import in_cluster
from reconciler.core.policy import Limits
from tests.backends.world import MIB, policy

GOLDEN = Path(__file__).parents[1] / "data" / "k8s"
RUN = "20261129T230000-0a1b2c3d"
OWNER = {"apiVersion": "batch/v1", "kind": "Job", "name": "ringfence-20261129t230000-0a1b2c3d-proxy", "uid": "u-1"}
WHERE = Where(
    namespace="agent-sandbox",
    run=RUN,
    owner="prod-1-0a1b2c3d",
    agent="helper",
    expires=1_800_000_000,
    runtime_class="gvisor",
    proxy_image="registry.example.com/ringfence-proxy@sha256:" + "a" * 64,
    secret="client-secret",  # noqa: S106 - of no proxy that lives
    start="start-word",
)
PLAIN = replace(WHERE, runtime_class=None)
PROXY = policy(RUN, generation=1, expires_at=1_800_000_000.0, resolvers=(("127.0.0.1", 53),), key=bytes(range(32)))
LAUNCH = Launch(
    run=RUN,
    owner="prod-1-0a1b2c3d",
    agent="helper",
    image="registry.example.com/agent@sha256:" + "b" * 64,
    user=1000,
    command=("python3", "job.py", "$(HOME) costs $5"),
    environment={"TOKEN": "swordfish $(HTTP_PROXY)"},
    input={"job.py": b"print(1)\n", "deep/er.bin": b"\x00\xff"},
    limits=Limits(cpus=0.5, memory=256 * MIB, pids=64, timeout=60, output=MIB, connections=16),
    proxy=PROXY,
    expires_at=1_800_000_000.0,
)


def entry(text: str) -> Entry:
    found = parse(text)
    assert isinstance(found, Entry)
    return found


def everything(where: Where) -> dict[str, Any]:
    """All objects of a run, by what they are."""
    adapted = in_cluster(PROXY, where=where, resolvers=(), addresses=("10.0.0.4", "203.0.114.9"))
    return {
        "anchor": k8s_objects.anchor(where, lasts=180, lingers=300),
        "agent-policy": k8s_objects.agent_policy(where, OWNER),
        "proxy-policy": k8s_objects.proxy_policy(
            where, OWNER, resolvers=(), forbidden=("10.0.0.4", "203.0.114.9"), ports=(80, 443, 5432)
        ),
        "policy-map": k8s_objects.policy_map(where, OWNER, adapted),
        "job-map": k8s_objects.job_map(where, OWNER, LAUNCH.input),
        "gate-map": k8s_objects.gate_map(where, OWNER, "{}"),
        "agent-pod": k8s_objects.agent_pod(where, LAUNCH, owner=OWNER, proxy="10.244.0.7", lasts=180),
    }


@pytest.mark.parametrize("where", [WHERE, PLAIN], ids=["gvisor", "container"])
def test_golden(where: Where) -> None:
    """A difference is one to look at: `python -m tests.backends.test_k8s_objects` writes the files anew."""
    path = GOLDEN / f"{'gvisor' if where.gvisor else 'container'}.json"
    assert everything(where) == json.loads(path.read_text())


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def pods(where: Where) -> dict[Role, dict[str, Any]]:
    made = everything(where)
    return {Role.AGENT: made["agent-pod"], Role.PROXY: made["anchor"]["spec"]["template"]}


@pytest.mark.parametrize("where", [WHERE, PLAIN], ids=["gvisor", "container"])
@pytest.mark.parametrize("role", Role)
def test_every_container_is_shut_in(where: Where, role: Role) -> None:
    pod = pods(where)[role]
    for container in containers(pod):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["privileged"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["runAsGroup"] == (1000 if role is Role.AGENT else 65532)
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {"cpu", "memory", "ephemeral-storage"} <= container["resources"]["limits"].keys()
        assert not container.keys() & {
            "ports",
            "livenessProbe",
            "lifecycle",
            "envFrom",
            "volumeDevices",
            "stdin",
            "tty",
        }
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["restartPolicy"] == "Never"
    assert spec["serviceAccountName"] == role
    assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC", "hostAliases", "imagePullSecrets"}
    assert all(volume.keys() & {"configMap", "emptyDir", "downwardAPI"} for volume in spec["volumes"])


@pytest.mark.parametrize("where", [WHERE, PLAIN], ids=["gvisor", "container"])
def test_the_agent_looks_nothing_up_and_ends_by_itself(where: Where) -> None:
    spec = everything(where)["agent-pod"]["spec"]
    assert (spec["dnsPolicy"], spec["dnsConfig"]) == ("None", {"nameservers": ["127.0.0.1"]})
    assert spec["activeDeadlineSeconds"] == 180
    assert spec.get("runtimeClassName") == where.runtime_class
    assert spec.get("shareProcessNamespace", False) is not where.gvisor
    assert [each["name"] for each in spec["initContainers"]] == ["gate"]
    assert [each["name"] for each in spec["containers"]] == ["agent"]


def test_the_gate_has_the_agents_place_and_nothing_of_the_agents() -> None:
    gate, agent = containers(everything(WHERE)["agent-pod"])
    assert gate["securityContext"] == agent["securityContext"]
    assert gate["resources"] == agent["resources"]
    assert gate["image"] == WHERE.proxy_image
    assert "env" not in gate
    assert {mount["name"] for mount in gate["volumeMounts"]} == {"gate", "start"}
    assert {mount["name"] for mount in agent["volumeMounts"]} == {"job", "tmp", "shm"}


def test_the_proof_key_is_where_only_the_proxy_looks() -> None:
    made = everything(WHERE)
    key = PROXY.proof_key.hex()
    assert [name for name, body in made.items() if key in json.dumps(body)] == ["policy-map"]
    mounted = {
        role: {volume["configMap"]["name"] for volume in pod["spec"]["volumes"] if "configMap" in volume}
        for role, pod in pods(WHERE).items()
    }
    assert mounted[Role.PROXY] == {WHERE.name("policy")}
    assert WHERE.name("policy") not in mounted[Role.AGENT]


def test_values_of_the_environment_are_in_the_pod_alone() -> None:
    assert [name for name, body in everything(WHERE).items() if "swordfish" in json.dumps(body)] == ["agent-pod"]


def test_everything_is_labelled_and_owned_by_the_anchor_which_owns_itself() -> None:
    for name, body in everything(WHERE).items():
        labels = body["metadata"]["labels"]
        assert labels["ringfence.run"] == RUN
        assert labels["ringfence.expires"] == "1800000000"
        assert ("ownerReferences" in body["metadata"]) is (name != "anchor")
    anchor = everything(WHERE)["anchor"]["spec"]
    assert (anchor["activeDeadlineSeconds"], anchor["ttlSecondsAfterFinished"], anchor["backoffLimit"]) == (180, 300, 0)
    assert anchor["suspend"] is False


def test_the_agents_policy_has_one_way_out_and_none_in() -> None:
    spec = everything(WHERE)["agent-policy"]["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in spec
    (rule,) = spec["egress"]
    assert rule["to"] == [{"podSelector": {"matchLabels": {"ringfence.run": RUN, "ringfence.role": "proxy"}}}]
    assert rule["ports"] == [{"protocol": "TCP", "port": 3128}]


def test_the_proxys_policy_lets_in_its_agent_alone_and_out_to_dns_and_public_addresses() -> None:
    spec = everything(WHERE)["proxy-policy"]["spec"]
    (inward,) = spec["ingress"]
    assert inward["from"] == [{"podSelector": {"matchLabels": {"ringfence.run": RUN, "ringfence.role": "agent"}}}]
    assert inward["ports"] == [{"protocol": "TCP", "port": 3128}]
    dns, public = spec["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    (block,) = public["to"]
    assert block["ipBlock"]["cidr"] == "0.0.0.0/0"
    assert {"10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "203.0.114.9/32"} <= set(block["ipBlock"]["except"])
    assert "10.0.0.4/32" not in block["ipBlock"]["except"], "a range above holds it already"
    assert [port["port"] for port in public["ports"]] == [80, 443, 5432]
    assert "3129" not in json.dumps(everything(WHERE)["proxy-policy"])


def test_named_resolvers_are_let_through_one_by_one() -> None:
    made = k8s_objects.proxy_policy(
        WHERE, OWNER, resolvers=(("10.1.2.3", 5353), ("2606:4700::53", 53)), forbidden=(), ports=(443,)
    )
    first, second, _ = made["spec"]["egress"]
    assert first["to"] == [{"ipBlock": {"cidr": "10.1.2.3/32"}}]
    assert {port["port"] for port in first["ports"]} == {5353}
    assert second["to"] == [{"ipBlock": {"cidr": "2606:4700::53/128"}}]


@pytest.mark.parametrize(
    ("allow", "ports"),
    [
        pytest.param((), (80, 443), id="a list without ports is the web's"),
        pytest.param(("a.example.com:5432", "b.example.com"), (80, 443, 5432), id="an entry's port is opened"),
    ],
)
def test_ports(allow: tuple[str, ...], ports: tuple[int, ...]) -> None:
    assert k8s_objects.ports(replace(PROXY, allow=tuple(map(entry, allow)))) == ports


def expanded(text: str) -> str:
    """What a kubelet makes of a text (third_party/forked/golang/expansion): `$$` is `$`, `$(NAME)` a reference."""
    out, at = "", 0
    while at < len(text):
        if text[at] == "$" and at + 1 < len(text):
            if text[at + 1] == "$":
                out, at = out + "$", at + 2
                continue
            if text[at + 1] == "(" and ")" in text[at:]:
                out, at = out + "EXPANDED", text.index(")", at) + 1
                continue
        out, at = out + text[at], at + 1
    return out


@given(st.text(alphabet="$()AB ", max_size=12))
def test_no_text_is_expanded_whatever_it_holds(text: str) -> None:
    assert expanded(k8s_objects.literal(text)) == text


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for each, name in ((WHERE, "gvisor"), (PLAIN, "container")):
        (GOLDEN / f"{name}.json").write_text(json.dumps(everything(each), indent=1, sort_keys=True) + "\n")
