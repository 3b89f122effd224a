"""The Ray Train example ends with the weights of an undisturbed run after a worker hung."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from ray_scripts import run_script
from torch import nn

pytestmark = pytest.mark.extended

pytest.importorskip("ray.train.torch")
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "ray_train.py"
ITERATIONS, WORKERS, WIDTH = 30, 2, 32


def undisturbed_digest() -> str:
    """Return the digest of the weights, computed by one process for both workers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the workers: the order of summation is the same
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for iteration in range(ITERATIONS):
        gradients = []
        for rank in range(WORKERS):
            torch.manual_seed(WORKERS * iteration + rank)
            inputs = torch.randn(64, WIDTH)
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True).sin())
            optimizer.zero_grad()
            loss.backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        for parameter, one, other in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = one + other
        optimizer.step()
    torch.set_num_threads(threads)
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()[:16]


@pytest.mark.campaign
@pytest.mark.process
def test_hung_worker_is_replaced_and_weights_are_unchanged(tmp_path: Path) -> None:
    """The hung worker is detected and killed, and the last line is the same as without a fault."""
    code, output = run_script(SCRIPT, str(tmp_path / "run"), "--fault=sleep", timeout_s=200)
    assert code == 0, output
    assert (tmp_path / "run" / "struck").exists()
    assert (tmp_path / "run" / "run" / "stacks" / "cycle-0" / "rank-1.txt").exists()
    assert output.splitlines()[-1] == f"weights {undisturbed_digest()}", output
