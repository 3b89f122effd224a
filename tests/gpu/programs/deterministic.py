"""Run a script, with its arguments, with torch's deterministic algorithms where there are any."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch

torch.use_deterministic_algorithms(True, warn_only=True)
torch.set_num_threads(1)
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
