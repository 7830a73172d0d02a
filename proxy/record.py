"""Owns the JSON lines that a proxy writes: one decision a line; does not decide or write."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from json.encoder import encode_basestring_ascii

VERSION = 1
MAX_TEXT = 253
CUT = "..."
"""Marks a text that was longer than `MAX_TEXT`."""


class Verdict(StrEnum):
    """What the proxy answered."""

    ALLOW = "allow"
    DENY = "deny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One decision, as evidence. schema/decision.v1.json. `time` is Unix seconds, `count` of coalesced denials."""

    seq: int
    time: float
    run: str
    generation: int
    verdict: Verdict
    code: str
    layer: str | None
    method: str
    host: str
    port: int | None
    address: str | None
    message: str
    count: int = 1

    def to_line(self) -> bytes:
        """Write one line, as `Form.line`."""
        form = Form(
            run=self.run,
            generation=self.generation,
            verdict=self.verdict,
            code=self.code,
            layer=self.layer,
            method=self.method,
            host=self.host,
            port=self.port,
            message=self.message,
        )
        return form.line(seq=self.seq, time=self.time, address=self.address, count=self.count)

    @staticmethod
    def parse(obj: object) -> Record | None:
        """Read the parsed JSON of one line; None when it is not a decision that this version knows."""
        if not isinstance(obj, dict) or obj.keys() != _KEYS or obj["kind"] != "decision" or obj["version"] != VERSION:
            return None
        whole = (obj["seq"], obj["generation"], obj["count"])
        words = (obj["run"], obj["code"], obj["method"], obj["host"], obj["message"])
        optional = (obj["layer"], obj["address"])
        port, time, verdict = obj["port"], obj["time"], obj["verdict"]
        if (
            any(type(number) is not int or number < 0 for number in whole)
            or any(type(word) is not str for word in words)
            or any(word is not None and type(word) is not str for word in optional)
            or (port is not None and type(port) is not int)
            or type(time) not in (int, float)
            or verdict not in (Verdict.ALLOW, Verdict.DENY)
        ):
            return None
        return Record(
            seq=obj["seq"],
            time=float(time),
            run=obj["run"],
            generation=obj["generation"],
            verdict=Verdict(verdict),
            code=obj["code"],
            layer=obj["layer"],
            method=obj["method"],
            host=obj["host"],
            port=port,
            address=obj["address"],
            message=obj["message"],
            count=obj["count"],
        )


class Form:
    """The line of a decision but for what differs each time that the same is decided."""

    __slots__ = ("_above", "_before", "_behind")

    def __init__(
        self,
        *,
        run: str,
        generation: int,
        verdict: Verdict,
        code: str,
        layer: str | None,
        method: str,
        host: str,
        port: int | None,
        message: str,
    ) -> None:
        self._above = f',"code":{_text(code)},"count":'
        self._before = (
            f',"generation":{generation},"host":{_text(host)},"kind":"decision","layer":{_optional(layer)},'
            f'"message":{_text(message)},"method":{_text(method)},"port":{"null" if port is None else port},'
            f'"run":{_text(run)},"seq":'
        )
        self._behind = f',"verdict":{_text(verdict)},"version":{VERSION}}}\n'

    def line(self, *, seq: int, time: float, address: str | None, count: int) -> bytes:
        """Write one line of compact JSON with sorted keys, newline included. ASCII whatever the fields hold."""
        where = "null" if address is None else _text(address)
        return (f'{{"address":{where}{self._above}{count}{self._before}{seq},"time":{time!r}{self._behind}').encode(
            "ascii"
        )


_text = encode_basestring_ascii
"""The encoder's own function for texts: an encoder that finds out what it was given takes five times as long."""


def _optional(text: str | None) -> str:
    return "null" if text is None else _text(text)


_KEYS = frozenset({*Record.__slots__, "kind", "version"})


def printable(text: str) -> str:
    """Make a text from outside fit for a line of evidence: escaped ASCII, cut at `MAX_TEXT` with a marker."""
    if not (text.isascii() and text.isprintable()):
        text = text.encode("ascii", "backslashreplace").decode("ascii")
        text = "".join(one if one.isprintable() else f"\\x{ord(one):02x}" for one in text)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + CUT
