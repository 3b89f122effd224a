"""The listener tells what came, from where, when to give up, and ends the process at its deadline."""

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
    """A source that gives notice the first time that it is asked."""

    name = "once"

    def __init__(self, left_s: float | None = None) -> None:
        self._left_s = left_s

    def poll(self) -> NoticeReceived | None:
        """Give notice."""
        return NoticeReceived("because", self._left_s)


class Broken:
    """A source that cannot be asked at first."""

    name = "broken"

    def __init__(self) -> None:
        self.asked = 0

    def poll(self) -> NoticeReceived | None:
        """Fail twice, then give notice."""
        self.asked += 1
        if self.asked < 3:
            raise OSError("no route")
        return NoticeReceived("at last")


def test_a_source_gives_notice_with_its_name_and_reason() -> None:
    """Who asks learns who said so, and why, and how long is left."""
    seen: list[Notice] = []
    with ShutdownListener((), sources=[Once(30.0)], deadline_s=600, on_notice=seen.append) as listener:
        assert listener.wait(60)
        assert listener.is_requested
        first = listener.first
        assert first is not None
        assert (first.source, first.reason, first.signal, first.ordinal) == ("once", "because", None, 1)
        remaining_s = listener.remaining_s
        assert remaining_s is not None
        assert remaining_s <= 30
        assert not listener.should_give_up
    assert [notice.source for notice in seen] == ["once"]


def test_without_a_notice_there_is_no_deadline() -> None:
    """The deadline runs from the first notice, not from the start; 0 is none at all."""
    with ShutdownListener((), deadline_s=0.01) as listener:
        assert not listener.wait(0.1)
        assert listener.remaining_s is None
    with ShutdownListener((), deadline_s=0) as listener:
        listener.request("go")
        assert listener.is_requested
        assert listener.remaining_s is None
        assert not listener.wait_to_give_up(0.01)


def test_a_source_that_fails_is_said_once_and_asked_on(caplog: pytest.LogCaptureFixture) -> None:
    """A metadata server that is away for a while neither stops the run nor fills the log."""
    with ShutdownListener((), sources=[Broken()], poll_interval_s=0.01) as listener:
        assert listener.wait(60)
    assert caplog.text.count("failed and is polled again") == 1


def test_what_asks_twice_is_no_second_signal() -> None:
    """The scheduler's time limit and then its signal are one story: the save goes on."""
    with ShutdownListener((signal.SIGUSR1,), deadline_s=600) as listener:
        listener.request("the job's time limit ends in 60 s", source="time_limit")
        os.kill(os.getpid(), signal.SIGUSR1)
        assert listener.wait(10, ordinal=2)
        assert not listener.should_give_up
        remaining_s = listener.remaining_s
        assert remaining_s is not None
        assert remaining_s > 500


def test_a_second_signal_gives_up() -> None:
    """Whoever signals again does not want to wait for the save."""
    with ShutdownListener((signal.SIGUSR1,), deadline_s=600, echo_s=0, impatience_s=300) as listener:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert listener.wait(60)
        assert not listener.should_give_up
        os.kill(os.getpid(), signal.SIGUSR1)
        assert listener.wait_to_give_up(60)
        remaining_s = listener.remaining_s
        assert remaining_s is not None
        assert remaining_s <= 300


def test_it_says_to_give_up_before_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread gets the time to leave in order, with what it has."""
    # It would end this process.
    monkeypatch.setattr("outlast.preemption.listener.ShutdownListener._end_in_time", lambda _: None)
    monkeypatch.setattr("outlast.preemption.listener.LastResort.arm", lambda *_: None)
    with ShutdownListener((), deadline_s=60) as listener:
        listener.request("go")
        assert not listener.should_give_up
        listener.request("sooner", left_s=2.0)
        assert listener.wait_to_give_up(60)
        assert listener._give_up_s is not None
        assert listener._give_up_s < listener._hard_s


def run(code: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a script, and return how it ended."""
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
def test_the_deadline_ends_a_process_whose_main_thread_is_in_c() -> None:
    """A collective that never returns cannot hold up the process; what is lost is said."""
    late = "from outlast.preemption.listener import LastResort\nLastResort.arm = lambda *_: None\n"
    ended = run(late + STUCK.format(stuck="ctypes.CDLL(None).pthread_mutex_lock(mutex)"))
    assert ended.returncode == 75, ended.stderr
    assert ended.stdout == "lost 75\n"


@pytest.mark.process
def test_the_deadline_ends_a_process_whose_main_thread_keeps_the_interpreters_lock() -> None:
    """No thread of Python runs any more; the C library ends the process, with the agreed exit code."""
    ended = run(STUCK.format(stuck="ctypes.PyDLL(None).pthread_mutex_lock(mutex)"))
    assert ended.returncode == 75, ended.stderr


@pytest.mark.process
def test_closing_lets_the_process_live() -> None:
    """After close() no deadline ends anything, and signals do what they did."""
    code = """
import os, signal, time
from outlast.preemption import ShutdownListener
with ShutdownListener(deadline_s=3) as listener:
    listener.request("go")
time.sleep(3.5)
print("alive", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
"""
    ended = run(code)
    assert ended.stdout == "alive\n"
    assert ended.returncode == -signal.SIGTERM


@pytest.mark.process
def test_a_forked_child_has_no_deadline() -> None:
    """What a process forks is not ended with it."""
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


def test_the_end_of_a_time_limit_comes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notice is given ``lead_s`` before the end, or at half time of what is shorter, with the seconds left."""
    now_s = 1000.0
    monkeypatch.setattr("outlast.clock.now_s", lambda: now_s)
    long = EndTime(3600, lead_s=60, what="the limit ends", name="time_limit")
    short = EndTime(100, lead_s=60, what="the limit ends", name="time_limit")
    assert long.poll() is None
    now_s += 51
    told = short.poll()
    assert told is not None
    assert told.left_s == pytest.approx(49)
    now_s = 1000.0 + 3539
    assert long.poll() is None
    now_s += 2
    told = long.poll()
    assert told is not None
    assert told == NoticeReceived("the limit ends in 59 s", pytest.approx(59))


def test_a_file_gives_notice_by_being_there(tmp_path: Path) -> None:
    """Kubernetes' hook, or a person, touches a file; its first line is the reason."""
    source = NoticeFile(str(tmp_path / "leave"))
    assert source.poll() is None
    (tmp_path / "leave").write_text("maintenance at noon\nmore")
    assert source.poll() == NoticeReceived(f"{tmp_path / 'leave'} is there: maintenance at noon")


@contextmanager
def answering(*answers: tuple[int, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve answers one after the other, the last one on; yield the address and the headers that came."""
    left, headers = list(answers), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers.append(self.headers.get("Metadata-Flavor", ""))
            status, body = left.pop(0) if len(left) > 1 else left[0]
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


def test_an_address_gives_notice_by_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """404, FALSE and NONE mean not yet; an error is one; another text means leave. No proxy is asked."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    answers = [(404, b""), (200, b"FALSE\n"), (200, b"none"), (204, b""), (500, b"x"), (200, b"TRUE")]
    with answering(*answers) as (url, headers):
        source = NoticeURL(url, header="Metadata-Flavor: Google", timeout_s=60)
        for _ in range(4):
            assert source.poll() is None
        with pytest.raises(OSError, match="500"):
            source.poll()
        told = source.poll()
    assert told == NoticeReceived(f"{url.partition('?')[0]} reports 'TRUE'")
    assert set(headers) == {"Google"}
    with pytest.raises(ConfigError, match="http"):
        NoticeURL("file:///etc/passwd")


def test_a_plugin_is_loaded_by_name() -> None:
    """``package.module:name`` makes a source; what is none is refused with its name."""
    assert load_source(f"{__name__}:Once").poll() == NoticeReceived("because")
    with pytest.raises(ConfigError, match=r"no\.such:thing"):
        load_source("no.such:thing")
    with pytest.raises(ConfigError, match=r"no poll\(\)"):
        load_source("builtins:dict")
