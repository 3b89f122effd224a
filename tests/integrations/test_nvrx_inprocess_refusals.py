"""Final errors of restarting under NVRx's names: an unknown name, a limit, restarts without progress, one rank each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pages import run_python

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.process]
SCRIPT = """
import json, os, sys, traceback, warnings
from datetime import timedelta
from outlast.integrations import nvrx
nvrx.install()
import nvidia_resiliency_ext.inprocess as inprocess
import torch.distributed as dist
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
SOME = dict(soft_timeout=timedelta(seconds=60), hard_timeout=timedelta(seconds=90))

class Asks(inprocess.initialize.Initialize):
    def __call__(self, state):
        return state.no_such_field

class Mine:
    @property
    def rate(self):
        return None.value

def refuses_a_name(call):
    call.no_such_method()

def refuses_a_call(call):
    call.ping("now")

def refuses_a_module(call):
    import nvidia_resiliency_ext.inprocess.monitor_process

def refuses_a_name_of_a_module(call):
    inprocess.abort.AbortEverything

def retries_an_error_of_its_own(call):
    if call.iteration < 2:
        Mine().rate
    return "done"

def gives_up(call):
    raise inprocess.exception.RestartAbort("enough")

def restarts_by_itself(call):
    if call.iteration < 2:
        raise inprocess.monitor_thread.RankShouldRestart
    return "done"

def never_gets_further(call):
    raise RuntimeError("as before")

def keeps_long_work(call):
    with call.disable_hang_protection():
        return "done"

class Fails(inprocess.rank_assignment.RankAssignment):
    def __init__(self, at):
        self.num_calls, self.at = 0, at

    def __call__(self, ctx):
        self.num_calls += 1
        if self.num_calls > self.at:
            raise ZeroDivisionError("by the rule")
        return ctx

def run(function, **options):
    calls = []

    def train(call: inprocess.CallWrapper = None):
        calls.append(call.iteration)
        return function(call)

    try:
        ended = inprocess.Wrapper(**SOME, **options)(train)()
    except Exception as error:
        ended = [[kind.__name__ for kind in type(error).__mro__], str(error), getattr(error, "counts", None)]
    return {"ended": ended, "calls": len(calls)}

found = {name: run(value) for name, value in list(globals().items()) if getattr(value, "__code__", None)
         and value.__code__.co_varnames[:1] == ("call",)}
found["a plug-in asks"] = run(keeps_long_work, initialize=Asks())
for calls in (0, 2):
    found[f"a rule fails after {calls}"] = run(never_gets_further, rank_assignment=Fails(calls))
pidfile = f"{sys.argv[1]}-{{rank}}.pid"
found["a pid file"] = run(keeps_long_work, monitor_process_pidfile=pidfile)
with open(pidfile.format(rank=0)) as file:
    found["pid"] = [int(file.read()), os.getpid()]
limit = inprocess.initialize.RetryController(max_iterations=12)
found["a limit"] = run(never_gets_further, initialize=inprocess.Compose(limit, inprocess.initialize.RetryController()))
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}.store", rank=0, world_size=1)
found["a group exists"] = run(keeps_long_work)
dist.destroy_process_group()
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
"""


HANDLES = """
import os, signal, sys, time
from datetime import timedelta
from outlast.integrations import nvrx
nvrx.install()
import nvidia_resiliency_ext.inprocess as inprocess
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")

def handle(number, frame):
    os.write(1, b"handled")
    os._exit(7)

signal.signal(signal.SIGTERM, handle)

@inprocess.Wrapper(
    soft_timeout=timedelta(seconds=2), hard_timeout=timedelta(seconds=3), termination_grace_time=timedelta(seconds=300)
)
def train(call: inprocess.CallWrapper = None):
    call.ping()
    with call.atomic():
        while True:
            time.sleep(0.01)

train()
"""


def test_uninterruptible_rank_gets_sigterm_before_sigkill() -> None:
    """At the hard timeout SIGTERM is sent first, and SIGKILL only ``termination_grace_time`` later."""
    assert run_python("-c", HANDLES, code=7, timeout_s=600).stdout == "handled"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result and the number of calls of each case."""
    folder = tmp_path_factory.mktemp("refusals")
    (folder / "script.py").write_text(SCRIPT)
    run_python(folder / "script.py", folder / "found.json", timeout_s=600)
    return json.loads((folder / "found.json").read_text())  # type: ignore[no-any-return]


def raised(outcome: dict[str, Any]) -> tuple[str, str]:
    """Return class and text of the exception that the caller got."""
    kinds, text, _ = outcome["ended"]
    return kinds[0], text


def test_unsupported_names_and_calls_are_not_retried(found: dict[str, Any], tmp_path: Path) -> None:
    """The function is not called again after an error that no call can change; a script's own error is retried."""
    for case, kind, text in (
        ("refuses_a_name", "AttributeError", "no_such_method"),
        ("refuses_a_call", "TypeError", "ping"),
        ("refuses_a_module", "ModuleNotFoundError", "monitor_process"),
        ("refuses_a_name_of_a_module", "AttributeError", "AbortEverything"),
    ):
        assert raised(found[case])[0] == kind, case
        assert text in raised(found[case])[1], case
        assert found[case]["calls"] == 1, case
    assert raised(found["a plug-in asks"])[0] == "AttributeError"
    assert found["a plug-in asks"]["calls"] == 0
    assert found["retries_an_error_of_its_own"] == {"ended": "done", "calls": 3}


def test_restart_abort_reaches_the_caller_with_the_counts(found: dict[str, Any]) -> None:
    """``RestartAbort`` ends the restarts of all ranks, and the caller gets the counts."""
    kinds, text, counts = found["gives_up"]["ended"]
    assert (kinds[0], text, counts) == ("RestartAbort", "enough", {"restarts": 0, "faults": 0})
    assert found["restarts_by_itself"] == {"ended": "done", "calls": 3}


def test_restarts_without_progress_end(found: dict[str, Any]) -> None:
    """A function that always fails is called 11 times, or as often as its ``RetryController`` allows."""
    kind, text = raised(found["never_gets_further"])
    assert kind == "RestartAbort"
    assert "10 restarts in a row made no progress (max_no_progress_restarts=10)" in text
    assert found["never_gets_further"]["calls"] == 11
    kind, text = raised(found["a limit"])
    assert "iteration=12" in text, text
    assert found["a limit"]["calls"] == 12


def test_error_of_a_script_rule_reaches_the_caller(found: dict[str, Any]) -> None:
    """A rank assignment that raises, at once or at a restart, ends restarting with its own error."""
    for num_calls in (0, 2):
        case = found[f"a rule fails after {num_calls}"]
        assert raised(case) == ("ZeroDivisionError", "by the rule")
        assert case["calls"] == num_calls


def test_monitor_process_writes_its_pid_file(found: dict[str, Any]) -> None:
    """``monitor_process_pidfile`` contains the process id of another process than the rank's; its name contains the
    rank."""
    assert found["a pid file"] == {"ended": "done", "calls": 1}
    pid, own = found["pid"]
    assert pid > 0
    assert pid != own


def test_hang_protection_can_be_disabled(found: dict[str, Any]) -> None:
    """``disable_hang_protection()`` works; a call with a process group is rejected."""
    assert found["keeps_long_work"] == {"ended": "done", "calls": 1}
    kind, text = raised(found["a group exists"])
    assert (kind, found["a group exists"]["calls"]) == ("ConfigError", 0)
    assert "not torch.distributed.is_initialized()" in text
