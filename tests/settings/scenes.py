"""The surroundings of a proof: training in this process, and the comparison of a config with a changed one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import outlast
from open_sessions import open_sessions
from outlast.checkpoint.catalogue.listing import look_into
from outlast.config import CheckpointConfig, Config

Proof = Callable[["Scene"], None]


@dataclass(kw_only=True)
class TrainingResult:
    """The result of a training."""

    exit_code: int | None = None
    """``None``: training finished."""
    begun: list[int] = field(default_factory=list)
    """The iterations that were begun, including those that a step's second run repeats."""
    iteration: int = 0
    weight: float = 0.0


@dataclass(kw_only=True)
class Scene:
    """The surroundings of a proof."""

    folder: Path
    patch: pytest.MonkeyPatch
    log: pytest.LogCaptureFixture

    @contextmanager
    def session(self, config: Config) -> Iterator[outlast.Session]:
        """Open a session of one rank in this process."""
        with open_sessions() as sessions:
            sessions.append(outlast.init(config))
            yield sessions[0]

    def train(
        self, config: Config, body: Callable[[outlast.Session], Any] | None = None, *, total: int = 9
    ) -> TrainingResult:
        """Train in this process; the body is called in each step."""
        trained, state = TrainingResult(), {"weight": torch.zeros(1)}
        with self.session(config) as run:
            try:
                for iteration in run.steps(state, total=total):
                    trained.begun.append(iteration)
                    if body is not None:
                        body(run)
                    state["weight"] += 1
                run.close()
            except SystemExit as exiting:
                trained.exit_code = int(exiting.code or 0)
            trained.iteration, trained.weight = run.iteration, state["weight"].item()
        return trained

    def saved(self, total: int = 9, *, at: str = "", **settings: Any) -> list[int]:
        """Train with these checkpoint settings, and return the checkpoints of a folder."""
        # Saves are synchronous: a queued save would be replaced by the next one a few milliseconds later.
        settings = {"directory": str(self.folder / "global"), "save_interval": 2, "async_save": False, **settings}
        assert self.train(Config(checkpoint=CheckpointConfig(**settings)), total=total).exit_code is None
        place = at or settings["directory"] or settings["local_directory"]
        return sorted({found.entry.iteration for found in look_into(str(place)).found})


def differs(observe: Callable[[Any], Any], cls: type, base: dict[str, Any] | None = None, **change: Any) -> Proof:
    """Return the proof that an observation of a config differs once a field is changed."""

    def proof(scene: Scene) -> None:
        plain = observe(cls(**(base or {})))
        changed = observe(cls(**{**(base or {}), **change}))
        assert plain != changed, f"{change} changes nothing: {plain}"

    return proof
