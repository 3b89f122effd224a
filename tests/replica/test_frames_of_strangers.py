"""The parser that stands before everything a stranger sends."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.replica import protocol as f
from outlast.checkpoint.replica.protocol import NONCE_BYTES, Session, is_proof, prove

NAMES = st.from_regex(r"\A[A-Za-z0-9_.-]{1,30}\Z")
KEYS = st.builds(CopyKey, st.integers(0, 1 << 60), NAMES, st.integers(0, 1 << 30), st.just("") | NAMES)
SIZES = st.integers(0, 1 << 46)
MESSAGES = st.one_of(
    st.builds(f.Challenge, st.binary(max_size=64)),
    st.builds(f.Prove, st.binary(max_size=64), st.binary(max_size=64)),
    st.builds(f.Put, KEYS, SIZES),
    st.builds(f.Put, KEYS, SIZES, st.integers(0, 1 << 30), st.integers(1, 1 << 16)),
    st.builds(f.Get, KEYS, SIZES, SIZES),
    st.builds(f.Chunk, st.text(max_size=20)),
    st.sampled_from([f.Ping(), f.Ready(), f.Keep(), f.Kept(), f.Working(), f.Failed("no room")]),
)


def parse(data: bytes) -> f.Message:
    """Read one frame as a connection does."""
    length = f.body_length(data[: f.HEAD_BYTES])
    return f.decode_body(data[f.HEAD_BYTES : f.HEAD_BYTES + length])


@given(MESSAGES)
def test_what_is_written_is_read(message: f.Message) -> None:
    """Every message comes out as it went in."""
    assert parse(f.encode_frame(message)) == message


@given(st.binary(min_size=f.HEAD_BYTES, max_size=f.HEAD_BYTES))
def test_any_head_is_a_frame_of_bounded_length_or_refused(head: bytes) -> None:
    """Eight bytes of anything never make the reader wait for more than a frame."""
    try:
        assert 0 < f.body_length(head) <= f.MAX_BODY_BYTES
    except f.FrameError:
        pass


@given(st.binary(max_size=f.MAX_BODY_BYTES))
def test_any_body_is_a_message_or_refused(body: bytes) -> None:
    """Whatever the bytes are, there is no other error."""
    try:
        f.decode_body(body)
    except f.FrameError:
        pass


@given(MESSAGES, st.data())
def test_a_changed_frame_is_a_message_within_bounds_or_refused(message: f.Message, data: st.DataObject) -> None:
    """Bytes overwritten, cut or put in: what still parses obeys the same limits."""
    frame = bytearray(f.encode_frame(message))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(frame) - 1))
        frame[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        if len(frame) < f.HEAD_BYTES:
            return
    try:
        found = parse(bytes(frame))
    except f.FrameError:
        return
    if isinstance(found, f.Put | f.Get):
        assert "/" not in found.key.attempt + found.key.part
        assert 0 <= found.num_bytes <= f.MAX_SHARD_BYTES
        assert found.key.rank >= 0


@pytest.mark.parametrize("depth", [100, 1000, 2040])
def test_nesting_without_end_is_refused(depth: int) -> None:
    """Arrays in arrays do not exhaust the stack."""
    with pytest.raises(f.FrameError):
        f.decode_body(b"\x82\xa4type\xa3Put\xa3key" + b"\x91" * (depth - 20) + b"\xc0")
    with pytest.raises(f.FrameError):
        f.decode_body(b"\x91" * depth)


@pytest.mark.parametrize("length", [0, f.MAX_BODY_BYTES + 1, 1 << 31, (1 << 32) - 1])
def test_an_oversized_or_empty_frame_is_refused_by_its_head(length: int) -> None:
    """Nothing is allocated for it."""
    with pytest.raises(f.FrameError, match="announces"):
        f.body_length(struct.pack("!4sI", b"OLr1", length))


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
def test_a_message_out_of_bounds_is_refused(message: f.Message) -> None:
    """No name can leave its folder, no number is negative or absurd."""
    with pytest.raises(f.FrameError, match="out of bounds"):
        f.decode_body(msgspec.msgpack.encode(message))


def test_a_long_error_is_cut() -> None:
    """An error always fits into a frame, on one line."""
    found = parse(f.encode_frame(f.Failed("x\n" * 10_000)))
    assert isinstance(found, f.Failed)
    assert "\n" not in found.error


def test_a_proof_serves_one_side_of_one_connection() -> None:
    """It cannot be sent back to who gave it, nor be used with other nonces or another key."""
    key, server, client = b"k" * 32, b"s" * NONCE_BYTES, b"c" * NONCE_BYTES
    proof = prove(key, "client", server, client)
    assert is_proof(proof, key, "client", server, client)
    assert not is_proof(proof, key, "server", server, client)
    assert not is_proof(proof, b"K" * 32, "client", server, client)
    assert not is_proof(proof, key, "client", client, server)
    assert not is_proof(prove(key, "client", b"", b"x"), key, "client", b"", b"x")


def test_a_signature_serves_one_place_in_one_direction() -> None:
    """A frame that is repeated, left out or sent back does not fit."""
    mine = Session.derive(b"k", "client", b"s", b"c")
    theirs = Session.derive(b"k", "server", b"s", b"c")
    first, second = mine.sign(b"frame"), mine.sign(b"frame")
    assert len({first, second, theirs.sign(b"frame")}) == 3
