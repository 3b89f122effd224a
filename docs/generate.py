"""Write the tables of these pages from the code, and measured figures from the committed results.

A page marks a table's place by ``<!-- table: NAME -->`` and ``<!-- end -->``: settings, exit codes, incidents, events.
Figures come from ``results/BENCH.json``, each what ``python -m benchmarks --json`` printed: in tables, and in a text as
``<!-- figure: BENCH.BAR -->`` and ``<!-- end -->``. Without an argument all is written; with ``--check`` nothing is
written, and the exit code is 1 when a page is out of date.
"""

from __future__ import annotations

import ast
import enum
import inspect
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from outlast.chaos import Fault, FaultKind, FaultTarget
from outlast.config import (
    CheckpointConfig,
    Config,
    FaultToleranceConfig,
    HealthConfig,
    InProcessRestartConfig,
    PreemptionConfig,
    RecoveryConfig,
    ReplicaDigestConfig,
    RerunStateMachineConfig,
    StragglerDetectionConfig,
)
from outlast.config.base import describe_fields
from outlast.errors import ExitReason
from outlast.incidents import EventKind, IncidentKind, RecoveryLevel
from outlast.integrations.kubernetes import KubernetesJob, as_yaml
from outlast.launch.node_metrics import METRICS
from outlast.launch.run_parser import describe_options
from outlast.simulate.benchmark_results import Bar, BenchResult
from outlast.status import report
from outlast.top import look

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks are in the repository, not in the wheel
from benchmarks.results import NOT_MEASURED, describe_measurement, read_folder, show_figure, split_peer

DOCS = Path(__file__).parent
PAGES = (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
RESULTS = DOCS / "results"
PLACE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"(<!-- figure: (?P<bench>\w+)\.(?P<bar>\w+) -->).*?(<!-- end -->)")

COMPARED = {
    "restart.restart_vs_torchrun_2": "one of 2 ranks is killed: until both have done an all-reduce again",
    "restart.restart_vs_torchrun_4": "one of 4 ranks is killed: until all have done an all-reduce again",
    "rendezvous.rendezvous_vs_c10d_64": "64 agents meet: until the last one has its rank",
    "inprocess.exception_s": "restart in process, an exception on one of 4 ranks: until all are in the function again",
    "inprocess.sigkill_s": "restart in process, one of 4 ranks is killed: until all have finished a step",
    "inprocess.sigkill_rank0_s": "the same, rank 0",
    "inprocess.hang_beyond_timeout_s": "restart in process, a rank hangs: from the end of the timeout until the same",
    "save.stall_vs_dcp_async": "1 GiB: how long an asynchronous save blocks training",
    "save.stall_overlapped_vs_dcp_staging": "the same, with the copy overlapped",
    "save.durable_vs_dcp_save": "1 GiB: until a save is durable",
    "load.load_verified_vs_torch_load": "1 GiB: load into live tensors (ours verifies every byte)",
    "load.load_verified_vs_dcp_load": "the same",
    "replica.replica_vs_gloo": "fetch a shard from another process over loopback (ours verifies every byte)",
    "ray.ray_recover_vs_train": "Ray, a training actor is killed: until all have finished a step",
    "heartbeat.heartbeat_us": "one heartbeat",
}
"""What the comparison shows: results of outlast and of a peer, measured in turns within one run."""

HEADLINES = ("restart.restart_vs_torchrun_4", "save.stall_vs_dcp_async", "ray.ray_recover_vs_train")
"""The same for the README: three."""


def settings_table(cls: type) -> str:
    """Return a config's fields as a table."""
    rows = []
    for field in describe_fields(cls):
        default = _default(field.default)
        kind = _type(field.type_name).removesuffix(" or none") if default == "none" else _type(field.type_name)
        rows.append([f"`{field.name}`", f"{kind}: {default}", _text(field.text)])
    return _table(["setting", "type: default", "meaning"], rows)


def options_table() -> str:
    """Return the options of ``outlast run`` that are not torchrun's alone, a table for each topic."""
    tables = []
    for group in describe_options()[:-1]:
        rows = []
        for option in group.options:
            value = "" if option.value is None else f"={option.value}"
            text = re.sub(r" \(default: none\)$", "", str(option.help))
            rows.append([f"`{option.long_name}{value}`".replace("|", "\\|"), _text(text)])
        tables.append(_table([f"{group.title}: {group.text}" if group.text else group.title, "meaning"], rows))
    return "\n".join(tables)


def agent_metrics_table() -> str:
    """Return the metrics that an agent serves for Prometheus."""
    rows = [
        [f"`outlast_{one.name}`", ", ".join(f"`{label}`" for label in one.labels) or "-", _text(one.help)]
        for one in METRICS.values()
    ]
    return _table(["metric", "labels", "value"], rows)


def words_table(cls: type[enum.Enum], head: str, *, value: str) -> str:
    """Return an enum's members with the text under each."""
    rows = [[f"`{member.value}`", member.name, _text(text)] for member, text in _members(cls)]
    if value == "word":
        rows = [[row[0], row[2]] for row in rows]
        return _table([head, "meaning"], rows)
    return _table([value, head, "meaning"], rows)


def fields_table(cls: type) -> str:
    """Return the fields of a struct with their types and the text under each."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    rows = []
    for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            explained = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            text = str(following.value.value) if explained else ""
            rows.append(
                [f"`{ast.unparse(statement.target)}`", _json_type(ast.unparse(statement.annotation)), _text(text)]
            )
    return _table(["field", "type", "meaning"], rows)


def _json_type(name: str) -> str:
    """Return a Python type as the reader of JSON knows it."""
    optional = name.endswith(" | None")
    name = name.removesuffix(" | None")
    plain = {"str": "text", "int": "number", "float": "number", "bool": "true or false", "State": "text"}
    plain |= {"NodeState": "text"}
    inner = name.removeprefix("list[").removesuffix("]")
    found = plain.get(inner, f"object `{inner}`")
    return ("list of " if inner != name else "") + found + (" or null" if optional else "")


def _members(cls: type[enum.Enum]) -> list[tuple[enum.Enum, str]]:
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            explained = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            texts[statement.targets[0].id] = str(following.value.value) if explained else ""
    return [(member, texts[member.name]) for member in cls]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _type(name: str) -> str:
    if "Mapping" in name:
        return "name:seconds, ..."
    name = re.sub(r"\b\w+Config\b", "section", name)
    return name.replace(" | None", " or none")


def _default(value: object) -> str:
    if value is None or (isinstance(value, Mapping) and not value):
        return "none"
    return str(value) if value == "required" else f"`{value}`"


def _text(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def integrations_table() -> str:
    """Return the adapters whose page is there, and the versions that they were run with."""
    matrix = json.loads((DOCS / "results" / "integrations.json").read_text(encoding="utf-8"))
    versions = dict(pins())
    rows = []
    for one in matrix["adapters"]:
        if not (DOCS / one["page"]).exists():
            continue
        ran = [f"{name} {versions[name.lower().replace('_', '-')]}" for name in one.get("pinned", ())]
        ran += [one[key] for key in ("not_pinned",) if key in one]
        ran += [f"{name} {version}" for name, version in one.get("beside", {}).items()]
        ran += [one[key] for key in ("not_run",) if key in one]
        extra = f"`{one['extra']}`" if one["extra"] else "-"
        rows.append([f"[{one['title']}]({one['page']})", one["what"], extra, "; ".join(ran)])
    when = f"Run {matrix['date']}, Python {matrix['python']}, torch {versions['torch']}, CPU and gloo."
    return _table(["stack", "what outlast has for it", "extra", "run with"], rows) + f"\n{when}\n"


def kubernetes_manifest() -> str:
    """Return the manifest that the page on Kubernetes shows the command of."""
    job = KubernetesJob(
        command=("train.py", "--lr", "3e-4"),
        name="gpt",
        image="registry/train:1",
        run_claim="runs",
        nnodes="4:5",
        gpus_per_node=8,
        cpus="96",
        memory="1Ti",
        shm_size="256Gi",
        run_key_secret="gpt-run-key",
    )
    return f"```yaml\n{as_yaml(job.manifests())}```\n"


def pins() -> Iterable[tuple[str, str]]:
    """Yield name and version of each package that constraints.txt pins."""
    for line in (DOCS.parent / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name, equals, version = line.partition("==")
        if equals:
            yield name.strip().lower().replace("_", "-"), version.strip()


def find_bar(results: Mapping[str, BenchResult], name: str) -> Bar | None:
    """Return a measured bar by ``BENCH.BAR``; ``None``: no result has it."""
    bench, _, wanted = name.partition(".")
    bars = results[bench].bars if bench in results else ()
    return next((bar for bar in bars if bar.name == wanted and bar.value is not None), None)


def comparison_table(names: Iterable[str], *, states_origin: bool = False) -> str:
    """Return measured results compared with the peers'; a ratio is shown as the two values that it is computed from.

    Args:
        names: The results, as ``BENCH.BAR``.
        states_origin: Add when and on what machine the results were measured.
    """
    results = read_folder(RESULTS)
    rows, machines = [], []
    for name in names:
        bar = find_bar(results, name)
        if bar is None or bar.value is None or bar.peer_value is None:
            continue
        peer, unit = split_peer(bar)
        value = bar.value * bar.peer_value if bar.unit == "x" else bar.value
        rows.append([COMPARED[name], show_figure(value, unit), show_figure(bar.peer_value, unit), peer])
        machines.append(describe_measurement(results[name.partition(".")[0]].machine))
    if not rows:
        return "No result is committed yet; `make bench` measures them on your machine.\n"
    table = _table(["measurement", "outlast", "peer", "name of the peer"], rows)
    return table + f"\nMeasured {' and '.join(dict.fromkeys(machines))}.\n" if states_origin else table


def all_figures_table() -> str:
    """Return every bar of every committed result."""
    rows = []
    for bench, result in read_folder(RESULTS).items():
        for number, bar in enumerate(result.bars):
            peer, peer_unit = split_peer(bar)
            rows.append(
                [
                    "" if number else f"`{bench}`",
                    f"`{bar.name}`",
                    show_figure(bar.value, bar.unit),
                    f"{show_figure(bar.bar, bar.unit)}{'' if bar.ok else ' (missed)'}",
                    "-" if bar.peer_value is None else f"{show_figure(bar.peer_value, peer_unit)}, {peer}",
                ]
            )
    if not rows:
        return "No result is committed yet.\n"
    return _table(["benchmark", "result", "value", "bar", "peer"], rows)


def machines_text() -> str:
    """Return on what machine, when and with which versions the committed results were measured, a line for each."""
    lines: dict[str, list[str]] = {}
    for bench, result in read_folder(RESULTS).items():
        where = "" if "gpu" in result.machine else "; CPU and gloo, no GPU"
        lines.setdefault(describe_measurement(result.machine) + where, []).append(bench)
    if len(lines) == 1:
        return f"Measured {next(iter(lines))}.\n"
    return "".join(f"* {', '.join(f'`{bench}`' for bench in some)}: {text}\n" for text, some in lines.items())


def figure_text(name: str) -> str:
    """Return one measured figure for a sentence."""
    bar = find_bar(read_folder(RESULTS), name)
    return NOT_MEASURED if bar is None else show_figure(bar.value, bar.unit)


def time_constants_table() -> str:
    """Return every constant of the package that is a duration."""
    time_constants = runpy.run_path(str(DOCS / "time_constants.py"))["time_constants"]
    rows = [
        [f"`{one.module}`", f"`{one.name}`", one.value, _text(one.text) or "-"]
        for one in time_constants(DOCS.parent / "src" / "outlast")
    ]
    return _table(["module", "constant", "seconds", "meaning"], rows)


CONFIGS: dict[str, type] = {
    "config": Config,
    "checkpoint": CheckpointConfig,
    "fault-tolerance": FaultToleranceConfig,
    "health": HealthConfig,
    "in-process-restart": InProcessRestartConfig,
    "preemption": PreemptionConfig,
    "recovery": RecoveryConfig,
    "replica-digest": ReplicaDigestConfig,
    "rerun-state-machine": RerunStateMachineConfig,
    "straggler-detection": StragglerDetectionConfig,
}
"""Every config class, by the name of its table."""

TABLES: dict[str, Callable[[], str]] = {
    "comparison-figures": lambda: comparison_table(COMPARED),
    "headline-figures": lambda: comparison_table(HEADLINES, states_origin=True),
    "all-figures": all_figures_table,
    "machines": machines_text,
    "integrations": integrations_table,
    "kubernetes-manifest": kubernetes_manifest,
    **{name: partial(settings_table, cls) for name, cls in CONFIGS.items()},
    "run-options": options_table,
    "exit-codes": lambda: words_table(ExitReason, "reason", value="code"),
    "incidents": lambda: words_table(IncidentKind, "kind", value="word"),
    "events": lambda: words_table(EventKind, "kind", value="word"),
    "fault": lambda: settings_table(Fault),
    "fault-kinds": lambda: words_table(FaultKind, "kind", value="word"),
    "fault-targets": lambda: words_table(FaultTarget, "target", value="word"),
    "status": lambda: fields_table(report.StatusReport),
    "status-states": lambda: words_table(report.RunState, "state", value="word"),
    "status-node": lambda: fields_table(report.NodeReport),
    "status-node-states": lambda: words_table(report.NodeState, "state", value="word"),
    "status-waiting": lambda: fields_table(report.WaitingReport),
    "status-budgets": lambda: fields_table(report.Budgets),
    "status-budget": lambda: fields_table(report.BudgetReport),
    "status-generation": lambda: fields_table(report.CheckpointReport),
    "status-durability": lambda: fields_table(report.DurabilityReport),
    "status-trouble": lambda: fields_table(report.IncidentReport),
    "top": lambda: fields_table(look.TopReport),
    "top-rank": lambda: fields_table(look.RankLine),
    "top-unanswered": lambda: fields_table(look.Unanswered),
    "time-constants": time_constants_table,
    "agent-metrics": agent_metrics_table,
    "recovery-levels": lambda: words_table(RecoveryLevel, "name", value="level"),
}


def render(text: str) -> str:
    """Return a page with current tables and results."""
    text = PLACE.sub(lambda found: found[1] + TABLES[found["name"]]() + found[3], text)
    return FIGURE.sub(lambda found: found[1] + figure_text(f"{found['bench']}.{found['bar']}") + found[4], text)


def main() -> int:
    stale = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (fresh := render(text)) != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(fresh, encoding="utf-8")
    if "--check" in sys.argv and stale:
        print(f"out of date: {', '.join(stale)}; run: python docs/generate.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
