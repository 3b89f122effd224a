"""The PPO example's arithmetic on four actors matches that of one process; its output and its options."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from outlast.ray import Mesh, MeshDispatch

pytestmark = pytest.mark.extended

pytest.importorskip("gymnasium")
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "ray_ppo.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("ray_ppo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_long_lines_wrap_between_words(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line wider than the terminal is wrapped between words and indented."""
    monkeypatch.setenv("COLUMNS", "60")
    text = "  kept      " + ", ".join(f"rank {rank} (pid 4711{rank})" for rank in range(4))
    example.say(text)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 60
    assert printed.split() == text.split()
    assert all(line.startswith(" " * 12) for line in printed.splitlines()[1:])


def train_on_threads(example: ModuleType, mesh: Mesh, batches: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the weights of the whole model after a step with each batch, on as many threads as the mesh has ranks."""
    store = dist.HashStore()
    dispatch = MeshDispatch()
    threads = torch.get_num_threads()

    def train(rank: int) -> list[torch.Tensor]:
        place = mesh.place(rank)
        groups = {
            axis: dist.ProcessGroupGloo(
                dist.PrefixStore(f"{axis}-{other}", store), getattr(place, axis), size, timedelta(seconds=20)
            )
            for axis, other, size in (("dp", place.tp, mesh.dp), ("tp", place.dp, mesh.tp))
        }

        class SingleTrainer(example.Trainer):  # type: ignore[misc, name-defined]
            """The example's actor without an actor group."""

            place = mesh.place(rank)

            def group(self, axis: str) -> Any:
                return groups[axis]

            def section(self, name: str) -> AbstractContextManager[None]:
                return nullcontext()

            def update(self, iteration: int) -> AbstractContextManager[None]:
                return nullcontext()

            def save(self, iteration: int) -> None:
                return None

        trainer = SingleTrainer({}, ".")
        trainer.setup()
        trainer.policy.double()  # so that differences are not rounding errors
        for iteration, batch in enumerate(batches, 1):
            parcels = dispatch.split(mesh, (batch,), {"iteration": iteration}, takes_weights=True)
            args, kwargs = parcels[dispatch.parcel_of(place)]
            trainer.train_step(*args, **kwargs)
        return [parameter.detach() for parameter in trainer.policy.parameters()]

    try:
        with ThreadPoolExecutor(mesh.size) as pool:
            results = list(pool.map(train, range(mesh.size), timeout=300))
    finally:
        torch.set_num_threads(threads)
    for shard in range(1, mesh.dp):
        for rank, other in zip(mesh.ranks(dp=0), mesh.ranks(dp=shard), strict=True):
            assert all(map(torch.equal, results[rank], results[other])), "data shards drifted apart"
    slices = [results[rank] for rank in mesh.ranks(dp=0)]
    assert all(torch.equal(part[3], slices[0][3]) for part in slices)
    return [torch.cat([part[i] for part in slices], dim=dim) for i, dim in ((0, 0), (1, 0), (2, 1))] + [slices[0][3]]


def make_batch(num_samples: int, seed: int) -> Mapping[str, torch.Tensor]:
    """Return random samples with the fields of the example's rounds."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "observations": torch.randn(num_samples, 4, generator=draw, dtype=torch.float64),
        "actions": torch.randint(2, (num_samples,), generator=draw),
        "logs": -torch.rand(num_samples, generator=draw, dtype=torch.float64),
        "returns": torch.rand(num_samples, generator=draw, dtype=torch.float64),
        "gains": torch.randn(num_samples, generator=draw, dtype=torch.float64),
    }


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"dp": 4}, {"dp": 3}, {"tp": 4}], ids=str)
def test_any_mesh_learns_the_weights_of_one_process(example: ModuleType, sizes: dict[str, int]) -> None:
    """With any mesh, including padding and micro-batches, the weights match those of one process with whole batches."""
    batches = [dict(make_batch(37 + step, seed=step)) for step in range(4)]
    expected = train_on_threads(example, Mesh(), batches)
    for weights, expected_weights in zip(train_on_threads(example, Mesh.of(sizes), batches), expected, strict=True):
        torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=1e-6)


def test_minibatches_are_deterministic(example: ModuleType) -> None:
    """The samples of an iteration depend only on the iteration, and an epoch contains every sample once."""
    episodes = {"gains": torch.arange(50.0), "lengths": torch.zeros(3)}
    for first in (0, example.STEPS, 3 * example.STEPS):
        for epoch in range(example.EPOCHS):
            steps = range(first + epoch * example.MINIBATCHES, first + (epoch + 1) * example.MINIBATCHES)
            parts = [example.minibatch(episodes, step)["gains"] for step in steps]
            assert sorted(torch.cat(parts).tolist()) == list(range(50))
            assert all(
                torch.equal(part, example.minibatch(episodes, step)["gains"])
                for part, step in zip(parts, steps, strict=True)
            )


def test_failures_are_parsed_from_the_command_line(example: ModuleType) -> None:
    """Each failure has its iteration; an unknown failure is rejected."""
    assert example.parse_failures("kill@40,stop@80") == {40: "kill", 80: "stop"}
    with pytest.raises(Exception, match="'melt@3' is not one of kill, stop, exception"):
        example.parse_failures("melt@3")
