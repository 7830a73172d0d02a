"""Which backend a run gets."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.core.choose import Available, Chosen, Missing, Probe, choose, strength
from reconciler.core.job import RefusalCode, Refused
from reconciler.core.policy import BackendChoice, BackendName, Isolation
from tests.flow.house import agent, platform

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reconciler.core.policy import Agent

DIGEST = "registry.example/helper@sha256:" + "0" * 64
USUAL = {
    BackendName.K8S: Isolation.GVISOR,
    BackendName.FIRECRACKER: Isolation.MICROVM,
    BackendName.DOCKER: Isolation.CONTAINER,
    BackendName.BUBBLEWRAP: Isolation.NAMESPACE,
}


def host(*names: BackendName, **isolations: Isolation) -> dict[BackendName, Probe]:
    """Probe results of a host that has these backends."""
    return {
        name: Available(backend=name, isolation=isolations.get(name, USUAL[name]))
        if name in names
        else Missing(backend=name, code=f"no_{name}", message=f"install {name}")
        for name in BackendName
    }


def wants(image: str, minimum: str) -> Agent:
    """An agent with this image and minimum."""
    return agent(image=image, minimum_isolation=Isolation(minimum))


EVERYTHING = host(*BackendName)


@pytest.mark.parametrize(
    ("probes", "image", "minimum", "expected"),
    [
        pytest.param(EVERYTHING, DIGEST, "container", "firecracker", id="the strongest"),
        pytest.param(host(BackendName.K8S, BackendName.DOCKER), DIGEST, "container", "k8s", id="gvisor over container"),
        pytest.param(
            host(BackendName.K8S, BackendName.DOCKER, docker=Isolation.GVISOR),
            DIGEST,
            "gvisor",
            "k8s",
            id="equal ones in the table's order",
        ),
        pytest.param(EVERYTHING, "host", "namespace", "bubblewrap", id="the host's image runs on bubblewrap only"),
        pytest.param(host(BackendName.DOCKER), DIGEST, "namespace", "docker", id="more than the minimum is fine"),
    ],
)
def test_auto_takes_the_strongest_that_fits(
    probes: Mapping[BackendName, Probe], image: str, minimum: str, expected: str
) -> None:
    chosen = choose(platform(), agent(image=image, minimum_isolation=Isolation(minimum)), probes)
    assert isinstance(chosen, Chosen)
    assert chosen.backend == expected


@pytest.mark.parametrize(
    ("backend", "probes", "helper", "code", "says"),
    [
        pytest.param(
            "auto", host(), wants(DIGEST, "container"), "backend_missing", "install docker", id="nothing is there"
        ),
        pytest.param(
            "auto",
            host(BackendName.BUBBLEWRAP),
            wants("host", "container"),
            "isolation_too_low",
            "signed reason",
            id="all that is there isolates too little",
        ),
        pytest.param(
            "auto",
            host(BackendName.BUBBLEWRAP),
            wants(DIGEST, "namespace"),
            "image_needs_backend",
            "image: host",
            id="all that is there runs other images",
        ),
        pytest.param(
            "firecracker",
            host(BackendName.BUBBLEWRAP),
            wants("host", "namespace"),
            "backend_missing",
            "install firecracker",
            id="a named backend is never replaced",
        ),
        pytest.param(
            "docker", EVERYTHING, wants(DIGEST, "gvisor"), "isolation_too_low", "gvisor", id="named and too weak"
        ),
        pytest.param(
            "docker", EVERYTHING, wants("host", "namespace"), "image_needs_backend", "digest", id="named, other image"
        ),
        pytest.param(
            "docker", {}, wants(DIGEST, "container"), "backend_missing", "not probed", id="named and not probed"
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_says_why(
    backend: str, probes: Mapping[BackendName, Probe], helper: Agent, code: str, says: str
) -> None:
    refused = choose(platform(backend=BackendChoice(backend)), helper, probes)
    assert isinstance(refused, Refused)
    assert refused.code == code
    assert says in refused.message


def test_a_cluster_without_gvisor_is_refused_where_the_runtime_class_is_required() -> None:
    probes = host(BackendName.K8S, k8s=Isolation.CONTAINER)
    refused = choose(platform(backend=BackendChoice.K8S, require_runtime_class=True), agent(image=DIGEST), probes)
    assert isinstance(refused, Refused)
    assert refused.code is RefusalCode.ISOLATION_TOO_LOW


def test_why_not_a_stronger_one_is_said_of_each() -> None:
    chosen = choose(platform(), agent(image=DIGEST), host(BackendName.DOCKER))
    assert isinstance(chosen, Chosen)
    assert [line.partition(":")[0] for line in chosen.why] == ["k8s", "firecracker", "bubblewrap"]


probes_of_hosts = st.fixed_dictionaries(
    {
        name: st.one_of(
            st.builds(Missing, backend=st.just(name), code=st.just("missing"), message=st.just("install it")),
            st.builds(Available, backend=st.just(name), isolation=st.sampled_from(Isolation)),
        )
        for name in BackendName
    }
)


@given(
    backend=st.sampled_from(BackendChoice),
    probes=probes_of_hosts,
    image=st.sampled_from(["host", DIGEST]),
    minimum=st.sampled_from(Isolation),
    require=st.booleans(),
)
def test_what_is_chosen_is_there_is_named_isolates_enough_and_runs_the_image(
    backend: BackendChoice, probes: dict[BackendName, Probe], image: str, minimum: Isolation, *, require: bool
) -> None:
    helper = agent(image=image, minimum_isolation=minimum)
    chosen = choose(platform(backend=backend, require_runtime_class=require), helper, probes)
    if isinstance(chosen, Refused):
        return
    probe = probes[chosen.backend]
    assert isinstance(probe, Available)
    assert chosen.isolation is probe.isolation
    assert backend in ("auto", chosen.backend)
    assert strength(chosen.isolation) >= strength(minimum)
    assert (image == "host") == (chosen.backend is BackendName.BUBBLEWRAP)


def test_the_order_of_isolations() -> None:
    order = [Isolation.NAMESPACE, Isolation.CONTAINER, Isolation.GVISOR, Isolation.MICROVM]
    assert all(strength(weaker) < strength(stronger) for weaker, stronger in itertools.pairwise(order))
