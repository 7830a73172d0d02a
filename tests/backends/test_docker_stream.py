"""The framing of attached outputs: nothing is lost, mixed up or held back, however the bytes are cut."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from reconciler.backends.base import Stream
from reconciler.backends.docker_stream import Frames

FRAMES = st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=40)), max_size=12)


def encode(frames: list[tuple[int, bytes]]) -> bytes:
    return b"".join(struct.pack("!B3xI", number, len(data)) + data for number, data in frames)


@given(FRAMES, st.lists(st.integers(1, 30), max_size=200))
def test_whatever_the_cuts_each_stream_comes_whole_and_in_order(
    frames: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    data, reader, got = encode(frames), Frames(), {Stream.STDOUT: b"", Stream.STDERR: b""}
    for size in [*cuts, len(data) + 1]:
        piece, data = data[:size], data[size:]
        for stream, part in reader.feed(piece):
            got[stream] += part
    assert not reader.broken
    assert got[Stream.STDOUT] == b"".join(part for number, part in frames if number == 1)
    assert got[Stream.STDERR] == b"".join(part for number, part in frames if number == 2)


def test_a_payload_is_handed_on_before_it_is_whole() -> None:
    reader = Frames()
    assert list(reader.feed(struct.pack("!B3xI", 1, 1 << 30) + b"first")) == [(Stream.STDOUT, b"first")]


def test_what_is_no_frame_breaks_the_stream_for_good() -> None:
    reader = Frames()
    assert list(reader.feed(b"HTTP/1.1 500 oh no\r\n")) == []
    assert reader.broken
    assert list(reader.feed(encode([(1, b"late")]))) == []
