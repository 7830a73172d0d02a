"""Owns waiting for pods: until they run, until they are gone, and for all that a container of theirs writes.

Asks again and again; a cluster's own words say why something does not come.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio

from reconciler.backends.k8s_client import ClusterError, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from reconciler.backends.k8s_client import Cluster

Plain = dict[str, Any]

ASK_S = 0.15
"""How often a pod is asked for while somebody waits for it."""
_SLOWLY_S = 1.0
_AWAY_S = 30.0
"""How long an API server may be away before what is in the cluster counts as lost."""
_HOPELESS = frozenset(
    {"ErrImageNeverPull", "InvalidImageName", "ImageInspectError", "CreateContainerConfigError", "ErrImagePull"}
)
"""Reasons of a waiting container that do not pass."""
_NO_HANDLER = re.compile(r"no runtime for |RuntimeHandler .* not supported|failed to get sandbox runtime")
_SETTLED = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class NotRunning:
    """A pod, or a container of it, that does not come up; `message` is the cluster's own."""

    code: str
    message: str


def status_of(pod: Plain, container: str) -> Plain:
    """Give the status of one container of a pod; empty while there is none."""
    status = pod.get("status") or {}
    rows = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    return next((row for row in rows if row.get("name") == container), {})


def has_begun(pod: Plain, container: str) -> bool:
    """Say whether a container runs or has run."""
    state = status_of(pod, container).get("state") or {}
    return "running" in state or "terminated" in state


def is_over(pod: Plain) -> bool:
    """Say whether nothing of a pod will run any more."""
    return (pod.get("status") or {}).get("phase") in _SETTLED


async def until_begun(cluster: Cluster, name: str, container: str, limit: float) -> Plain | NotRunning:
    """Wait until a container runs or has run; the pod as it is then, or why not within `limit` seconds.

    Raises:
        ClusterError: the API server is not there.
    """
    deadline = anyio.current_time() + limit
    asked = 0
    while True:
        pod = await cluster.get(Kind.POD, name)
        if pod is None:
            return NotRunning("pod_gone", f"the pod {name} is gone")
        if has_begun(pod, container):
            return pod
        if is_over(pod):
            return NotRunning("pod_failed", f"the pod {name} ended: {await _why(cluster, pod, container)}")
        waiting = (status_of(pod, container).get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _HOPELESS:
            return NotRunning("no_image", f"{waiting.get('reason')}: {waiting.get('message') or ''}")
        late = anyio.current_time() >= deadline
        asked += 1
        if late or asked % 8 == 0:
            why = await _why(cluster, pod, container)
            if _NO_HANDLER.search(why):
                return NotRunning("no_runtime_handler", why)
            if late:
                return NotRunning("pod_not_started", f"the pod {name} did not start within {limit:g} s: {why}")
        await anyio.sleep(ASK_S)


async def _why(cluster: Cluster, pod: Plain, container: str) -> str:
    """Say what the cluster itself says of a pod that does not come up: its last warning, else its status."""
    name = pod["metadata"]["name"]
    events = await cluster.find(Kind.EVENT, fields=f"involvedObject.name={name}")
    warnings = [each for each in events if each.get("type") == "Warning"]
    if warnings:
        last = max(warnings, key=lambda each: str(each.get("lastTimestamp") or each.get("eventTime") or ""))
        return f"{last.get('reason')}: {str(last.get('message'))[:400]}"
    status = pod.get("status") or {}
    waiting = (status_of(pod, container).get("state") or {}).get("waiting") or {}
    words = (status.get("reason"), status.get("message"), waiting.get("reason"), waiting.get("message"))
    return "; ".join(str(word) for word in words if word) or f"it is {status.get('phase')}"


async def until_gone(cluster: Cluster, kind: Kind, name: str) -> None:
    """Wait until an object is gone; the caller says for how long.

    Raises:
        ClusterError: the API server is not there.
    """
    while await cluster.get(kind, name) is not None:  # noqa: ASYNC110 - another machine tells of no event
        await anyio.sleep(ASK_S)


async def until_over(
    cluster: Cluster, name: str, container: str, *, hint: anyio.Event, given_up: Callable[[], bool]
) -> Plain | None:
    """Wait until a container has ended; its pod as it is then, None when that cannot be known.

    Args:
        cluster: where.
        name: the pod.
        container: which container of it.
        hint: set when it may have ended: until then it is asked for seldom.
        given_up: says when nobody waits any more.
    """
    away = 0.0
    while away < _AWAY_S and not given_up():
        pause = ASK_S if hint.is_set() else _SLOWLY_S
        try:
            pod = await cluster.get(Kind.POD, name)
        except ClusterError:
            away += pause
        else:
            away = 0.0
            if pod is None:
                return None
            if "terminated" in (status_of(pod, container).get("state") or {}) or is_over(pod):
                return pod
        if hint.is_set():
            await anyio.sleep(pause)
        else:
            with anyio.move_on_after(pause):
                await hint.wait()
    return None


async def hear(cluster: Cluster, name: str, container: str, output: Callable[[bytes], None]) -> None:
    """Hand on everything that a container writes until it has ended; it has begun already.

    A connection that ends before the container is made again, and what was handed on already is left out.
    """
    given = 0
    away = 0.0
    while away < _AWAY_S:
        skip = given

        def take(data: bytes) -> None:
            nonlocal given, skip
            left_out = min(skip, len(data))
            skip -= left_out
            if left_out < len(data):
                given += len(data) - left_out
                output(data[left_out:])

        try:
            whole = await cluster.follow(name, container, take)
            # The kubelet says a moment later what the end of the log has said already.
            runs = await _runs(cluster, name, container) and await _runs(cluster, name, container, after=ASK_S)
        except ClusterError:
            away += _SLOWLY_S
            await anyio.sleep(_SLOWLY_S)
            continue
        away = 0.0
        if whole and not runs:
            return


async def _runs(cluster: Cluster, name: str, container: str, after: float = 0.0) -> bool:
    await anyio.sleep(after)
    pod = await cluster.get(Kind.POD, name)
    return pod is not None and "running" in (status_of(pod, container).get("state") or {})
