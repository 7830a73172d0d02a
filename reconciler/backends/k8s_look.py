"""Owns reading the structural proof of a fence in a cluster, from its API server and from this node; judges nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reconciler.backends import k8s_proof
from reconciler.backends.k8s_client import Kind
from reconciler.backends.k8s_place import Role
from reconciler.backends.together import both, side_by_side

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reconciler.backends.k8s_client import Cluster
    from reconciler.backends.k8s_node import Fence
    from reconciler.backends.k8s_place import Where

Plain = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What stands and must go on standing: what each pod and each policy was made from, and the pods' names."""

    cluster: Cluster
    where: Where
    pods: Mapping[Role, Plain]
    policies: Mapping[Role, Plain]
    names: Mapping[Role, str]
    fence: Fence


async def differences(standing: Standing) -> tuple[str, ...]:
    """Look at both pods and at every policy of the namespace; each line names what is not as it must be.

    Raises:
        ClusterError: the API server does not answer.
    """
    cluster, where = standing.cluster, standing.where
    found, policies = await both(
        lambda: side_by_side(*(lambda role=role: cluster.get(Kind.POD, standing.names[role]) for role in Role)),
        lambda: cluster.find(Kind.POLICY),
    )
    pods = dict(zip(Role, found, strict=True))
    by_name = {each["metadata"]["name"]: each for each in policies}
    lines: list[str] = []
    for role in Role:
        pod = pods[role]
        lines += k8s_proof.pod(role, standing.pods[role], pod)
        name = where.name(role)
        lines += k8s_proof.policy(name, standing.policies[role], by_name.get(name))
        labels = standing.pods[role]["metadata"]["labels"] if pod is None else pod["metadata"].get("labels") or {}
        lines += k8s_proof.selecting(labels, policies, [where.name(each) for each in Role], who=role)
    if not k8s_proof.denies_by_default(policies):
        lines.append("no policy of the namespace denies by default")
    return (*lines, *await standing.fence.missing())
