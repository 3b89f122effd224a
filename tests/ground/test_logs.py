"""The log has one format for all processes, the requested level, and respects the handlers of an application."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from outlast import logs
from outlast.errors import ConfigError
from outlast.wording import count, name_ranks, printable

LINE = re.compile(r"^\d\d:\d\d:\d\d\.\d\d\d (DEBUG|INFO|WARNING|ERROR) \[([^\]]+)\] (.*)$")


def run_and_capture(code: str, **variables: str) -> list[str]:
    """Return what a process that runs ``code`` writes to standard error, line by line."""
    start = "import logging\nfrom outlast import logs\nlog = logging.getLogger('outlast.some.module')\n"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OUTLAST_LOG")}
    done = subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(code)],
        env={**inherited, **variables},
        timeout=300,
        check=True,
        text=True,
        stderr=subprocess.PIPE,
    )
    return done.stderr.splitlines()


def test_line_contains_time_level_process_and_message() -> None:
    """Time to the millisecond, level, the process in brackets and the message; another thread's name is added."""
    lines = run_and_capture(
        """
        import threading
        logs.configure("agent a", node="a", threads={"outlast-coordinator": "coordinator"})
        log.info("%d nodes are here", 2)
        thread = threading.Thread(target=log.warning, args=("one is lost",), name="outlast-coordinator")
        thread.start()
        thread.join()
        """
    )
    found = [LINE.match(line) for line in lines]
    assert [match and match.groups() for match in found] == [
        ("INFO", "agent a", "2 nodes are here"),
        ("WARNING", "coordinator", "one is lost"),
    ]


def test_json_lines_are_objects() -> None:
    """``OUTLAST_LOG=json``: time in UTC, level, process, logger, text, node and rank; a traceback is a field."""
    first, second = (
        json.loads(line)
        for line in run_and_capture(
            """
            logs.configure_worker(0, "a")
            log.info("two\\nlines")
            try:
                1 / 0
            except ZeroDivisionError:
                log.exception("it failed")
            """,
            OUTLAST_LOG="json",
        )
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    where = {"where": "rank 0", "logger": "outlast.some.module", "node": "a", "rank": 0}
    assert first == {"level": "INFO", "text": "two\nlines", **where}
    assert second["traceback"].endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("level", "seen"),
    [
        ("", ["0 info", "0 warning", "end"]),
        ("debug", ["0 debug", "0 info", "0 warning", "1 debug", "1 info", "1 warning", "end"]),
        ("WARNING", ["0 warning", "end"]),
        ("error", ["end"]),
    ],
)
def test_level_applies_and_the_last_line_is_always_written(level: str, seen: list[str]) -> None:
    """Rank 0 logs messages common to all ranks and the others warn only; with ``debug`` all log everything. A run's
    last line is written at every level."""
    lines = run_and_capture(
        """
        for rank in (0, 1):
            logs.configure_worker(rank, "a")
            log.debug("%d debug", rank)
            log.info("%d info", rank)
            if rank == 0 or logging.getLogger("outlast").level == logging.DEBUG:
                log.warning("%d warning", rank)
        logs.configure("agent a")
        logging.getLogger(logs.OUTCOME).info("end")
        """,
        OUTLAST_LOG_LEVEL=level,
    )
    assert [line.partition("] ")[2] for line in lines] == seen


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["before", "after"])
def test_application_keeps_its_log_handlers(when: str, rank: int) -> None:
    """An application's handler, configured before or after, gets the lines of its level, each once, on any rank, and no
    handler is added to it."""
    lines = run_and_capture(
        f"""
        def configure_application():
            logging.basicConfig(format="app: %(message)s", level=logging.INFO)
        if {when!r} == "before":
            configure_application()
        logs.configure_worker({rank}, "a")
        if {when!r} == "after":
            configure_application()
        log.info("hello")
        print(len(logging.getLogger().handlers), "handlers", file=__import__("sys").stderr)
        """
    )
    assert lines == ["app: hello", "1 handlers"]


def test_outlast_log_level_precedes_the_applications() -> None:
    """An application's level applies unless ``OUTLAST_LOG_LEVEL`` is set."""
    code = """
    logging.basicConfig(format="app: %(message)s")
    logs.configure_worker(0, "a")
    log.info("hello")
    """
    assert run_and_capture(code) == []
    assert run_and_capture(code, OUTLAST_LOG_LEVEL="info") == ["app: hello"]


def test_log_file_is_appended_to(tmp_path: Path) -> None:
    """With a path, as from ``monitor_process_logdir``, lines go to that file only."""
    path = tmp_path / "log"
    path.write_text("earlier\n")
    assert run_and_capture(f"logs.configure('monitor rank 3', rank=3, path={str(path)!r})\nlog.info('hello')") == []
    earlier, line = path.read_text().splitlines()
    assert earlier == "earlier"
    assert line.endswith(" INFO [monitor rank 3] hello")


def test_invalid_log_value_lists_the_valid_ones() -> None:
    """An invalid value is an error at the start of a run, and a warning in a process of a running one."""
    with pytest.raises(ConfigError, match=r"OUTLAST_LOG_LEVEL='loud' is not one of debug, info, warning, error"):
        logs.read_settings({"OUTLAST_LOG_LEVEL": "loud"})
    with pytest.raises(ConfigError, match=r"OUTLAST_LOG='xml' is not one of text, json"):
        logs.read_settings({"OUTLAST_LOG": "xml"})
    first, second = run_and_capture("logs.configure('agent a')\nlog.info('hello')", OUTLAST_LOG="xml")
    assert "WARNING [agent a] environment variable OUTLAST_LOG='xml'" in first
    assert second.endswith("INFO [agent a] hello")


def test_import_does_not_configure_logging() -> None:
    """Importing the package does not change logging."""
    code = """
    import outlast
    from outlast.launch import options
    print(logging.getLogger().handlers, logging.getLogger("outlast").handlers, file=__import__("sys").stderr)
    """
    assert run_and_capture(code) == ["[] []"]


@pytest.mark.parametrize(
    ("first", "num", "world_size", "text"),
    [(0, 1, 1, "rank 0 of 1"), (0, 4, 8, "ranks 0 to 3 of 8"), (6, 2, 8, "ranks 6 to 7 of 8")],
)
def test_ranks_are_described_in_words(first: int, num: int, world_size: int, text: str) -> None:
    """One rank is ``rank 0 of 1``, not a range from itself to itself."""
    assert name_ranks(first, num, world_size) == text


def test_one_is_singular() -> None:
    """1 iteration, and 0 or 2 iterations."""
    assert [count(number, "iteration") for number in (0, 1, 2)] == ["0 iterations", "1 iteration", "2 iterations"]


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters of an exception's text are escaped in a log line; its lines, tabs and letters stay."""
    text = "\x1b]0;title\x07\x1b[2J\x9b31m \u202etxt.exe\ud800\r é 日本 \xa0\n\tat line 3"
    assert printable(text) == r"\x1b]0;title\x07\x1b[2J\x9b31m \u202etxt.exe\ud800\r é 日本 " + "\xa0\n\tat line 3"
    assert printable("plain") == "plain"
    logger = logging.getLogger("outlast.of_test")
    logs.configure("agent a")
    try:
        logger.warning("job over: %s", "\x1b[31mboom")
    finally:
        for handler in list(logging.getLogger("outlast").handlers):
            logging.getLogger("outlast").removeHandler(handler)
    assert "\x1b" not in capsys.readouterr().err
