"""``outlast`` commands, run in the tests' process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from outlast.cli.main import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def outlast(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process; return its exit code, output and error output."""

    def command(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["outlast", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return command
