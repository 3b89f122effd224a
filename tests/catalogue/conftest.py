"""Fixtures that run ``outlast`` commands inside the test process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from outlast.cli.main import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def outlast(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process; return its exit code, output and error output."""

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["outlast", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        out, err = capsys.readouterr()
        return int(exit_info.value.code or 0), out, err

    return command
