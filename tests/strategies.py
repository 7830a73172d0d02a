"""Owns the hypothesis strategies that tests share: entries, ranges, documents; asserts nothing.

Alphabets are small on purpose: what is drawn must often be equal, nested or disjoint.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from reconciler.core.load import Document, load
from reconciler.core.resolve import Resolved, resolve
from reconciler.core.schema import load_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

HOSTS = ("a.com", "b.a.com", "c.b.a.com", "x.com", "b.x.com")
PORTS = (None, 80, 443, 5432)
AGENTS = ("one", "two", "three")
IMAGE = f"registry.example/helper@sha256:{'0' * 64}"


def _entry(wildcard: bool, host: str, port: int | None) -> str:
    return f"{'*.' if wildcard else ''}{host}{'' if port is None else f':{port}'}"


def entries() -> st.SearchStrategy[str]:
    """Entries of an allow list or a deny list, in canonical form."""
    return st.builds(_entry, st.booleans(), st.sampled_from(HOSTS), st.sampled_from(PORTS))


def entry_lists() -> st.SearchStrategy[list[str]]:
    """Lists of entries, not in any order, with repeats."""
    return st.lists(entries(), max_size=5)


def ranges() -> st.SearchStrategy[str]:
    """Address blocks of both versions that often lie in one another."""
    old = st.builds(
        lambda length, index: f"198.51.{(index << (24 - length)) & 255 if length < 24 else index}.0/{length}",
        st.integers(22, 24),
        st.integers(0, 3),
    )
    new = st.builds(lambda index: f"2001:db8:{index:x}::/48", st.integers(0, 3))
    return st.one_of(old.filter(_is_network), new, st.just("2001:db8::/46"))


def _is_network(text: str) -> bool:
    address, _, length = text.partition("/")
    third = int(address.split(".")[2])
    return third % (1 << (24 - int(length))) == 0


def range_lists() -> st.SearchStrategy[list[str]]:
    """Lists of address blocks."""
    return st.lists(ranges(), max_size=4)


def name_lists() -> st.SearchStrategy[list[str]]:
    """Lists of names, `*` among them."""
    return st.lists(st.sampled_from((*AGENTS, "*")), max_size=3)


def platforms() -> st.SearchStrategy[dict[str, Any]]:
    """Platform documents, with some fields left out."""
    return st.fixed_dictionaries(
        {"version": st.just(1), "kind": st.just("platform")},
        optional={
            "enabled": st.booleans(),
            "backend": st.sampled_from(("auto", "k8s", "firecracker", "docker", "bubblewrap")),
            "require_runtime_class": st.booleans(),
            "max_parallel_runs": st.integers(1, 8),
            "k8s": st.fixed_dictionaries({}, optional={"tolerate_icmp": st.booleans()}),
        },
    )


def agents(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """Documents of one agent, with some fields left out."""
    limits = st.fixed_dictionaries(
        {},
        optional={
            "cpus": st.sampled_from((0.5, 1, 2)),
            "memory": st.sampled_from(("256MiB", "512MiB", "1GiB")),
            "pids": st.sampled_from((16, 256, 512)),
            "timeout": st.sampled_from(("30s", "10m", "600s", "1h")),
            "connections": st.sampled_from((8, 256, 1024)),
        },
    )
    secrets = st.dictionaries(
        st.sampled_from(("API_KEY", "TOKEN")),
        st.fixed_dictionaries({"file": st.sampled_from(("/etc/s/one", "/etc/s/two"))}),
        max_size=2,
    )
    return st.fixed_dictionaries(
        {"version": st.just(1), "kind": st.just("agent"), "name": st.just(name), "image": st.just(IMAGE)},
        optional={
            "description": st.sampled_from(("", "syncs")),
            "minimum_isolation": st.sampled_from(("microvm", "gvisor", "container", "namespace")),
            "user": st.sampled_from((1000, 65534)),
            "allow": entry_lists(),
            "deny": entry_lists(),
            "submitters": st.lists(st.sampled_from(("svc", "ops")), max_size=2),
            "env": st.fixed_dictionaries({}, optional={"allow": st.lists(st.sampled_from(("A", "B")), max_size=2)}),
            "secrets": secrets,
            "limits": limits,
        },
    )


def egresses(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """Egress documents of one name, with some fields left out."""
    return st.fixed_dictionaries(
        {"version": st.just(1), "kind": st.just("egress"), "name": st.just(name), "agents": name_lists()},
        optional={
            "default": st.sampled_from(("deny", "allow")),
            "allow": entry_lists(),
            "deny": entry_lists(),
            "deny_ranges": range_lists(),
        },
    )


def directories() -> st.SearchStrategy[dict[str, bytes]]:
    """Whole policy directories with a platform document: file name to bytes. JSON is YAML."""
    files: dict[str, st.SearchStrategy[dict[str, Any]]] = {f"agents/{name}.yaml": agents(name) for name in AGENTS[:2]}
    files |= {f"egress/{name}.yaml": egresses(name) for name in ("org", "team")}
    documents = st.fixed_dictionaries({"platform.yaml": platforms()}, optional=files)
    return documents.map(lambda found: {file: json.dumps(value).encode() for file, value in found.items()})


def resolved(kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve one document that is valid."""
    document = load(f"{kind}.yaml", json.dumps(value).encode())
    assert isinstance(document, Document), document
    found = resolve(document, load_schema(kind))
    assert isinstance(found, Resolved), found
    return found.value
