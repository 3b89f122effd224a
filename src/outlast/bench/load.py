"""``outlast bench load``: from a committed generation to live tensors with every byte verified, beside other loaders.

One process saves the state with all libraries and is killed; what it staged stays with a writer process, as under an
agent. Another process then loads, in turns.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from outlast import env
from outlast.bench.measuring import describe_place, measure_in_process, plain_environment
from outlast.bench.peer_figures import compared, missing_peers, times
from outlast.bench.result import BenchResult
from outlast.bench.rounds import Say
from outlast.bench.state_size import NUM_TENSORS, TENSOR_BYTES
from outlast.checkpoint.writer_client import WriterProcess
from outlast.errors import OutlastError

__all__ = ["measure"]

_WORKER = "outlast.bench.load_worker"
_SAVED = "saved"
_TIMEOUT_S = 600.0
_SECONDS = {
    "local": "outlast, local tier, into the live state, every byte verified",
    "local_opened": "  opening its manager before",
    "memory": "outlast, from the writer's memory after SIGKILL of the worker, the same",
    "memory_opened": "  opening its manager before",
    "torch_load": "torch.load, into new tensors",
    "torch_load_applied": "torch.load and load_state_dict()",
    "torch_mapped": "torch.load of a mapped file and load_state_dict()",
    "dcp_load": "dcp.load, into the live state",
    "safetensors": "safetensors' load_file and a copy into the live state",
    "meta": "torch-checkpointing, into the live state",
}


def measure(*, repeats: int, say: Say, num_tensors: int = NUM_TENSORS) -> BenchResult:
    """Load a state again and again.

    Args:
        repeats: Rounds that count.
        say: Hears of every round.
        num_tensors: Size of the state, in tensors of 16 MiB.

    Raises:
        OutlastError: A process failed, or loaded other values than were saved.

    Blocks: about 5 s a round, for a state of 1 GiB.
    """
    try:
        writer = WriterProcess()
    except OSError as error:
        raise OutlastError(f"no writer process can be started: {error}") from error
    try:
        with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
            place = describe_place(Path(name))
            say(f"{num_tensors * TENSOR_BYTES / 2**20:.0f} MiB, {place}; all are read from the page cache")
            arguments = (name, str(num_tensors))
            agents = {env.WRITER: writer.address}
            _save_and_kill(arguments, agents)
            say("saved by all libraries; the process that did is killed")
            rounds = measure_in_process(
                _WORKER, arguments, repeats=repeats, say=say, timeout_s=_TIMEOUT_S, variables=agents
            )
    finally:
        writer.close()
    return BenchResult(
        bench="load",
        bars=(
            compared(rounds, "load_verified_vs_torch_load", "local", "torch_load", 0.5, "torch.load"),
            compared(rounds, "load_verified_vs_dcp_load", "local", "dcp_load", 0.6, "dcp.load"),
            compared(rounds, "load_memory_vs_torch_load", "memory", "torch_load", 0.5, "torch.load"),
        ),
        notes=(
            f"{num_tensors} tensors of 16 MiB, {place}, all in the page cache; the values are compared after each load",
            *times(rounds, _SECONDS),
            *missing_peers(measured="meta" in rounds),
        ),
    )


def _save_and_kill(arguments: tuple[str, ...], variables: dict[str, str]) -> None:
    """Have a process save with all libraries, and kill it once everything is durable."""
    with subprocess.Popen(
        [sys.executable, "-m", _WORKER, "0", *arguments],
        env=plain_environment() | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as saver:
        killer = threading.Timer(_TIMEOUT_S, saver.kill)
        killer.start()
        try:
            assert saver.stdout is not None
            said = saver.stdout.readline().strip()
        finally:
            killer.cancel()
            saver.kill()
    if said != _SAVED:
        raise OutlastError("the process that saves failed, or was too slow; its output is above")
