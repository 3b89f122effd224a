"""The record of a worker's end: its exception, last output and fatal signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from outlast.runtime.postmortem import Postmortem, Recorder, describe_exception


@pytest.fixture
def postmortem() -> Iterator[Postmortem]:
    """The memory files of two workers."""
    files = Postmortem(2)
    yield files
    files.close()


def raised(error: Exception) -> Exception:
    """Return an exception with the traceback of a raise in this file."""
    with pytest.raises(type(error)) as caught:
        _raise(error)
    return caught.value


def _raise(error: Exception) -> None:
    raise error


def test_exception_is_kept_with_text_frame_and_traceback(postmortem: Postmortem) -> None:
    """The type, the text in one line, the innermost line of the user's code, and the traceback."""
    recorder = Recorder(postmortem.path(1))
    recorder.exception(raised(ValueError("token 50257\nout of range")))
    record = postmortem.read(1)
    assert record.cause is not None
    assert record.cause.describe().startswith("ValueError: token 50257 out of range (")
    assert "test_postmortem.py:" in record.cause.frame
    assert record.cause.frame.endswith(" in _raise")
    assert "Traceback (most recent call last)" in record.trace
    assert postmortem.read(0).cause is None


def test_non_utf8_text_is_kept(postmortem: Postmortem) -> None:
    """A message may contain a file name that is not UTF-8; invalid bytes are written as escapes."""
    recorder = Recorder(postmortem.path(0))
    recorder.exception(raised(ValueError("cannot read part-\udcff.bin")))
    record = postmortem.read(0)
    assert record.cause is not None
    assert record.cause.text == "cannot read part-\\udcff.bin"
    assert "part-\\udcff.bin" in record.trace


def test_exception_with_a_reused_address_is_kept(postmortem: Postmortem) -> None:
    """The record is that of the exception that ends the process, even if the object has the address of an earlier
    one."""
    recorder = Recorder(postmortem.path(0))
    numbers = set()
    for number in range(20):
        recorder.forget()
        error = ValueError(f"error {number}")
        numbers.add(id(error))
        recorder.exception(error)
        cause = postmortem.read(0).cause
        assert cause is not None
        assert cause.text == f"error {number}"
        first_ns = cause.mono_ns
        recorder.exception(error)  # recorded again at the outermost level: unchanged
        cause = postmortem.read(0).cause
        assert cause is not None
        assert cause.mono_ns == first_ns
        del error
    assert len(numbers) < 20, "no memory was used again"


def test_library_frames_are_omitted() -> None:
    """The recorded line is the user's, even if the exception comes from the standard library."""
    with pytest.raises(ValueError, match="base") as caught:
        int("x", base=99)
    assert "test_postmortem.py:" in describe_exception(caught.value).frame


def test_last_output_is_kept_in_a_ring(postmortem: Postmortem) -> None:
    """The last lines are kept, complete and in order, however much was printed."""
    recorder = Recorder(postmortem.path(0))
    for number in range(5000):
        recorder.output(b"line %d\n" % number)
    lines = postmortem.read(0).output
    assert lines[-1] == "line 4999"
    assert list(lines) == [f"line {number}" for number in range(5000 - len(lines), 5000)]
    recorder.output(b"x" * 200_000 + b"\nend\n")
    assert postmortem.read(0).output[-1] == "end"


def test_long_or_failing_exception_text_is_cut(postmortem: Postmortem) -> None:
    """Any exception can be recorded, also one with a huge text or a failing ``__str__``."""

    class Strange(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    recorder = Recorder(postmortem.path(0))
    recorder.exception(raised(Strange()))
    cause = postmortem.read(0).cause
    assert cause is not None
    assert "cannot be made" in cause.text
    recorder.exception(raised(ValueError("\x00" * 100_000)))
    cause = postmortem.read(0).cause
    assert cause is not None
    assert cause.type == "ValueError"
    assert len(cause.text) < 1000


def test_forked_child_records_nothing(postmortem: Postmortem) -> None:
    """An exception of a data loader process is not recorded as its worker's."""
    recorder = Recorder(postmortem.path(0))
    pid = os.fork()
    if not pid:
        recorder.exception(raised(ValueError("a child's")))
        os._exit(0)
    os.waitpid(pid, 0)
    assert postmortem.read(0).cause is None


def test_fatal_signal_is_kept_with_its_stack(postmortem: Postmortem) -> None:
    """The faulthandler output of a dying process has the signal and the user's line."""
    pid = os.fork()
    if not pid:
        import faulthandler

        faulthandler.disable()  # pytest's own
        Recorder(postmortem.path(0)).catch_fatal_signals()
        os.kill(os.getpid(), signal.SIGSEGV)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGSEGV
    record = postmortem.read(0)
    assert record.cause is not None
    assert record.cause.text == "Segmentation fault"
    assert "test_postmortem.py:" in record.cause.frame
    assert "most recent call first" in record.fault
