"""The benchmarks by name, in the order of the suite; the module of that name implements each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The description of a benchmark, available without importing it."""

    summary: str
    text: str
    takes_s: float
    """Seconds with the default number of rounds."""
    repeats: int = 5
    """Counted rounds by default."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Further integer options of its ``measure()``, with their help."""


def _tensors(default: str) -> dict[str, str]:
    return {"tensors": f"Size of the state, in tensors of 16 MiB; default {default}, which the bars are for."}


BENCHMARKS: Mapping[str, Benchmark] = {
    "heartbeat": Benchmark(
        "A heartbeat, and entering and leaving a section.",
        "A heartbeat, compared with TCPStore.set on the same machine; entering and leaving a section. In a worker "
        "process, with a heartbeat memory that another process holds, as under `outlast run`.",
        takes_s=10,
    ),
    "restart": Benchmark(
        "From a killed rank to all ranks' next all-reduce.",
        "From SIGKILL of one of 2 and of 4 ranks until all have finished an all-reduce in the next cycle, compared "
        "with torchrun; how soon a death and a hang are detected.",
        takes_s=120,
    ),
    "inprocess": Benchmark(
        "From a fault to the function restarted in process.",
        "From an exception, a kill and three kinds of hang until four ranks are back in the function, compared with "
        "nvidia-resiliency-ext where it is installed (it takes ten minutes then); what the wrapper costs when "
        "nothing is wrong.",
        takes_s=360,
    ),
    "rendezvous": Benchmark(
        "Up to 4,096 agents meet on this machine.",
        "64, 256 and 512 agents meet, compared with torchrun's c10d rendezvous; 2,048 and 4,096 meet and lose 64 at "
        "once; how much memory their coordinator takes. The agents are simulated and start no workers.",
        takes_s=120,
    ),
    "save": Benchmark(
        "What a save costs training, and when it is durable.",
        "How long training waits in a save, how much its steps slow down while it is written, and how long until it "
        "is durable, compared with torch.distributed.checkpoint and others. Writes to TMPDIR: name a real disk.",
        takes_s=300,
        repeats=7,
        options=_tensors("64"),
    ),
    "load": Benchmark(
        "From files or memory to live tensors, verified.",
        "From files, and from the memory of a writer that outlived its process, to live tensors, every byte "
        "verified, compared with torch.load and torch.distributed.checkpoint. Writes to TMPDIR: name a real disk.",
        takes_s=60,
        repeats=7,
        options=_tensors("64"),
    ),
    "replica": Benchmark(
        "A shard fetched from another node's writer, verified.",
        "A shard fetched from another writer over loopback, every byte verified, compared with gloo's send and recv "
        "of the same bytes.",
        takes_s=30,
        repeats=7,
        options=_tensors("64"),
    ),
    "commit": Benchmark(
        "What a save of 16,384 ranks costs rank 0.",
        "From the responses of 16,384 simulated ranks of an 80-layer model under FSDP with Adam to the outcome that "
        "rank 0 posts; how large the manifest is that it writes. The same for the global tier with 1,024 ranks. "
        "Writes about 2 GiB to TMPDIR.",
        takes_s=180,
        options={"ranks": "Simulated ranks; default 16384, which the bars are for."},
    ),
    "numerics": Benchmark(
        "Digests of replicas; what judging a step costs.",
        "Digests of 512 MiB of bfloat16 on one core, compared with torch.hash_tensor; how much longer a step of two "
        "ranks takes when its loss is judged and nothing is wrong.",
        takes_s=60,
    ),
    "straggler": Benchmark(
        "What timing a step's sections costs.",
        "Timing a step with three sections, compared with torch's record_function; a report on slow ranks.",
        takes_s=15,
    ),
    "ray": Benchmark(
        "From an actor's death or hang to the next step.",
        "From SIGKILL of an actor until its group's next step has returned, compared with Ray Train's restart; how "
        "soon a hang is detected. Needs outlast[ray].",
        takes_s=420,
        options={"actors": "Kill one of N light actors instead, and one of 16, of 64 and of 256 where N is more."},
    ),
    "adapters": Benchmark(
        "What a trainer's adapter costs a step.",
        "How much longer a step of Lightning's Trainer and of Hugging Face's takes with the adapter when nothing is "
        "wrong: one rank and two, on CPU, compared with the bare framework. Needs outlast[lightning] and "
        "outlast[transformers].",
        takes_s=300,
    ),
    "gpu": Benchmark(
        "Saves, loads, restarts and digests on a GPU.",
        "How long training waits in a save, and in a load, of a state on the GPU, compared with pinned copies of as "
        "many bytes and torch.distributed.checkpoint; from SIGKILL to the next step on the GPU, compared with "
        "torchrun; an exception recovered in process with NCCL; what monitors a device. Needs a GPU, and three times "
        "the state's size of memory.",
        takes_s=300,
        repeats=3,
        options=_tensors("1192 (20 GB)"),
    ),
}
