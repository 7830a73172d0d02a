"""What is read from a child process line by line, however it arrives."""

from __future__ import annotations

import os
import threading

import anyio
import pytest

from reconciler.backends.process_io import Lines


def lines(data: bytes, *, most: int) -> list[bytes]:
    """Every line that is read from a pipe through which `data` comes as fast as it takes it."""
    read, write = os.pipe()

    def send() -> None:
        with os.fdopen(write, "wb") as file:
            file.write(data)

    sender = threading.Thread(target=send)
    sender.start()

    async def main() -> list[bytes]:
        said, found = Lines(read, most=most), []
        while (line := await said.next()) is not None:
            found.append(line)
        return found

    try:
        return anyio.run(main)
    finally:
        os.close(read)
        sender.join()


def test_short_lines_of_a_busy_writer_are_all_read() -> None:
    sent = [b"%d" % number + b"x" * 600 for number in range(2_000)]
    assert lines(b"".join(line + b"\n" for line in sent), most=64 * 1024) == sent


@pytest.mark.parametrize(
    ("data", "found"),
    [
        pytest.param(b"a\n" + b"x" * 100, [b"a"], id="what has no end is no line"),
        pytest.param(b"a\n" + b"x" * 10 + b"\nb\n", [b"a", b"x" * 10, b"b"], id="as long as it may be"),
        pytest.param(b"a\n" + b"x" * 11 + b"\nb\n", [b"a"], id="too long"),
        pytest.param(b"a\n" + b"x" * 11, [b"a"], id="too long and without an end"),
    ],
)
def test_a_line_that_is_too_long_is_the_end(data: bytes, found: list[bytes]) -> None:
    assert lines(data, most=10) == found
