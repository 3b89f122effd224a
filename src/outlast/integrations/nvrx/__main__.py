"""Run a script or module for which ``nvidia_resiliency_ext`` is outlast's."""

from __future__ import annotations

import os
import runpy
import sys

from outlast.integrations.nvrx import install

USAGE = "usage: python -m outlast.integrations.nvrx [-m MODULE | SCRIPT] [ARGUMENT ...]"


def main() -> None:
    """Run the script or module of the command line as ``python`` does, after :func:`install`."""
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    arguments = arguments[is_module:]
    if not arguments or arguments[0].startswith("-"):
        sys.stderr.write(f"{USAGE}\n")
        sys.exit(2)
    target, sys.argv = arguments[0], arguments
    install()
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    if not os.path.exists(target):
        sys.stderr.write(f"{target} does not exist\n{USAGE}\n")
        sys.exit(2)
    if not sys.flags.safe_path:  # with -P, Python adds no folder
        sys.path[0] = os.path.dirname(os.path.realpath(target))
    runpy.run_path(target, run_name="__main__")


main()
