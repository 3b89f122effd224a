"""Log lines of the checkpoint writer contain its node, and failed requests do not end it."""

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
def test_a_writers_log_lines_contain_its_node(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log line of the writer has the common format and contains its node."""
    monkeypatch.setenv("OUTLAST_LOG", "xml")  # causes a warning
    with closing(WriterProcess(node="a")) as writer, closing(WriterClient(writer.address)) as client:
        client.ask(protocol.List(), protocol.Listed, timeout_s=300.0)
    (line,) = capfd.readouterr().err.splitlines()
    assert re.match(
        r"\d\d:\d\d:\d\d\.\d{3} WARNING \[checkpoint writer a\] environment variable OUTLAST_LOG='xml'", line
    )


@pytest.mark.process
def test_an_unreadable_manifest_is_rejected() -> None:
    """The worker gets the reason, not that the writer is gone."""
    with closing(WriterProcess()) as writer, closing(WriterClient(writer.address)) as client:
        request = protocol.PreparePart(key=CopyKey(1, "a", 0), manifest=b"no")
        with pytest.raises(CheckpointError, match="the manifest cannot be read"):
            client.ask(request, protocol.Done, timeout_s=300.0)


@pytest.mark.process
def test_a_writer_without_free_descriptors_survives(capfd: pytest.CaptureFixture[str]) -> None:
    """A writer that runs out of descriptors does not exit, and accepts connections again when there are some."""
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
