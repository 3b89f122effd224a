"""Stack dumps: parsing, arrangement and requests that do not harm the process."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

import outlast
from outlast.monitor import stacks
from outlast.monitor.examination import Books, count_collectives, waits_in
from outlast.policy.root_cause import Collective
from outlast.runtime.processes import process_state

DUMP = """main thread 0x00007f0000000001
Thread 0x00007f0000000002 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/home/u/loader.py", line 3 in run

Current thread 0x00007f0000000001 (most recent call first):
{frames}
"""
USER = '  File "/home/u/train.py", line 12 in main'
LOADER = '  File "/home/u/data.py", line 7 in fetch'
STDLIB = '  File "/usr/lib/python3.11/selectors.py", line 415 in select'
ALL_REDUCE = '  File "/v/site-packages/torch/distributed/distributed_c10d.py", line 2936 in all_reduce'
BACKWARD = '  File "/v/site-packages/torch/autograd/graph.py", line 841 in _engine_run_backward'
DDP = '  File "/v/site-packages/torch/nn/parallel/distributed.py", line 1666 in forward'


@pytest.mark.parametrize(
    ("frames", "line", "waits"),
    [
        ([LOADER, USER], 'File "/home/u/data.py", line 7 in fetch', False),
        ([STDLIB, LOADER, USER], 'File "/home/u/data.py", line 7 in fetch', False),
        ([ALL_REDUCE, USER], 'File "/home/u/train.py", line 12 in main', True),
        ([BACKWARD, USER], 'File "/home/u/train.py", line 12 in main', True),
        ([LOADER, DDP, USER], 'File "/home/u/data.py", line 7 in fetch', False),
        ([STDLIB], 'File "/usr/lib/python3.11/selectors.py", line 415 in select', False),
        ([], None, None),
    ],
)
def test_the_main_threads_stack_gives_line_and_wait(frames, line, waits):
    """A stack gives the innermost line of the user's code and whether the rank waits in a collective there."""
    stack = stacks.parse(DUMP.format(frames="\n".join(frames)))
    assert (stack.line, stack.waits_in_collective) == (line, waits)


@pytest.mark.process
def test_the_stack_of_a_training_thread_is_used(tmp_path):
    """Where another thread trains, its stack is used instead of the main thread's, which only waits."""
    script = (
        "import threading, time\n"
        "from outlast.monitor import stacks\n"
        "def train():\n"
        "    stacks.follow(threading.get_ident())\n"
        "    print('here', flush=True)\n"
        "    time.sleep(600)\n"
        "stacks.register()\n"
        "threading.Thread(target=train, daemon=True).start()\n"
        "input()\n"
    )
    path = tmp_path / "trainer.py"
    path.write_text(script)
    with subprocess.Popen(
        [sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "here\n"
        dump = stacks.Dump(process.pid)
        assert dump.request()
        deadline_s = time.monotonic() + 60
        while not dump.is_complete():
            assert time.monotonic() < deadline_s, dump.text()
            time.sleep(0.01)
        stack = stacks.parse(dump.text())
        process.kill()
    assert stack.line is not None
    assert stack.line.startswith(f'File "{path}", line ')
    assert stack.line.endswith(" in train")
    assert stack.waits_in_collective is False


def test_the_users_lines_come_first_in_a_dump():
    """A dump starts with the user's lines of the training thread, followed by its whole stack and other threads,
    without threads that outlast started; a dump in another form is not changed."""
    package = str(Path(outlast.__file__).parent)
    dump = (
        "main thread 0x0000000000000002\n"
        "Thread 0x0000000000000001 (most recent call first):\n"
        f'  File "{package}/monitor/responder.py", line 9 in _serve\n'
        '  File "/usr/lib/python3.11/threading.py", line 8 in run\n'
        "Thread 0x0000000000000003 (most recent call first):\n"
        '  File "/home/me/loader.py", line 7 in fetch\n'
        "Current thread 0x0000000000000002 (most recent call first):\n"
        '  File "/x/site-packages/torch/functional.py", line 6 in einsum\n'
        '  File "/home/me/train.py", line 5 in forward\n'
        f'  File "{package}/session/session.py", line 4 in steps\n'
        '  File "/home/me/train.py", line 3 in <module>\n'
    )
    lines = stacks.arrange(dump).splitlines()
    assert lines[1:3] == [
        '  File "/home/me/train.py", line 5 in forward',
        '  File "/home/me/train.py", line 3 in <module>',
    ]
    text = "\n".join(lines)
    assert text.index("einsum") < text.index("loader.py")
    assert "responder.py" not in text
    assert stacks.arrange("what py-spy says") == "what py-spy says"


def test_a_users_own_wait_is_neither_busy_nor_waiting(tmp_path):
    """It is unknown whether a user's line that calls into C to wait for something waits in a collective."""
    script = tmp_path / "train.py"
    script.write_text("work = start()\nwork.wait()\ntime.sleep(5)\n")
    frame = f'  File "{script}", line %d in <module>'
    assert stacks.parse(DUMP.format(frames=frame % 2)).waits_in_collective is None
    assert stacks.parse(DUMP.format(frames=frame % 3)).waits_in_collective is False


def test_a_dump_of_py_spy_is_parsed():
    """A dump that py-spy wrote is parsed like one of the interpreter."""
    text = (
        "Process 1: python t.py\nPython v3.11.7\n\n"
        'Thread 8 (idle): "loader"\n    run (loader.py:3)\n'
        'Thread 7 (idle): "MainThread"\n    fetch (/home/u/data.py:7)\n    <module> (/home/u/train.py:12)\n'
    )
    assert stacks.parse(text).line == 'File "/home/u/data.py", line 7 in fetch'


def test_collectives_are_not_counted_without_torch():
    """A process without torch.distributed has no count of collectives, and does not import it for the query."""
    assert count_collectives() == -1


C10D = "/x/site-packages/torch/distributed/distributed_c10d.py"
USER = stacks.Frame("/home/u/train.py", "9", "step")


def test_the_stack_gives_the_collective_without_a_recorder():
    """The stack gives the function of torch.distributed, and its number where only one group exists."""
    frames = (stacks.Frame(C10D, "1", "_wait"), stacks.Frame(C10D, "2", "all_reduce"), USER)
    waits, collective = waits_in(stacks.Stack(frames), Books(groups={"0": 7}))
    assert waits
    assert collective == Collective(op="ALLREDUCE", seq=7)
    assert waits_in(stacks.Stack(frames), Books(groups={"0": 7, "1": 3}))[1] == Collective(op="ALLREDUCE")
    assert waits_in(stacks.Stack((USER,)), Books(groups={"0": 7})) == (False, None)


def test_the_recorder_distinguishes_computing_from_waiting():
    """A backward pass without a pending collective computes; one with a pending collective waits in it."""
    backward = stacks.Stack((stacks.Frame("/x/site-packages/torch/autograd/graph.py", "1", "run_backward"), USER))
    pending = Collective(op="ALLREDUCE", seq=7, group="0")
    assert waits_in(backward, Books(groups={"0": 7}, recorded=True)) == (False, None)
    assert waits_in(backward, Books(groups={"0": 7}, recorded=True, pending=pending)) == (True, pending)


SCRIPT = """
import os, sys
from outlast.monitor import stacks
if sys.argv[1] == "register":
    stacks.register()
    stacks.register()
    if os.fork() == 0:
        stacks.register()  # as a zygote's child does
        print(os.getpid(), flush=True)
        sys.stdin.read()
        os._exit(0)
    os.wait()
else:
    print(os.getpid(), flush=True)
    sys.stdin.read()
assert "torch" not in sys.modules
"""


@contextlib.contextmanager
def started(mode: str):
    command = [sys.executable, "-c", SCRIPT, mode]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.stdin.close()
        code = process.wait(60)
        process.stdout.close()
    assert code == 0  # it was not harmed


@pytest.mark.cold
@pytest.mark.process
def test_a_process_without_handler_is_not_signalled():
    """The signal would end a process that did not register, so it is not sent."""
    with started("plain") as (_, pid):
        dump = stacks.Dump(pid)
        assert not dump.request()
        assert dump.text() == ""


@pytest.mark.cold
@pytest.mark.process
def test_a_forked_child_writes_its_own_stack():
    """A child that registers after a fork writes its stack to its own memory; the parent's memory stays empty."""
    with started("register") as (process, child):
        parent_dump, dump = stacks.Dump(process.pid), stacks.Dump(child)
        assert dump.request()
        deadline_s = time.monotonic() + 60
        while not dump.is_complete() and time.monotonic() < deadline_s:
            time.sleep(0.005)
        line = stacks.parse(dump.text()).line
        assert line in ('File "<string>", line 9 in <module>', 'File "<string>", line 10 in <module>')
        assert parent_dump.text() == ""
    assert process_state(child) == "X"
