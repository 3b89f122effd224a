"""Where the demo's training script is: the example that users copy, never a copy of it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import outlast
from outlast.errors import OutlastError

__all__ = ["find_example"]

_NAME = "train_gpt.py"
_SHARE = Path("share", "outlast", "examples", _NAME)


def find_example() -> Path:
    """Return the path of ``examples/train_gpt.py``: in the checkout, or where the wheel has put it.

    Raises:
        OutlastError: It is in neither place.
    """
    for path in _candidates():
        if path.is_file():
            return path.resolve()
    raise OutlastError(
        f"the demo's script {_NAME} is not installed; reinstall outlast, or run the demo in a checkout of its sources"
    )


def _candidates() -> Iterator[Path]:
    package = Path(outlast.__file__).resolve().parent
    checkout = package.parents[1]
    if (checkout / "pyproject.toml").is_file():
        yield checkout / "examples" / _NAME
    try:
        files = metadata.files("outlast") or []
    except metadata.PackageNotFoundError:
        files = []
    yield from (Path(str(file.locate())) for file in files if file.name == _NAME)
    yield package.parent / _SHARE  # pip install --target moves it there, and records the old place
