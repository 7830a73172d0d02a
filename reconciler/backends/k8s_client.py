"""Owns talking to one cluster's API server: the only place that imports the client library.

Bodies go in as plain data and come out as plain data, read from the raw reply: the typed models of the library differ
between its majors, and one of them loses what it does not know. What an API server says no to is a value where a caller
can do something about it, else `ClusterError`. Calls run in worker threads, so many at a time.
"""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import anyio
import anyio.from_thread
import anyio.to_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

Plain = dict[str, Any]

_CALL_S = (5.0, 15.0)
"""Seconds to connect, and to wait for a reply."""
_FOLLOW_S = (5.0, 3600.0)
"""A log that says nothing for so long is asked for again."""
_AT_ONCE = 16
_FOLLOWED_AT_ONCE = 512
_POOL = 64
_CHUNK = 64 * 1024
_MOST_LOG = 1 << 20
_NOT_FOUND = 404
_REFUSED = frozenset({401, 403})
_MERGE = "application/merge-patch+json"
_LONGEST_MESSAGE = 500
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class ClusterError(Exception):
    """The API server is not there, or does not do as it is told; `status` is its answer's, 0 where there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def no_right(self) -> bool:
        """Whether it is a right that is missing."""
        return self.status in _REFUSED


class Kind(StrEnum):
    """What is made, read and removed; the values are the library's words for them."""

    POD = "pod"
    JOB = "job"
    POLICY = "network_policy"
    CONFIG_MAP = "config_map"
    EVENT = "event"


_GROUPS = {Kind.JOB: "batch", Kind.POLICY: "networking"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Connection:
    """The library's objects, and how many of its calls may go on at once."""

    core: Any
    batch: Any
    networking: Any
    node: Any
    version: Any
    host: str
    calls: anyio.CapacityLimiter
    follows: anyio.CapacityLimiter


@dataclass(slots=True)
class Cluster:
    """One namespace of one cluster. `made` counts the calls that were made through this value."""

    namespace: str
    connection: _Connection
    made: int = field(default=0)

    def counted(self) -> Cluster:
        """Give the same cluster with a count of its own."""
        return Cluster(self.namespace, self.connection)

    @property
    def server(self) -> str:
        """The API server's URL."""
        return self.connection.host

    async def versions(self) -> Plain:
        """Ask for the API server's version.

        Raises:
            ClusterError: it does not answer.
        """
        return await self._json(self.connection.version.get_code)

    async def create(self, kind: Kind, body: Plain) -> Plain:
        """Create an object; what the API server made of it.

        Raises:
            ClusterError: it refused, or is not there.
        """
        return await self._json(self._method("create", kind), (self.namespace, body), {"field_validation": "Strict"})

    async def get(self, kind: Kind, name: str) -> Plain | None:
        """Read an object; None when there is none.

        Raises:
            ClusterError: the API server is not there, or the right is missing.
        """
        return await self._maybe(self._method("read", kind), (name, self.namespace))

    async def find(self, kind: Kind, *, labels: str = "", fields: str = "") -> list[Plain]:
        """List the objects of the namespace that have these labels and fields.

        Raises:
            ClusterError: the API server is not there, or the right is missing.
        """
        asked = {key: value for key, value in (("label_selector", labels), ("field_selector", fields)) if value}
        found = await self._json(self._method("list", kind), (self.namespace,), asked)
        items: list[Plain] = found.get("items") or []
        return items

    async def patch(self, kind: Kind, name: str, body: Plain) -> Plain:
        """Merge a change into an object (RFC 7386).

        Raises:
            ClusterError: the API server refused, or is not there.
        """
        return await self._json(self._method("patch", kind), (name, self.namespace, body), {"_content_type": _MERGE})

    async def delete(self, kind: Kind, name: str, *, grace: int | None = None) -> bool:
        """Have an object removed, in the background; False when it was not there.

        Raises:
            ClusterError: the API server refused, or is not there.
        """
        asked: dict[str, Any] = {"propagation_policy": "Background"}
        if grace is not None:
            asked["grace_period_seconds"] = grace
        return await self._maybe(self._method("delete", kind), (name, self.namespace), asked) is not None

    async def nodes(self) -> list[Plain]:
        """List all nodes.

        Raises:
            ClusterError: the API server is not there, or the right is missing.
        """
        found = await self._json(self.connection.core.list_node)
        items: list[Plain] = found.get("items") or []
        return items

    async def runtime_class(self, name: str) -> Plain | None:
        """Read a RuntimeClass; None when the cluster has none of this name.

        Raises:
            ClusterError: the API server is not there, or the right is missing.
        """
        return await self._maybe(self.connection.node.read_runtime_class, (name,))

    async def log(self, pod: str, container: str) -> bytes:
        """Read what a container wrote so far, both outputs as they came, cut.

        Raises:
            ClusterError: there is no such container yet, or the API server is not there.
        """
        response = await self._call(
            self.connection.core.read_namespaced_pod_log,
            (pod, self.namespace),
            {"container": container, "limit_bytes": _MOST_LOG},
        )
        return bytes(response.data)

    async def follow(self, pod: str, container: str, output: Callable[[bytes], None]) -> bool:
        """Hand on what a container writes; a cancellation ends it at once.

        True at the end of its log, False when the connection ended before that.

        Raises:
            ClusterError: there is no such container yet, or the API server is not there.
        """
        response = await self._call(
            self.connection.core.read_namespaced_pod_log,
            (pod, self.namespace),
            {"container": container, "follow": True, "_request_timeout": _FOLLOW_S},
        )
        done = anyio.Event()
        whole = False

        async def pump() -> None:
            nonlocal whole
            # Not to be cancelled: it ends when the connection does, and whoever waits closes that.
            with anyio.CancelScope(shield=True):
                whole = await anyio.to_thread.run_sync(_pump, response, output, limiter=self.connection.follows)
            done.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pump)
            try:
                await done.wait()
            finally:
                if not done.is_set():
                    _shut(response)
        return whole

    def _method(self, verb: str, kind: Kind) -> Callable[..., Any]:
        group = getattr(self.connection, _GROUPS.get(kind, "core"))
        method: Callable[..., Any] = getattr(group, f"{verb}_namespaced_{kind}")
        return method

    async def _maybe(
        self, method: Callable[..., Any], arguments: tuple[Any, ...], asked: Mapping[str, Any] = _NOTHING
    ) -> Plain | None:
        try:
            return await self._json(method, arguments, asked)
        except ClusterError as error:
            if error.status == _NOT_FOUND:
                return None
            raise

    async def _json(
        self, method: Callable[..., Any], arguments: tuple[Any, ...] = (), asked: Mapping[str, Any] = _NOTHING
    ) -> Plain:
        response = await self._call(method, arguments, asked)
        try:
            found = json.loads(response.data)
        except ValueError as error:
            raise ClusterError("the API server's reply is not JSON") from error
        if not isinstance(found, dict):
            raise ClusterError("the API server's reply is not an object")
        return found

    async def _call(self, method: Callable[..., Any], arguments: tuple[Any, ...], asked: Mapping[str, Any]) -> Any:
        self.made += 1
        timed = {"_request_timeout": _CALL_S, **asked}
        return await anyio.to_thread.run_sync(_call, method, arguments, timed, limiter=self.connection.calls)


def _call(method: Callable[..., Any], arguments: tuple[Any, ...], asked: Mapping[str, Any]) -> Any:
    from kubernetes.client.exceptions import ApiException  # noqa: PLC0415 - a third of a second of every command's start
    from urllib3.exceptions import HTTPError  # noqa: PLC0415 - as above

    try:
        response = method(*arguments, _preload_content=False, **asked)
    except ApiException as error:
        raise ClusterError(_message(error.body, str(error.reason)), int(error.status or 0)) from None
    except (HTTPError, OSError) as error:
        raise ClusterError(f"the API server is not there: {type(error).__name__}") from None
    if not 200 <= response.status < 300:  # noqa: PLR2004 - what HTTP calls success
        raise ClusterError(_message(response.data, str(response.reason)), response.status)
    return response


def _message(body: Any, otherwise: str) -> str:
    """Read what a Status object says (Kubernetes API conventions, "Response Status Kind")."""
    try:
        said = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):
        return otherwise
    return str(said)[:_LONGEST_MESSAGE]


def _pump(response: Any, output: Callable[[bytes], None]) -> bool:
    from urllib3.exceptions import HTTPError  # noqa: PLC0415 - as above

    try:
        for chunk in response.stream(_CHUNK, decode_content=False):
            anyio.from_thread.run_sync(output, chunk)
    except (HTTPError, OSError, ValueError):
        return False
    finally:
        response.close()
    return True


def _shut(response: Any) -> None:
    """End a reply that another thread is reading."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        response.shutdown()
        return
    with contextlib.suppress(OSError, AttributeError):
        response.connection.sock.shutdown(socket.SHUT_RDWR)


def connect(namespace: str, *, kubeconfig: Path | None, context: str | None = None) -> Cluster:
    """Read the credentials of a cluster: of a file, or of the pod that this runs in. Asks nothing of it yet.

    Raises:
        ClusterError: there are none that can be used.
    """
    from kubernetes import client, config  # noqa: PLC0415 - as above

    configuration = client.Configuration()
    try:
        if kubeconfig is None:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=str(kubeconfig),
                context=context,
                client_configuration=configuration,
                persist_config=False,
            )
    except (config.ConfigException, OSError, ValueError) as error:
        raise ClusterError(f"no usable credentials: {error}") from None
    if not str(configuration.host).startswith("https://") or not configuration.verify_ssl:
        raise ClusterError("the API server must be reached over TLS, with its certificate verified")
    configuration.connection_pool_maxsize = _POOL
    # Nothing is tried again behind our back: whoever asks knows whether asking twice is harmless.
    configuration.retries = False
    configuration.proxy = None
    api = client.ApiClient(configuration)
    return Cluster(
        namespace,
        _Connection(
            core=client.CoreV1Api(api),
            batch=client.BatchV1Api(api),
            networking=client.NetworkingV1Api(api),
            node=client.NodeV1Api(api),
            version=client.VersionApi(api),
            host=str(configuration.host),
            calls=anyio.CapacityLimiter(_AT_ONCE),
            follows=anyio.CapacityLimiter(_FOLLOWED_AT_ONCE),
        ),
    )
