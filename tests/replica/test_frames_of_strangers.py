"""Validation of every message that a writer receives; tests/runtime/test_wire.py covers frames and keys."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.replica import protocol as f
from outlast.runtime.wire import ProtocolError, encode_frame

NAMES = st.from_regex(r"\A[A-Za-z0-9_.-]{1,30}\Z")
KEYS = st.builds(CopyKey, st.integers(0, 1 << 60), NAMES, st.integers(0, 1 << 30), st.just("") | NAMES)
SIZES = st.integers(0, 1 << 46)
MESSAGES = st.one_of(
    st.builds(f.Put, KEYS, SIZES),
    st.builds(f.Put, KEYS, SIZES, st.integers(0, 1 << 30), st.integers(1, 1 << 16)),
    st.builds(f.Get, KEYS, SIZES, SIZES),
    st.builds(f.Chunk, st.text(max_size=20)),
    st.sampled_from([f.Ping(), f.Proceed(), f.Keep(), f.Kept(), f.Working(), f.Failed("no room")]),
)


def parse(data: bytes) -> f.Message | None:
    """Parse one frame as a connection does."""
    left, right = socket.socketpair()
    with left, f.ReplicaChannel(right, 1.0) as channel:
        left.sendall(data)
        left.shutdown(socket.SHUT_WR)
        return channel.receive()


def parse_body(body: bytes) -> f.Message | None:
    """Parse one message as a connection does."""
    return parse(struct.pack("<I", len(body)) + body)


@given(MESSAGES)
def test_every_message_round_trips(message: f.Message) -> None:
    """Each message is decoded to the message that was encoded."""
    assert parse(encode_frame(message)) == message


@given(st.binary(max_size=f.MAX_BODY_BYTES))
def test_any_body_is_parsed_or_rejected(body: bytes) -> None:
    """Random bytes are a message or raise `ProtocolError`, and no other error."""
    try:
        parse_body(body)
    except ProtocolError:
        pass


@given(MESSAGES, st.data())
def test_a_corrupt_frame_is_parsed_within_bounds_or_rejected(message: f.Message, data: st.DataObject) -> None:
    """A frame with overwritten, removed or inserted bytes is rejected, or its values are within the limits."""
    frame = bytearray(encode_frame(message))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, max(0, len(frame) - 1)))
        frame[position : position + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    try:
        parsed = parse(bytes(frame))
    except ConnectionError:  # rejected or truncated
        return
    if isinstance(parsed, f.Put | f.Get):
        assert "/" not in parsed.key.attempt + parsed.key.part
        assert 0 <= parsed.num_bytes <= f.MAX_SHARD_BYTES
        assert parsed.key.rank >= 0


@pytest.mark.parametrize("depth", [100, 1000, 2040])
def test_deep_nesting_is_rejected(depth: int) -> None:
    """Deeply nested arrays are rejected without a stack overflow."""
    with pytest.raises(ProtocolError):
        parse_body(b"\x82\xa4type\xa3Put\xa3key" + b"\x91" * (depth - 20) + b"\xc0")
    with pytest.raises(ProtocolError):
        parse_body(b"\x91" * depth)


@pytest.mark.parametrize("length", [0, f.MAX_BODY_BYTES + 1, 1 << 31, (1 << 32) - 1])
def test_an_invalid_frame_length_is_rejected(length: int) -> None:
    """A frame with an invalid length is rejected before memory is allocated or more bytes are read."""
    with pytest.raises(ProtocolError):
        parse(struct.pack("<I", length))


@pytest.mark.parametrize(
    "message",
    [
        f.Put(CopyKey(1, "../../etc", 0), 1),
        f.Put(CopyKey(1, "", 0), 1),
        f.Put(CopyKey(1, "a" * 201, 0), 1),
        f.Put(CopyKey(-1, "a", 0), 1),
        f.Put(CopyKey(1, "a", -1), 1),
        f.Put(CopyKey(1, "a", 0, "../x"), 1),
        f.Put(CopyKey(1, "a", 0), -1),
        f.Put(CopyKey(1, "a", 0), (1 << 46) + 1),
        f.Put(CopyKey(1, "a", 0), 1, -2, 0),
        f.Put(CopyKey(1, "a", 0), 1, 3, 0),
        f.Put(CopyKey(1, "a", 0), 1, -1, 3),
        f.Get(CopyKey(1, "a\n", 0), 0, 1),
        f.Get(CopyKey(1, "a", 0), -1, 1),
        f.Data(2, 1),
    ],
)
def test_a_message_out_of_bounds_is_rejected(message: f.Message) -> None:
    """Names that would leave their folder, negative numbers and oversized numbers are rejected."""
    with pytest.raises(ProtocolError, match="out of bounds"):
        parse(encode_frame(message))


def test_a_long_error_is_truncated() -> None:
    """An error always fits into one frame, on one line."""
    left, right = (f.ReplicaChannel(end, 1.0) for end in socket.socketpair())
    with left, right:
        left.refuse("x\n" * 10_000)
        parsed = right.receive()
    assert isinstance(parsed, f.Failed)
    assert "\n" not in parsed.error
