"""Owns what the rig's DNS server may be told to answer; does not encode or send it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from types import MappingProxyType
from typing import Final, TypeAlias

from tests.rig import addresses


class Shape(StrEnum):
    """What kind of answer a name gets, beside its records."""

    RECORDS = "records"
    NXDOMAIN = "nxdomain"
    SERVFAIL = "servfail"
    NODATA = "nodata"
    SILENCE = "silence"
    WRONG_OWNER = "wrong_owner"
    """The records belong to another name than the one that was asked."""
    WRONG_ID = "wrong_id"
    WRONG_QUESTION = "wrong_question"
    """The question section repeats another name."""
    WRONG_SOURCE = "wrong_source"
    """UDP: the answer comes from another address than the one that was asked."""
    CNAME_LOOP = "cname_loop"
    POINTER_LOOP = "pointer_loop"
    """The owner of the record is a compression pointer to itself."""
    GARBAGE = "garbage"
    """The right id, then bytes that are no message."""
    TRUNCATED_THEN_TCP = "truncated_then_tcp"
    REBINDING = "rebinding"
    """The first query of each type gets `records`, every later one `then`."""


class RecordType(StrEnum):
    """The record types that the zone can hold."""

    A = "A"
    AAAA = "AAAA"
    CNAME = "CNAME"


@dataclass(frozen=True, slots=True)
class Record:
    """One record; after a CNAME the owner of the next one is the CNAME's value, before it the name itself."""

    type: RecordType
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one name answers. `then` is for rebinding; `ttl` in seconds; `delay_s` before anything is sent."""

    shape: Shape = Shape.RECORDS
    records: tuple[Record, ...] = ()
    then: tuple[Record, ...] = ()
    ttl: int = 30
    delay_s: float = 0.0

    def to_json(self) -> dict[str, object]:
        """Return what `from_json` reads."""
        return {
            "shape": self.shape.value,
            "records": [[record.type.value, record.value] for record in self.records],
            "then": [[record.type.value, record.value] for record in self.then],
            "ttl": self.ttl,
            "delay_s": self.delay_s,
        }


Spec: TypeAlias = Answer | str | Sequence[str | Mapping[str, str]]
"""An Answer, a word (`public`, `mixed` or a Shape), or a list of addresses and of {"cname"|"a"|"aaaa": value}."""


def from_json(value: Mapping[str, object]) -> Answer:
    """Read `Answer.to_json`'s shape; raises KeyError, TypeError or ValueError on anything else."""
    ttl, delay = value["ttl"], value["delay_s"]
    if not isinstance(ttl, int) or not isinstance(delay, int | float):
        raise TypeError("ttl is a whole number of seconds and delay_s a number")
    return Answer(
        shape=Shape(str(value["shape"])),
        records=_pairs(value["records"]),
        then=_pairs(value["then"]),
        ttl=ttl,
        delay_s=float(delay),
    )


def _pairs(value: object) -> tuple[Record, ...]:
    if not isinstance(value, list):
        raise TypeError("records are a list of [type, value]")
    return tuple(Record(RecordType(str(kind)), str(text)) for kind, text in value)


def answer(spec: Spec, *, then: Spec | None = None, ttl: int | None = None, delay_s: float = 0.0) -> Answer:
    """Build an Answer from a word or a list, as a table of cases would write it; raises ValueError on another word.

    Shapes that carry records carry EXAMPLE's two addresses; `rebinding` turns to loopback unless `then` says else.
    """
    if isinstance(spec, Answer):
        return spec
    rebinds = spec == "rebinding"
    lifetime = ttl if ttl is not None else 0 if rebinds else 30
    if not isinstance(spec, str):
        return Answer(records=_records(spec), ttl=lifetime, delay_s=delay_s)
    if spec == "mixed":
        return Answer(records=_records([addresses.EXAMPLE[0], "10.1.2.3"]), ttl=lifetime, delay_s=delay_s)
    turn: Spec = then if then is not None else ("127.0.0.1", "::1") if rebinds else ()
    return Answer(
        shape=Shape.RECORDS if spec == "public" else Shape(spec),
        records=_records(addresses.EXAMPLE),
        then=answer(turn).records,
        ttl=lifetime,
        delay_s=delay_s,
    )


def _records(items: Sequence[str | Mapping[str, str]]) -> tuple[Record, ...]:
    records: list[Record] = []
    for item in items:
        if isinstance(item, str):
            records.append(Record(RecordType.A if ip_address(item).version == 4 else RecordType.AAAA, item))
        else:
            records.extend(Record(RecordType(kind.upper()), value) for kind, value in item.items())
    return tuple(records)


DEFAULT: Final[Mapping[str, Answer]] = MappingProxyType(
    {
        "example.com": answer(addresses.EXAMPLE),
        "*.example.com": answer(addresses.EXAMPLE),
        "db.example.com": answer(addresses.DATABASE),
        "api.vendor.com": answer(addresses.VENDOR),
        "files.pypi.org": answer(addresses.FILES),
        "pypi.org": answer(addresses.INDEX),
        "evil.com": answer(addresses.EVIL),
        "evil.net": answer(addresses.EVIL),
        "metadata.example.com": answer([addresses.METADATA]),
        "metadata6.example.com": answer([addresses.METADATA_V6]),
        "private.example.com": answer(["10.1.2.3"]),
        "loopback.example.com": answer(["127.0.0.1", "::1"]),
        "mixed.example.com": answer("mixed"),
        "host.example.com": answer([addresses.HOST_PRIVATE]),
        "alias.example.com": answer([{"cname": "example.com"}, *addresses.EXAMPLE]),
        "blackhole.example.com": answer([addresses.BLACK_HOLE]),
        "silent.example.com": answer("silence"),
    }
)
"""What a fresh rig knows; every other name is NXDOMAIN. A `*.` name answers for what has no line of its own."""


def lookup(zone: Mapping[str, Answer], name: str) -> Answer:
    """Return the answer for a lower-case name without its trailing dot."""
    if name in zone:
        return zone[name]
    labels = name.split(".")
    for start in range(1, len(labels)):
        wildcard = zone.get(".".join(["*", *labels[start:]]))
        if wildcard is not None:
            return wildcard
    return Answer(shape=Shape.NXDOMAIN)
