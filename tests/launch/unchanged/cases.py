"""One rank, one case: what a script may count on, printed and written so that two launchers can be compared.

What no two processes share (seeds, names, keys) is written to the file ``drawn``; what must be equal is printed.
"""

import atexit
import csv
import gc
import io
import json
import locale
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path

OUT = Path(os.environ["CASE_OUT"]) / os.environ["RANK"]
OUT.mkdir(parents=True, exist_ok=True)


@dataclass
class Batch:
    """An object of a class of the script's own, as workers send them back."""

    number: int
    name: str = "batch"


def double(number: int) -> Batch:
    return Batch(2 * number)


def say_batch(rank: int) -> None:
    print("spawned", rank, __name__, double(rank), flush=True)


class Numbers:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Batch:
        return Batch(index)


class Dying:
    def __init__(self, name: str) -> None:
        self.name = name

    def __del__(self) -> None:
        os.write(1, f"{self.name} is deleted\n".encode())


def start() -> None:
    main = sys.modules["__main__"]
    print(
        {name: getattr(main, name, "none") for name in ("__name__", "__file__", "__spec__", "__package__", "__doc__")}
    )
    print(type(main.__loader__).__name__, main.__cached__, main.__annotations__, type(__builtins__).__name__)
    print(sys.argv, sys.orig_argv, sys.path, os.getcwd(), sys.flags, sys.executable, sys.warnoptions)
    print(Path("/proc/self/cmdline").read_text().replace("\0", " ")[:100])
    print("torch" in sys.modules, sys.modules["__main__"].__dict__ is globals())
    print({number: str(signal.getsignal(number)) for number in signal.valid_signals() if number < signal.SIGRTMIN})
    print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getitimer(signal.ITIMER_REAL))
    print(os.getsid(0) == os.getpgid(0) == os.getpid(), threading.main_thread().native_id == os.getpid())
    print([thread.name for thread in threading.enumerate()], threading.Thread(target=print).name)
    print(sys.getrecursionlimit(), sys.getswitchinterval(), gc.get_threshold(), gc.isenabled(), locale.getlocale())
    print(sys.excepthook is sys.__excepthook__, sys.stdout is sys.__stdout__, sys.gettrace(), os.umask(0o22))
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        print(stream.name, stream.mode, stream.encoding, stream.errors, stream.isatty(), stream.line_buffering)
    print(sys.stdout.write_through, tempfile.gettempdir(), time.tzname)
    skipped = (
        "CASE_",
        "MASTER_",
        "OUTLAST_",
        "TORCH_CPP_LOG_LEVEL",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_SIGNALS",
    )
    print({name: value for name, value in sorted(os.environ.items()) if not name.startswith(skipped)})
    print(repr(sys.stdin.read()))


def seeds() -> None:
    import random
    import uuid
    from multiprocessing import current_process

    import numpy
    import torch

    drawn = [torch.initial_seed(), torch.randint(2**62, ()).item(), numpy.random.randint(2**62), random.getrandbits(62)]
    drawn += [str(uuid.uuid4()), current_process().authkey.hex(), tempfile.mktemp(), str(uuid.uuid1())]
    drawn += [torch.nn.functional.dropout(torch.ones(64)).tolist(), torch.randperm(64).tolist()]
    (OUT / "drawn").write_text(json.dumps(drawn))
    torch.manual_seed(7)
    numpy.random.seed(7)
    random.seed(7)
    print(torch.randn(3), numpy.random.random(3), random.random(), torch.initial_seed(), torch.get_num_threads())
    print(torch.nn.Linear(2, 2).weight, torch.__spec__.name, torch.__spec__.origin == torch.__file__)


def threads() -> None:
    os.environ["OMP_NUM_THREADS"] = "2"
    os.environ["TMPDIR"] = str(OUT)
    import torch
    import torch.nn.functional

    print(torch.get_num_threads(), tempfile.gettempdir() == str(OUT))
    os.environ["OMP_NUM_THREADS"] = "1"
    from torch import nn

    print(torch.get_num_threads(), nn.functional is torch.nn.functional)


def annotations() -> None:
    import argparse

    @dataclass
    class Options:
        steps: int = 3
        rate: float = 0.5

    print([(field.name, field.type) for field in fields(Options)], double.__annotations__)
    parser = argparse.ArgumentParser()
    for field in fields(Options):
        parser.add_argument(f"--{field.name}", type=field.type, default=field.default)
    print(parser.parse_args(["--steps", "8"]))


def left_open() -> None:
    import gzip
    import logging.handlers
    import zipfile

    globals()["plain"] = open(OUT / "plain", "w")
    globals()["plain"].write("sixteen bytes 16")
    globals()["binary"] = open(OUT / "binary", "wb")
    globals()["binary"].write(b"left")
    globals()["packed"] = gzip.open(OUT / "packed.gz", "wt")
    globals()["packed"].write("packed")
    globals()["rows"] = csv.writer(open(OUT / "rows.csv", "w"))
    globals()["rows"].writerow(["a", 1])
    globals()["zipped"] = zipfile.ZipFile(OUT / "zipped.zip", "w")
    globals()["zipped"].writestr(zipfile.ZipInfo("name"), "content")
    globals()["dying"] = Dying("global")
    globals()["temporary"] = tempfile.NamedTemporaryFile(dir=OUT, prefix="temporary")
    globals()["folder"] = tempfile.TemporaryDirectory(dir=OUT)
    kept = open(OUT / "kept", "w")
    kept.write("held by a closure")
    globals()["closure"] = lambda: kept
    import helper

    helper.log = open(OUT / "of-module", "w")
    helper.log.write("held by a module")
    handler = logging.handlers.MemoryHandler(100, target=logging.FileHandler(OUT / "log"))
    logging.getLogger().addHandler(handler)
    logging.getLogger().warning("buffered until the end")
    atexit.register(print, "first registered")
    atexit.register(os.write, 1, b"last registered\n")
    ended = threading.Event()
    threading.Thread(target=lambda: (ended.wait(60), print("thread ends"))).start()
    sys.stdout = Tee(open(OUT / "tee", "w"))
    print("main ends")
    ended.set()


class Tee(io.TextIOBase):
    def __init__(self, copy: io.TextIOBase) -> None:
        self.copy = copy

    def write(self, text: str) -> int:
        self.copy.write(text)
        return sys.__stdout__.write(text)


def libraries_print() -> None:
    import ctypes

    library = ctypes.CDLL(None)
    library.printf(b"printed by a library\n")
    daemon = threading.Thread(target=time.sleep, args=(600,), daemon=True)
    daemon.start()
    globals()["plain"] = open(OUT / "plain", "w")
    globals()["plain"].write("beside a daemon")


def children() -> None:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    for method in ("fork", "forkserver", "spawn"):
        context = multiprocessing.get_context(method)
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            print(method, pool.submit(double, 4).result(), list(pool.map(double, [1, 2])))
    queue = context.Queue()
    process = context.Process(target=put, args=(queue,))
    process.start()
    print(queue.get(timeout=60), process.join(60), process.exitcode)
    with context.Manager() as manager:
        shared = manager.dict(one=Batch(1))
        print(dict(shared), type(shared["one"]) is Batch)


def put(queue) -> None:
    queue.put([Batch(5), sys.argv[1:], __name__])


def loaders() -> None:
    import torch

    loader = torch.utils.data.DataLoader(
        Numbers(), batch_size=2, num_workers=1, collate_fn=list, multiprocessing_context="spawn"
    )
    print(list(loader))
    torch.multiprocessing.spawn(say_batch, nprocs=1)
    globals()["left"] = iter(torch.utils.data.DataLoader(Numbers(), num_workers=1, collate_fn=list))
    print(next(globals()["left"]))


def coroutines() -> None:
    import asyncio

    async def work() -> list:
        child = await asyncio.create_subprocess_exec(
            "cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        text, _ = await child.communicate(b"through a child")
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, print, "signal in the loop")
        os.kill(os.getpid(), signal.SIGUSR2)
        return [
            text,
            child.returncode,
            await asyncio.to_thread(double, 3),
            await asyncio.gather(asyncio.sleep(0.05, 1)),
        ]

    print(asyncio.run(work()))


def bars() -> None:
    for done in range(0, 101, 20):
        sys.stderr.write(f"\r{done:3d}% |{'#' * (done // 10):10s}|")
        sys.stderr.flush()
        print(f"\rstep {done}", end="")
    print()
    sys.stdout.buffer.write(b"bytes\xff\n")
    os.write(1, b"descriptor\n")
    print("äöü ☃ \U0001f600", "a", "b", sep="-", file=sys.stderr)
    print("tabs\tand\r\nends")
    sys.stdout.write("no newline at the end")


def much() -> None:
    line = "x" * 99 + "\n"
    for _ in range(10):
        sys.stdout.write(line * 10_000)
    for number in range(20_000):
        print("line", number)
    sys.stdout.flush()
    os.write(2, b"done\n")


def signals() -> None:
    import subprocess

    got: list = []
    for name in ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGALRM", "SIGHUP", "SIGCHLD"):
        signal.signal(getattr(signal, name), lambda number, frame: got.append(signal.Signals(number).name))
    for name in ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGHUP"):
        os.kill(os.getpid(), getattr(signal, name))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    time.sleep(0.5)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    except KeyboardInterrupt:
        got.append("interrupted")
    print(got, subprocess.run(["bash", "-c", "set -o pipefail; yes | head -1"], check=False, capture_output=True))
    print(got)


def replaced() -> None:
    print("lives", os.environ.get("SECOND_LIFE"), sys.argv, sys.orig_argv)
    if "SECOND_LIFE" not in os.environ:
        os.environ["SECOND_LIFE"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def forks() -> None:
    pid = os.fork()
    if not pid:
        print("child ends")
        sys.exit(3)
    print("parent", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    from concurrent.futures import ThreadPoolExecutor

    pool, ended = ThreadPoolExecutor(1), threading.Event()
    for number in range(3):
        pool.submit(lambda number=number: (ended.wait(60), print("late", number)))
    print("main ends")
    ended.set()
    exit()


def imports() -> None:
    import inspect
    import pickle

    import helper
    import numpy
    import torch

    print(helper.WHERE, inspect.getsource(double), pickle.loads(pickle.dumps(Batch(1))), Batch.__module__)
    site = Path(torch.__file__).parents[1]
    print(Path(numpy.__file__).parents[1] == site, __import__("__main__").Batch is Batch, "shadow" in sys.modules)
    print(torch.nn.functional.relu(torch.tensor([-1.0, 2.0])), torch.distributed.is_torchelastic_launched())
    print(torch.compile(lambda value: value + 1, backend="eager")(torch.ones(1)))


CASES = [
    start,
    seeds,
    seeds,
    threads,
    annotations,
    left_open,
    libraries_print,
    children,
    loaders,
    coroutines,
    bars,
    much,
    signals,
    replaced,
    forks,
    imports,
]

if __name__ == "__main__":
    CASES[int(os.environ["RANK"])]()
