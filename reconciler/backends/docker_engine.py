"""Owns the calls to a Docker engine: one at a time in worker threads, each with its own end; knows no fence.

The only module that imports the client library. Its high-level half is not used: it drops warnings, pulls images by
itself and reads the user's own configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
from docker.api.client import APIClient
from docker.errors import APIError, DockerException, NotFound
from requests.exceptions import ReadTimeout, RequestException
from urllib3.exceptions import HTTPError

from reconciler.backends import docker_attach
from reconciler.backends.docker_versions import api

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    Plain = dict[str, Any]

CALL_S = 30
_WAIT_S = 2
"""How long one request may wait for a container's end; then it is asked again."""
_IN_PROGRESS = 409
_LAST_LINES = 20

T = TypeVar("T")


class EngineError(OSError):
    """The engine is not there, took too long, or refused; `status` is its HTTP status, 0 where it gave none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Versions:
    """What an engine says of itself, as its API gives it."""

    engine: str
    api: str
    oldest_api: str


class Engine:
    """One engine behind a Unix socket. Every method may raise EngineError."""

    def __init__(self, path: str) -> None:
        """Talk to nobody yet."""
        self._path = path
        self._url = f"unix://{path}"
        self._api = ""
        self._client: APIClient | None = None

    async def versions(self) -> Versions:
        """Ask for the versions, in the oldest way that every engine of ours understands."""

        def ask() -> Plain:
            client = APIClient(base_url=self._url, version="1.41", timeout=CALL_S)
            try:
                return client.version(api_version=False)
            finally:
                client.close()

        said = await _in_thread(ask)
        return Versions(said.get("Version", ""), said.get("ApiVersion", ""), said.get("MinAPIVersion", ""))

    def speak(self, versions: Versions) -> bool:
        """Use the newest API that both know; False when there is none."""
        chosen = api(versions.api, versions.oldest_api)
        if chosen is None:
            return False
        self.close()
        self._api = chosen
        self._client = APIClient(base_url=self._url, version=chosen, timeout=CALL_S, num_pools=32)
        # What the environment says of proxies and passwords is not for a socket, and reading it costs each call.
        self._client.trust_env = False
        return True

    @property
    def speaks(self) -> bool:
        """Whether `speak` has settled on an API."""
        return self._client is not None

    def close(self) -> None:
        """Close every connection that is kept."""
        if self._client is not None:
            self._client.close()
            self._client = None

    async def _ask(self, call: Callable[[APIClient], T]) -> T:
        client = self._client
        if client is None:
            raise EngineError("the engine was not asked for its version yet")
        return await _in_thread(lambda: call(client))

    async def info(self) -> Plain:
        """Ask what the engine and its host can do."""
        return await self._ask(lambda client: client.info())

    async def image(self, reference: str) -> Plain | None:
        """Look at an image; None when the engine does not have it under this reference."""
        return await self._ask(lambda client: _or_none(lambda: client.inspect_image(reference)))  # type: ignore[no-untyped-call]  # as its stubs have it

    async def networks(self) -> list[Plain]:
        """List every network."""
        return await self._ask(lambda client: client.networks())

    async def create_network(self, spec: Mapping[str, Any]) -> None:
        """Create a network."""
        name = str(spec["name"])
        await self._ask(
            lambda client: client.create_network(
                name,
                driver=spec["driver"],
                options=dict(spec["options"]),
                ipam=spec["ipam"],
                internal=spec["internal"],
                labels=dict(spec["labels"]),
                enable_ipv6=spec["enable_ipv6"],
            )
        )

    async def network(self, name: str) -> Plain | None:
        """Look at a network; None when there is none of this name."""
        return await self._ask(lambda client: _or_none(lambda: client.inspect_network(name)))

    async def remove_network(self, name: str) -> None:
        """Remove a network; fine when there is none."""
        await self._ask(lambda client: _or_none(lambda: client.remove_network(name)))

    async def connect(self, network: str, container: str, address: str) -> None:
        """Put a container on a second network."""
        await self._ask(lambda client: client.connect_container_to_network(container, network, ipv4_address=address))

    async def create_volume(self, name: str, labels: Mapping[str, str]) -> None:
        """Create a volume of the engine's own."""
        await self._ask(lambda client: client.create_volume(name, driver="local", labels=dict(labels)))

    async def remove_volume(self, name: str) -> None:
        """Remove a volume; fine when there is none."""
        await self._ask(lambda client: _or_none(lambda: client.remove_volume(name, force=True)))

    async def create_container(self, name: str, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Create a container; gives what the engine warns of."""
        made = await self._ask(lambda client: client.create_container_from_config(dict(config), name))  # type: ignore[no-untyped-call]  # as its stubs have it
        return tuple(made.get("Warnings") or ())

    async def put(self, container: str, path: str, archive: bytes) -> None:
        """Unpack a tar archive in a container."""
        if not await self._ask(lambda client: client.put_archive(container, path, archive)):
            raise EngineError(f"the engine did not take the files for {path}")

    async def start(self, container: str) -> None:
        """Start a container."""
        await self._ask(lambda client: client.start(container))

    async def container(self, name: str) -> Plain | None:
        """Look at a container; None when there is none."""
        return await self._ask(lambda client: _or_none(lambda: client.inspect_container(name)))

    async def last_words(self, container: str) -> bytes:
        """Give the last lines that the engine kept of a container's outputs."""
        return await self._ask(lambda client: client.logs(container, stdout=True, stderr=True, tail=_LAST_LINES))

    async def kill(self, container: str, signal: str) -> None:
        """Send a signal; fine when the container does not run or is gone."""

        def call(client: APIClient) -> None:
            try:
                client.kill(container, signal)
            except APIError as error:
                if _status(error) not in (404, _IN_PROGRESS, 500):
                    raise

        await self._ask(call)

    async def wait(self, container: str) -> bool:
        """Wait a little for a container's end; True when it has ended or is gone."""

        def call(client: APIClient) -> bool:
            try:
                client.wait(container, timeout=_WAIT_S)
            except NotFound:
                return True
            except ReadTimeout:
                return False
            except RequestException as error:
                # How the client library lets a timeout while reading a body through.
                if "timed out" in str(error).lower():
                    return False
                raise
            return True

        return await self._ask_abandoning(call)

    async def _ask_abandoning(self, call: Callable[[APIClient], T]) -> T:
        client = self._client
        if client is None:
            raise EngineError("the engine was not asked for its version yet")
        return await _in_thread(lambda: call(client), abandon=True)

    async def remove_container(self, name: str) -> None:
        """Kill and remove a container with its anonymous volumes; fine when it is gone or going."""

        def call(client: APIClient) -> None:
            try:
                client.remove_container(name, force=True, v=True)
            except APIError as error:
                if _status(error) not in (404, _IN_PROGRESS):
                    raise

        await self._ask(call)

    async def labelled(self, label: str) -> tuple[list[Plain], list[Plain], list[Plain]]:
        """List the containers, networks and volumes that carry a label (`name=value`)."""
        filters = {"label": [label]}

        def call(client: APIClient) -> tuple[list[Plain], list[Plain], list[Plain]]:
            volumes = client.volumes(filters=filters).get("Volumes") or []
            return client.containers(all=True, filters=filters), client.networks(filters=filters), volumes

        return await self._ask(call)

    async def attach(self, container: str, *, stdin: bool) -> socket.socket:
        """Attach to a container that has not started; the caller closes what it gets. Framed outputs, raw input."""
        version = self._api
        return await _in_thread(lambda: docker_attach.attach(self._path, api=version, container=container, stdin=stdin))


async def _in_thread(call: Callable[[], T], *, abandon: bool = False) -> T:
    """Run one call in a worker thread; whatever the library raises comes out as EngineError."""

    def guarded() -> T:
        try:
            return call()
        except APIError as error:
            raise EngineError(_words(error), _status(error)) from error
        except (DockerException, RequestException, HTTPError, OSError) as error:
            raise EngineError(f"{type(error).__name__}: {error}"[:500]) from error

    return await anyio.to_thread.run_sync(guarded, abandon_on_cancel=abandon)


def _or_none(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except NotFound:
        return None


def _status(error: APIError) -> int:
    return int(error.status_code or 0)


def _words(error: APIError) -> str:
    text: object = error.explanation or error
    return str(text).strip()[:500]
