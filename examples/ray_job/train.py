"""Train with a group of actors as a job of a Ray cluster; `run.sh` and `job.yaml` submit it.

A job that is submitted again resumes from the newest verified checkpoint.
"""

import argparse

import ray
import torch
import torch.distributed as dist

import outlast.ray


class Trainer(outlast.ray.TrainActor):
    def setup(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 1)
        self.optim = torch.optim.AdamW(self.model.parameters())

    def state(self):
        return {"model": self.model, "optim": self.optim}

    def train_step(self, inputs, targets, iteration):
        loss = (self.model(inputs) - targets).square().mean()
        self.optim.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, group=self.group("dp"))
        with self.update(iteration):
            self.optim.step()
        self.save(iteration)
        return float(loss.detach())

    def finish(self):
        handle = self.save(self.iteration, now=True)
        if handle is not None:
            handle.wait()  # uncommitted saves are dropped when the group is closed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", required=True, help="a path that every node sees, or s3://, gs://")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--actors", type=int, default=2)
    options = parser.parse_args()
    ray.init()  # `ray job submit` sets the address
    checkpoint = outlast.CheckpointConfig(directory=options.checkpoints, save_interval=1)
    with outlast.ray.ActorGroup(Trainer, {"dp": options.actors}, num_spares=1, checkpoint=checkpoint) as group:
        first = group.iteration
        print(f"starting at iteration {first}", flush=True)
        for step in group.steps(options.iterations):
            with step as done:
                iteration = done + 1
                inputs = torch.randn(16 * options.actors, 8, generator=torch.Generator().manual_seed(iteration))
                losses = group.run("train_step", inputs, inputs[:, :1], iteration=iteration)
                print(f"iteration {iteration}: loss {sum(losses) / len(losses):.4f}", flush=True)
            if step.rolled_back:
                print(f"went back to iteration {step.rolled_back.iteration}", flush=True)
        group.run("finish", dispatch="pass_through")
        print(f"trained from iteration {first} to {group.iteration}, {len(group.recoveries)} recoveries", flush=True)


if __name__ == "__main__":
    main()
