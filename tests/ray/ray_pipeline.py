"""A small pipeline that groups of actors train with real sends, and the expected weights.

Its stages are numbered through all actors. An actor has several, interleaved as Megatron does it (the last stage is
on the last actor) or folded back (it is on the first). Sequences are cut over ``cp``: a stage adds the mean over the
whole sequence to each position, so that slices need each other in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from ray_trainer import Trainer

WIDTH, LENGTH, SAMPLES, MICROBATCHES = 4, 6, 4, 2
CHUNKS = 2
"""Virtual stages of each actor."""
RATE = 0.05


def sequences_of(iteration: int) -> torch.Tensor:
    """Return the sequences of an iteration, which depend on the iteration alone."""
    made = torch.Generator().manual_seed(iteration)
    return torch.randn(SAMPLES, LENGTH, WIDTH, generator=made, dtype=torch.float64)


def first_stage_weights(stage: int) -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(777 + stage), dtype=torch.float64)


def owner_of(stage: int, pp: int, shape: str = "interleaved") -> int:
    """Return the actor along ``pp`` that has a stage: of two actors 0 1 0 1, or folded 0 1 1 0."""
    round_number, position = divmod(stage, pp)
    return pp - 1 - position if shape == "folded" and round_number % 2 else position


class Slices:
    """The slices of a stage's sequences and their reduction, of all slices in one process, or of one slice and its
    peers."""

    def sum(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum over all slices."""
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def forward(self, inputs: list[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
        """Return a stage's outputs."""
        hidden = [one @ weight for one in inputs]
        mean = self.sum([one.sum(dim=1, keepdim=True) for one in hidden]) / LENGTH
        return [torch.tanh(one + mean) for one in hidden]

    def backward(
        self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], grads: list[torch.Tensor], weight: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the gradients of a stage's inputs, and the gradient of its weight over all slices."""
        through = [grad * (1 - output.square()) for grad, output in zip(grads, outputs, strict=True)]
        mean = self.sum([one.sum(dim=1, keepdim=True) for one in through]) / LENGTH
        hidden = [one + mean for one in through]
        own = self.sum([torch.einsum("slw,slv->wv", one, grad) for one, grad in zip(inputs, hidden, strict=True)])
        return [grad @ weight.T for grad in hidden], own


class OwnSlice(Slices):
    """One slice; its peers have the others."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def sum(self, parts: list[torch.Tensor]) -> torch.Tensor:
        total = parts[0].clone()
        dist.all_reduce(total, group=self._group)
        return total


def undisturbed(iterations: int, *, pp: int = 2, cp: int = 2) -> tuple[list[torch.Tensor], list[float]]:
    """Return the weights of all stages and the loss of each step, computed in one process."""
    weights, losses, slices = [first_stage_weights(stage) for stage in range(pp * CHUNKS)], [], Slices()
    for iteration in range(1, iterations + 1):
        grads, loss = [torch.zeros_like(weight) for weight in weights], 0.0
        for microbatch in sequences_of(iteration).chunk(MICROBATCHES):
            # Contiguous like the slices of the actors: products with other strides may be summed in another order.
            values = [[one.contiguous() for one in microbatch.chunk(cp, dim=1)]]
            for weight in weights:
                values.append(slices.forward(values[-1], weight))
            loss += float(slices.sum([one.square().sum() for one in values[-1]])) / 2
            back = values[-1]
            for stage in reversed(range(len(weights))):
                back, own = slices.backward(values[stage], values[stage + 1], back, weights[stage])
                grads[stage] += own
        weights = [weight - RATE * grad for weight, grad in zip(weights, grads, strict=True)]
        losses.append(loss)
    return weights, losses


class PipelineTrainer(Trainer):
    """Train some stages of the pipeline, on one slice of each sequence."""

    def setup(self) -> None:
        self.inject_fault("setup", -1)
        self.stages = self.stages_of("interleaved")
        self.weight = torch.stack([first_stage_weights(stage) for stage in self.stages])

    def peers(self, axis: str, iteration: int) -> dist.ProcessGroup:
        """Return the group along an axis."""
        return self.group(axis)

    def stages_of(self, shape: str) -> list[int]:
        pp = self.place.pp_size
        return [stage for stage in range(pp * CHUNKS) if owner_of(stage, pp, shape) == self.place.pp]

    def train_step(self, batch: torch.Tensor, iteration: int) -> float | None:  # type: ignore[override]
        """Make a step; return the loss where the last stage is."""
        with self.section("step"):
            self.inject_fault("begin", iteration)
            grads, losses = torch.zeros_like(self.weight), []
            for microbatch in batch.chunk(MICROBATCHES):
                values = self._forward(microbatch, self.weight, iteration, "interleaved")
                self.inject_fault("middle", iteration)
                losses.append(self._loss(values, iteration))
                self._backward(values, grads, iteration)
            dist.barrier(group=self.peers("pp", iteration))  # no rank begins its update before all have their gradients
            dist.barrier(group=self.peers("cp", iteration))
            self.inject_fault("before_update", iteration)
            with self.update(iteration):
                self.inject_fault("update", iteration)
                self.weight -= RATE * grads
        self.save(iteration)
        return None if losses[0] is None else sum(losses)

    def evaluate(self, batch: torch.Tensor, shape: str) -> float | None:
        """Return the loss of the untrained pipeline where the last stage is."""
        weights = torch.stack([first_stage_weights(stage) for stage in self.stages_of(shape)])
        losses = [self._loss(self._forward(one, weights, 0, shape), 0) for one in batch.chunk(MICROBATCHES)]
        return None if losses[0] is None else sum(losses)

    def _forward(
        self, microbatch: torch.Tensor, weights: torch.Tensor, iteration: int, shape: str
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the inputs and outputs of the own stages."""
        pp, number = self.place.pp_size, self.place.pp
        value = microbatch.chunk(self.place.cp_size, dim=1)[self.place.cp].contiguous()
        slices, group = OwnSlice(self.peers("cp", iteration)), self.peers("pp", iteration)
        values = {}
        for position, stage in enumerate(self.stages_of(shape)):
            before, after = owner_of(stage - 1, pp, shape), owner_of(stage + 1, pp, shape)
            if stage > 0 and before != number:
                value = torch.empty_like(value)
                dist.recv(value, group=group, group_src=before)
            (output,) = slices.forward([value], weights[position])
            values[stage] = value, output
            if stage < pp * CHUNKS - 1 and after != number:
                dist.send(output, group=group, group_dst=after)
            value = output
        return values

    def _loss(self, values: Mapping[int, Sequence[torch.Tensor]], iteration: int) -> Any:
        last = self.place.pp_size * CHUNKS - 1
        if last not in values:
            return None
        return float(OwnSlice(self.peers("cp", iteration)).sum([values[last][1].square().sum()])) / 2

    def _backward(
        self, values: Mapping[int, tuple[torch.Tensor, torch.Tensor]], grads: torch.Tensor, iteration: int
    ) -> None:
        pp, slices, group = self.place.pp_size, OwnSlice(self.peers("cp", iteration)), self.peers("pp", iteration)
        for position, stage in reversed(list(enumerate(self.stages))):
            value, output = values[stage]
            grad = output
            if stage < pp * CHUNKS - 1:
                grad = torch.empty_like(output)
                dist.recv(grad, group=group, group_src=owner_of(stage + 1, pp))
            (grad,), own = slices.backward([value], [output], [grad], self.weight[position])
            grads[position] += own
            if stage > 0:
                dist.send(grad, group=group, group_dst=owner_of(stage - 1, pp))

    def members(self, axis: str) -> list[int]:
        """Return the ranks of the group along an axis."""
        return dist.get_process_group_ranks(self.group(axis))
