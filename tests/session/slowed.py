"""A training script with a slow rank, for tests: a small DDP model whose forward pass sleeps."""

SCRIPT = """
import hashlib, json, os, sys, time
from pathlib import Path
import torch
import outlast

folder, options = sys.argv[1], json.loads(sys.argv[2])
torch.set_num_threads(1)
if options.get("gate") and os.environ["OUTLAST_CYCLE"] == "0":
    end = time.monotonic() + 60
    while not Path(folder, "go").exists():  # the spare is there
        assert time.monotonic() < end
        time.sleep(0.01)
plan = None
if options.get("plan"):
    plan = f"{folder}/plan-{os.getpid()}.json"
    Path(plan).write_text(json.dumps({"faults": options["plan"]}))
run = outlast.init(outlast.Config(
    checkpoint=outlast.CheckpointConfig(directory=folder + "/ckpt", save_interval=10),
    # A report as soon as there are enough steps, whatever the machine's speed; only what is very slow is slow.
    straggler_detection=outlast.StragglerDetectionConfig(
        enabled=options.get("enabled", True), report_time_interval=0.001, stop_if_detected=options.get("stop", False),
        noticeable_score=0.5, gpu_relative_perf_threshold=0.5, gpu_individual_perf_threshold=0.5),
    fault_plan=plan,
    run_dir=None if os.environ.get("OUTLAST_RUN_DIR") else folder + "/run",
))

class Slept(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def forward(self, batch):
        time.sleep(0.1)
        return self.layers(batch)

torch.manual_seed(7)
model = Slept()
net = torch.nn.parallel.DistributedDataParallel(model) if run.world_size > 1 else model
optim = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
state = {"model": net, "optim": optim, "seen": []}
for iteration in run.steps(state, total=options["total"]):
    draw = torch.Generator().manual_seed(1000 * iteration + run.global_rank)
    with run.section("data"):
        batch = torch.randn(4, 8, generator=draw)
    if options.get("evaluates") == run.global_rank:
        with run.section("evaluation"):
            time.sleep(0.03)
    if options.get("sections") == run.global_rank:  # what is within a section of its own name
        with run.section("forward"):
            loss = net(batch).square().mean()
    else:
        loss = net(batch).square().mean()
    with run.section("backward"):  # the gradients are averaged meanwhile: everybody waits for the slowest
        optim.zero_grad()
        loss.backward()
    if run.global_rank == 0 and options.get("augments"):
        with run.section("augment"):
            time.sleep(0.001)
    optim.step()
    state["seen"].append(iteration)
weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
if run.global_rank == 0:
    Path(folder, "result.json").write_text(json.dumps(
        {"weights": hashlib.sha256(weights).hexdigest(), "seen": state["seen"]}))
"""
