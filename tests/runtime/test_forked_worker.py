"""A forked worker: it starts like a new interpreter, and its output and files are complete when it exits."""

from __future__ import annotations

import gzip
import json
import os
import select
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from outlast.runtime.fork_server import Clear, Cleared, Exited, ForkServer, ForkServerReady, Spawn

KEYS = count()
pytestmark = [pytest.mark.process, pytest.mark.cold]


def ready_fork_server(*preload: str, own: str = "", folder: str = "", **variables: str) -> ForkServer:
    fork_server = ForkServer(
        preload=preload,
        own_preload=[own] if own else [],
        folder=folder,
        env={**os.environ, "TMPDIR": "/tmp", **variables},
    )
    assert select.select([fork_server], [], [], 90)[0]
    assert isinstance(fork_server.receive(), ForkServerReady)
    return fork_server


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    fork_server = ready_fork_server()
    yield fork_server
    fork_server.close()


def run(fork_server: ForkServer, folder: Path, code: str, *args: str, **variables: str) -> tuple[int, str]:
    """Run a script to its end; return its exit code and output."""
    script, out = folder / "script.py", folder / "out"
    script.write_text(code)
    out.unlink(missing_ok=True)
    environment = {os.fsencode(name): os.fsencode(value) for name, value in {**os.environ, **variables}.items()}
    argv = tuple(map(os.fsencode, (os.path.relpath(script), *args)))
    with open(out, "ab") as file:
        request = Spawn(key=next(KEYS), argv=argv, env=environment, stdout=True, stderr=True)
        fork_server.send(request, [file.fileno(), file.fileno()])
    return wait_for_exit(fork_server), out.read_text()


def wait_for_exit(fork_server: ForkServer) -> int:
    """Return the exit code of the worker once it has exited and is reaped."""
    code = None
    while True:
        assert select.select([fork_server], [], [], 90)[0]
        news = fork_server.receive()
        if isinstance(news, Exited):
            code = news.exit_code
            fork_server.send(Clear())
        elif isinstance(news, Cleared):
            assert code is not None
            return code


NUMBERS = """
import os, random, sys, tempfile, uuid
from multiprocessing import current_process
print("torch" in sys.modules, "own_module" in sys.modules)
os.environ["OMP_NUM_THREADS"], os.environ["TORCH_LOGS"], os.environ["TMPDIR"] = "2", "dynamo", "/var/tmp"
import numpy, torch.nn.functional, own_module
print(torch.get_num_threads(), tempfile.gettempdir(), torch.nn.functional.__spec__.name)
print(torch.initial_seed(), numpy.random.randint(2**62), random.random(), current_process().authkey.hex(), uuid.uuid4())
torch.manual_seed(7)
print(torch.rand(1).item())
"""


@pytest.mark.extended
def test_workers_have_own_seeds_and_torch_settings(tmp_path: Path) -> None:
    """Seeds and keys differ between workers, those of a seeded script do not; torch is visible once the script
    imports it, with the thread settings of the script; settings that come too late are logged in one line."""
    (tmp_path / "own_module.py").write_text("")
    fork_server = ready_fork_server("torch", own="own_module", folder=str(tmp_path), OMP_NUM_THREADS="1")
    try:
        results = [run(fork_server, tmp_path, NUMBERS, OMP_NUM_THREADS="1", TMPDIR="/tmp") for _ in range(2)]
    finally:
        fork_server.close()
    assert [code for code, _ in results] == [0, 0], results
    (first, second) = ([line for line in text.splitlines() if "TORCH_LOGS" not in line] for _, text in results)
    assert first[:2] == second[:2] == ["False False", "2 /var/tmp torch.nn.functional"]
    for ours, theirs in zip(first[2].split(), second[2].split(), strict=True):
        assert ours != theirs
    assert first[3] == second[3]
    (line_of_warning,) = (line for line in results[0][1].splitlines() if "TORCH_LOGS" in line)
    assert "before the script began" in line_of_warning
    assert line_of_warning.endswith("or add --no-warm-start")
    assert "OMP_NUM_THREADS" not in line_of_warning


START = """
import dataclasses, json, os, sys, threading
@dataclasses.dataclass
class Options:
    steps: int = 1
main = sys.modules["__main__"]
print(json.dumps([__file__, sys.argv, sys.orig_argv[1:], sys.path, os.getcwd(), Options.__annotations__["steps"] is int,
                  main.__spec__, main.__package__, type(main.__loader__).__name__,
                  threading.main_thread().native_id == os.getpid()]))
"""


def test_script_starts_like_in_a_new_interpreter(fork_server: ForkServer, tmp_path: Path) -> None:
    """The script gets no future import of outlast (annotations are types); its file is absolute, its own folder is
    first in the path, and the working directory is not searched."""
    code, text = run(fork_server, tmp_path, START, "--lr", "1")
    assert code == 0, text
    file, argv, original, path, cwd, is_type, spec, package, loader, is_main = json.loads(text)
    assert os.path.isabs(file)
    assert os.path.samefile(file, tmp_path / "script.py")
    relative = os.path.relpath(tmp_path / "script.py")
    assert argv == [relative, "--lr", "1"]
    assert original == ["-u", relative, "--lr", "1"]
    assert path[0] == str(tmp_path)
    assert cwd not in path
    assert "" not in path
    assert (is_type, spec, package, loader, is_main) == (True, None, None, "SourceFileLoader", True)


LEFT = """
import atexit, ctypes, gzip, os, sys, threading, time
os.chdir(sys.argv[1])
class Dying:
    def __del__(self):
        os.write(1, b"deleted\\n")
plain = open("plain", "w"); plain.write("sixteen bytes 16")
packed = gzip.open("packed.gz", "wt"); packed.write("packed")
dying = Dying()
kept = open("kept", "wb"); kept.write(b"bytes")
atexit.register(lambda: kept.write(b" and more"))
threading.Thread(target=lambda: (time.sleep(0.1), print("thread ends"))).start()
if sys.argv[2] == "daemon":
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
ctypes.CDLL(None).printf(b"from C\\n")
sys.stdout.buffer.write(b"line\\n"); os.write(1, b"after it\\n")
if sys.argv[2] == "fails":
    raise ValueError("after all")
"""


@pytest.mark.parametrize("mode", ["ends", "daemon", "fails"])
def test_open_files_are_written_at_the_exit(fork_server: ForkServer, tmp_path: Path, mode: str) -> None:
    """Files, archives and C output are written, threads end and objects are deleted, even if the script fails or a
    daemon thread is left."""
    code, text = run(fork_server, tmp_path, LEFT, str(tmp_path), mode)
    assert code == (1 if mode == "fails" else 0), text
    assert (tmp_path / "plain").read_text() == "sixteen bytes 16"
    assert (tmp_path / "kept").read_bytes() == b"bytes and more"
    assert gzip.decompress((tmp_path / "packed.gz").read_bytes()) == b"packed"
    assert {"thread ends", "deleted", "from C"} <= set(text.splitlines())
    assert text.index("line") < text.index("after it")
    assert ("ValueError: after all" in text) == (mode == "fails")


SPAWNED = """
import multiprocessing, os
class Batch:
    def __init__(self, number): self.number = number
def batch(number): return Batch(number)
if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            made = pool.map(batch, [4])[0]
            print(method, type(made) is Batch, made.number)
"""


def test_spawned_children_return_objects(fork_server: ForkServer, tmp_path: Path) -> None:
    """Children of `spawn` and `forkserver` return objects of the script's classes."""
    assert run(fork_server, tmp_path, SPAWNED) == (0, "spawn True 4\nforkserver True 4\n")


def test_script_exits_like_in_an_interpreter(fork_server: ForkServer, tmp_path: Path) -> None:
    """An interrupted script prints a traceback and ends by SIGINT; a missing script is exit code 2; a failing hook
    is reported, and output that cannot be written is 120."""
    code, text = run(fork_server, tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nsignal.pause()")
    assert code == -signal.SIGINT
    assert text.startswith("Traceback")
    assert text.endswith("KeyboardInterrupt\n")
    code, text = run(fork_server, tmp_path, "import sys\nsys.excepthook = lambda *_: 1 / 0\nraise ValueError('first')")
    assert code == 1
    assert text.startswith("Error in sys.excepthook:\nTraceback")
    assert text.index("ZeroDivisionError") < text.index("Original exception was:") < text.index("ValueError: first")
    assert "forked_worker" not in text
    code, _ = run(
        fork_server, tmp_path, "import os, sys\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)\nprint('x', end='')"
    )
    assert code == 120
    with open(tmp_path / "missing", "ab") as file:
        request = Spawn(key=next(KEYS), argv=(b"no_such.py",), env=dict(os.environb), stderr=True)
        fork_server.send(request, [file.fileno()])
    assert wait_for_exit(fork_server) == 2
    assert "no_such.py': [Errno 2] No such file" in (tmp_path / "missing").read_text()


ENDS_GROUP = """
import copy, os, weakref
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", init_method=f"file://{os.environ['MEETING']}", rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(20, 1))
model(torch.randn(4, 20)).sum().backward()
copied = copy.deepcopy(model.module)
dist.destroy_process_group()
freed = []
parts = {"group": model.process_group, "reducer": model.reducer, "logger": model.logger}
watching = [weakref.ref(part, lambda _, name=name: freed.append(name)) for name, part in parts.items()]
del parts, model
print(*freed)
"""


@pytest.mark.extended
def test_model_frees_its_process_group_last(tmp_path: Path) -> None:
    """A DistributedDataParallel that outlives destroy_process_group() frees its gloo group last, by a Python
    reference, for which torch releases the global lock. A reducer that frees the group holds the lock and waits
    without end for a thread of the group that needs it: the worker never exits."""
    fork_server = ready_fork_server("torch", "torch._dynamo")
    try:
        code, printed = run(fork_server, tmp_path, ENDS_GROUP, MEETING=str(tmp_path / "meeting"))
    finally:
        fork_server.close()
    assert (code, printed.split()) == (0, ["logger", "reducer", "group"])
