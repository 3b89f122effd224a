"""A training loop that calls the client as Megatron-LM does (ft_integration) and writes its own checkpoints.

Arguments: the checkpoint folder, the number of steps, and the fault of the last rank near the end: ``none``,
``stop`` (SIGSTOP to itself), ``exclude`` or ``shutdown`` (a request to the launcher, and a failure).
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient, WorkloadAction, WorkloadControlRequest
from torch.nn.parallel import DistributedDataParallel

MIN_STEPS = 16
REQUESTS = {"exclude": WorkloadAction.ExcludeThisNode, "shutdown": WorkloadAction.ShutdownWorkload}


class FaultTolerance:
    """Megatron's callbacks, in its order of calls."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ft_state.json"
        self.client = RankMonitorClient()
        self.client.init_workload_monitoring()  # before the process group
        if self.path.exists():
            self.client.load_state_dict(json.loads(self.path.read_text()))
        self.client.start_section("setup")
        self.in_setup, self.has_loaded, self.num_steps, self.num_saves = True, False, 0, 0

    def on_step_start(self) -> None:
        if self.in_setup:
            self.client.end_section("setup")
            self.in_setup = False
        if self.num_steps >= 1:
            self.client.start_section("step")

    def on_step_end(self) -> None:
        if self.num_steps >= 1:
            self.client.end_section("step")
        self.num_steps += 1

    def on_checkpointing_start(self) -> None:
        self.client.start_section("checkpointing")

    def on_checkpointing_end(self) -> None:
        self.client.end_section("checkpointing")
        self.num_saves += 1
        self.update(closing=False)

    def update(self, *, closing: bool) -> None:
        sections = ["setup"] if self.has_loaded else []
        sections += ["step"] if self.num_steps >= MIN_STEPS else []
        sections += ["checkpointing"] if self.num_saves else []
        outside = closing and {"setup", "step", "checkpointing"} <= set(sections)
        if sections or outside:
            self.client.calculate_and_set_section_timeouts(selected_sections=sections, calc_out_of_section=outside)
            if dist.get_rank() == 0:
                self.path.write_text(json.dumps(self.client.state_dict()))

    def shutdown(self) -> None:
        self.update(closing=True)
        self.client.shutdown_workload_monitoring()


def main() -> None:
    folder, total, fault = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    saved, fault_file = folder / "weights.pt", folder / "had-its-fault"
    folder.mkdir(exist_ok=True)
    ft = FaultTolerance(folder)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        print("timeouts:", json.dumps(dict(ft.client.section_timeouts.section)), flush=True)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        ft.has_loaded = True
        time.sleep(1.5)  # the measured setup time
    net = DistributedDataParallel(model)
    first = step
    while step < total:
        ft.on_step_start()
        if rank == dist.get_world_size() - 1 and step == total - 3 and fault != "none" and not fault_file.exists():
            fault_file.touch()
            if fault == "stop":
                while True:
                    os.kill(os.getpid(), signal.SIGSTOP)
            ft.client.send_workload_control_request(WorkloadControlRequest(REQUESTS[fault], "a test"))
            raise RuntimeError("as it announced")
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
        if step == first + 5:
            time.sleep(0.5)  # the longest step
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
        step += 1
        ft.on_step_end()
        if step == first + 5:
            time.sleep(0.5)  # the longest time outside sections
        if step % 5 == 0:
            ft.on_checkpointing_start()
            if rank == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, saved)
            if step == 5:
                time.sleep(0.5)  # the longest save
            dist.barrier()
            ft.on_checkpointing_end()
    ft.shutdown()
    if rank == 0:
        weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
        print("trained", first, "to", step, hashlib.sha256(weights).hexdigest(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
