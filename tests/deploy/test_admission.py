"""The manifests on a real API server: it takes them, and refuses in the namespace of sandboxes what is not ours."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.deploy import shapes
from tests.deploy.manifests import DAEMON, MANIFESTS, NAMESPACE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.deploy.conftest import Deployed
    from tests.rig.k8s import Cluster

pytestmark = [pytest.mark.k8s, pytest.mark.rig]


@pytest.fixture(scope="module")
def cluster(deployed: Deployed) -> Cluster:
    """The cluster with the standing objects."""
    return deployed.cluster


@pytest.fixture(scope="module")
def answers(deployed: Deployed) -> dict[str, str]:
    """What the API server says of each refusal's object, by its name; one request for all of them takes its time."""
    objects = [refusal.object(f"bad-{at:03}") for at, refusal in enumerate(shapes.REFUSALS)]
    said: dict[str, str] = {}
    for line in deployed.judge(*objects).split("Error from server"):
        for name in re.findall(r'"(bad-\d{3})"', line)[:1]:
            said[name] = said.get(name, "") + line
    return said


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_the_api_server_takes_each_manifest_as_it_is(deployed: Deployed, path: Path) -> None:
    # Namespaces that do not exist yet cannot hold anything, not even in thought.
    deployed.cluster.kubectl("create", "namespace", "ringfence-guard")
    done = deployed.apply(path, "--dry-run=server", "--force-conflicts")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


def test_the_expressions_of_the_admission_policies_fit_the_types_that_they_are_of(cluster: Cluster) -> None:
    for policy in cluster.get("/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies")["items"]:
        checked = policy.get("status", {}).get("typeChecking", {})
        assert checked.get("expressionWarnings", []) == [], policy["metadata"]["name"]


@pytest.mark.parametrize("name", shapes.MAKERS)
def test_what_ringfence_makes_is_let_in(deployed: Deployed, name: str) -> None:
    assert deployed.judge(shapes.MAKERS[name]("good"), user="" if name == "service" else DAEMON) == ""


@pytest.mark.parametrize(
    ("at", "refusal"), list(enumerate(shapes.REFUSALS)), ids=[each.title for each in shapes.REFUSALS]
)
def test_the_api_server_refuses(answers: dict[str, str], at: int, refusal: shapes.Refusal) -> None:
    said = answers.get(f"bad-{at:03}", "")
    assert said, "it was let in"
    assert refusal.says in said


def test_our_own_policy_refuses_what_opens_the_host_where_pod_security_does_not(deployed: Deployed) -> None:
    alone = "ringfence-test-alone"
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": alone, "annotations": {"ringfence.runtime-classes": "gvisor"}},
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": alone},
        "spec": {
            "policyName": "ringfence-sandbox-pods",
            "validationActions": ["Deny"],
            "matchResources": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": alone}}},
        },
    }
    accounts = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": alone}}
        for name in ("agent", "proxy")
    ]
    deployed.cluster.apply(namespace, binding, *accounts)
    opening = [each for each in shapes.REFUSALS if each.says == shapes.POD_SECURITY and "host" in each.title]
    assert len(opening) > 3
    for at, refusal in enumerate(opening):
        made = refusal.object(f"alone-{at}")
        made["metadata"]["namespace"] = alone
        said = deployed.judge_until(made, "ringfence-sandbox-pods")
        assert ("ringfence-sandbox-pods" in said) == (refusal.title != "a port of the host"), refusal.title
    good = shapes.agent("good")
    good["metadata"]["namespace"] = alone
    assert deployed.judge(good) == ""


def test_a_plain_agent_is_let_in_where_the_namespace_says_that_it_may_be(deployed: Deployed) -> None:
    cluster = deployed.cluster
    plain = shapes.agent("plain")
    del plain["spec"]["runtimeClassName"]
    assert "ringfence-sandbox-pods" in deployed.judge(plain)
    annotate = ("annotate", "--overwrite", "namespace", NAMESPACE)
    cluster.kubectl(*annotate, "ringfence.runtime-classes=gvisor,none", check=True)
    try:
        assert deployed.judge_until(plain, "") == ""
        # The runtime's own process is the first one then.
        plain["spec"]["shareProcessNamespace"] = True
        assert deployed.judge(plain) == ""
        cluster.kubectl(*annotate, "ringfence.runtime-classes-", check=True)
        assert "ringfence-sandbox-pods" in deployed.judge_until(plain, "ringfence-sandbox-pods")
        assert "ringfence-sandbox-pods" in deployed.judge(shapes.agent("gvisor"))
    finally:
        cluster.kubectl(*annotate, "ringfence.runtime-classes=gvisor", check=True)
        deployed.judge_until(shapes.agent("gvisor"), "")


def test_labels_that_policies_select_by_stay_and_nothing_joins_a_pod_later(cluster: Cluster) -> None:
    cluster.apply(shapes.agent("stays"))
    try:
        for change in ("ringfence.role=proxy", "ringfence.run=other", "ringfence.owner-"):
            done = cluster.kubectl("label", "--overwrite", "pod", "stays", "-n", NAMESPACE, change)
            assert "ringfence-sandbox-pods" in done.stderr, change
        cluster.kubectl("annotate", "pod", "stays", "-n", NAMESPACE, "ringfence.start=x", check=True)
        one = shapes.container("debugger", "x.invalid/debug:test", "true")
        del one["resources"]
        body = json.dumps({"spec": {"ephemeralContainers": [one]}})
        done = cluster.kubectl(
            "patch", "pod", "stays", "-n", NAMESPACE, "--subresource=ephemeralcontainers", "-p", body
        )
        assert "ringfence-sandbox-pods" in done.stderr
    finally:
        cluster.kubectl("delete", "pod", "stays", "-n", NAMESPACE, "--grace-period=0", "--force")


def test_default_deny_can_neither_be_removed_nor_opened_by_whoever_is_no_administrator(cluster: Cluster) -> None:
    there = ("networkpolicy", "default-deny", "-n", NAMESPACE)
    path = f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies/default-deny"
    assert "ringfence-sandbox-network" in cluster.kubectl("delete", "--raw", path, f"--as={DAEMON}").stderr
    # An administrator may remove it, and may not have it allow anything.
    opened = json.dumps({"spec": {"egress": [{}]}})
    assert "ringfence-sandbox-network" in cluster.kubectl("patch", *there, "-p", opened).stderr
    assert cluster.kubectl("get", *there).returncode == 0


FORBIDDEN = (
    ("create", "pods/exec", NAMESPACE),
    ("get", "pods/exec", NAMESPACE),
    ("create", "pods/attach", NAMESPACE),
    ("create", "pods/portforward", NAMESPACE),
    ("patch", "pods/ephemeralcontainers", NAMESPACE),
    ("get", "secrets", NAMESPACE),
    ("list", "secrets", NAMESPACE),
    ("create", "serviceaccounts/token", NAMESPACE),
    ("create", "services", NAMESPACE),
    ("create", "rolebindings", NAMESPACE),
    ("patch", "namespaces", NAMESPACE),
    ("watch", "pods", NAMESPACE),
    ("create", "pods", "default"),
    ("list", "pods", "kube-system"),
    ("get", "secrets", "ringfence"),
    ("create", "pods", "ringfence"),
    ("patch", "nodes", ""),
    ("create", "runtimeclasses", ""),
    ("delete", "validatingadmissionpolicybindings", ""),
)


@pytest.mark.parametrize(("verb", "resource", "namespace"), FORBIDDEN, ids=[" ".join(each) for each in FORBIDDEN])
def test_the_daemon_may_not(cluster: Cluster, verb: str, resource: str, namespace: str) -> None:
    kind, _, part = resource.partition("/")
    where = [*(["-n", namespace] if namespace else []), *([f"--subresource={part}"] if part else [])]
    assert cluster.kubectl("auth", "can-i", verb, kind, *where, f"--as={DAEMON}").stdout.strip() == "no"


def test_what_an_agent_and_a_proxy_may_is_nothing(cluster: Cluster) -> None:
    for account in ("agent", "proxy"):
        user = f"--as=system:serviceaccount:{NAMESPACE}:{account}"
        for verb, resource in (("get", "pods"), ("list", "secrets"), ("create", "pods"), ("get", "configmaps")):
            done = cluster.kubectl("auth", "can-i", verb, resource, "-n", NAMESPACE, user)
            assert done.stdout.strip() == "no"
