"""A script that calls ``init_process_group()`` after ``outlast.init()``."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import Ranks

SCRIPT = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group, init_process_group
import outlast
from outlast.errors import ConfigError

run = outlast.init(outlast.Config(checkpoint=outlast.CheckpointConfig(directory=sys.argv[1])))
world = dist.group.WORLD
for asked in ({"backend": "mpi"}, {"world_size": 7}, {"rank": 9}):
    try:
        init_process_group(**asked)
    except ConfigError as error:
        name, value = next(iter(asked.items()))
        assert f"{name}={value!r}" in str(error) and "before outlast.init()" in str(error), error
    else:
        raise AssertionError(asked)
init_process_group("gloo", "env://", timedelta(seconds=7), world_size=2, rank=run.global_rank)
dist.init_process_group()
torch.distributed.distributed_c10d.init_process_group(backend="cpu:gloo")
assert dist.group.WORLD is world
print("timeout", world._get_backend(torch.device("cpu")).options._timeout, flush=True)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
for _ in run.steps({"net": net}, total=2):
    net(torch.ones(1, 2)).sum().backward()
destroy_process_group()  # as scripts do
run.close()
init_process_group("gloo", store=dist.FileStore(sys.argv[1] + "/store", 2), rank=run.global_rank, world_size=2)
dist.barrier()
assert dist.group.WORLD is not world
try:
    init_process_group("gloo")
except ValueError as error:
    print("torch:", error)
"""


@pytest.mark.process
@pytest.mark.slow
def test_init_process_group_after_outlast_init_keeps_the_group(tmp_path: Path) -> None:
    """The call returns with the default group of ``outlast.init()`` and the requested timeout, for every way to
    import the function; a call that requests another group is an error with the difference. Once that group is
    destroyed, the function is torch's."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Ranks(script, str(tmp_path / "ckpt"), world_size=2) as ranks:
        codes, outputs = ranks.end()
    assert codes == [0, 0], outputs
    for output in outputs:
        assert "timeout 0:00:07" in output
        assert "torch: trying to initialize the default process group twice!" in output
