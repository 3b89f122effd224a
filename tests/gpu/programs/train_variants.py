"""Train a small model with checkpoints, using a device in one of several ways; kills do not change the result.

``--variant`` is ``compile`` (torch.compile), ``reduce-overhead`` (model and optimizer compiled to CUDA graphs), ``amp``
(float16 with GradScaler), ``graph`` (a CUDA graph of forward and backward), ``fused`` (a fused AdamW), ``float8``
(bfloat16 states and float8 copies of the weights) or ``fsdp2`` (``fully_shard`` on a mesh of one device).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import outlast

WIDTH, BATCH = 640, 64  # large enough for overlap_staging to copy the matrices late
WAITS_S = 100.0
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Does one optimizer step for inputs and targets; returns the loss."""


def make_model() -> nn.Module:
    """Return the model, on the CPU."""
    torch.manual_seed(1)
    block = (nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    return nn.Sequential(*block, nn.Linear(WIDTH, 8))


def draw_batch(iteration: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets that depend on the iteration alone."""
    numbers = torch.Generator().manual_seed(iteration)
    inputs, targets = torch.randn(BATCH, WIDTH, generator=numbers), torch.randn(BATCH, 8, generator=numbers)
    return inputs.to(device), targets.to(device)


def step_by(forward: Callable[[torch.Tensor], torch.Tensor], optim: torch.optim.Optimizer) -> Step:
    """Return a plain step with this forward."""

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optim.zero_grad()
        loss = functional.mse_loss(forward(inputs), targets)
        loss.backward()
        optim.step()
        return loss.detach()

    return step


def compiled(model: nn.Module, optim: torch.optim.Optimizer, device: torch.device) -> Step:
    """Return a step by torch.compile: by inductor on a GPU where its requirements are met (a C compiler, ...)."""
    backend, why = "eager", "no GPU"
    if device.type == "cuda":
        backend, why = "inductor", "it works here"
        try:
            torch.compile(lambda part: part.sin() + 1, backend=backend)(torch.ones(8, device=device))
        except Exception as error:  # noqa: BLE001  whatever its tools raise
            torch._dynamo.reset()
            backend, why = "aot_eager", f"{type(error).__name__}: {str(error)[:300]!r}"
    sys.stdout.write(f"compiled by {backend}: {why}\n")
    return step_by(torch.compile(model, backend=backend), optim)


def scaled(model: nn.Module, optim: torch.optim.Optimizer, scaler: torch.amp.GradScaler, device: torch.device) -> Step:
    """Return a step in float16 with a scaled loss."""

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optim.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            outputs = model(inputs)
        loss = functional.mse_loss(outputs.float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optim)
        scaler.update()
        return loss.detach()

    return step


def graphed(model: nn.Module, optim: torch.optim.Optimizer, device: torch.device) -> Step:
    """Return a step that replays forward and backward as one CUDA graph; a load must keep the weights' addresses."""
    inputs, targets = (part.clone() for part in draw_batch(0, device))
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):  # allocations of the first passes must not be captured
            optim.zero_grad()
            functional.mse_loss(model(inputs), targets).backward()
    torch.cuda.current_stream().wait_stream(aside)
    optim.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()

    def step(new_inputs: torch.Tensor, new_targets: torch.Tensor) -> torch.Tensor:
        inputs.copy_(new_inputs)
        targets.copy_(new_targets)
        graph.replay()
        optim.step()
        return loss.detach()

    return step


def reduced(model: nn.Module, optim: torch.optim.Optimizer) -> Step:
    """Return a step whose model and optimizer torch.compile turns into CUDA graphs: run, captured, then replayed."""
    forward = torch.compile(model, mode="reduce-overhead")
    update = torch.compile(optim.step, mode="reduce-overhead")

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        loss = functional.mse_loss(forward(inputs), targets)
        loss.backward()
        update()
        optim.zero_grad()
        return loss.detach().clone()

    return step


class Float8Linear(nn.Linear):
    """Computes with a float8 copy of its bfloat16 weight; the gradient is that of the weight."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__(size_in, size_out, dtype=torch.bfloat16)
        self.register_buffer("low", self.weight.detach().to(torch.float8_e4m3fn))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        low = self.low.to(torch.bfloat16)
        return functional.linear(inputs, self.weight + (low - self.weight).detach(), self.bias)

    def quantize(self) -> None:
        """Copy the weight to float8."""
        self.low.copy_(self.weight.detach())


def make_float8_model() -> nn.Module:
    """Return the model of the variant ``float8``, on the CPU."""
    torch.manual_seed(1)
    return nn.Sequential(Float8Linear(WIDTH, 2 * WIDTH), nn.GELU(), Float8Linear(2 * WIDTH, WIDTH))


def in_float8(model: nn.Module, optim: torch.optim.Optimizer) -> Step:
    """Return a step in bfloat16 that copies the weights to float8 at its end."""

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optim.zero_grad()
        outputs = model(inputs.to(torch.bfloat16))[:, : targets.shape[1]]
        loss = functional.mse_loss(outputs.float(), targets)
        loss.backward()
        optim.step()
        for layer in model.children():
            if isinstance(layer, Float8Linear):
                layer.quantize()
        return loss.detach()

    return step


def shard(model: nn.Module, device: torch.device) -> None:
    """Apply FSDP2, on a mesh of this one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp",))
    for part in model.children():
        if isinstance(part, nn.Linear):
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


def digest(value: Any) -> str:
    """Return the SHA-256 of the names, numbers and tensor bytes of a state."""
    sha = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, dict):
            for name in sorted(part, key=str):
                sha.update(str(name).encode())
                add(part[name])
        elif isinstance(part, list | tuple):
            for item in part:
                add(item)
        elif isinstance(part, torch.Tensor):
            local = part.to_local() if hasattr(part, "to_local") else part
            sha.update(local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            sha.update(repr(part).encode())

    add(value)
    return sha.hexdigest()


def wait_to_be_killed() -> None:
    """Wait for the SIGKILL that the first cycle receives once a checkpoint is committed."""
    sys.stdout.write("waits to be killed\n")
    sys.stdout.flush()
    end_s = time.monotonic() + WAITS_S
    while time.monotonic() < end_s:
        time.sleep(0.05)
    raise TimeoutError("this process was not killed in time")


def main() -> None:
    """Train one variant to its end, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    variants = ("compile", "reduce-overhead", "amp", "graph", "fused", "float8", "fsdp2")
    parser.add_argument("--variant", choices=variants, required=True)
    parser.add_argument("--directory", required=True, help="of the checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="JSON file with the result")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--save-interval", type=int, default=4)
    parser.add_argument("--wait-at", type=int, default=-1, help="in the first cycle wait there to be killed")
    parser.add_argument("--overlap", action="store_true", help="copy the state while the next step computes")
    args = parser.parse_args()

    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if args.variant == "fsdp2":
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    model = (make_float8_model if args.variant == "float8" else make_model)().to(device)
    if args.variant == "fsdp2":
        shard(model, device)
    fused = True if args.variant == "fused" else None
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused, capturable=args.variant == "reduce-overhead")
    state: dict[str, Any] = {"model": model, "optim": optim, "losses": []}
    if args.variant == "compile":
        step = compiled(model, optim, device)
    elif args.variant == "amp":
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**20, growth_interval=3)
        state["scaler"] = scaler
        step = scaled(model, optim, scaler, device)
    elif args.variant == "reduce-overhead":
        step = reduced(model, optim)
    elif args.variant == "float8":
        step = in_float8(model, optim)
    elif args.variant == "graph":
        step = graphed(model, optim, device)
    else:
        step = step_by(model, optim)

    saves = outlast.CheckpointConfig(
        directory=args.directory, save_interval=args.save_interval, overlap_staging=args.overlap
    )
    first = None
    with outlast.init(outlast.Config(checkpoint=saves)) as run:
        for iteration in run.steps(state, total=args.iterations):
            first = iteration if first is None else first
            if iteration == args.wait_at and os.environ.get("OUTLAST_CYCLE") == "0":
                wait_to_be_killed()
            state["losses"].append(step(*draw_batch(iteration, device)).item())
        result = {
            "begins": first,
            "iterations": run.iteration,
            "weights": digest(model.state_dict()),
            "optimizer": digest(optim.state_dict()),
            "num_updates": int(next(iter(optim.state.values()))["step"]),
            "losses": [loss.hex() for loss in state["losses"]],
            "scaler": repr(state["scaler"].state_dict()) if "scaler" in state else None,
        }
    args.out.write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
