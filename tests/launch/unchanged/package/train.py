"""A module that is run with ``-m``: first it fails, then it prints much through a pipe."""

import multiprocessing
import os
import sys
from dataclasses import dataclass

from . import names


@dataclass
class Batch:
    number: int


def double(number: int) -> Batch:
    return Batch(2 * number)


def train() -> None:
    print(__name__, __file__, __package__, __spec__.name, sys.argv, sys.orig_argv, sys.path, os.getcwd(), names.WHERE)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("first")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1]))
    for done in range(100):
        print(f"\r{done}%", end="", flush=True)
    print()
    for _ in range(10):
        sys.stdout.write(("y" * 99 + "\n") * 10_000)
    print("no newline at the end", end="")


if __name__ == "__main__":
    train()
