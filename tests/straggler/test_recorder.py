"""A section has its own time only, and hooks and wrappers in other code are removed again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from outlast.errors import OutlastError
from outlast.policy.slowness import OUTSIDE, Timing
from outlast.straggler import StragglerDetector, recorder
from outlast.straggler.recorder import SectionRecorder


class Time:
    """A performance counter that tests advance, in seconds."""

    def __init__(self) -> None:
        self.now_ns = 1

    def __call__(self) -> int:
        return self.now_ns

    def passes(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    """The counter that sections read."""
    counter = Time()
    monkeypatch.setattr(recorder, "perf_counter_ns", counter)
    return counter


@pytest.fixture
def detector() -> Iterator[StragglerDetector]:
    """A detector of one rank that times from the first step."""
    new_recorder = StragglerDetector(num_warmup_steps=0)
    yield new_recorder
    new_recorder.close()


def timings(detector: StragglerDetector) -> dict[str, Timing]:
    return detector.report().ranks[0].by_name


def test_a_section_excludes_inner_sections(detector: StragglerDetector, time: Time) -> None:
    """A section's time excludes inner sections and waiting; sections are reported in the order in which they end."""
    for number in range(5):
        with detector.step(number):
            time.passes(0.001)
            with detector.section("forward"):
                time.passes(0.010)
                with detector.section("attention"):
                    time.passes(0.030)
                with detector.waiting():
                    time.passes(0.500)
            with detector.leave_out(), detector.section("evaluation"):
                time.passes(7.0)
    timings_found = timings(detector)
    assert list(timings_found) == ["attention", "forward", OUTSIDE]
    assert {name: round(timing.median_s, 6) for name, timing in timings_found.items()} == {
        "attention": 0.030,
        "forward": 0.010,
        OUTSIDE: 0.001,
    }
    assert {timing.count for timing in timings_found.values()} == {5}


def test_a_section_can_be_entered_within_itself(detector: StragglerDetector, time: Time) -> None:
    """Each entry has its own time, except for an entry within the same section, which is part of the outer one."""
    section = detector.section("layer")
    with detector.step(0):
        for _ in range(3):
            with section:
                time.passes(0.002)
                with section:
                    time.passes(0.001)
    timings_found = timings(detector)["layer"]
    assert timings_found.count == 3
    assert timings_found.median_s == pytest.approx(0.003)
    assert timings_found.total_s == pytest.approx(0.009)


def test_a_section_that_raises_is_not_counted(detector: StragglerDetector, time: Time) -> None:
    """A section that ends with an exception is not counted, and neither is its step; the next step is."""

    def fail() -> None:
        with detector.step(0), detector.section("forward"):
            time.passes(9.0)
            raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        fail()
    with detector.step(1), detector.section("forward"):
        time.passes(0.01)
    timings_found = timings(detector)
    assert (timings_found["forward"].count, timings_found[OUTSIDE].count) == (1, 1)
    assert timings_found["forward"].median_s == pytest.approx(0.01)


def test_an_open_section_ends_with_its_outer_one() -> None:
    """A section that was entered and not left, as by a hook of a forward that raised, ends with the section around
    it."""
    new_recorder = SectionRecorder()
    new_recorder.active = True
    outer, inner = new_recorder.index("outer"), new_recorder.index("inner")
    new_recorder.enter(outer)
    new_recorder.enter(inner)
    new_recorder.leave(outer)
    new_recorder.leave(inner)
    assert [timing.name for timing in new_recorder.take({})] == ["outer"]


def test_warmup_and_profiling_interval_skip_steps(time: Time) -> None:
    """The first steps are not timed, and of the others one in profiling_interval."""
    from outlast.config import StragglerDetectionConfig

    new_recorder = StragglerDetector(StragglerDetectionConfig(profiling_interval=4), num_warmup_steps=3)
    for number in range(20):
        with new_recorder.step(number), new_recorder.section("forward"):
            time.passes(100.0 if number < 3 else 0.01)
    assert new_recorder.report().ranks[0].by_name["forward"].count == 5


def test_sections_outside_of_steps_are_not_timed(detector: StragglerDetector) -> None:
    """Sections between steps belong to no step; a rank without steps reports that it timed nothing."""
    with detector.section("forward"):
        pass
    report = detector.report()
    assert report.ranks[0].sections == ()
    assert report.findings.notes == ("rank 0 timed nothing: it cannot be compared",)


def test_sections_of_other_threads_are_ignored(detector: StragglerDetector, time: Time) -> None:
    """Sections of another thread are not timed and do not affect the open sections of the training thread."""
    section = detector.section("load")

    def enter() -> None:
        with section, detector.leave_out():
            pass
        detector.leave_out().__enter__()

    with detector.step(0), detector.section("forward"):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join(10)
        time.passes(0.01)
    assert list(timings(detector)) == ["forward", OUTSIDE]


def test_decorated_and_wrapped_functions_are_timed(detector: StragglerDetector, time: Time) -> None:
    """A decorator and wrap() time every call; close() restores the original function."""

    class Model:
        def forward(self) -> str:
            time.passes(0.01)
            return "out"

    model = Model()
    library = SimpleNamespace(recv=lambda: time.passes(5.0))
    before = library.recv
    detector.wrap(model, "forward")
    detector.wrap(library, "recv", waits=True)

    @detector.section("loss")
    def loss() -> int:
        time.passes(0.002)
        library.recv()
        return 3

    for number in range(3):
        with detector.step(number):
            assert model.forward() == "out"
            assert loss() == 3
    timings_found = timings(detector)
    assert timings_found["forward"].median_s == pytest.approx(0.01)
    assert timings_found["loss"].median_s == pytest.approx(0.002)
    detector.close()
    assert "forward" not in vars(model)
    assert library.recv is before


def test_a_target_that_cannot_be_timed_is_rejected(detector: StragglerDetector) -> None:
    """A target that is not callable, a coroutine function and the reserved section name are rejected at once."""
    with pytest.raises(OutlastError, match="no callable 'forward'"):
        detector.wrap(SimpleNamespace(), "forward")

    async def work() -> None: ...

    with pytest.raises(TypeError, match="returns before its work is done"):
        detector.section("work")(work)
    with pytest.raises(OutlastError, match="choose another name"):
        detector.section(OUTSIDE)


def torch_hooks() -> list[object]:
    """Return the functions that :meth:`StragglerDetector.watch` replaces in torch."""
    return [torch.autograd.backward, _BaseDataLoaderIter.__next__, dist.Work.wait, dist.ProcessGroup.allreduce]


@pytest.mark.slow
def test_hooks_time_a_training_step(detector: StragglerDetector) -> None:
    """Data loader, forward, backward and optimizer step are sections, wherever the objects are in the state; close()
    removes all hooks from torch."""
    before = torch_hooks()
    model = torch.nn.Linear(3, 3)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    detector.watch({"model": SimpleNamespace(wrapped=model), "optimizers": {"0": optim}, "note": "text"})
    batches = iter(DataLoader(torch.ones(100, 3), batch_size=2))
    for number in range(4):
        with detector.step(number):
            model(next(batches)).sum().backward()
            optim.step()
    timings_found = timings(detector)
    assert list(timings_found) == ["data", "forward", "backward", "optimizer", OUTSIDE]
    assert {timing.count for timing in timings_found.values()} == {4}
    detector.close()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert torch_hooks() == before


def test_the_backward_excludes_the_wait_for_other_ranks(detector: StragglerDetector, time: Time) -> None:
    """Gradient hooks are part of the backward; the engine's final callbacks, in which DDP waits for other ranks, are
    not, also within a section of the script."""
    weight = torch.ones(2, requires_grad=True)

    def compute(_: torch.Tensor) -> None:
        time.passes(0.003)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: time.passes(5.0))

    weight.register_hook(compute)
    detector.watch({})
    for number in range(6):
        with detector.step(number), detector.section("backward") if number % 2 else nullcontext():
            (weight * 2).sum().backward()
    with pytest.raises(RuntimeError, match="does not require grad"), detector.step(6):
        torch.ones(2).sum().backward()
    with detector.step(7):
        torch.autograd.backward([weight.sum(), (weight * 3).sum()])
    timings_found = timings(detector)
    assert (timings_found["backward"].count, timings_found["backward"].median_s) == (7, pytest.approx(0.003))
    assert timings_found[OUTSIDE].median_s == 0.0


@pytest.mark.slow
def test_a_compiled_backward_is_timed_as_a_whole(detector: StragglerDetector) -> None:
    """Compiled autograd traces tensor hooks, which then must not queue callbacks, so none is added."""
    from torch._dynamo import compiled_autograd

    weight = torch.ones(2, requires_grad=True)
    detector.watch({})
    with detector.step(0), compiled_autograd._enable(lambda graph: graph):
        (weight * 2).sum().backward()
    assert weight.grad is not None
    assert timings(detector)["backward"].count == 1


def test_a_long_window_samples_backwards(detector: StragglerDetector, time: Time) -> None:
    """After 32 steps only one step of seven has the hooks that split a backward, and the backward keeps its share of
    the step."""
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda _: time.passes(0.003))
    detector.watch({})
    for number in range(102):
        with detector.step(number):
            (weight * 2).sum().backward()
    timings_found = timings(detector)
    assert (timings_found["backward"].count, timings_found["backward"].median_s) == (102, pytest.approx(0.003))
    assert timings_found["backward"].total_s == pytest.approx(102 * 0.003)
    assert timings_found[OUTSIDE].median_s == 0.0


def test_time_between_steps_counts_for_the_next_step(detector: StragglerDetector, time: Time) -> None:
    """Data loaded between two steps is the rank's own time, in its section if it has one; excluded saves and the time
    around a report are not."""
    for number in range(5):
        with detector.section("data"):
            time.passes(0.004)
        time.passes(0.002)
        with detector.leave_out():
            time.passes(60.0)
        with detector.step(number):
            time.passes(0.001)
    timings_found = timings(detector)
    assert (timings_found["data"].count, timings_found["data"].median_s) == (4, pytest.approx(0.004))
    assert (timings_found[OUTSIDE].count, timings_found[OUTSIDE].median_s) == (5, pytest.approx(0.003))
    time.passes(9.0)
    with detector.step(5):
        time.passes(0.001)
    assert timings(detector)[OUTSIDE].median_s == pytest.approx(0.001)


def test_the_median_is_of_the_newest_times(monkeypatch: pytest.MonkeyPatch, time: Time) -> None:
    """Memory is bounded: the median is of the newest times, and the count is of all."""
    monkeypatch.setattr(recorder, "MAX_SAMPLES", 8)
    new_recorder = SectionRecorder()
    new_recorder.active = True
    index = new_recorder.index("forward")
    for number in range(40):
        new_recorder.enter(index)
        time.passes(1.0 if number < 32 else 0.01)
        new_recorder.leave(index)
    (timings_found,) = new_recorder.take({})
    assert (timings_found.count, timings_found.median_s) == (40, pytest.approx(0.01))


def test_a_report_starts_a_new_window(detector: StragglerDetector, time: Time) -> None:
    """Times are reported once, and a section that is no longer entered is no longer reported."""
    with detector.step(0), detector.section("once"):
        time.passes(0.01)
    assert "once" in timings(detector)
    with detector.step(1):
        time.passes(0.01)
    assert list(timings(detector)) == [OUTSIDE]
