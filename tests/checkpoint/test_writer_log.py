"""What the checkpoint writer logs bears its node's name; what it cannot do neither ends it nor its connection."""

from __future__ import annotations

import re
import resource
import socket
import time
from contextlib import ExitStack, closing

import pytest

from outlast.checkpoint import protocol
from outlast.checkpoint.manifest import CopyKey
from outlast.checkpoint.writer_client import WriterClient, WriterProcess
from outlast.errors import CheckpointError


@pytest.mark.process
def test_a_writer_says_whose_it_is(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of the writer has the form of all others, and names its node."""
    monkeypatch.setenv("OUTLAST_LOG", "xml")  # something that it warns of
    with closing(WriterProcess(node="a")) as writer, closing(WriterClient(writer.address)) as client:
        client.ask(protocol.List(), protocol.Listed, timeout_s=300.0)
    (line,) = capfd.readouterr().err.splitlines()
    assert re.match(
        r"\d\d:\d\d:\d\d\.\d{3} WARNING \[checkpoint writer a\] environment variable OUTLAST_LOG='xml'", line
    )


@pytest.mark.process
def test_a_manifest_that_cannot_be_read_is_refused_with_the_reason() -> None:
    """The worker learns what is wrong, not that the writer is gone."""
    with closing(WriterProcess()) as writer, closing(WriterClient(writer.address)) as client:
        request = protocol.PreparePart(key=CopyKey(1, "a", 0), manifest=b"no")
        with pytest.raises(CheckpointError, match="the manifest cannot be read"):
            client.ask(request, protocol.Done, timeout_s=300.0)


@pytest.mark.process
def test_a_writer_without_free_descriptors_keeps_what_it_holds(capfd: pytest.CaptureFixture[str]) -> None:
    """It does not end, and serves whoever comes once there are descriptors again."""
    with closing(WriterProcess()) as writer, closing(WriterClient(writer.address)) as client:
        pid = writer.pid
        client.ask(protocol.List(), protocol.Listed, timeout_s=300.0)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (16, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))
        with ExitStack() as opened:
            for _ in range(16):
                connection = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                connection.connect(b"\0" + writer.address.encode())
            end_s, text = time.monotonic() + 60.0, ""
            while "cannot accept connections" not in text:
                assert time.monotonic() < end_s
                time.sleep(0.01)
                text += capfd.readouterr().err
        with closing(WriterClient(writer.address)) as another:
            another.ask(protocol.List(), protocol.Listed, timeout_s=300.0)
        assert writer.pid == pid
