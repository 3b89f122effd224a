"""NVRx's in-process restart over the engine: its documented use survives an exception and a killed rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Optional, cast

import pytest

from outlast.errors import ConfigError, RestartAbort
from outlast.inprocess import State
from outlast.inprocess.call import Handle
from outlast.integrations.nvrx import inprocess, ranks
from outlast.policy.rank_assignment import Assignment, Member, assign
from outlast.testing import RankProcesses

SCRIPT = """
import datetime, os, signal, sys, warnings
from typing import Optional
from outlast.integrations import nvrx
nvrx.install()
import nvidia_resiliency_ext.inprocess as inprocess
import torch, torch.distributed as dist
started_as = int(os.environ["RANK"])
seconds = lambda number: datetime.timedelta(seconds=number)

class Told(inprocess.abort.Abort):
    def __call__(self, state):
        assert isinstance(state, inprocess.state.FrozenState) and state.initial_rank == started_as
        return state

def finalized():
    print("finalized", flush=True)

class Checked(inprocess.health_check.HealthCheck):
    def __call__(self, state):
        print("raised", type(state.fn_exception).__name__, state.mode.name, flush=True)
        return state

@inprocess.Wrapper(
    store_kwargs={"timeout": seconds(300), "port": int(os.environ["MASTER_PORT"]) + 2},
    initialize=inprocess.Compose(
        inprocess.initialize.RetryController(min_world_size=2),
        inprocess.nested_restarter.NestedRestarterHandlingCompleted(),
    ),
    abort=inprocess.Compose(
        inprocess.abort.AbortTransformerEngine(), inprocess.abort.AbortTorchDistributed(), Told(),
        inprocess.nested_restarter.NestedRestarterHandlingStarting(),
    ),
    finalize=inprocess.finalize.ThreadedFinalize(timeout=seconds(10), fn=finalized),
    health_check=inprocess.Compose(
        inprocess.health_check.CudaHealthCheck(timeout=seconds(10)),
        inprocess.health_check.FaultCounter(max_rank_faults=3), Checked(),
    ),
    completion=inprocess.nested_restarter.NestedRestarterFinalized(),
    terminate=inprocess.nested_restarter.NestedRestarterAborted(),
    rank_assignment=RANK_ASSIGNMENT,
    soft_timeout=seconds(60), hard_timeout=seconds(90), heartbeat_timeout=seconds(60),
)
def train(base_store, total, call_wrapper: Optional[inprocess.CallWrapper] = None):
    rank, world, call = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), call_wrapper.iteration
    dist.init_process_group("gloo", store=dist.PrefixStore(str(call), base_store), rank=rank, world_size=world)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    net = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for iteration in range(total):
        with call_wrapper.atomic():
            inputs = torch.randn(2, 4)
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        optimizer.step()
        if iteration == 3 and call == 0 and started_as == 2:
            raise RuntimeError("example fault")
        if iteration == 5 and call == 1 and started_as == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        call_wrapper.ping()
    return world, call, rank, repr(model.weight.detach().sum().item())

store = dist.TCPStore(
    "127.0.0.1", int(os.environ["MASTER_PORT"]) + 1, is_master=started_as == 0, multi_tenant=True,
    wait_for_workers=True, use_libuv=True,
)
print("returned", train(store, 10), flush=True)
"""
SHIFT = "inprocess.Compose(inprocess.rank_assignment.ActivateAllRanks(), inprocess.rank_assignment.ShiftRanks())"
TREE = """inprocess.rank_assignment.Tree(layers=[
    inprocess.rank_assignment.Layer(
        min_ranks=3, max_ranks=3, flag=inprocess.rank_assignment.LayerFlag.RESERVE),
    inprocess.rank_assignment.Layer(
        min_ranks=1, max_ranks=4, key_or_fn=lambda _: "node", flag=inprocess.rank_assignment.LayerFlag.RESERVE),
])"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("rule", "expected"),
    [(SHIFT, {0: 0, 2: 1, 3: 2}), pytest.param(TREE, {0: 0, 2: 2, 3: 1}, marks=pytest.mark.extended)],
)
def test_documented_use_survives_exception_and_killed_rank(rule: str, expected: dict[int, int], tmp_path: Path) -> None:
    """After an exception and a SIGKILL on two of four ranks, the others finish in the same processes with the ranks
    that the rule assigns and equal weights; plug-ins get the exception and the role."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("RANK_ASSIGNMENT", rule))
    with RankProcesses(script, world_size=4, directory=tmp_path / "logs") as processes:
        codes = processes.wait(timeout_s=300)
        outputs = [(tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in range(4)]
        assert codes == [0, -9, 0, 0], processes.tails()
    weights = set()
    for started_as, rank in expected.items():
        (line,) = [one for one in outputs[started_as].splitlines() if one.startswith("returned")]
        world, call, now, weight = eval(line.removeprefix("returned "))
        assert (world, call, now) == (3, 2, rank), line
        weights.add(weight)
        assert (
            "finalized" in outputs[started_as] or "INACTIVE" in outputs[started_as]
        )  # an inactive rank does not finalize
    assert len(weights) == 1
    assert "raised RuntimeError ACTIVE" in outputs[2]
    states = [line.partition("name=[InProcess] ")[2] for line in outputs[0].splitlines() if "InProcess]" in line]
    begins, completes = "state=handling stage=starting", "state=handling stage=completed"
    assert states == ["state=initialize", begins, completes, begins, completes, "state=finalized"]


def member(initial: int, node: str, *, rank: int | None = None, alive: bool = True) -> Member:
    """Return a member of a machine with two layers."""
    labels = {"layer-0": "", "layer-1": node}
    return Member(initial_rank=initial, node=node, rank=rank, alive=alive, labels=labels)


def tree(*, least: int = 2, root: Any = None, **options: Any) -> ranks.LayeredTree:
    """Return the rule of Megatron-Bridge: nodes with two ranks, of which both or none run the function."""
    reserve = ranks.LayerFlag.RESERVE
    layers = [
        ranks.Layer(min_ranks=2, max_ranks=4, flag=reserve if root is None else root),
        ranks.Layer(min_ranks=least, max_ranks=2, key_or_fn="node", flag=reserve),
    ]
    return ranks.LayeredTree(layers, **options)


def ranks_after(rule: Callable[[Assignment], Assignment], members: Iterable[Member]) -> dict[int, int | None]:
    return assign(rule, members, iteration=1, active_world_size=None)


def test_tree_replaces_a_broken_node_by_the_reserve() -> None:
    """Of three nodes with two ranks the third is a reserve, and takes the ranks of a node that lost a rank."""
    nodes = "aabbcc"
    before = ranks_after(tree(), [member(one, node) for one, node in enumerate(nodes)])
    assert before == {0: 0, 1: 1, 2: 2, 3: 3, 4: None, 5: None}
    after = [member(one, node, rank=before[one], alive=one != 0) for one, node in enumerate(nodes)]
    assert ranks_after(tree(), after) == {1: None, 2: 2, 3: 3, 4: 1, 5: 0}


def test_tree_without_reserve_backfills_or_shifts() -> None:
    """The flag of a layer decides how a gap is filled; remaining gaps are closed, and the filter is applied last."""
    members = [member(one, node, rank=one, alive=one != 1) for one, node in enumerate("aabb")]
    backfill, no_flag = ranks.LayerFlag.RESERVE | ranks.LayerFlag.BACKFILL, ranks.LayerFlag(0)
    assert ranks_after(tree(least=1, root=no_flag), members) == {0: 0, 2: 1, 3: 2}
    layers = [ranks.Layer(flag=backfill)]
    assert ranks_after(ranks.LayeredTree(layers), members) == {0: 0, 2: 2, 3: 1}
    halved = tree(least=1, root=no_flag, world_size_filter=lambda size: size // 2 * 2)
    assert ranks_after(halved, members) == {0: 0, 2: 1, 3: None}


def test_tree_without_enough_ranks_aborts() -> None:
    """If no branch has its minimum number of ranks, restarting ends on all ranks with a reason."""
    members = [member(one, node, rank=one, alive=one % 2 == 0) for one, node in enumerate("aabb")]
    with pytest.raises(RestartAbort, match="2 ranks live"):
        ranks_after(tree(), members)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rank_filter": 1}, "rank_filter is not supported"),
        ({"monitor_process_pidfile": "x"}, "monitor_process_pidfile='x' must be an absolute path"),
        ({"store_factory": dict}, "store_factory=dict is not supported"),
        ({"store_kwargs": {"prot": 1}}, "store_kwargs has prot"),
        ({"soft_timeout": timedelta(seconds=90)}, "soft_timeout=90.0 must be smaller than hard_timeout=90.0"),
        ({"abort": 3}, "abort=3 cannot be called"),
    ],
)
def test_unsupported_arguments_are_rejected_by_name(arguments: dict[str, Any], text: str) -> None:
    """Every argument has an effect or is rejected in one line."""
    with pytest.raises(ConfigError, match=text):
        inprocess.WrapperOfNVRx(**arguments)


class ShiftOneRank(ranks.AssignmentRule):
    """A script's own rule for one rank, as in NVRx's guide."""

    def __init__(self) -> None:
        self.seen: list[tuple[int | None, int, set[int]]] = []

    def __call__(self, ctx: Any) -> Any:
        """Close the gaps before this rank."""
        state, terminated = ctx.state, ctx.terminated_ranks
        self.seen.append((state.rank, state.world_size, terminated))
        if len(self.seen) > 1:
            raise ranks.RankDiscarded(f"rank {state.rank} is called twice")
        new_rank = state.rank - sum(one < state.rank for one in terminated)
        ctx.state = dataclasses.replace(state, rank=new_rank, world_size=state.world_size - len(terminated))
        ctx.terminated_ranks = set()
        return ctx


class AtMostTwo(ranks.FilterRule):
    """A script's own filter."""

    def __call__(self, ctx: Any) -> Any:
        """Make two ranks active."""
        state = ctx.state
        is_active = state.rank < 2
        mode, rank = (ranks.Mode.ACTIVE, state.rank) if is_active else (ranks.Mode.INACTIVE, None)
        ctx.state = dataclasses.replace(state, mode=mode, active_rank=rank, active_world_size=2)
        return ctx


class UseStore(ranks.ShiftRanksUp):
    """A script's own rule that uses the store."""

    def __call__(self, ctx: Any) -> Any:
        """Use the store."""
        ctx.store.get_states(range(4))
        return super().__call__(ctx)


def members(*former_ranks: tuple[int | None, bool]) -> list[Member]:
    """Return living or dead members with these former ranks."""
    return [
        Member(initial_rank=one, node="n", rank=rank, alive=alive) for one, (rank, alive) in enumerate(former_ranks)
    ]


def test_script_rank_assignment_is_called_for_each_rank() -> None:
    """A script's own rule is called once for each living rank with that rank's context, on a separate copy; alone
    and composed."""
    before = members((None, True), (None, True), (None, True), (None, True))
    failed = members((0, True), (1, False), (2, True), (None, True))
    for given, iteration, ended in ((before, 0, {0: 0, 1: 1, 2: 2, 3: 3}), (failed, 1, {0: 0, 2: 1, 3: None})):
        assert assign(ShiftOneRank(), given, iteration=iteration, active_world_size=None) == ended
    filtered = inprocess.ComposeFromRight(AtMostTwo(), ranks.ActivateAllRanks(), ranks.ShiftRanksUp())
    assert isinstance(filtered, ranks.AssignmentRule)
    assert assign(filtered, before, iteration=0, active_world_size=None) == {0: 0, 1: 1, 2: None, 3: None}
    failed = members((0, False), (1, True), (None, True), (None, True))
    assert assign(filtered, failed, iteration=1, active_world_size=None) == {1: 0, 2: 1, 3: None}
    with pytest.raises(ConfigError, match=r"of your own uses ctx\.store\.get_states, and no rank has NVRx's store"):
        assign(UseStore(), before, iteration=0, active_world_size=None)


def test_script_rule_must_return_a_context() -> None:
    """A rule that returns no context is rejected by name."""

    class Forgets(ranks.AssignmentRule):
        def __call__(self, ctx: Any) -> Any:
            pass

    with pytest.raises(ConfigError, match="Forgets returned NoneType; it must return a RankAssignmentCtx"):
        assign(Forgets(), members((None, True)), iteration=0, active_world_size=None)


def test_disabled_wrapper_returns_the_function() -> None:
    """With ``enabled=False`` nothing is wrapped."""

    def train(number: int) -> int:
        return number

    assert inprocess.WrapperOfNVRx(enabled=False)(train) is train


def test_plug_ins_are_composed_from_right_to_left() -> None:
    """``Compose(a, b)(x)`` is ``a(b(x))``; a plug-in that returns ``None`` causes a warning and is skipped."""
    composed = inprocess.ComposeFromRight(lambda x: f"a({x})", lambda x: None, lambda x: f"b({x})")
    with pytest.warns(UserWarning, match="returned None"):
        assert composed("x") == "a(b(x))"


def test_composition_has_the_nearest_common_class() -> None:
    """A composition is an instance of the nearest class that all its plug-ins share, also if it is composed again."""

    class Check(inprocess.StatePlugin):
        def __call__(self, state: Any) -> Any:
            return state

    class Other(Check): ...

    checks: Any = inprocess.ComposeFromRight(Check(), Other())
    assert isinstance(checks, Check)
    assert not isinstance(checks, Other)
    assert isinstance(inprocess.ComposeFromRight(checks, Other()), Check)
    rules = inprocess.ComposeFromRight(ranks.ActivateAllRanks(), ranks.ShiftRanksUp())
    assert isinstance(rules, ranks.AssignmentRule)
    mixed = inprocess.ComposeFromRight(Check(), print)
    assert not isinstance(mixed, Check)


def test_groups_with_too_few_ranks_are_removed() -> None:
    """``FilterCountGroupedByKey`` removes the rest of a node that lost a rank; the rule to its left closes the gaps."""
    rule = ranks.CountedGroups(lambda _: "node", condition=lambda count: count == 2)
    (label,) = rule.labels()
    members = [
        Member(initial_rank=one, node=node, rank=one, alive=one != 1, labels={label: node})
        for one, node in enumerate("aabbcc")
    ]
    composed = inprocess.ComposeFromRight(ranks.ShiftRanksUp(), rule)
    assert composed.labels() == {label: "node"}
    assert ranks_after(composed, members) == {2: 0, 3: 1, 4: 2, 5: 3}
    with pytest.raises(ConfigError, match="FilterCountGroupedByKey cannot count in a RankAssignmentCtx"):
        rule(ranks.RankAssignmentCtx(ranks.WrapperState(0, 2), None, set()))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (ranks.ShiftRanksUp(), {0: 0, 2: 1, 3: 2, 6: 3, 7: 4}),
        (ranks.FillGapsFromTheEnd(), {0: 0, 2: 2, 3: 3, 6: 1, 7: 4}),
    ],
)
def test_rules_accept_the_context_of_one_rank(rule: ranks.AssignmentRule, expected: dict[int, int]) -> None:
    """With a ``RankAssignmentCtx`` a rule assigns one rank, or raises for a terminated one."""
    assigned = {}
    for rank in range(8):
        ctx = ranks.RankAssignmentCtx(ranks.WrapperState(rank, 8), None, {1, 4, 5})
        if rank in ctx.terminated_ranks:
            with pytest.raises(ranks.RankDiscarded, match=f"rank {rank} is permanently removed"):
                rule(ctx)
            continue
        state = ranks.ActiveDivisibleBy(2)(rule(ctx)).state
        assert state.rank is not None
        assigned[rank] = state.rank
        assert (state.world_size, state.active_world_size, ctx.terminated_ranks) == (5, 4, set())
        assert (state.mode is ranks.Mode.ACTIVE, state.active_rank is None) == (state.rank < 4, state.rank == 4)
    assert assigned == expected


def test_tree_fills_gaps_with_last_spares_then_last_ranks() -> None:
    """As in NVRx, a gap is filled by the last spare of the nearest branch, else by the last ranks of the widest
    branch, in order."""
    backfill = ranks.LayerFlag.BACKFILL
    layers = [ranks.Layer(flag=backfill), ranks.Layer(key_or_fn="node", flag=backfill)]
    members = [member(one, node, rank=one, alive=one not in (2, 3)) for one, node in enumerate("aabbccdd")]
    assert ranks_after(ranks.LayeredTree(layers), members) == {0: 0, 1: 1, 4: 4, 5: 5, 6: 2, 7: 3}


def test_thousands_of_ranks_are_assigned_in_one_pass() -> None:
    """A tree of 16384 ranks that loses 1024 is assigned in one pass."""
    num, flag = 1 << 14, ranks.LayerFlag.RESERVE | ranks.LayerFlag.BACKFILL
    layers = [ranks.Layer(flag=flag), ranks.Layer(max_ranks=8, key_or_fn="node", flag=flag)]
    members = [member(one, str(one // 8), rank=one, alive=one % 16 != 1) for one in range(num)]
    after = ranks_after(ranks.LayeredTree(layers), members)
    assert sorted(rank for rank in after.values() if rank is not None) == list(range(num - num // 16))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (inprocess.NicHealthCheck, "health.network_interfaces"),
        (inprocess.TCPStore, "torch.distributed.TCPStore"),
        (lambda: inprocess.AbortTorchDistributed("traces"), "torch_fr_trace_path is not supported"),
    ],
)
def test_unsupported_names_are_rejected_with_a_replacement(make: Callable[[], object], text: str) -> None:
    """A name of NVRx without a counterpart is rejected, and the error contains the replacement."""
    with pytest.raises(ConfigError, match=text):
        make()


def test_wrapper_errors_have_nvrx_classes() -> None:
    """A script can catch errors by NVRx's classes, and by outlast's."""
    state = State(
        initial_rank=1, initial_world_size=2, rank=1, world_size=2, active_world_size=2, iteration=1, node="n",
        fault_counts={1: 2},
    )  # fmt: skip
    with pytest.raises(inprocess.RankFaultsExceeded, match="rank 1 failed 2 times") as caught:
        inprocess.RankFaultCounter(max_rank_faults=1)(state)
    assert isinstance(caught.value, ranks.RestartError)
    for kind in (inprocess.InternalError, inprocess.RestartTimeout, ranks.RankDiscarded, inprocess.HealthCheckError):
        assert issubclass(kind, ranks.RestartError)


def test_parameters_are_found_by_their_annotation() -> None:
    """A value replaces every parameter that is annotated with its class, alone, in a union, or as text."""

    def fn(a: int, wrapper: Optional[inprocess.CallWrapper], other: inprocess.CallWrapper | None = None) -> None: ...  # noqa: UP045

    assert inprocess.count_type_in_params(fn, inprocess.CallWrapper) == 2
    given = inprocess.CallWrapper(cast(Handle, None))
    args, kwargs = inprocess.substitute_param_value(fn, (1,), {}, {inprocess.CallWrapper: given})
    assert args == (1, given, given)
    assert kwargs == {}
    assert not inprocess.is_annotated(int, inprocess.CallWrapper)


def test_threaded_finalize_raises_errors_and_timeouts() -> None:
    """A ``ThreadedFinalize`` raises the exception of the function, and fails after its time limit."""
    import threading

    never = threading.Event()
    with pytest.raises(ranks.RestartError, match="did not return within"):
        inprocess.ThreadedFinalize(timedelta(seconds=0.01), never.wait)(None)
    never.set()
    with pytest.raises(ZeroDivisionError):
        inprocess.ThreadedFinalize(timedelta(seconds=60), lambda: 1 / 0)(None)


def test_abort_drops_asynchronous_calls() -> None:
    """``AbortPersistentCheckpointProcesses`` drops scheduled calls without finalising them, and returns the state."""
    from outlast.integrations.nvrx.async_calls import AsyncCallsQueue, AsyncRequest

    finalised: list[int] = []
    calls = AsyncCallsQueue()
    calls.schedule_async_request(AsyncRequest(print, (), [lambda: finalised.append(1)]))
    assert inprocess.AbortAsyncCalls()("state") == "state"
    assert (calls.get_num_unfinalized_calls(), finalised) == (0, [])


def test_gpu_health_follows_the_driver() -> None:
    """A GPU that must be reset or replaced fails the check; inactive links are only logged; without a GPU all checks
    pass."""
    from outlast.health.devices import NvmlReading

    with pytest.raises(inprocess.HealthCheckError, match="reset the GPU"):
        inprocess.GpuMemoryHealthCheck(0).judge(NvmlReading(name="gpu", rows_pending=True))
    inprocess.GpuMemoryHealthCheck(0).judge(NvmlReading(name="gpu", links_active=1, links_inactive=17, slowdowns=0x40))
    inprocess.NvLinkHealthCheck(0).judge(NvmlReading(name="gpu", links_active=1, links_inactive=17))
    for check in (inprocess.GpuMemoryHealthCheck(), inprocess.NvLinkHealthCheck()):
        assert check("state") == "state"
