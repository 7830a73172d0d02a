"""Owns how a value is cut that is too large for its place: what is left names the whole, so that it can be checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TypeVar

Item = TypeVar("Item")

_OWN = 128
"""Bytes that the words around a cut value take."""
_PER_CHARACTER = 12
"""Bytes of canonical JSON that one character takes at most: two escapes."""


def canonical(value: object) -> bytes:
    """One byte string for each JSON value: keys sorted, no white space, ASCII, no NaN.

    Raises:
        TypeError: the value is not JSON.
        ValueError: a number is not finite.
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, default=_plain
    ).encode("ascii")


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    message = f"{type(value).__name__} is not JSON"
    raise TypeError(message)


def cut(value: object, most: int) -> object:
    """Give `value` where its canonical JSON is at most `most` bytes; else its beginning, its length and its digest.

    What is left of a list, map or text is `{"cut": true, "first": …, "count": …, "sha256": …}`: as many first items (of
    a map in the order of its keys, each cut to its share; of a text characters) as there is room for, how many there
    are, and the SHA-256 of the whole value's canonical JSON. Its own JSON may be some 200 bytes more than `most`.
    """
    whole = canonical(value)
    if len(whole) <= most:
        return value
    first: object = None
    count = 1
    if isinstance(value, str):
        first, count = value[: most // _PER_CHARACTER], len(value)
    elif isinstance(value, Mapping):
        keys = _fitting([str(key) for key in sorted(value)], most // 4)
        share = max(1, (most - most // 4) // max(1, len(keys)) - _OWN)
        first, count = {key: cut(value[key], share) for key in keys if share > _OWN}, len(value)
    elif isinstance(value, Sequence):
        first, count = _fitting(value, most), len(value)
    return {"cut": True, "first": first, "count": count, "sha256": hashlib.sha256(whole).hexdigest()}


def shortened(text: str, most: int) -> str:
    """Give `text` where it has at most `most` characters; else its beginning, length and SHA-256 as UTF-8."""
    if len(text) <= most:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{text[:most]}… ({len(text)} characters, sha256 {digest})"


def _fitting(items: Sequence[Item], most: int) -> list[Item]:
    found: list[Item] = []
    for item in items:
        most -= len(canonical(item)) + 1
        if most < 0:
            break
        found.append(item)
    return found
