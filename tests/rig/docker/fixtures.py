"""Owns the pytest fixtures of the Docker rig; starts and ends engines, tests nothing."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.requirements import required
from tests.rig import Rig
from tests.rig.docker import Engine, Firewall, Image, Store, Which, agent_image_tar, cache, proxy_image_tar

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """What every engine of `docker_engine` has loaded."""

    agent: Image
    proxy: Image


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Which engine a test wants; the value of the fixture `docker_engine`'s parameter."""

    which: Which = Which.CURRENT
    firewall: Firewall = Firewall.IPTABLES
    store: Store | None = None
    rp_filter: int = 0
    local_resolver: bool = False

    def __str__(self) -> str:
        """Read as a test's id."""
        store = "" if self.store is None else f", {self.store} store"
        resolver = ", resolver on loopback" if self.local_resolver else ""
        return f"{self.which} engine, {self.firewall}{store}, rp_filter {self.rp_filter}{resolver}"


ENGINES = (
    Setup(),
    Setup(firewall=Firewall.NFTABLES, rp_filter=2),
    Setup(store=Store.CLASSIC),
    Setup(which=Which.DEBIAN),
)
"""Both engines, both firewalls, both stores: what a test of the Docker fence has to hold on."""


@pytest.fixture(scope="session")
def docker_built() -> None:
    """Skip where nothing was built; build it where REQUIRE_BACKENDS names docker."""
    if os.geteuid() != 0:
        pytest.skip("the Docker rig needs root")
    if not cache.built():
        if "docker" not in required():
            pytest.skip("the Docker rig is not built: `python -m tests.rig.docker build` (about 6 minutes)")
        cache.build(*cache.everything())


@pytest.fixture(scope="session")
def docker_images(docker_built: None, tmp_path_factory: pytest.TempPathFactory) -> Images:
    """The archives of the agent's test image and of the proxy image."""
    del docker_built
    place = tmp_path_factory.mktemp("images")
    return Images(agent=agent_image_tar(place / "agent.tar"), proxy=proxy_image_tar(place / "proxy.tar"))


@pytest.fixture(scope="module", params=ENGINES, ids=str)
def docker_engine(request: pytest.FixtureRequest, docker_images: Images) -> Iterator[Engine]:
    """An engine with both images loaded, in a rig of its own (`.rig`); narrow it by `parametrize(indirect=True)`."""
    setup: Setup = request.param
    with contextlib.ExitStack() as stack:
        rig = stack.enter_context(Rig())
        made = stack.enter_context(
            Engine(
                rig,
                which=setup.which,
                firewall=setup.firewall,
                store=setup.store,
                rp_filter=setup.rp_filter,
                local_resolver=setup.local_resolver,
            )
        )
        for image in (docker_images.agent, docker_images.proxy):
            made.load(image.archive)
        yield made
    if rig.stragglers:
        pytest.fail("still running in the rig's host namespace:\n  " + "\n  ".join(rig.stragglers), pytrace=False)
