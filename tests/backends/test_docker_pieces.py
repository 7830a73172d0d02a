"""Small decisions of the docker backend: which image a digest names, what a proxy in a container is told."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from reconciler.backends.base import ExitCode
from reconciler.backends.docker import Docker
from reconciler.backends.docker_engine import EngineError
from reconciler.backends.docker_image import FoundImage, find_image
from reconciler.backends.docker_proxy import NoResolver, reachable
from reconciler.backends.exits import why_not
from reconciler.backends.input_files import archive
from reconciler.core.choose import Missing
from reconciler.host import DockerSettings
from tests.backends.docker_world import OWNER, Kind, beside
from tests.backends.world import host, policy
from tests.rig.docker import Runtime
from tests.rig.docker.fixtures import Setup

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.backends.docker_world import Engines

DIGEST, OTHER = "sha256:" + "a" * 64, "sha256:" + "b" * 64


class Images:
    """An engine that has some images, by each reference under which it finds one."""

    def __init__(self, images: Mapping[str, dict[str, Any]]) -> None:
        self._images = images

    async def image(self, reference: str) -> dict[str, Any] | None:
        """Look one up."""
        return self._images.get(reference)


ROW = {"Id": OTHER, "RepoTags": ["registry.example.com:5000/team/agent:1"], "Config": {"Volumes": {"/data": {}}}}
FOUND = FoundImage(OTHER, ("/data",))
NAME = "registry.example.com:5000/team/agent"


@pytest.mark.parametrize(
    ("images", "reference", "found"),
    [
        pytest.param({f"{NAME}@{DIGEST}": ROW}, f"{NAME}@{DIGEST}", FOUND, id="one that was pulled"),
        pytest.param({f"{NAME}@{DIGEST}": ROW}, f"{NAME}:1@{DIGEST}", FOUND, id="its tag is not looked at"),
        pytest.param({DIGEST: ROW}, f"{NAME}@{DIGEST}", FOUND, id="one that was loaded, by its id"),
        pytest.param({DIGEST: ROW}, f"elsewhere/agent@{DIGEST}", None, id="an id of another repository"),
        pytest.param({DIGEST: ROW | {"RepoTags": None}}, f"{NAME}@{DIGEST}", None, id="an id without a name"),
        pytest.param({DIGEST: ROW}, DIGEST, FOUND, id="an id alone, as the probe has it"),
        pytest.param({}, f"{NAME}@{DIGEST}", None, id="none"),
    ],
)
def test_an_image_by_digest(images: Mapping[str, dict[str, Any]], reference: str, found: FoundImage | None) -> None:
    engine = Images(images)
    assert anyio.run(find_image, engine, reference) == found  # type: ignore[arg-type]  # all that is asked of one


def told(*resolvers: tuple[str, int], upstreams: tuple[tuple[str, int], ...] = ()) -> object:
    given = policy("run", generation=1, expires_at=1e10, resolvers=resolvers)
    return reachable(given, upstreams=upstreams, addresses=("127.0.0.1", "10.0.0.5", "fe80::1%eth0"))


def test_a_proxy_in_a_container_is_told_of_the_hosts_addresses() -> None:
    made = told(("9.9.9.9", 53))
    assert not isinstance(made, NoResolver)
    assert made.local_addresses == ("127.0.0.1", "10.0.0.5", "fe80::1")  # type: ignore[attr-defined]  # a policy


@pytest.mark.parametrize(
    ("resolvers", "upstreams", "found"),
    [
        ((("9.9.9.9", 53),), (("8.8.8.8", 53),), (("9.9.9.9", 53),)),
        ((("127.0.0.53", 53),), (("127.0.0.53", 53), ("8.8.8.8", 53)), (("8.8.8.8", 53),)),
        ((("::1", 53), ("9.9.9.9", 53)), (("8.8.8.8", 53),), (("9.9.9.9", 53), ("8.8.8.8", 53))),
    ],
    ids=["servers elsewhere stay", "a stub is replaced by what it asks", "one of two is a stub"],
)
def test_a_stub_on_loopback_is_replaced(
    resolvers: tuple[tuple[str, int], ...], upstreams: tuple[tuple[str, int], ...], found: tuple[tuple[str, int], ...]
) -> None:
    assert told(*resolvers, upstreams=upstreams).resolvers == found  # type: ignore[attr-defined]  # a policy


def test_a_host_with_nothing_but_a_stub_has_no_resolver() -> None:
    assert isinstance(told(("127.0.0.53", 53), upstreams=(("127.0.0.53", 53),)), NoResolver)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ('exec: "x": executable file not found in $PATH: unknown', ExitCode.NOT_FOUND),
        ('exec: "/x": stat /x: no such file or directory', ExitCode.NOT_FOUND),
        ('exec: "/etc/passwd": permission denied', ExitCode.NOT_EXECUTABLE),
        ('exec: "/usr": is a directory', ExitCode.NOT_EXECUTABLE),
        ("failed to set up the network", ExitCode.SANDBOX_CRASHED),
    ],
)
def test_why_a_command_did_not_start(message: str, code: ExitCode) -> None:
    assert why_not(message) is code


def test_an_archive_is_the_same_for_the_same_files_and_holds_directories() -> None:
    assert archive({"a/b": b"1", "c": b""}) == archive({"c": b"", "a/b": b"1"})


def test_an_engine_that_is_not_there_is_missing_and_says_what_to_install(tmp_path: Path) -> None:
    for settings, code in (
        (DockerSettings(), "no_proxy_image"),
        (DockerSettings(proxy_image=f"x@{DIGEST}", socket=tmp_path / "none.sock"), "no_docker"),
    ):
        found = anyio.run(Docker(dataclasses.replace(host(tmp_path), docker=settings), OWNER).probe)
        assert isinstance(found, Missing)
        assert found.code == code
        assert found.message


@pytest.mark.docker
@pytest.mark.rig
def test_a_proxy_image_that_the_engine_lacks_is_missing(
    docker_engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Kind(setup=Setup(), runtime=Runtime.RUNC)
    with beside(docker_engines.engine(kind.setup), monkeypatch):
        settings = docker_engines.settings(kind)
        lacking = dataclasses.replace(settings.docker, proxy_image=f"ringfence.invalid/proxy@{DIGEST}")
        found = anyio.run(Docker(dataclasses.replace(settings, docker=lacking), OWNER).probe)
    assert isinstance(found, Missing)
    assert found.code == "no_proxy_image"


def test_an_error_of_the_engine_carries_its_status() -> None:
    assert EngineError("no", 409).status == 409
