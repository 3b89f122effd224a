"""A training script that validates its results, for tests: a small DDP model with dropout and batch statistics."""

SCRIPT = """
import hashlib, json, os, sys, time
from pathlib import Path
import torch
import outlast
from outlast import env
from outlast.numerics import NonFiniteDetector
from outlast.runtime.device import device_name

folder, options = sys.argv[1], json.loads(sys.argv[2])
total = options.get("total", 12)
torch.set_num_threads(1)
place = env.read_worker()
device = device_name(place.device or place.node, place.local_rank)

def wait_for(path):
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.01)

if options.get("gate") and place.cycle == 0:
    wait_for(Path(folder, "go"))  # all nodes are there, spares too
settings = {"local_directory": folder + "/local", "directory": folder + "/global", "save_interval": 4,
            "non_persistent_save_interval": 2, "most_recent_k": -1, "local_most_recent_k": -1}
settings |= options.get("checkpoint", {})
plan = options.get("plan")
if plan is not None:
    victim = Path(folder, "victim")  # the device that carried rank 1 first
    if place.cycle == 0 and place.global_rank == 1:
        victim.write_text(device)
    for fault in plan:
        if fault.get("device") == "victim":
            fault["device"] = victim.read_text() if victim.exists() else "another"
    path = f"{folder}/plan-{os.getpid()}.json"
    with open(path, "w") as file:
        json.dump({"faults": plan}, file)
run = outlast.init(outlast.Config(
    checkpoint=outlast.CheckpointConfig(**settings),
    rerun_state_machine=outlast.RerunStateMachineConfig(**options.get("rerun", {})),
    replica_digest=outlast.config.ReplicaDigestConfig(interval=options.get("digest", 0)),
    fault_plan=path if plan is not None else None,
    run_dir=None if os.environ.get("OUTLAST_RUN_DIR") else folder + "/run",
))
torch.manual_seed(7)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)
)
net = model
if run.world_size > 1:
    net = torch.nn.parallel.DistributedDataParallel(model)
    net(torch.zeros(4, 8)).sum().backward()  # buckets get their final order
    model.zero_grad()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            module.reset_running_stats()
optim = torch.optim.AdamW(model.parameters(), lr=0.01)

class Batches:
    def __init__(self):
        self.position = 0
    def __iter__(self):
        return self
    def __next__(self):
        self.position += 1
        numbers = torch.Generator().manual_seed(1000 * self.position + run.global_rank)
        batch = torch.randn(4, 8, generator=numbers)
        if self.position == options.get("bad_batch") and run.global_rank == 0:
            batch[1, 2] = float("inf")
        return batch
    def state_dict(self):
        return {"position": self.position}
    def load_state_dict(self, state):
        self.position = state["position"]

batches, seen = Batches(), []

def digest():
    sha = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sha.update(name.encode() + tensor.numpy().tobytes())
    for moments in optim.state.values():
        for tensor in moments.values():
            sha.update(tensor.numpy().tobytes())
    sha.update(repr(state["losses"]).encode())
    return sha.hexdigest()

def tell_begin(iteration):  # what this process went on from, and what the tracker said then
    tracker = Path(folder, "global", "latest")
    with open(folder + "/begins.jsonl", "a") as file:
        begin = {"cycle": place.cycle, "rank": run.global_rank, "node": place.node, "device": device,
                 "iteration": iteration, "digest": digest(), "position": batches.position,
                 "own": run._attempts.state_dict()["rerun"]["found"],
                 "latest": tracker.read_text().strip() if tracker.exists() else None}
        file.write(json.dumps(begin) + "\\n")

poisoned = options.get("poisoned_save")
if poisoned is not None and place.cycle == 0:
    from outlast.checkpoint.manager import CheckpointEngine
    save = CheckpointEngine.save

    def save_poisoned(manager, saved, iteration, **how):
        weight = model[0].weight.detach()
        if iteration != poisoned:
            return save(manager, saved, iteration, **how)
        sound, weight[0, 0] = weight[0, 0].item(), float("nan")
        try:
            return save(manager, saved, iteration, **how)  # staged and digested with the NaN within
        finally:
            weight[0, 0] = sound

    CheckpointEngine.save = save_poisoned

detector = NonFiniteDetector("rollback", on_rollback=lambda found: run.roll_back()) if options.get("detector") else None
torch.manual_seed(100 + run.global_rank)
state = {"model": net, "optim": optim, "data": batches, "losses": []}
for iteration in run.steps(state, total=total):
    if not seen:
        tell_begin(iteration)
    for attempt in run.attempts(batches):
        batch = attempt.next_batch()
        seen.append((iteration, attempt.number, batches.position))
        optim.zero_grad()
        loss = net(batch).square().mean()
        loss.backward()
        if detector is None:
            attempt.validate(loss, "loss")
        else:
            detector.check(loss, optim, iteration=iteration)
    optim.step()
    state["losses"].append(loss.item())

if run.global_rank == 0:
    with open(folder + "/result.json", "w") as file:
        json.dump({"digest": digest(), "seen": seen, "iteration": run.iteration, "position": batches.position}, file)
run.close()
"""
