"""What the checkpoint writer logs bears its owner's name."""

from __future__ import annotations

import re
from contextlib import closing

import pytest

from outlast.checkpoint import protocol
from outlast.checkpoint.writer_client import WriterClient, WriterProcess


@pytest.mark.process
def test_a_writer_says_whose_it_is(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of the writer has the form of all others, and names the node or the rank that started it."""
    monkeypatch.setenv("OUTLAST_LOG", "xml")  # something that it warns of
    with closing(WriterProcess(owner="rank 3", node="a")) as writer, closing(WriterClient(writer.address)) as client:
        client.ask(protocol.List(), protocol.Listed, timeout_s=100.0)
    (line,) = capfd.readouterr().err.splitlines()
    assert re.match(
        r"\d\d:\d\d:\d\d\.\d{3} WARNING \[checkpoint writer rank 3\] environment variable OUTLAST_LOG='xml'", line
    )
