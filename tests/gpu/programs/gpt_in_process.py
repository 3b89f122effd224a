"""Train the model of ``examples/train_gpt.py`` in a wrapped function, which fails once.

Arguments: the example's path, a folder, the number of iterations, and the iteration before which the exception is
raised. Prints a JSON object for each call; the result is a file in the folder, as the example's ``--out`` writes it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

import outlast
from outlast import inprocess

EXAMPLE, FOLDER, TOTAL, FAILS_AT = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
assert spec is not None
assert spec.loader is not None
gpt = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpt)
CONFIG = outlast.InProcessRestartConfig(soft_timeout=60, hard_timeout=90)


@inprocess.Wrapper(CONFIG)
def train(call: inprocess.Handle) -> None:
    """Train as the example does, with state that is kept across the exception."""
    saves = outlast.CheckpointConfig(directory=str(FOLDER / "saved"), save_interval=4)
    config = outlast.Config(checkpoint=saves, in_process=True, run_dir=str(FOLDER / "run"))
    with outlast.init(config) as run:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        text = gpt.read_text()
        model = call.keep("model", lambda: gpt.GPT().to(run.device))
        optim = call.keep("optim", lambda: torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01))
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, TOTAL, eta_min=3e-4)
        state = {"model": model, "optim": optim, "sched": sched, "losses": []}
        first = None
        for iteration in run.steps(state, total=TOTAL):
            if first is None:
                first = iteration
                sys.stdout.write(json.dumps({"call": call.iteration, "begins": first, "pid": os.getpid()}) + "\n")
            for attempt in run.attempts():
                batch = gpt.draw_batch(text, 0, iteration, 0).to(run.device)
                loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
                optim.zero_grad()
                loss.backward()
                attempt.validate(loss)
            if iteration == FAILS_AT and call.iteration == 0:
                raise ValueError("planned")
            optim.step()
            sched.step()
            state["losses"].append(loss.item())
        result = {
            "iterations": run.iteration,
            "final_loss": state["losses"][-1],
            "weights": gpt.digest(model.state_dict()),
            "optimizer": gpt.digest(optim.state_dict()),
            "losses": gpt.digest(state["losses"]),
        }
        (FOLDER / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    train()
