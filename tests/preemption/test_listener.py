"""The listener reports preemption notices with their source, when to give up, and ends the process at its deadline."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outlast.errors import ConfigError
from outlast.preemption import EndTime, Notice, NoticeFile, NoticeReceived, NoticeURL, ShutdownListener, load_source


class Once:
    """A source with a preemption notice at the first poll."""

    name = "once"

    def __init__(self, left_s: float | None = None) -> None:
        self._left_s = left_s

    def poll(self) -> NoticeReceived | None:
        return NoticeReceived("because", self._left_s)


class Broken:
    """A source that fails at first."""

    name = "broken"

    def __init__(self) -> None:
        self.num_polls = 0

    def poll(self) -> NoticeReceived | None:
        self.num_polls += 1
        if self.num_polls < 3:
            raise OSError("no route")
        return NoticeReceived("at last")


def test_notice_has_source_reason_and_remaining_time() -> None:
    """A notice has its source, its reason and the remaining time."""
    notices: list[Notice] = []
    with ShutdownListener((), sources=[Once(30.0)], deadline_s=600, on_notice=notices.append) as listener:
        assert listener.wait(60)
        assert listener.is_requested
        first = listener.first
        assert first is not None
        assert (first.source, first.reason, first.signal, first.ordinal) == ("once", "because", None, 1)
        remaining_s = listener.remaining_s
        assert remaining_s is not None
        assert remaining_s <= 30
        assert not listener.should_give_up
    assert [notice.source for notice in notices] == ["once"]


def test_without_a_notice_there_is_no_deadline() -> None:
    """The deadline counts from the first notice, not from the start; 0 means no deadline."""
    with ShutdownListener((), deadline_s=0.01) as listener:
        assert not listener.wait(0.1)
        assert listener.remaining_s is None
    with ShutdownListener((), deadline_s=0) as listener:
        listener.request("go")
        assert listener.is_requested
        assert listener.remaining_s is None
        assert not listener.wait_to_give_up(0.01)


def test_failing_source_is_logged_once_and_polled_again(caplog: pytest.LogCaptureFixture) -> None:
    """A temporarily unreachable metadata server neither stops the run nor fills the log."""
    with ShutdownListener((), sources=[Broken()], poll_interval_s=0.01) as listener:
        assert listener.wait(60)
    assert caplog.text.count("failed and is polled again") == 1


def test_signal_after_a_notice_is_not_a_second_signal() -> None:
    """The scheduler's time limit and then its signal are one shutdown request: the save continues."""
    with ShutdownListener((signal.SIGUSR1,), deadline_s=600) as listener:
        listener.request("the job's time limit ends in 60 s", source="time_limit")
        os.kill(os.getpid(), signal.SIGUSR1)
        assert listener.wait(10, ordinal=2)
        assert not listener.should_give_up
        remaining_s = listener.remaining_s
        assert remaining_s is not None
        assert remaining_s > 500


def test_second_signal_gives_up() -> None:
    """A second signal means that the save is not to be waited for."""
    with ShutdownListener((signal.SIGUSR1,), deadline_s=600, echo_s=0, impatience_s=300) as listener:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert listener.wait(60)
        assert not listener.should_give_up
        os.kill(os.getpid(), signal.SIGUSR1)
        assert listener.wait_to_give_up(60)
        remaining_s = listener.remaining_s
        assert remaining_s is not None
        assert remaining_s <= 300


def test_listener_gives_up_before_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread gets time before the deadline to exit in order."""
    # These would end this process.
    monkeypatch.setattr("outlast.preemption.listener.ShutdownListener._end_in_time", lambda _: None)
    monkeypatch.setattr("outlast.preemption.listener.LastResort.arm", lambda *_: None)
    now_s = 1000.0
    monkeypatch.setattr("outlast.clock.now_s", lambda: now_s)
    with ShutdownListener((), deadline_s=60) as listener:
        listener.request("go")
        assert not listener.should_give_up
        listener.request("sooner", left_s=2.0)
        now_s += 1.5
        assert not listener.should_give_up
        now_s += 0.2
        assert listener.wait_to_give_up(60)
        assert listener.remaining_s == pytest.approx(0.3)


def run(code: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a script, and return its result."""
    return subprocess.run(
        [sys.executable, "-c", code], timeout=timeout_s, check=False, text=True, capture_output=True, env=os.environ
    )


STUCK = """
import ctypes, os, signal
from outlast.preemption import ShutdownListener
mutex = ctypes.create_string_buffer(64)
ctypes.CDLL(None).pthread_mutex_lock(mutex)
listener = ShutdownListener(deadline_s=1.0, before_exit=lambda code: print("lost", code, flush=True))
os.kill(os.getpid(), signal.SIGTERM)
assert listener.wait(60)
{stuck}
"""


@pytest.mark.process
def test_deadline_ends_a_process_blocked_in_c() -> None:
    """A collective that never returns cannot keep the process alive; the loss is reported."""
    late = "from outlast.preemption.listener import LastResort\nLastResort.arm = lambda *_: None\n"
    result = run(late + STUCK.format(stuck="ctypes.CDLL(None).pthread_mutex_lock(mutex)"))
    assert result.returncode == 75, result.stderr
    assert result.stdout == "lost 75\n"


@pytest.mark.process
def test_deadline_ends_a_process_that_holds_the_gil() -> None:
    """If no Python thread can run, the C library ends the process with the same exit code."""
    result = run(STUCK.format(stuck="ctypes.PyDLL(None).pthread_mutex_lock(mutex)"))
    assert result.returncode == 75, result.stderr


@pytest.mark.process
def test_close_cancels_the_deadline() -> None:
    """After close() no deadline ends the process, and signals have their earlier effect."""
    code = """
import os, signal, time
from outlast.preemption import ShutdownListener
with ShutdownListener(deadline_s=3) as listener:
    listener.request("go")
time.sleep(3.5)
print("alive", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
"""
    result = run(code)
    assert result.stdout == "alive\n"
    assert result.returncode == -signal.SIGTERM


@pytest.mark.process
def test_forked_child_has_no_deadline() -> None:
    """The deadline of a process does not end its forked children."""
    code = """
import os, time
from outlast.preemption import ShutdownListener
listener = ShutdownListener((), deadline_s=3)
listener.request("go")
child = os.fork()
if child == 0:
    time.sleep(3.5)
    os._exit(7)
listener.close()
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
"""
    assert run(code).returncode == 0


def test_end_time_notifies_before_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notice comes ``lead_s`` before the end, or at half time of a shorter limit, with the remaining seconds."""
    now_s = 1000.0
    monkeypatch.setattr("outlast.clock.now_s", lambda: now_s)
    long = EndTime(3600, lead_s=60, what="the limit ends", name="time_limit")
    short = EndTime(100, lead_s=60, what="the limit ends", name="time_limit")
    assert long.poll() is None
    now_s += 51
    received = short.poll()
    assert received is not None
    assert received.left_s == pytest.approx(49)
    now_s = 1000.0 + 3539
    assert long.poll() is None
    now_s += 2
    received = long.poll()
    assert received is not None
    assert received == NoticeReceived("the limit ends in 59 s", pytest.approx(59))


def test_existing_file_is_a_notice(tmp_path: Path) -> None:
    """A file created by a Kubernetes hook or a person is a notice; its first line is the reason."""
    source = NoticeFile(str(tmp_path / "leave"))
    assert source.poll() is None
    (tmp_path / "leave").write_text("maintenance at noon\nmore")
    assert source.poll() == NoticeReceived(f"{tmp_path / 'leave'} is there: maintenance at noon")


@contextmanager
def serve_responses(*answers: tuple[int, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve responses in order, the last one repeatedly; yield the URL and the received headers."""
    remaining, headers = list(answers), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers.append(self.headers.get("Metadata-Flavor", ""))
            status, body = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/preempted?key=1", headers
        finally:
            server.shutdown()
            thread.join()


def test_url_response_is_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """404, FALSE and NONE mean no notice; an error is one; another text is a notice. No proxy is used."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    answers = [(404, b""), (200, b"FALSE\n"), (200, b"none"), (204, b""), (500, b"x"), (200, b"TRUE")]
    with serve_responses(*answers) as (url, headers):
        source = NoticeURL(url, header="Metadata-Flavor: Google", timeout_s=60)
        for _ in range(4):
            assert source.poll() is None
        with pytest.raises(OSError, match="500"):
            source.poll()
        received = source.poll()
    assert received == NoticeReceived(f"{url.partition('?')[0]} reports 'TRUE'")
    assert set(headers) == {"Google"}
    with pytest.raises(ConfigError, match="http"):
        NoticeURL("file:///etc/passwd")


def test_plugin_source_is_loaded_by_name() -> None:
    """``package.module:name`` creates a source; an invalid one is rejected with its name."""
    assert load_source(f"{__name__}:Once").poll() == NoticeReceived("because")
    with pytest.raises(ConfigError, match=r"no\.such:thing"):
        load_source("no.such:thing")
    with pytest.raises(ConfigError, match=r"no poll\(\)"):
        load_source("builtins:dict")
