"""Train with a custom loop on Accelerate, kept alive by outlast.

    outlast run --nproc-per-node 2 examples/transformers/accelerate_train.py --config outlast.toml

`accelerate launch` and `torchrun` start it as well. It needs no network, and takes seconds on two ranks of a laptop.
"""

import argparse
import hashlib

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration

import outlast


def batches(loader, number):
    """Yield the batches of one epoch after the other, from the given one of all on."""
    epoch, done = divmod(number, len(loader))
    while True:
        loader.set_epoch(epoch)  # the order of an epoch follows from data_seed and its number
        yield from skip_first_batches(loader, done) if done else loader
        epoch, done = epoch + 1, 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="settings of outlast: .toml, .yaml or .json")
    parser.add_argument("--total", type=int, default=100, help="optimizer steps")
    options = parser.parse_args()
    with outlast.init(options.config) as run:
        accelerator = Accelerator(
            cpu=not torch.cuda.is_available(),
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1),
        )
        torch.manual_seed(1)
        samples = torch.utils.data.TensorDataset(torch.randn(200, 8))
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * options.total)
        # A separate generator, so that an epoch's start does not change the random numbers of dropout.
        loader = torch.utils.data.DataLoader(samples, 8, shuffle=True, generator=torch.Generator())
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

        data = None
        state = {"model": accelerator.unwrap_model(model), "optimizer": optimizer.optimizer, "schedule": schedule}
        for iteration in run.steps(state, total=options.total):
            data = data or batches(loader, iteration)
            (inputs,) = next(data)
            loss = model(inputs).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        weights = b"".join(weight.detach().cpu().numpy().tobytes() for weight in model.parameters())
        print("trained", run.iteration, "steps:", hashlib.sha256(weights).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
