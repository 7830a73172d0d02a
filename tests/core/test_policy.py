"""The frozen values of what is in force, and the policy of one run's proxy."""

from __future__ import annotations

import dataclasses

import pytest

from proxy.entry import Entry
from reconciler.core.order import Group, Order, order_of
from reconciler.core.policy import Agent, BackendChoice, Isolation, Layer, Limits, Platform, in_force, proxy_policy
from reconciler.core.schema import load_schema
from reconciler.core.units import orders
from tests.core.scene import Host, agent, effective, egress, force, platform, signed

GRANTS = signed(
    ("platform", "/enabled", "value", True),
    ("agents/helper", "/allow", "add", "*.a.com"),
    ("agents/helper", "/submitters", "add", "svc"),
    ("agents/helper", "/env/allow", "add", "ID"),
    ("agents/helper", "/secrets/KEY/file", "value", "/etc/s"),
    ("egress/org", "/allow", "add", "*.a.com"),
)
FILES = (
    platform(enabled=True)
    | agent(
        allow=["*.a.com"],
        deny=["x.a.com"],
        submitters=["svc"],
        env={"allow": ["ID"]},
        secrets={"KEY": {"file": "/etc/s"}},
    )
    | egress(allow=["*.a.com"], deny=["y.a.com"], deny_ranges=["161.26.0.0/16"])
)


def names(order: Order, prefix: str = "") -> set[str]:
    """Name the fields of a schema as the dataclasses do."""
    if not isinstance(order, Group):
        return {prefix}
    found: set[str] = set()
    for name, child in order.fields.items():
        found |= names(child, name if not prefix or prefix in ("limits", "k8s") else f"{prefix}_{name}")
    return found


def fields(*kinds: type) -> set[str]:
    return {field.name for kind in kinds for field in dataclasses.fields(kind)}


def test_each_field_of_the_schemas_is_a_field_of_the_frozen_values() -> None:
    """A new field has to be carried to where it counts, or this fails."""
    assert names(order_of(load_schema("platform"))) - {"version", "kind"} == fields(Platform)
    assert names(order_of(load_schema("agent"))) - {"version", "kind"} == (fields(Agent) - {"limits"}) | fields(Limits)
    assert names(orders().layer) - {"default"} | {"default_allow", "name"} == fields(Layer)


def test_everything_in_force_becomes_frozen_values() -> None:
    found = force(Host().good(FILES, GRANTS))
    assert found.platform == Platform(
        enabled=True,
        backend=BackendChoice.AUTO,
        require_runtime_class=False,
        max_parallel_runs=4,
        tolerate_icmp=False,
    )
    helper = found.agents["helper"]
    assert helper.agent.allow == (Entry("a.com", wildcard=True, port=None),)
    assert helper.agent.deny == (Entry("x.a.com", wildcard=False, port=None),)
    assert helper.agent.submitters == ("svc",)
    assert helper.agent.env_allow == ("ID",)
    assert helper.agent.secrets == {"KEY": "/etc/s"}
    assert helper.agent.minimum_isolation is Isolation.CONTAINER
    assert helper.agent.limits.memory == 512 * 2**20
    (layer,) = helper.layers
    assert layer == Layer(
        name="org",
        default_allow=False,
        allow=(Entry("a.com", wildcard=True, port=None),),
        deny=(Entry("y.a.com", wildcard=False, port=None),),
        deny_ranges=("161.26.0.0/16",),
    )
    assert helper.blocked == ()
    assert helper.reasons == ("CHG-1",)


def test_agents_below_the_same_layer_share_its_value() -> None:
    found = force(Host().good(FILES | agent("other"), GRANTS))
    assert found.agents["helper"].layers[0] is found.agents["other"].layers[0]


def test_the_proxys_policy_names_layers_by_their_document() -> None:
    helper = effective(Host().good(FILES, GRANTS))
    found = proxy_policy(
        helper,
        run="20270101T000000-00000000",
        generation=3,
        revision="sha256:0",
        resolvers=(("192.0.2.53", 53),),
        proof_key=b"k" * 32,
        expires_at=100.0,
        local_addresses=("192.0.2.1",),
    )
    assert [layer.name for layer in found.layers] == ["egress/org"]
    assert found.allow == helper.agent.allow
    assert found.deny == helper.agent.deny
    assert found.layers[0].deny_ranges == ("161.26.0.0/16",)
    assert (found.connections, found.generation, found.expires_at) == (256, 3, 100.0)
    assert "kkk" not in repr(found)


def test_what_is_no_tree_raises() -> None:
    tree = Host().good(FILES, GRANTS).tree
    broken = {**tree, "platform": {**tree["platform"], "backend": "vm"}}
    with pytest.raises(ValueError, match="vm"):
        in_force(broken, {}, revision="sha256:0", generation=1)
    with pytest.raises(KeyError):
        in_force({}, {}, revision="sha256:0", generation=1)
    own = {**tree["agents"]["helper"]["own"], "allow": ["*"]}
    broken = {**tree, "agents": {"helper": {**tree["agents"]["helper"], "own": own}}}
    with pytest.raises(ValueError, match="not all entries"):
        in_force(broken, {}, revision="sha256:0", generation=1)
