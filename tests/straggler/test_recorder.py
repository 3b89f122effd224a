"""What is timed is a section's own time, and what is put around other people's code is taken away again."""

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
    """A performance counter that is moved by hand, in seconds."""

    def __init__(self) -> None:
        self.now_ns = 1

    def __call__(self) -> int:
        return self.now_ns

    def passes(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    """The counter that sections read."""
    moved = Time()
    monkeypatch.setattr(recorder, "perf_counter_ns", moved)
    return moved


@pytest.fixture
def detector() -> Iterator[StragglerDetector]:
    """A detector of one rank that times from the first step."""
    made = StragglerDetector(num_warmup_steps=0)
    yield made
    made.close()


def timings(detector: StragglerDetector) -> dict[str, Timing]:
    return detector.report().ranks[0].by_name


def test_a_sections_time_is_its_own(detector: StragglerDetector, time: Time) -> None:
    """Sections within a section, and marked waiting, are not part of its time; sections are told in the order in which
    they end."""
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
    found = timings(detector)
    assert list(found) == ["attention", "forward", OUTSIDE]
    assert {name: round(timing.median_s, 6) for name, timing in found.items()} == {
        "attention": 0.030,
        "forward": 0.010,
        OUTSIDE: 0.001,
    }
    assert {timing.count for timing in found.values()} == {5}


def test_a_section_may_be_entered_many_times_and_within_itself(detector: StragglerDetector, time: Time) -> None:
    """Each entry is a time of its own; one within itself, as around the forward of a module that is watched too, is
    part of the one around it."""
    section = detector.section("layer")
    with detector.step(0):
        for _ in range(3):
            with section:
                time.passes(0.002)
                with section:
                    time.passes(0.001)
    found = timings(detector)["layer"]
    assert found.count == 3
    assert found.median_s == pytest.approx(0.003)
    assert found.total_s == pytest.approx(0.009)


def test_what_raises_is_not_counted(detector: StragglerDetector, time: Time) -> None:
    """A section that ended by an exception has no time, and neither has its step; the next step is timed as ever."""

    def fail() -> None:
        with detector.step(0), detector.section("forward"):
            time.passes(9.0)
            raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        fail()
    with detector.step(1), detector.section("forward"):
        time.passes(0.01)
    found = timings(detector)
    assert (found["forward"].count, found[OUTSIDE].count) == (1, 1)
    assert found["forward"].median_s == pytest.approx(0.01)


def test_an_open_section_does_not_outlive_what_is_around_it() -> None:
    """What was entered and never left, as by a hook of a forward that raised, ends with the section around it."""
    made = SectionRecorder()
    made.active = True
    outer, inner = made.index("outer"), made.index("inner")
    made.enter(outer)
    made.enter(inner)
    made.leave(outer)
    made.leave(inner)
    assert [timing.name for timing in made.take({})] == ["outer"]


def test_steps_are_left_out_as_configured(time: Time) -> None:
    """The first steps are not timed, and of the others one in profiling_interval."""
    from outlast.config import StragglerDetectionConfig

    made = StragglerDetector(StragglerDetectionConfig(profiling_interval=4), num_warmup_steps=3)
    for number in range(20):
        with made.step(number), made.section("forward"):
            time.passes(100.0 if number < 3 else 0.01)
    assert made.report().ranks[0].by_name["forward"].count == 5


def test_sections_outside_of_steps_are_not_timed(detector: StragglerDetector) -> None:
    """What lies between steps is no part of any; a rank that never begins one is said to have timed nothing."""
    with detector.section("forward"):
        pass
    report = detector.report()
    assert report.ranks[0].sections == ()
    assert report.findings.notes == ("rank 0 timed nothing: it cannot be compared",)


def test_other_threads_disturb_nothing(detector: StragglerDetector, time: Time) -> None:
    """What another thread enters is not timed, leaves nothing out, and does not get into what the thread that trains
    has open."""
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
    """A decorator and wrap() time every call; close() gives back what was there before."""

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
    found = timings(detector)
    assert found["forward"].median_s == pytest.approx(0.01)
    assert found["loss"].median_s == pytest.approx(0.002)
    detector.close()
    assert "forward" not in vars(model)
    assert library.recv is before


def test_what_cannot_be_timed_is_refused(detector: StragglerDetector) -> None:
    """A name that is no callable, a coroutine, and the name of what is outside all sections are refused at once."""
    with pytest.raises(OutlastError, match="no callable 'forward'"):
        detector.wrap(SimpleNamespace(), "forward")

    async def work() -> None: ...

    with pytest.raises(TypeError, match="returns before its work is done"):
        detector.section("work")(work)
    with pytest.raises(OutlastError, match="choose another name"):
        detector.section(OUTSIDE)


def replaced() -> list[object]:
    """Return what :meth:`StragglerDetector.watch` replaces in torch."""
    return [torch.autograd.backward, _BaseDataLoaderIter.__next__, dist.Work.wait, dist.ProcessGroup.allreduce]


@pytest.mark.slow
def test_a_training_step_is_watched_by_hooks(detector: StragglerDetector) -> None:
    """The data loader, the forward of a module, the backward and the step of an optimizer are sections, wherever they
    are in the state; after close() no hook is left and torch is as it was."""
    before = replaced()
    model = torch.nn.Linear(3, 3)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    detector.watch({"model": SimpleNamespace(wrapped=model), "optimizers": {"0": optim}, "note": "text"})
    batches = iter(DataLoader(torch.ones(100, 3), batch_size=2))
    for number in range(4):
        with detector.step(number):
            model(next(batches)).sum().backward()
            optim.step()
    found = timings(detector)
    assert list(found) == ["data", "forward", "backward", "optimizer", OUTSIDE]
    assert {timing.count for timing in found.values()} == {4}
    detector.close()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert replaced() == before


def test_the_backward_ends_where_the_wait_for_other_ranks_begins(detector: StragglerDetector, time: Time) -> None:
    """What a hook of a gradient does is part of the backward; final callbacks of the engine, in which DDP waits for the
    other ranks' gradients, are not, also where the script has a section around the backward."""
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
    found = timings(detector)
    assert (found["backward"].count, found["backward"].median_s) == (7, pytest.approx(0.003))
    assert found[OUTSIDE].median_s == 0.0


@pytest.mark.slow
def test_a_backward_that_is_compiled_is_timed_as_a_whole(detector: StragglerDetector) -> None:
    """Compiled autograd traces the hooks of tensors, which then may not queue callbacks: none is put there."""
    from torch._dynamo import compiled_autograd

    weight = torch.ones(2, requires_grad=True)
    detector.watch({})
    with detector.step(0), compiled_autograd._enable(lambda graph: graph):
        (weight * 2).sum().backward()
    assert weight.grad is not None
    assert timings(detector)["backward"].count == 1


def test_in_a_long_window_few_backwards_are_timed_and_all_are_counted(detector: StragglerDetector, time: Time) -> None:
    """The hooks that split a backward cost some microseconds: after 32 steps one of seven has them; the share of the
    step that the backward takes is the same."""
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda _: time.passes(0.003))
    detector.watch({})
    for number in range(102):
        with detector.step(number):
            (weight * 2).sum().backward()
    found = timings(detector)
    assert (found["backward"].count, found["backward"].median_s) == (102, pytest.approx(0.003))
    assert found["backward"].total_s == pytest.approx(102 * 0.003)
    assert found[OUTSIDE].median_s == 0.0


def test_what_is_between_steps_counts_for_the_next_step(detector: StragglerDetector, time: Time) -> None:
    """Data that a loop or a trainer loads between two steps is own time of the rank, in its section where it has one; a
    save that is left out and the time around a report are not."""
    for number in range(5):
        with detector.section("data"):
            time.passes(0.004)
        time.passes(0.002)
        with detector.leave_out():
            time.passes(60.0)
        with detector.step(number):
            time.passes(0.001)
    found = timings(detector)
    assert (found["data"].count, found["data"].median_s) == (4, pytest.approx(0.004))
    assert (found[OUTSIDE].count, found[OUTSIDE].median_s) == (5, pytest.approx(0.003))
    time.passes(9.0)
    with detector.step(5):
        time.passes(0.001)
    assert timings(detector)[OUTSIDE].median_s == pytest.approx(0.001)


def test_the_newest_times_make_the_median_and_all_are_counted(monkeypatch: pytest.MonkeyPatch, time: Time) -> None:
    """Memory is bounded: of very many times the newest count for the median, and the count is that of all."""
    monkeypatch.setattr(recorder, "MAX_SAMPLES", 8)
    made = SectionRecorder()
    made.active = True
    index = made.index("forward")
    for number in range(40):
        made.enter(index)
        time.passes(1.0 if number < 32 else 0.01)
        made.leave(index)
    (found,) = made.take({})
    assert (found.count, found.median_s) == (40, pytest.approx(0.01))


def test_a_window_begins_anew_after_a_report(detector: StragglerDetector, time: Time) -> None:
    """What was told is not told again, and a section that is not entered any more is gone."""
    with detector.step(0), detector.section("once"):
        time.passes(0.01)
    assert "once" in timings(detector)
    with detector.step(1):
        time.passes(0.01)
    assert list(timings(detector)) == [OUTSIDE]
