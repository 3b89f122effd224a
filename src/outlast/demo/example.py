"""Where the demo's training script is: the example that users copy, never a copy of it."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import outlast
from outlast.errors import OutlastError

__all__ = ["find_example"]

_NAME = "train_gpt.py"


def find_example() -> Path:
    """Return the path of ``examples/train_gpt.py``: in the checkout, or where the wheel has put it.

    Raises:
        OutlastError: It is in neither place.
    """
    checkout = Path(outlast.__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file() and (path := checkout / "examples" / _NAME).is_file():
        return path
    try:
        files = metadata.files("outlast") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == _NAME and (path := Path(str(file.locate())).resolve()).is_file():
            return path
    raise OutlastError(
        f"the demo's script {_NAME} is not installed; reinstall outlast, or run the demo in a checkout of its sources"
    )
