"""Owns the way from bytes to text that shows all that it says: encoding and invisible characters; knows no YAML."""

from __future__ import annotations

import re

from reconciler.core.problem import MOST, Problem, Problems

_HIDDEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, C1 (with U+0085), carriage return
    "\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # zero width, bidi, separators
    "\U000e0000-\U000e007f"  # tags
)
_BAD_TEXT = re.compile(f"[\t{_HIDDEN}]")
BAD_SCALAR = re.compile(f"[{_HIDDEN}\ud800-\udfff]")
"""The same of a quoted scalar. An escape may write a tab there: it is seen for what it is."""


def text_of(file: str, data: bytes, most: int) -> str | tuple[Problem, ...]:
    """Decode the bytes of a file, at most `most` of them; or say what is wrong: size, encoding, characters."""
    if len(data) > most:
        return (Problem(file, 1, 1, "", f"has {len(data)} bytes; at most {most} are read (max_bytes of the host)"),)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        return (Problem(file, line, column, "", "is not UTF-8; save the file as UTF-8 without a byte order mark"),)
    return _invisible(file, text) or text


def _invisible(file: str, text: str) -> tuple[Problem, ...]:
    if _BAD_TEXT.search(text) is None:
        return ()
    problems = Problems()
    problems.count(max(0, sum(1 for _ in _BAD_TEXT.finditer(text)) - MOST))
    for number, line in enumerate(text.split("\n"), start=1):
        for found in _BAD_TEXT.finditer(line):
            name = f"U+{ord(found[0]):04X}"
            advice = {
                "\t": "indent with spaces",
                "\r": "end lines with a line feed only",
                "\ufeff": "save the file without a byte order mark",
            }.get(found[0], "remove it")
            message = f"holds the invisible character {name}; {advice}"
            problems.add(Problem(file, number, found.start() + 1, "", message))
            if problems.full:
                return problems.sorted()
    return problems.sorted()
