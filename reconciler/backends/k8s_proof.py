"""Owns what an API server must show of a run's objects, compared with what was asked for.

Pure. What a cluster fills in by itself and what an admission plugin put in are told apart by a table of what may be
filled in; anything else that was not asked for refuses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reconciler.backends.k8s_place import Role, Where

Plain = dict[str, Any]

_LONGEST_VALUE = 160
_QUANTITY = re.compile(r"([0-9.]+)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_UNITS = {
    None: Decimal(1),
    "m": Decimal("0.001"),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
}
_MEASURED = frozenset({"cpu", "memory", "ephemeral-storage", "sizeLimit"})
_ANY = object()
_CONTAINER: Mapping[str, object] = {
    "terminationMessagePath": "/dev/termination-log",
    "terminationMessagePolicy": "File",
}
_POD: Mapping[str, object] = {
    "nodeName": _ANY,
    "schedulerName": _ANY,
    "priority": _ANY,
    "priorityClassName": _ANY,
    "preemptionPolicy": _ANY,
    "imagePullSecrets": _ANY,
    # Where it may run is no part of the fence: the RuntimeClass and the cluster's defaults say.
    "tolerations": _ANY,
    "overhead": _ANY,
    "nodeSelector": _ANY,
    "affinity": _ANY,
}
"""What a cluster fills in, and with what; everything else that was not asked for is somebody's change."""
_OF_JOBS = frozenset(
    {"controller-uid", "job-name", "batch.kubernetes.io/controller-uid", "batch.kubernetes.io/job-name"}
)


def pod(role: Role, asked: Plain, found: Plain | None) -> tuple[str, ...]:
    """Compare a pod with the one that was asked for; each line names one thing that is not as it must be."""
    if found is None:
        return (f"{role}: the pod is gone",)
    spec, shown = asked["spec"], dict(found["spec"])
    account = shown.pop("serviceAccount", spec["serviceAccountName"])
    lines = [] if account == spec["serviceAccountName"] else [f"its service account is {_cut(account)}"]
    for key in ("initContainers", "containers", "ephemeralContainers"):
        lines += _containers(key, spec.get(key) or [], shown.pop(key, None) or [])
    rest = {key: value for key, value in spec.items() if key not in ("initContainers", "containers")}
    selector = shown.get("nodeSelector") or {}
    if any(selector.get(key) != value for key, value in rest.pop("nodeSelector", {}).items()):
        lines.append("it is not kept to its node")
    lines += _differences("", rest, shown, _POD)
    lines += _labels(asked["metadata"]["labels"], found["metadata"].get("labels") or {})
    if found["metadata"].get("deletionTimestamp"):
        lines.append("somebody removes it")
    return tuple(f"{role} pod: {line}" for line in lines)


def _containers(key: str, asked: Sequence[Plain], found: Sequence[Plain]) -> Iterable[str]:
    wanted, there = [each["name"] for each in asked], [str(each.get("name")) for each in found]
    if wanted != there:
        yield f"{key} are {', '.join(there) or 'none'}"
        return
    for one, other in zip(asked, found, strict=True):
        yield from (f"{one['name']}: {line}" for line in _differences("", one, other, _CONTAINER))


def _labels(asked: Mapping[str, str], found: Mapping[str, str]) -> Iterable[str]:
    for key, value in asked.items():
        if found.get(key) != value:
            yield f"its label {key} is {_cut(found.get(key))}"
    # A policy may select by any label: what is not ours is not known to be harmless.
    yield from (f"it has the label {key}" for key in sorted(found.keys() - asked.keys() - _OF_JOBS))


def policy(name: str, asked: Plain, found: Plain | None) -> tuple[str, ...]:
    """Compare a policy with the one that was asked for: nothing in it is filled in by a cluster."""
    if found is None:
        return (f"policy {name} is gone",)
    lines = list(_differences("", asked["spec"], found["spec"], {}))
    if found["metadata"].get("deletionTimestamp"):
        lines.append("somebody removes it")
    return tuple(f"policy {name}: {line}" for line in lines)


def selecting(
    labels: Mapping[str, str], policies: Iterable[Plain], ours: Iterable[str], *, who: Role
) -> tuple[str, ...]:
    """Name every policy that selects a pod with these labels and is not ours; policies add up.

    One that allows nothing cannot open anything: the namespace's default is one.
    """
    known = frozenset(ours)
    return tuple(
        f"policy {each['metadata']['name']} selects the {who}'s pod and is not ours"
        for each in policies
        if each["metadata"]["name"] not in known
        and (each["spec"].get("ingress") or each["spec"].get("egress"))
        and selects(each["spec"].get("podSelector") or {}, labels)
    )


def selects(selector: Plain, labels: Mapping[str, str]) -> bool:
    """Say whether a label selector selects these labels; one that cannot be read does (API: LabelSelector)."""
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_expression(each, labels) for each in selector.get("matchExpressions") or ())


def _expression(expression: Plain, labels: Mapping[str, str]) -> bool:
    key, operator, values = expression.get("key"), expression.get("operator"), expression.get("values") or ()
    value = labels.get(str(key))
    match operator:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case _:
            return True


def denies_by_default(policies: Iterable[Plain]) -> bool:
    """Say whether one of these policies selects every pod, both ways, and allows nothing."""
    return any(
        not any((each["spec"].get("podSelector") or {}).values())
        and {"Ingress", "Egress"} <= set(each["spec"].get("policyTypes") or ())
        and not each["spec"].get("ingress")
        and not each["spec"].get("egress")
        for each in policies
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateEnded:
    """How the init container of the gate stands: not yet ended is neither."""

    ended: bool
    status: int | None


def gate_state(found: Plain) -> GateEnded:
    """Read how the gate's container ended, from its pod."""
    for each in (found.get("status") or {}).get("initContainerStatuses") or ():
        ended = (each.get("state") or {}).get("terminated")
        if each.get("name") == "gate" and ended is not None:
            return GateEnded(ended=True, status=ended.get("exitCode"))
    return GateEnded(ended=False, status=None)


def runtime(where: Where, kernel: object) -> tuple[str, ...]:
    """Judge by the kernel that the gate saw whether it ran under the runtime that was asked for."""
    text = str(kernel)
    seen = "gvisor" in text.lower() or text.startswith("Linux version 4.4.0 ")
    if seen or not where.gvisor:
        return ()
    return (f"runtime: asked for RuntimeClass {where.runtime_class}, and the gate saw {text[:80]!r}",)


def _differences(path: str, asked: Any, found: Any, filled_in: Mapping[str, object]) -> Iterable[str]:
    """Compare two values, and all that is in them; `filled_in` is what may be in `found` beside what was asked for."""
    if isinstance(asked, dict):
        yield from _keys(path, asked, found if isinstance(found, dict) else {}, filled_in)
    elif isinstance(asked, list):
        there = found if isinstance(found, list) else []
        if len(asked) != len(there):
            yield f"{path} has {len(there)} parts and not {len(asked)}"
            return
        for at, (one, other) in enumerate(zip(asked, there, strict=True)):
            yield from _differences(f"{path}[{at}]", one, other, {})
    elif not _same(path, asked, found):
        # Values of the environment and words of the command may be secret.
        yield f"{path} is not as asked for" if _is_secret(path) else f"{path} is {_cut(found)}"


def _keys(path: str, asked: Plain, found: Plain, filled_in: Mapping[str, object]) -> Iterable[str]:
    for key, value in asked.items():
        where = f"{path}.{key}".lstrip(".")
        # False is no absence: what is left out may mean true.
        if value is not False and _is_empty(value) and _is_empty(found.get(key)):
            continue
        yield from _differences(where, value, found.get(key), {})
    for key, value in found.items():
        if key in asked or _is_empty(value):
            continue
        allowed = filled_in.get(key)
        if allowed is not _ANY and allowed != value:
            yield f"{path}.{key} is {_cut(value)}".lstrip(".")


def _same(path: str, asked: object, found: object) -> bool:
    if asked == found:
        return True
    if path.rpartition(".")[2] not in _MEASURED:
        return False
    one, other = _amount(asked), _amount(found)
    return one is not None and one == other


def _amount(text: object) -> Decimal | None:
    """Read a quantity (Kubernetes API conventions, "Quantities"), as far as we write any."""
    found = _QUANTITY.fullmatch(str(text))
    return None if found is None else Decimal(found[1]) * _UNITS[found[2]]


def _is_secret(path: str) -> bool:
    return path.startswith(("env", "command", "args"))


def _is_empty(value: object) -> bool:
    """Say whether a value is as good as none. An empty object is not: as a selector it selects everything."""
    return value in (None, "", False, [])


def _cut(value: object) -> str:
    return repr(value)[:_LONGEST_VALUE]
