"""Messages between processes: framing, authentication, descriptors, bulk data, and what a hostile peer can do."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import NoReturn

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.runtime.wire import (
    AuthenticationFailed,
    BufferedChannel,
    FrameSigner,
    Handshake,
    MessageChannel,
    MessageReader,
    ProtocolError,
    encode_frame,
    socket_pair,
)

KEY = b"the key of a run"


class Number(msgspec.Struct, frozen=True, tag=True):
    value: int


class Text(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    value: str


Any = Number | Text
messages = st.one_of(st.builds(Number, st.integers(-(2**63), 2**63 - 1)), st.builds(Text, st.text(max_size=40)))
Pair = tuple[MessageChannel[Any], MessageChannel[Any]]


@pytest.fixture(params=[socket.SOCK_STREAM, socket.SOCK_SEQPACKET], ids=["stream", "packets"])
def ends(request: pytest.FixtureRequest) -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, request.param)


@pytest.fixture
def pair(ends: tuple[socket.socket, socket.socket]) -> Iterator[Pair]:
    one, other = (MessageChannel[Any](end, Any, timeout_s=5) for end in ends)
    with one, other:
        yield one, other


def send_forever(channel: MessageChannel[Any] | BufferedChannel[Any], message: Any) -> NoReturn:
    while True:
        channel.send(message)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return client, listener.accept()[0]


@given(st.lists(messages, max_size=8), st.data())
def test_stream_is_split_into_its_messages(sent: list[Any], data: st.DataObject) -> None:
    """However a stream is split on its way, the messages are received unchanged."""
    stream = b"".join(map(encode_frame, sent))
    reader: MessageReader[Any] = MessageReader(Any)
    found = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += reader.feed(stream[:size])
        stream = stream[size:]
    assert found == sent


@given(st.binary(max_size=64))
def test_reader_accepts_or_rejects_any_bytes(data: bytes) -> None:
    """Any bytes are messages, an incomplete message, or a ProtocolError."""
    reader: MessageReader[Any] = MessageReader(Any, max_bytes=32)
    try:
        found = reader.feed(data)
    except ProtocolError:
        return
    assert all(isinstance(one, Number | Text) for one in found)


@given(st.binary(min_size=1, max_size=64))
def test_channel_accepts_or_rejects_any_bytes(data: bytes) -> None:
    """A blocking channel neither waits forever nor accepts a message that is too large."""
    ours, theirs = socket_pair()
    with MessageChannel[Any](ours, Any, timeout_s=1, max_bytes=32) as channel, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        try:
            while channel.receive() is not None:
                pass
        except ConnectionError:
            pass


def test_messages_pass_both_ways(pair: Pair) -> None:
    """Each side receives the other's messages in order, and then the end."""
    one, other = pair
    for value in range(100):
        one.send(Number(value))
        other.send(Text(str(value)))
    assert [other.receive() for _ in range(100)] == [Number(value) for value in range(100)]
    assert [one.receive() for _ in range(100)] == [Text(str(value)) for value in range(100)]
    one.close()
    assert other.receive() is None


def test_torn_message_is_an_error() -> None:
    """A connection that ends within a message differs from one that ends after it."""
    ours, theirs = socket_pair()
    with MessageChannel[Any](ours, Any) as channel:
        theirs.sendall(encode_frame(Text("whole")) + encode_frame(Text("torn"))[:-1])
        theirs.close()
        assert channel.receive() == Text("whole")
        with pytest.raises(ConnectionResetError):
            channel.receive()


def test_messages_above_the_limit_are_rejected(ends: tuple[socket.socket, socket.socket]) -> None:
    """Neither side sends or accepts a message above the limit, and the receiver does not wait for its body."""
    with (
        MessageChannel[Any](ends[0], Any, timeout_s=5, max_bytes=1 << 20) as one,
        MessageChannel[Any](ends[1], Any, timeout_s=5, max_bytes=100) as other,
    ):
        with pytest.raises(ProtocolError, match="larger than the limit of 100"):
            other.send(Text("x" * 200))
        one.send(Text("x" * 200))
        with pytest.raises(ProtocolError, match=r"announces|announced"):
            other.receive()


def test_silent_peer_raises_a_timeout(pair: Pair) -> None:
    """A receiver gives up when nothing has arrived for its timeout, and so does a sender whose peer does not read."""
    one, other = pair
    one.timeout_s = 0.05
    with pytest.raises(TimeoutError, match=r"nothing came for 0\.05 s"):
        one.receive()
    with pytest.raises(TimeoutError):
        send_forever(one, Text("x" * 1000))
    assert other.receive() == Text("x" * 1000)


def test_slow_peer_does_not_extend_a_deadline() -> None:
    """``within_s`` bounds the whole message, even if a byte of it arrives now and then."""
    ours, theirs = socket_pair()
    frame = encode_frame(Text("x" * 500))
    stop = threading.Event()

    def trickle() -> None:
        for byte in frame:
            if stop.wait(0.01):
                return
            theirs.send(bytes([byte]))

    thread = threading.Thread(target=trickle)
    thread.start()
    with MessageChannel[Any](ours, Any, timeout_s=30) as channel:
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            channel.receive(within_s=0.2)
        assert time.monotonic() - began_s < 2
        stop.set()
        thread.join()
    theirs.close()


def test_abort_ends_another_threads_wait(pair: Pair) -> None:
    """``abort()`` ends the wait of another thread for a message."""
    one, _ = pair
    ended = threading.Event()

    def wait() -> None:
        try:
            one.receive()
        except OSError:
            pass
        ended.set()

    one.timeout_s = None
    thread = threading.Thread(target=wait)
    thread.start()
    while not ended.is_set():
        one.abort()
        ended.wait(0.01)
    thread.join()


def test_descriptors_arrive_with_their_message(pair: Pair) -> None:
    """A descriptor arrives with its message as one of the receiver's own; ``receive()`` closes it."""
    one, other = pair
    with open(os.memfd_create("test"), "w+b", buffering=0) as file:
        file.write(b"content")
        one.send(Number(1), [file.fileno()])
        one.send(Number(2))
        one.send(Number(3), [file.fileno()])
    received = other.receive_with_fds()
    assert received is not None
    message, (fd,) = received
    assert message == Number(1)
    assert os.pread(fd, 100, 0) == b"content"
    assert not os.get_inheritable(fd)
    os.close(fd)
    assert other.receive_with_fds() == (Number(2), [])
    before = len(os.listdir("/proc/self/fd"))
    assert other.receive() == Number(3)
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptors_of_an_unreadable_message_do_not_leak() -> None:
    """Descriptors that arrive with invalid data are closed."""
    ours, theirs = socket_pair()
    with MessageChannel[Any](ours, Any, timeout_s=5) as channel, theirs, open(os.devnull, "rb") as file:
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(theirs, [b"\x01\x00\x00\x00\xc1"], [file.fileno()])
        with pytest.raises(ProtocolError):
            channel.receive_with_fds()
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("packet", [b"x", b"\1\0\0", b"\2\0\0\0x", b"\1\0\0\0xy"])
def test_packet_of_another_length_is_an_error(packet: bytes) -> None:
    """A packet that is shorter or longer than its header, or too short for one, is rejected."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with MessageChannel[Any](ours, Any) as channel, theirs:
        theirs.send(packet)
        with pytest.raises(ProtocolError, match="a packet of"):
            channel.receive()


def test_bulk_data_passes_between_messages() -> None:
    """The bytes of a file follow a message and arrive in the receiver's buffer."""
    data = os.urandom(3_000_000)
    client, server = tcp_pair()
    with MessageChannel[Any](client, Any, timeout_s=5) as one, MessageChannel[Any](server, Any, timeout_s=5) as other:  # noqa: SIM117
        with open(os.memfd_create("test"), "w+b", buffering=0) as file:
            file.write(data)

            def send() -> None:
                one.send(Number(len(data) - 10))
                one.send_file(file.fileno(), 10, len(data) - 10)
                one.send(Text("the end"))

            thread = threading.Thread(target=send)
            thread.start()
            buffer = memoryview(bytearray(len(data)))
            assert other.receive() == Number(len(data) - 10)
            other.receive_into(buffer[10:])
            assert buffer[10:] == data[10:]
            assert other.receive() == Text("the end")
            thread.join()
            with pytest.raises(ConnectionAbortedError, match="7 bytes too early"):
                one.send_file(file.fileno(), len(data) - 3, 10)


def authenticate(
    client: socket.socket,
    server: socket.socket,
    client_part: Handshake,
    server_part: Handshake,
    *,
    sign: bool = False,
) -> tuple[MessageChannel[Any], MessageChannel[Any], list[BaseException]]:
    one, other = MessageChannel[Any](client, Any, timeout_s=5), MessageChannel[Any](server, Any, timeout_s=5)
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            if not other.authenticate(server_part, within_s=5, sign=sign):
                errors.append(ConnectionError("the client left without a word"))
        except OSError as error:
            errors.append(error)
            other.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        one.authenticate(client_part, within_s=5, sign=sign)
    except OSError as error:
        errors.append(error)
        one.close()
    thread.join()
    return one, other, errors


def client(key: bytes | None = KEY, protocol: str = "test", **more: int) -> Handshake:
    return Handshake(key, protocol, is_server=False, **more)


def server(key: bytes | None = KEY, protocol: str = "test", **more: int) -> Handshake:
    return Handshake(key, protocol, is_server=True, **more)


@pytest.mark.parametrize("sign", [False, True])
def test_peers_with_one_key_authenticate(sign: bool) -> None:
    """Two sides with one key authenticate, the server learns the client's number, and messages pass."""
    part = server()
    one, other, errors = authenticate(*tcp_pair(), client(client_id=-7), part, sign=sign)
    with one, other:
        assert not errors
        assert part.client_id == -7
        for value in range(3):
            one.send(Number(value))
            other.send(Text(str(value)))
            assert other.receive() == Number(value)
            assert one.receive() == Text(str(value))


@pytest.mark.parametrize(
    ("client_part", "server_part", "reason"),
    [
        (client(b"another key"), server(), "does not know this run's key"),
        (client(), server(None), "no key yet"),
        (client(protocol="another"), server(), "does not know this run's key"),
        (client(version=2), server(), "install the same outlast on all nodes"),
    ],
)
def test_peer_without_the_key_is_rejected(client_part: Handshake, server_part: Handshake, reason: str) -> None:
    """Another key, no key, another protocol or another version: both sides fail with the reason."""
    one, other, errors = authenticate(*tcp_pair(), client_part, server_part)
    with one, other:
        assert len(errors) == 2
        assert all(isinstance(error, ConnectionError) for error in errors)
        assert any(reason in str(error) for error in errors)


def test_server_without_the_key_is_rejected() -> None:
    """A client rejects a server that cannot prove the key, even one that returns the client's own proof."""
    for reflect in (False, True):
        part = client()
        ours = part.feed(server().outgoing)
        with pytest.raises(AuthenticationFailed, match="does not know"):
            part.feed(ours[-32:] if reflect else bytes(32))


def test_recorded_handshake_is_rejected() -> None:
    """A recorded client opens no other connection, and a recorded server response convinces no client."""
    one, other = client(), server()
    hello = one.feed(other.outgoing)
    proof = other.feed(hello)
    assert one.feed(proof) == b""
    assert one.signing_keys() == other.signing_keys()[::-1]
    with pytest.raises(AuthenticationFailed):
        server().feed(hello)
    late = client()
    late.feed(other.outgoing)
    with pytest.raises(AuthenticationFailed):
        late.feed(proof)


@given(st.binary(min_size=78, max_size=78))
def test_random_hello_is_rejected(hello: bytes) -> None:
    """A hello of random bytes is rejected."""
    part = server()
    assert part.num_wanted == len(hello)
    with pytest.raises(ConnectionError):
        part.feed(hello)
    assert not part.is_over


def test_silent_client_is_a_timeout_and_a_closed_one_is_not() -> None:
    """A port scan that disconnects is not an error; a client that stays silent is a timeout."""
    one, two = tcp_pair()
    with MessageChannel[Any](two, Any, timeout_s=30) as channel, pytest.raises(TimeoutError):
        channel.authenticate(server(), within_s=0.05)
    one.close()
    one, two = tcp_pair()
    one.close()
    with MessageChannel[Any](two, Any, timeout_s=30) as channel:
        assert not channel.authenticate(server(), within_s=5)


def test_changed_or_repeated_frames_are_rejected() -> None:
    """On a connection with signed frames, a changed, repeated or missing frame is an error."""
    for change in ("changed", "repeated", "left out"):
        ours, theirs = socket_pair()
        relay_in, relay_out = socket_pair()
        one, other = MessageChannel[Any](ours, Any, timeout_s=5), MessageChannel[Any](relay_out, Any, timeout_s=5)
        key_part, server_part = client(), server()
        server_part_answer = server_part.feed(key_part.feed(server_part.outgoing))
        key_part.feed(server_part_answer)
        one.signer = FrameSigner(key_part.signing_keys()[0])
        other.checker = FrameSigner(server_part.signing_keys()[1])
        with one, other, theirs, relay_in:
            one.send(Number(1))
            first = theirs.recv(1000)
            one.send(Number(2))
            second = theirs.recv(1000)
            if change == "changed":
                relay_in.sendall(first[:-17] + b"\x09" + first[-16:])
            elif change == "repeated":
                relay_in.sendall(first + first)
                assert other.receive() == Number(1)
            else:
                relay_in.sendall(second)
            with pytest.raises(ProtocolError, match="signature"):
                other.receive()


def test_buffered_channel_never_blocks() -> None:
    """Unread data waits, is sent when the peer reads, and is an error when it is too much."""
    ours, theirs = socket_pair()
    sender: BufferedChannel[Any] = BufferedChannel(ours, Any)
    receiver: BufferedChannel[Any] = BufferedChannel(theirs, Any)
    with closing(sender), closing(receiver):
        assert receiver.receive() == []
        text = "x" * 100_000
        for _ in range(50):
            sender.send(Text(text))
        assert sender.is_waiting
        found: list[Any] = []
        while len(found) < 50:
            found += receiver.receive()
            sender.flush()
        assert found == [Text(text)] * 50
        assert not sender.is_waiting
        with pytest.raises(ConnectionAbortedError, match="unread"):
            send_forever(sender, Text(text * 10))


def test_buffered_channel_authenticates_before_it_decodes() -> None:
    """Messages sent before the handshake is over wait for it; a stranger's message is never decoded."""
    one, two = tcp_pair()
    sender: BufferedChannel[Any] = BufferedChannel(one, Any, handshake=client(client_id=3))
    receiver: BufferedChannel[Any] = BufferedChannel(two, Any, handshake=server())
    with closing(sender), closing(receiver):
        sender.send(Number(1))
        receiver.send(Text("early"))
        found: list[Any] = []
        replies: list[Any] = []
        while not (found and replies):
            found += receiver.receive()
            replies += sender.receive()
        assert (found, replies) == ([Number(1)], [Text("early")])
        assert receiver.client_id == 3
    one, two = tcp_pair()
    receiver = BufferedChannel(two, Any, handshake=server())
    with closing(receiver), one:
        one.sendall(encode_frame(Number(1)) + bytes(100))
        poll = select.poll()
        poll.register(receiver, select.POLLIN)
        assert poll.poll(100_000)
        with pytest.raises(ProtocolError):
            receiver.receive()
        assert not receiver.is_authenticated


def test_buffered_and_blocking_channels_interoperate() -> None:
    """Both kinds of channel use the same protocol."""
    one, two = tcp_pair()
    buffered: BufferedChannel[Any] = BufferedChannel(two, Any, handshake=server())
    with MessageChannel[Any](one, Any, timeout_s=5) as channel, closing(buffered):
        thread = threading.Thread(target=channel.authenticate, args=(client(),), kwargs={"within_s": 5})
        thread.start()
        while not buffered.is_authenticated:
            buffered.receive()
        thread.join()
        channel.send(Number(5))
        found: list[Any] = []
        while not found:
            found = buffered.receive()
        assert found == [Number(5)]
        buffered.send(Number(6))
        assert channel.receive() == Number(6)
