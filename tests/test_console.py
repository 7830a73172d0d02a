"""What commands print is the text that they were given, whatever a workload put into it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reconciler.commands.console import complain, printable, say, table

if TYPE_CHECKING:
    from collections.abc import Callable

TEXTS = [
    "fd00:a:b::/48",
    "[bold]not markup[/bold]",
    "a trailing backslash \\",
    ":smile:",
    "https://example.com/?a=1&b=[2]",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("put", [say, complain])
def test_text_is_printed_as_it_is(put: Callable[[str], None], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    put(text)
    out, err = capsys.readouterr()
    assert out + err == f"{text}\n"


@pytest.mark.parametrize("text", TEXTS)
def test_a_cell_is_printed_as_it_is(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    table(("one",), [(text,)])
    assert capsys.readouterr().out.splitlines()[1].rstrip() == text


@pytest.mark.parametrize("text", ["\x1b[31mred", "\r[allow] forged", "a\x00b", "\u202ereversed", "\x9b31m"])
def test_no_control_character_reaches_the_terminal(text: str) -> None:
    assert printable(text).isprintable()
