"""A training script that validates its results, for tests: a small net with dropout and batch statistics, in DDP."""

SCRIPT = """
import hashlib, json, os, sys
import torch
import outlast

folder, options = sys.argv[1], json.loads(sys.argv[2])
total = options.get("total", 12)
torch.set_num_threads(1)
settings = {"local_directory": folder + "/local", "directory": folder + "/global", "save_interval": 4,
            "non_persistent_save_interval": 2, "most_recent_k": -1, "local_most_recent_k": -1}
settings |= options.get("checkpoint", {})
plan = options.get("plan")
if plan is not None:
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
    net = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=True)
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
torch.manual_seed(100 + run.global_rank)
state = {"model": net, "optim": optim, "data": batches, "losses": []}
for iteration in run.steps(state, total=total):
    for attempt in run.attempts(batches):
        batch = attempt.next_batch()
        seen.append((iteration, attempt.number, batches.position))
        optim.zero_grad()
        loss = net(batch).square().mean()
        loss.backward()
        attempt.validate(loss, "loss")
    optim.step()
    state["losses"].append(loss.item())

def digest():
    sha = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sha.update(name.encode() + tensor.numpy().tobytes())
    for moments in optim.state.values():
        for tensor in moments.values():
            sha.update(tensor.numpy().tobytes())
    sha.update(repr(state["losses"]).encode())
    return sha.hexdigest()

if run.global_rank == 0:
    with open(folder + "/result.json", "w") as file:
        json.dump({"digest": digest(), "seen": seen, "iteration": run.iteration, "position": batches.position}, file)
run.close()
"""
