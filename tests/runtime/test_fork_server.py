"""The fork server: its workers behave like those of new interpreters, and none outlives its owner."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from outlast.errors import OutlastError
from outlast.runtime.fork_server import (
    Clear,
    Cleared,
    Exited,
    ForkServer,
    ForkServerReady,
    SendSignal,
    Spawn,
    Started,
)

pytestmark = [pytest.mark.process, pytest.mark.cold]


@pytest.fixture
def fork_server() -> Iterator[ForkServer]:
    fork_server = ForkServer(preload=("json", "no_such_module"), env=dict(os.environ))
    try:
        yield fork_server
    finally:
        fork_server.close()


def wait_for(fork_server: ForkServer, reason: str = "no reply within 100 s") -> None:
    """Wait until a reply can be received."""
    poll = select.poll()
    poll.register(fork_server, select.POLLIN)
    assert poll.poll(100_000), reason


def receive(fork_server: ForkServer, kind: Any) -> object:
    """Return the next reply, which must be of a kind."""
    wait_for(fork_server)
    reply = fork_server.receive()
    assert isinstance(reply, kind), reply
    return reply


def send(fork_server: ForkServer, out: Path, **request: Any) -> None:
    """Start a worker that writes to ``out``."""
    with open(out, "ab") as file:
        fork_server.send(Spawn(**request, stdout=True, stderr=True), [file.fileno(), file.fileno()])


def spawn(fork_server: ForkServer, tmp_path: Path, code: str, *args: str, key: int = 0) -> int:
    script = tmp_path / f"script{key}.py"
    script.write_text(code)
    argv, environment = tuple(map(os.fsencode, (script, *args))), {**os.environb, b"RANK": b"%d" % key}
    send(fork_server, tmp_path / f"out{key}", key=key, argv=argv, env=environment)
    started = receive(fork_server, Started)
    assert isinstance(started, Started)
    return started.pid


def test_worker_behaves_like_a_new_interpreter(fork_server: ForkServer, tmp_path: Path) -> None:
    """A forked script is ``__main__``, has its argv, path and environment, its own session and its own random
    numbers."""
    ready = receive(fork_server, ForkServerReady)
    assert isinstance(ready, ForkServerReady)
    assert list(ready.failed) == ["no_such_module"]
    code = (
        "import json, os, random, sys\n"
        "print(json.dumps([__name__, __file__, sys.argv[1:], sys.path[0], os.environ['RANK'], os.getsid(0),\n"
        "                  random.random(), sys.modules['__main__'].__file__]))\n"
    )
    numbers = set()
    for key in range(2):
        pid = spawn(fork_server, tmp_path, code, "--lr", "1", key=key)
        exited = receive(fork_server, Exited)
        assert isinstance(exited, Exited)
        assert exited.exit_code == 0
        name, file, argv, path, rank, sid, number, main_file = json.loads((tmp_path / f"out{key}").read_text())
        assert (name, argv, rank, sid) == ("__main__", ["--lr", "1"], str(key), pid)
        assert file == main_file == str(tmp_path / f"script{key}.py")
        assert path == str(tmp_path)
        numbers.add(number)
    assert len(numbers) == 2


def test_workers_that_share_an_output_write_whole_lines(tmp_path: Path) -> None:
    """The output of two concurrent workers is not mixed within a line, even with PYTHONUNBUFFERED."""
    fork_server = ForkServer(preload=(), env={**os.environ, "PYTHONUNBUFFERED": "1"})
    script, out = tmp_path / "script.py", str(tmp_path / "out")
    script.write_text(
        "import os, sys\n"
        "for number in range(3000):\n"
        "    print('rank', os.environ['RANK'], 'at', number, file=(sys.stdout, sys.stderr)[number % 2])\n"
    )
    try:
        receive(fork_server, ForkServerReady)
        for key in range(2):
            environment = {**os.environb, b"PYTHONUNBUFFERED": b"1", b"RANK": b"%d" % key}
            send(fork_server, Path(out), key=key, argv=(bytes(script),), env=environment)
        codes = [
            reply.exit_code for _ in range(4) if isinstance(reply := receive(fork_server, (Started, Exited)), Exited)
        ]
        assert codes == [0, 0]
    finally:
        fork_server.close()
    lines = Path(out).read_text().splitlines()
    expected = [f"rank {rank} at {number}" for rank in range(2) for number in range(3000)]
    assert sorted(lines) == sorted(expected)


@pytest.mark.parametrize(
    ("code", "exit_code", "text"),
    [
        ("raise SystemExit(75)", 75, ""),
        ("raise SystemExit('bad luck')", 1, "bad luck"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("def f():\n    raise ValueError('boo')\nf()", 1, "ValueError: boo"),
        ("import atexit; atexit.register(print, 'last words')", 0, "last words"),
    ],
)
def test_exit_of_a_worker_is_reported(
    code: str, exit_code: int, text: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    """Exit codes, signals and tracebacks are those of the script, without a line of outlast."""
    receive(fork_server, ForkServerReady)
    spawn(fork_server, tmp_path, code)
    exited = receive(fork_server, Exited)
    assert isinstance(exited, Exited)
    assert exited.exit_code == exit_code
    output = (tmp_path / "out0").read_text()
    assert text in output
    assert "fork_server" not in output


def test_clear_ends_workers_and_their_children(fork_server: ForkServer, tmp_path: Path) -> None:
    """After Cleared no process of the workers is left, not even children that ignore SIGTERM."""
    receive(fork_server, ForkServerReady)
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "os.write(os.open(sys.argv[1], os.O_WRONLY), b'%d\\n' % child.pid)\n"
        "time.sleep(600)\n"
    )
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    pid = spawn(fork_server, tmp_path, code, str(fifo))
    with fifo.open() as lines:
        child = int(lines.readline())
    fork_server.send(SendSignal(signal=signal.SIGTERM))
    fork_server.send(Clear(token=7))
    cleared = receive(fork_server, Exited | Cleared)
    if isinstance(cleared, Exited):
        cleared = receive(fork_server, Cleared)
    assert cleared == Cleared(token=7)
    assert not psutil.pid_exists(pid)
    _, alive = psutil.wait_procs([psutil.Process(child)] if psutil.pid_exists(child) else [], timeout=300)
    assert not alive


def test_workers_die_with_the_owner(tmp_path: Path) -> None:
    """When the owner of a fork server is SIGKILLed, the fork server and its workers die."""
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(600)")
    code = (
        "import os, sys, time\n"
        "from outlast.runtime.fork_server import *\n"
        "fork_server = ForkServer(preload=(), env=dict(os.environ))\n"
        "fork_server.receive()\n"
        f"fork_server.send(Spawn(key=0, argv=({bytes(script)!r},), env=dict(os.environb)))\n"
        "print(fork_server.pid, fork_server.receive().pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    processes = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    assert len(processes) == 2
    owner.kill()
    owner.wait(timeout=300)
    owner.stdout.close()
    _, alive = psutil.wait_procs(processes, timeout=300)
    assert not alive


def test_dead_fork_server_is_an_error_not_a_hang(fork_server: ForkServer, tmp_path: Path) -> None:
    """The workers of a killed fork server die with it; its owner reads the end and gets an error from the next
    request."""
    receive(fork_server, ForkServerReady)
    worker = psutil.Process(spawn(fork_server, tmp_path, "import time; time.sleep(600)"))
    os.kill(fork_server.pid, signal.SIGKILL)
    wait_for(fork_server)
    assert fork_server.receive() is None
    _, alive = psutil.wait_procs([worker], timeout=300)
    assert not alive
    with pytest.raises(OutlastError, match="is gone"):
        fork_server.send(Clear())


def test_owner_with_thousands_of_descriptors_starts_workers(tmp_path: Path) -> None:
    """A fork server with high descriptor numbers, as of an agent that hosts thousands of others, works like the
    first one."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, limits[0]), limits[1]))
    connections = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    fork_server = ForkServer(preload=("json",), env=dict(os.environ))
    try:
        assert fork_server.fileno() > 1024
        receive(fork_server, ForkServerReady)
        spawn(fork_server, tmp_path, "print('here')")
        exited = receive(fork_server, Exited)
        assert isinstance(exited, Exited)
        assert exited.exit_code == 0
        assert (tmp_path / "out0").read_text() == "here\n"
    finally:
        fork_server.close()
        for connection in connections:
            os.close(connection)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("kind", ["script", "exec"])
def test_clear_ends_workers_that_were_just_forked(fork_server: ForkServer, tmp_path: Path, kind: str) -> None:
    """Requests that queued up while the fork server imported are handled back to back: a worker that has no session
    yet is ended as well."""
    script = tmp_path / "sleep.py"
    script.write_text("import time; time.sleep(60)")
    argv = (bytes(script),) if kind == "script" else (os.fsencode(sys.executable), bytes(script))
    for token in range(10):
        for key in range(4):
            fork_server.send(Spawn(key=key, kind=kind, argv=argv, env=dict(os.environb)))
        fork_server.send(Clear(token=token))
        news: object = None
        while not isinstance(news, Cleared):
            wait_for(fork_server, f"workers of round {token} were not ended")
            news = fork_server.receive()
        assert news.token == token


def test_worker_does_not_inherit_ignored_signals(tmp_path: Path) -> None:
    """Under nohup, or in a background script, SIGHUP and SIGQUIT end a worker, as under torchrun."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGQUIT)}
    try:
        fork_server = ForkServer(preload=(), env=dict(os.environ))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    try:
        receive(fork_server, ForkServerReady)
        code = "import os, signal; os.kill(os.getpid(), signal.SIG{}); signal.pause()"
        for key, number in enumerate(before):
            spawn(fork_server, tmp_path, code.format(number.name[3:]), key=key)
            exited = receive(fork_server, Exited)
            assert isinstance(exited, Exited)
            assert exited.exit_code == -number
    finally:
        fork_server.close()


def test_started_workers_leave_no_open_descriptors(fork_server: ForkServer, tmp_path: Path) -> None:
    """The fork server closes the descriptors of a worker's output, whether or not the worker's program can run."""
    receive(fork_server, ForkServerReady)
    before = sorted(os.listdir(f"/proc/{fork_server.pid}/fd"))
    for key, argv in enumerate([(b"/no such program",), (os.fsencode(sys.executable), b"-c", b"")]):
        send(fork_server, tmp_path / "out", key=key, kind="exec", argv=argv, env=dict(os.environb))
        receive(fork_server, Started)
        exited = receive(fork_server, Exited)
        assert isinstance(exited, Exited)
        assert exited.exit_code == (127, 0)[key]
    assert sorted(os.listdir(f"/proc/{fork_server.pid}/fd")) == before


@pytest.mark.parametrize("kind", ["script", "exec"])
def test_non_utf8_arguments_and_variables_are_passed(fork_server: ForkServer, tmp_path: Path, kind: str) -> None:
    """Arguments and environment variables are bytes: any value reaches the worker unchanged."""
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text("import os, sys; print(os.environb[b'STRANGE'], os.fsencode(sys.argv[1]))")
    argv = (bytes(script), b"a\xffb") if kind == "script" else (os.fsencode(sys.executable), bytes(script), b"a\xffb")
    environment = {**os.environb, b"STRANGE": b"\xfe"}
    send(fork_server, out, key=0, kind=kind, argv=argv, env=environment)
    receive(fork_server, ForkServerReady)
    receive(fork_server, Started)
    exited = receive(fork_server, Exited)
    assert out.read_text() == "b'\\xfe' b'a\\xffb'\n"
    assert isinstance(exited, Exited)
    assert exited.exit_code == 0


def test_sigterm_reaches_workers_that_were_just_forked(fork_server: ForkServer, tmp_path: Path) -> None:
    """A signal that arrives before a worker differs from the fork server, which ignores it, is not lost."""
    script = tmp_path / "sleep.py"
    script.write_text("import time; time.sleep(60)")
    for key in range(40):
        fork_server.send(Spawn(key=key, argv=(bytes(script),), env=dict(os.environb)))
        fork_server.send(SendSignal(signal=signal.SIGTERM, key=key, group=key % 2 == 0))
    receive(fork_server, ForkServerReady)
    codes: dict[int, int] = {}
    while len(codes) < 40:
        wait_for(fork_server, f"only {sorted(codes)} were ended")
        if isinstance(news := fork_server.receive(), Exited):
            codes[news.key] = news.exit_code
    assert set(codes.values()) == {-signal.SIGTERM}
