"""Train a module of Megatron-Core on CPU, with local checkpoints that outlast verifies, replicates and restores.

    outlast run --nproc-per-node 2 examples/megatron/train_local.py /tmp/megatron-local
    outlast run --nproc-per-node 2 examples/megatron/train_local.py /tmp/megatron-killed --kill-at 12

Both print the same digest of the weights: the second run loses rank 1 in iteration 12, and resumes from iteration 10.
"""

import argparse
import hashlib
import os
import signal

from outlast.integrations import nvrx

nvrx.install()  # before Megatron-Core looks for nvidia_resiliency_ext

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager  # noqa: E402
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy  # noqa: E402


class Model(MegatronModule):
    """Two layers."""

    def __init__(self):
        super().__init__(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1))
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def forward(self, inputs):
        return self.layers(inputs)

    def sharded(self, rank):
        """Return the state as Megatron-Core saves it: each rank has a replica of all weights."""
        weights = self.state_dict()
        return {name: ShardedTensor.from_rank_offsets(name, one, replica_id=rank) for name, one in weights.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--total", type=int, default=20)
    parser.add_argument("--kill-at", type=int, default=-1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = Model()
    manager = LocalCheckpointManager(
        args.folder, session_id="example", repl_strategy=CliqueReplicationStrategy.from_replication_params(1, 2)
    )
    begin = max(manager.find_latest(), 0)
    if begin:
        saved, _ = manager.load()
        loaded = saved.to_state_dict({"model": model.sharded(rank), "iteration": 0}, algo="atomic")
        assert loaded["iteration"] == begin
        model.load_state_dict(loaded["model"])
    print("starting from iteration", begin, flush=True)
    for iteration in range(begin, args.total):
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * iteration + rank))
        model(inputs).square().mean().backward()
        if iteration == args.kill_at and rank == 1 and begin == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
            weight.data -= 0.05 * weight.grad
            weight.grad = None
        if (iteration + 1) % 5 == 0:
            state = {"model": model.sharded(rank), "iteration": iteration + 1}
            manager.save(MCoreTensorAwareStateDict.from_state_dict(state, algo="atomic")[0], iteration + 1)
    weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
    print("trained", args.total, "iterations:", hashlib.sha256(weights).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
