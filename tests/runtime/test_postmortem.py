"""What a worker leaves for whoever asks why it ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from outlast.runtime.postmortem import Postmortem, Recorder, describe_exception


@pytest.fixture
def kept() -> Iterator[Postmortem]:
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


def test_an_exception_is_kept_with_its_text_frame_and_traceback(kept: Postmortem) -> None:
    """The type, the text in one line, the innermost line of the user's code, and the traceback."""
    recorder = Recorder(kept.path(1))
    recorder.exception(raised(ValueError("token 50257\nout of range")))
    remains = kept.read(1)
    assert remains.cause is not None
    assert remains.cause.describe().startswith("ValueError: token 50257 out of range (")
    assert "test_postmortem.py:" in remains.cause.frame
    assert remains.cause.frame.endswith(" in _raise")
    assert "Traceback (most recent call last)" in remains.trace
    assert kept.read(0).cause is None


def test_a_text_that_is_not_utf8_is_kept(kept: Postmortem) -> None:
    """A message may name a file whose name is no text; its strange bytes are written as escapes."""
    recorder = Recorder(kept.path(0))
    recorder.exception(raised(ValueError("cannot read part-\udcff.bin")))
    remains = kept.read(0)
    assert remains.cause is not None
    assert remains.cause.text == "cannot read part-\\udcff.bin"
    assert "part-\\udcff.bin" in remains.trace


def test_an_exception_in_the_place_of_an_earlier_one_is_kept(kept: Postmortem) -> None:
    """What is kept is of the exception that ends the process, also where it lies in the memory of an earlier one."""
    recorder = Recorder(kept.path(0))
    numbers = set()
    for number in range(20):
        recorder.forget()
        error = ValueError(f"error {number}")
        numbers.add(id(error))
        recorder.exception(error)
        cause = kept.read(0).cause
        assert cause is not None
        assert cause.text == f"error {number}"
        first_ns = cause.mono_ns
        recorder.exception(error)  # told again at the outermost level: as it was told first
        cause = kept.read(0).cause
        assert cause is not None
        assert cause.mono_ns == first_ns
        del error
    assert len(numbers) < 20, "no memory was used again"


def test_library_frames_are_left_out() -> None:
    """The line that is named is the user's, though the exception comes from the standard library."""
    with pytest.raises(ValueError, match="base") as caught:
        int("x", base=99)
    assert "test_postmortem.py:" in describe_exception(caught.value).frame


def test_the_last_output_is_kept_in_a_ring(kept: Postmortem) -> None:
    """Whatever was printed, the last lines are there, whole and in order."""
    recorder = Recorder(kept.path(0))
    for number in range(5000):
        recorder.output(b"line %d\n" % number)
    lines = kept.read(0).output
    assert lines[-1] == "line 4999"
    assert list(lines) == [f"line {number}" for number in range(5000 - len(lines), 5000)]
    recorder.output(b"x" * 200_000 + b"\nend\n")
    assert kept.read(0).output[-1] == "end"


def test_a_text_that_is_too_long_or_cannot_be_made_is_cut(kept: Postmortem) -> None:
    """No exception is too large, or too strange, to be kept."""

    class Strange(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    recorder = Recorder(kept.path(0))
    recorder.exception(raised(Strange()))
    cause = kept.read(0).cause
    assert cause is not None
    assert "cannot be made" in cause.text
    recorder.exception(raised(ValueError("\x00" * 100_000)))
    cause = kept.read(0).cause
    assert cause is not None
    assert cause.type == "ValueError"
    assert len(cause.text) < 1000


def test_a_forked_child_records_nothing(kept: Postmortem) -> None:
    """A data loader's exception is not its worker's."""
    recorder = Recorder(kept.path(0))
    pid = os.fork()
    if not pid:
        recorder.exception(raised(ValueError("a child's")))
        os._exit(0)
    os.waitpid(pid, 0)
    assert kept.read(0).cause is None


def test_a_fatal_signal_leaves_its_stack(kept: Postmortem) -> None:
    """What faulthandler writes as a process dies names the signal and the user's line."""
    pid = os.fork()
    if not pid:
        import faulthandler

        faulthandler.disable()  # pytest's own
        Recorder(kept.path(0)).catch_fatal_signals()
        os.kill(os.getpid(), signal.SIGSEGV)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGSEGV
    remains = kept.read(0)
    assert remains.cause is not None
    assert remains.cause.text == "Segmentation fault"
    assert "test_postmortem.py:" in remains.cause.frame
    assert "most recent call first" in remains.fault
