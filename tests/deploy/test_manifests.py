"""The manifests as they are written: what they must say, read without a cluster."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from reconciler.core.trust import Trust, read_trust_files
from reconciler.host import Host, parse_host
from tests.deploy.manifests import (
    DAEMON_IMAGE,
    K3S,
    MANIFESTS,
    NAMESPACE,
    PROXY_IMAGE,
    ROOT,
    SANDBOX,
    containers,
    documents,
    found,
    pod_specs,
    rights,
)

ALL = [(path, document) for path in MANIFESTS for document in documents(path)]
WORKLOADS = [(document, spec) for _, document in ALL for spec in pod_specs(document)]


def name(document: dict[str, Any]) -> str:
    metadata = document["metadata"]
    assert isinstance(metadata, dict)
    return f"{document['kind']} {metadata['name']}"


def test_every_file_is_one_of_these_and_is_in_the_kustomization() -> None:
    (kustomization,) = documents(K3S / "kustomization.yaml")
    assert {K3S / each for each in kustomization["resources"]} == set(MANIFESTS)
    listed = {*MANIFESTS, K3S / "kustomization.yaml", K3S / "daemon" / "host.yaml"}
    assert set(K3S.rglob("*.yaml")) == listed
    generated = {each["name"]: each for each in kustomization["configMapGenerator"]}
    deployment = found("Deployment", "ringfenced")["spec"]["template"]["spec"]
    used = {each["configMap"]["name"] for each in deployment["volumes"] if "configMap" in each}
    used |= {each["configMapRef"]["name"] for one in containers(deployment) for each in one.get("envFrom", ())}
    assert used == set(generated)


@pytest.mark.parametrize(("document", "spec"), WORKLOADS, ids=[name(document) for document, _ in WORKLOADS])
def test_a_workload_names_images_by_digest_and_no_architecture(document: dict[str, Any], spec: dict[str, Any]) -> None:
    for container in containers(spec):
        assert re.fullmatch(r"[a-z0-9./-]+@sha256:[0-9a-f]{64}", container["image"]), container["image"]
    assert "arch" not in str(document)
    assert "amd64" not in str(document)


@pytest.mark.parametrize(("document", "spec"), WORKLOADS, ids=[name(document) for document, _ in WORKLOADS])
def test_a_workload_has_only_the_capabilities_that_it_says_and_a_read_only_root(
    document: dict[str, Any], spec: dict[str, Any]
) -> None:
    allowed = {"DaemonSet node-guard": {"NET_ADMIN"}, "Deployment ringfenced": {"CHOWN", "DAC_OVERRIDE", "FOWNER"}}
    for container in containers(spec):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert not security.get("privileged", False)
        assert security["capabilities"]["drop"] == ["ALL"]
        assert set(security["capabilities"].get("add", ())) <= allowed[name(document)]
        assert container["resources"]["limits"].keys() == {"cpu", "memory"}
    assert spec.get("hostNetwork", False) == (name(document) == "DaemonSet node-guard")
    assert not any("hostPath" in volume for volume in spec.get("volumes", ()))


def test_the_daemons_role_is_exactly_what_its_backend_needs_and_holds_no_exec_and_no_secrets() -> None:
    many = {
        ("", "pods"): {"create", "get", "list", "patch", "delete"},
        ("", "pods/log"): {"get"},
        ("batch", "jobs"): {"create", "list", "delete"},
        ("networking.k8s.io", "networkpolicies"): {"create", "list", "patch", "delete"},
        ("", "configmaps"): {"create", "list", "patch", "delete"},
        ("", "events"): {"list"},
    }
    assert rights("Role", "ringfenced") == {(*where, verb) for where, verbs in many.items() for verb in verbs}
    everywhere = {("node.k8s.io", "runtimeclasses", "get"), ("", "nodes", "list")}
    assert rights("ClusterRole", "ringfenced") == everywhere
    assert rights("Role", "node-guard") == {("", "pods", "list")}


def test_accounts_have_no_token_by_themselves() -> None:
    accounts = [document for _, document in ALL if document["kind"] == "ServiceAccount"]
    assert {each["metadata"]["name"] for each in accounts} == {"agent", "proxy", "ringfenced", "node-guard"}
    assert all(each["automountServiceAccountToken"] is False for each in accounts)
    bound = {subject["name"] for _, document in ALL for subject in document.get("subjects", ())}
    assert bound == {"ringfenced", "node-guard"}


def test_the_namespace_of_sandboxes_is_restricted_at_one_version_and_shut_both_ways() -> None:
    labels = found("Namespace", NAMESPACE)["metadata"]["labels"]
    for mode in ("enforce", "audit", "warn"):
        assert labels[f"pod-security.kubernetes.io/{mode}"] == "restricted"
        assert re.fullmatch(r"v1\.[0-9]+", labels[f"pod-security.kubernetes.io/{mode}-version"])
    policy = found("NetworkPolicy", "default-deny")
    assert policy["metadata"]["namespace"] == NAMESPACE
    assert policy["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_each_admission_policy_fails_closed_is_bound_and_denies_in_this_namespace_alone() -> None:
    policies = [document for _, document in ALL if document["kind"] == "ValidatingAdmissionPolicy"]
    assert len(policies) == 4
    for policy in policies:
        assert policy["spec"]["failurePolicy"] == "Fail"
        binding = found("ValidatingAdmissionPolicyBinding", policy["metadata"]["name"])["spec"]
        assert binding["validationActions"] == ["Deny"]
        assert binding["matchResources"] == {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}}
        }
        assert all(len(validation["message"]) > 20 for validation in policy["spec"]["validations"])


def test_the_settings_of_the_daemon_load_and_name_what_the_manifests_name() -> None:
    host = parse_host("host.yaml", (K3S / "daemon" / "host.yaml").read_bytes())
    assert isinstance(host, Host), host
    assert host.k8s.namespace == NAMESPACE
    assert host.k8s.runtime_class == found("RuntimeClass", "gvisor")["metadata"]["name"]
    assert host.k8s.proxy_image == PROXY_IMAGE
    mounts = found("Deployment", "ringfenced")["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    paths = {each["mountPath"] for each in mounts}
    assert {str(host.trust / "allowed_signers"), str(host.trust / "revoked"), str(host.runtime)} <= paths
    assert {str(host.state.parent), str(host.spool.parent), str(host.policy.parent)} <= paths


def test_the_trust_files_that_are_shipped_trust_nobody() -> None:
    files = [(K3S / "daemon" / each).read_bytes() for each in ("allowed_signers", "revoked")]
    trust = read_trust_files("allowed_signers", files[0], "revoked", files[1])
    assert isinstance(trust, Trust)
    assert trust.signers == ()


def test_the_runtimes_template_is_the_base_and_a_runtime_of_the_name_that_the_runtime_class_has() -> None:
    text = (SANDBOX / "containerd" / "config-v3.toml.tmpl").read_text("utf-8")
    base, rest = text.split("\n", 1)
    assert base == '{{ template "base" . }}'
    runtimes = tomllib.loads(rest)["plugins"]["io.containerd.cri.v1.runtime"]["containerd"]["runtimes"]
    assert list(runtimes) == [found("RuntimeClass", "gvisor")["handler"]]
    assert runtimes["runsc"]["runtime_type"] == "io.containerd.runsc.v1"
    settings = Path(runtimes["runsc"]["options"]["ConfigPath"])
    shipped = tomllib.loads((SANDBOX / "containerd" / settings.name).read_text("utf-8"))
    assert "network" not in shipped["runsc_config"]
    assert "host-uds" not in shipped["runsc_config"]


def test_kustomize_puts_the_digests_in() -> None:
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("kubectl is not installed")
    made = subprocess.run([program, "kustomize", str(K3S)], capture_output=True, text=True, timeout=60, check=True)
    assert made.stdout.count(DAEMON_IMAGE) == 3


def test_every_file_that_the_images_are_made_of_is_there() -> None:
    for path in (ROOT / "deploy" / "images").glob("*/Containerfile"):
        copied = re.findall(r"^COPY (?:--chmod=\d+ )?(?!--from)(.+) \S+$", path.read_text("utf-8"), re.MULTILINE)
        assert copied
        for pattern in " ".join(copied).split():
            assert list(ROOT.glob(pattern)), pattern
