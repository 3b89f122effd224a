"""Where the example saves, by the options it is given."""

from __future__ import annotations

import argparse
import runpy
from functools import cache
from typing import Any

from outlast.demo.example import find_example


@cache
def example() -> dict[str, Any]:
    return runpy.run_path(str(find_example()), run_name="example")


def settings(**given: Any) -> tuple[Any, ...] | None:
    """Return directory, local directory and the two intervals that the example asks for."""
    options = {"checkpoint_dir": None, "local_dir": None, "save_interval": 20, "global_save_interval": None, **given}
    saves = example()["where_to_save"](argparse.Namespace(**options))
    if saves is None:
        return None
    return saves.directory, saves.local_directory, saves.save_interval, saves.non_persistent_save_interval


def test_one_folder_gets_every_generation() -> None:
    """As before there was a second one, whichever it is; without any nothing is saved."""
    assert settings(checkpoint_dir="/shared") == ("/shared", None, 20, 0)
    assert settings(local_dir="/disk", save_interval=7) == (None, "/disk", 7, 0)
    assert settings() is None


def test_with_two_the_far_one_gets_every_second() -> None:
    """Or as often as is asked for."""
    both = {"checkpoint_dir": "/shared", "local_dir": "/disk"}
    assert settings(**both) == ("/shared", "/disk", 40, 20)
    assert settings(**both, save_interval=5, global_save_interval=50) == ("/shared", "/disk", 50, 5)
