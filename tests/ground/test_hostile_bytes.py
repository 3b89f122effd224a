"""Decoding bytes from outside the process returns a value or raises the promised error, whatever the bytes."""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

import outlast
from outlast.checkpoint import protocol as writer_messages
from outlast.checkpoint.dcp.items import named_tensors
from outlast.checkpoint.dcp.manifest import decode_global_manifest
from outlast.checkpoint.directory import decode_hint
from outlast.checkpoint.manifest import decode_manifest, run_of
from outlast.checkpoint.replica import protocol as replica_messages
from outlast.checkpoint.shard import read_header
from outlast.checkpoint.state import layouts_of
from outlast.config import FaultToleranceConfig
from outlast.config.sources import load_config
from outlast.decoding import from_json, from_msgpack, msgpack_decoder, parse_json
from outlast.errors import CheckpointError, ConfigError, OutlastError
from outlast.inprocess import protocol as rank_messages
from outlast.inprocess.coordinator import OnLink
from outlast.integrations.slurm.jobs import load_requeue_state
from outlast.journal import decode_events
from outlast.launch import protocol as agent_messages
from outlast.launch.control import Introduction, join_handshake
from outlast.launch.recovery_state_file import load_recovery_state, state_of_job
from outlast.monitor.examination import Books
from outlast.monitor.learned_timeouts import read_learned
from outlast.policy.recovery_point import decode_excluded
from outlast.policy.rerun import Diagnosis
from outlast.ray.actor_state import HeldState
from outlast.runtime.board import Board, MarkChanged
from outlast.runtime.lease import decode_owner
from outlast.runtime.run_key import RunKey
from outlast.runtime.wire import MessageReader, ProtocolError

DEPTH = 100_000
RANDOM_BYTES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**63,
    2**64 - 1,
    -(2**63),
    1e308,
    -0.5,
    "",
    "\x1b[2J",
    "x" * 5000,
    [],
    {},
    [[]],
)
NESTED = (b"[" * DEPTH, b'{"a":' * DEPTH, b"[" * DEPTH + b"]" * DEPTH, b'{"manifest":' + b"[" * DEPTH, b"\x91" * DEPTH)
NESTED += (b"\x81\xa1a" * DEPTH, b"\xdd\x00\x00\x00\x01" * DEPTH, b"\x81\xa1z" + b"\x91" * DEPTH + b"\xc0")
BYTES = (b"", b"\0" * 4096, b"\xff" * 4096, b'"\xff\xff"', b"9" * 5000, b'{"a":' + b"9" * 5000 + b"}", b"NaN", b"1e999")


@dataclass(frozen=True)
class Decoder:
    """A function that decodes bytes from outside the process."""

    decode: Callable[[bytes], object]
    seeds: tuple[Any, ...] = ({},)
    """Values that are modified to make inputs."""
    raises: tuple[type[Exception], ...] = ()
    encode: Callable[[Any], bytes] = field(default=lambda value: json.dumps(value).encode())
    more: tuple[bytes, ...] = ()
    """Further inputs."""


def sealed(value: Any) -> bytes:
    body = json.dumps(value).encode()
    return b'{"manifest":%s,"sha256":"%s"}' % (body, hashlib.sha256(body).hexdigest().encode())


def framed(value: Any) -> bytes:
    return with_length(msgspec.msgpack.encode(value))


def with_length(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def read_frames(kind: Any) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        reader: MessageReader[Any] = MessageReader(kind)
        return [reader.feed(data), MessageReader[Any](kind).feed(with_length(data))]

    return read


def make_messages(*kinds: Any) -> tuple[Any, ...]:
    """Return one value of each type of a union, with simple values for the fields."""
    simple: dict[Any, Any] = {int: 1, str: "a", float: 1.5, bool: True, bytes: b"x"}
    found = []
    for union in kinds:
        for kind in getattr(union, "__args__", (union,)):
            values = {one.encode_name: simple.get(one.type, []) for one in msgspec.structs.fields(kind)}
            found.append(values | {kind.__struct_config__.tag_field: kind.__struct_config__.tag})
    return tuple(found)


def file_of(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Return a decoder of a file's bytes that receives the folder of the file."""

    def decode(data: bytes) -> object:
        (FOLDER[0] / name).unlink(missing_ok=True)  # ext4 flushes a file that is truncated and rewritten
        (FOLDER[0] / name).write_bytes(data)
        return read(FOLDER[0])

    return decode


def bomb(row: bytes) -> bytes:
    """Return YAML of 10 lines that stands for 10 ** 9 values."""
    rows = (b"a%d: &a%d %s" % (n, n, row % b", ".join([b"*a%d" % (n - 1)] * 10)) for n in range(1, 10))
    return b"\n".join((b"a0: &a0 {k: 1}", *rows))


FOLDER: list[Path] = []
SETTINGS = {"seed": 1, "fault_tolerance": {"rank_section_timeouts": {"setup": 600}}, "train": {"nccl": [1.5]}}
TOML = """seed = 1  # "
"a b".'c' = ['''x''', 2001-02-03T04:05:06+01:00, {d.e = 0x1F, f = [1.5, inf]}]
[fault_tolerance]
rank_section_timeouts = {setup = 600}
text = \"\"\"a\"\"\"
[[list.of]]
x = 1
"""
YAML = """seed: 1
fault_tolerance: &a
  rank_section_timeouts: {setup: !!float 600, step: 2001-02-03 04:05:06 +1}
text: |
  a
list: [*a, ~, 'x', "y", 1:30, 0x1F]
"""
TAGS = (b"int", b"float", b"bool", b"null", b"timestamp", b"binary", b"set", b"omap", b"pairs", b"map", b"seq", b"str")
SHARD = {"rank": 0, "num_bytes": 4, "digests": "MTIzNDU2Nzg=", "table": "0", "finite": True}
MANIFEST = {"schema": 2, "run": "r", "topology": "t", "world_size": 1, "iteration": 3, "attempt": "a-0-b.1"}
MANIFEST |= {"restored_from": None, "shards": [list(SHARD.values())]}
WHERE = [0, 0, 16, 4, 8]
GLOBAL = {"schema": 1, "run": "r", "topology": "t", "world_size": 1, "iteration": 3, "attempt": "a-0-b.1"}
GLOBAL |= {"restored_from": None, "finite": True, "files": [{"name": "f", "num_bytes": 64, "chunks": ["0"]}]}
GLOBAL |= {
    "items": [{"name": "w", "path": ["w", 0], "dtype": "F32", "shape": [2], "pieces": [[[0], [2], WHERE]]}],
    "ranks": [{"tree": WHERE, "tensors": [{"name": "o", "dtype": "F32", "shape": [2], "where": WHERE}]}],
}
IDENTITY = {
    "run": "r",
    "topology": "t",
    "rank": 0,
    "world_size": 1,
    "iteration": 3,
    "attempt": "a",
    "restored_from": None,
}
HEADER = {
    "__metadata__": {"outlast": json.dumps(IDENTITY)},
    "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
}
TREE = [
    "d",
    [["outlast/state", ["d", [["w", ["T", "w"]], ["l", ["l", [["v", 1]]]]]]], ["rng", ["d", [["a", ["n", "x"]]]]]],
]
EVENT = {
    "wall_ns": 1,
    "mono_ns": 1,
    "boot": "b",
    "pid": 1,
    "host": "h",
    "kind": "incident",
    "run": "r",
    "data": {"a": 1},
}
OWNER = {"token": "t", "process": {"host": "h", "machine": "m", "pid": 1, "started": 1}, "run": "r"}

DECODERS: dict[str, Decoder] = {
    "the journal": Decoder(decode_events, (EVENT,)),
    "an owner record": Decoder(decode_owner, (OWNER,)),
    "run.json": Decoder(decode_hint, ({"run": "r"},)),
    "a local manifest": Decoder(decode_manifest, (MANIFEST,), (CheckpointError,), sealed),
    "the run of a manifest": Decoder(lambda data: run_of(data, 3), (MANIFEST,), (), sealed),
    "a global manifest": Decoder(decode_global_manifest, (GLOBAL,), (CheckpointError,), sealed),
    "a shard's header": Decoder(
        lambda data: read_header(memoryview(with_length(b"0000" + data)), len(data) + 16), (HEADER,), (CheckpointError,)
    ),
    "the plain values of a shard": Decoder(layouts_of, (TREE,), (CheckpointError,), msgspec.msgpack.encode),
    "the items of a shard": Decoder(named_tensors, (TREE,), (CheckpointError,), msgspec.msgpack.encode),
    "learned timeouts": Decoder(
        read_learned,
        (
            {"version": 1, "learned": {"sections": {"a": 1.0}}, "cycle": "", "before": {}, "seen": {}},
            {"current_timeouts": {"heartbeat": {"initial": 1.0}, "section": {"section": {"a": 1.0}}}},
        ),
        (msgspec.DecodeError,),
    ),
    "ladder.json": Decoder(
        file_of("ladder.json", lambda folder: state_of_job(load_recovery_state(folder), "j", is_new_job=True)),
        ({"job": "j"},),
        (ConfigError,),
    ),
    "requeue.json": Decoder(file_of("requeue.json", load_requeue_state), ({"retries": 1},), (ConfigError,)),
    "a diagnosis": Decoder(lambda data: from_json(data, Diagnosis), ({"rank": 0},), (msgspec.DecodeError,)),
    "a JSON file": Decoder(
        file_of("c.json", lambda folder: load_config(folder / "c.json")), ({"ft": {"a": 1}}, SETTINGS), (ConfigError,),
        more=(json.dumps({f"k{n}": 1 for n in range(10_000)}).encode()[:-1] + b', "k9999": 1}',),
    ),
    "a TOML file": Decoder(
        file_of("c.toml", lambda folder: load_config(folder / "c.toml")), (TOML,), (ConfigError,), str.encode,
        (*(b"a = " + data for data in NESTED), b"a = " + b"9" * 5000, b"a = {b=" * DEPTH, b"a." * DEPTH + b"a = 1",
         b"[" + b"a." * DEPTH + b"a]", b"a = " + b'"""' * DEPTH, b"a = {" + b".".join([b"b"] * 40) + b"= {" * DEPTH),
    ),
    "a YAML file": Decoder(
        file_of("c.yaml", lambda folder: load_config(folder / "c.yaml")), (YAML, SETTINGS), (ConfigError,),
        lambda value: value.encode() if isinstance(value, str) else json.dumps(value).encode(),
        (b"- " * DEPTH, b"? " * DEPTH, b"{a: " * DEPTH, b"a: &a [*a]", b"a: &a {b: *a}", bomb(b"[%s]"), b"&" * DEPTH,
         bomb(b"{<<: [%s]}"), bomb(b"{? [%s] : 1}"), b"a: " + b":".join([b"1"] * DEPTH) + b".5", b'"\\UDDDDDDDD"',
         b"[a,a,a,a]" * DEPTH,
         *(b"a: !!%s %s" % (tag, value) for tag in TAGS for value in (b"''", b"x", b"[]", b"{}"))),
    ),
    "settings of a worker": Decoder(
        lambda data: FaultToleranceConfig.from_json(data.decode(errors="replace")),
        ({"rank_section_timeouts": {"a": 1.0}},),
        (ConfigError,),
    ),
    "excluded copies": Decoder(
        lambda data: decode_excluded(data.decode(errors="replace")), ([{"a": 1}],), (msgspec.DecodeError,)
    ),
    "torch's error file": Decoder(parse_json, ({"message": {"message": "m"}},), (ValueError,)),
    "a datagram to the agent": Decoder(
        msgpack_decoder(MarkChanged).decode, make_messages(MarkChanged), (msgspec.DecodeError,), msgspec.msgpack.encode
    ),
    "a rank's answer to the examiner": Decoder(
        lambda data: from_json(data, Books), ({"groups": {"a": 1}, "recorded": True},), (msgspec.DecodeError,)
    ),
    "what a coordinator says openly": Decoder(
        lambda data: Introduction.decode(data[:272].ljust(272, b"\0")), raises=(ProtocolError,)
    ),
    "the handshake": Decoder(
        lambda data: (
            shake := join_handshake("r", RunKey.of_run_id("r")),
            shake.feed(data[: shake.num_wanted].ljust(shake.num_wanted, b"\0")),
        ),
        raises=(ConnectionError, OutlastError),
    ),
    "messages to the coordinator": Decoder(
        read_frames(agent_messages.OnControl), make_messages(agent_messages.OnControl), (ProtocolError,), framed
    ),
    "messages to an agent": Decoder(
        read_frames(agent_messages.OnAgent), make_messages(agent_messages.OnAgent), (ProtocolError,), framed
    ),
    "answers of a coordinator": Decoder(
        read_frames(agent_messages.Answer), make_messages(agent_messages.Answer), (ProtocolError,), framed
    ),
    "messages of the replica tier": Decoder(
        read_frames(replica_messages.Message), make_messages(replica_messages.Message), (ProtocolError,), framed
    ),
    "requests to the checkpoint writer": Decoder(
        read_frames(writer_messages.Request), make_messages(writer_messages.Request), (ProtocolError,), framed
    ),
    "messages between agent processes": Decoder(read_frames(OnLink), make_messages(OnLink), (ProtocolError,), framed
    ),
    "messages to the relay": Decoder(
        read_frames(rank_messages.ToRelay), make_messages(rank_messages.ToRelay), (ProtocolError,), framed
    ),
    "messages of a rank to its agent process": Decoder(
        lambda data: rank_messages.decode(data, rank_messages.FromRank),
        make_messages(rank_messages.FromRank),
        (OutlastError,),
        msgspec.msgpack.encode,
    ),
    "the state that an actor holds": Decoder(
        lambda data: from_json(data, HeldState), ([[1, "a"], True],), (msgspec.DecodeError,)
    ),
    "bytes that ranks gather": Decoder(
        lambda data: from_msgpack(data, list[tuple[int, bytes]]), ([[1, b"a"]],), (msgspec.DecodeError,),
        msgspec.msgpack.encode,
    ),
}  # fmt: skip

LISTED = {
    "checkpoint.directory", "checkpoint.manifest", "checkpoint.shard", "checkpoint.state",
    "config.launching", "config.sources", "inprocess.protocol", "integrations.slurm.jobs", "journal", "launch.cycle",
    "launch.in_process_recovery", "launch.recovery_state_file",
    "monitor.examination", "monitor.learned_timeouts", "policy.recovery_point", "runtime.diagnoses",
    "ray.actor_state", "runtime.lease", "runtime.postmortem", "runtime.process_groups", "runtime.wire",
    "status.evidence",  # ladder.json
}  # fmt: skip
"""Modules whose decoders are in the table above."""

DECODING = {f"msgspec.{form}.{name}" for form in ("json", "msgpack") for name in ("decode", "Decoder")}
DECODING |= {"msgspec.convert", "json.load", "json.loads", "json.JSONDecoder", "tomllib.load", "tomllib.loads"}
DECODING |= {f"yaml.{name}" for name in ("load", "safe_load", "load_all", "safe_load_all", "compose", "parse", "scan")}
READING = {"from_json", "from_msgpack", "json_decoder", "msgpack_decoder", "parse_json", "parse_settings"}

INSIDE = {
    "cli.soak", "testing.cluster", "runtime.injection", "simulate.benchmark_results", "simulate.failures",
    "chaos.copies",
    # from this process's own parent, on a socket pair or in the environment
    "checkpoint.writer_client", "env", "inprocess.monitor_duty", "monitor.hang_watch", "session.step",
    # from the ranks of the same process group or their store; an error in them ends the call
    "checkpoint.lane", "checkpoint.places",
    "inprocess.rank_local_state", "inprocess.restore", "integrations.nvrx.async_calls", "integrations.nvrx.exchange",
    "numerics.replica_digest", "straggler.detector", "straggler.machine_check",
    # from the state of a checkpoint that was verified
    "integrations.transformers", "numerics.rerun_machine",
    "checkpoint.dcp.directory",  # its list of the files that an earlier owner was deleting
}  # fmt: skip
"""Modules that decode what this run's own processes sent, tools of developers, and files that a user names."""


def make_inputs(decoder: Decoder, num_inputs: int) -> Iterator[bytes]:
    """Yield nested bytes, random bytes, and seeds with replaced or removed values and bytes."""
    draw = random.Random(7)
    yield from NESTED
    yield from map(with_length, NESTED)
    yield from BYTES + decoder.more
    for number in range(num_inputs):
        seed = draw.choice(decoder.seeds)
        data = bytearray(decoder.encode(mutate(seed, draw) if not isinstance(seed, str) else seed))
        for _ in range(number % 3):
            if data:
                data[draw.randrange(len(data))] = draw.randrange(256)
        yield bytes(data[: draw.randrange(len(data) + 1)] if number % 7 == 0 else data)


def mutate(seed: Any, draw: random.Random) -> Any:
    """Return a value with one or two places replaced or removed."""
    value = copy.deepcopy(seed)
    for _ in range(draw.randint(1, 2)):
        node, places = value, list[tuple[Any, Any]]()
        pending = [node]
        while pending:
            node = pending.pop()
            keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
            places += [(node, key) for key in keys]
            pending += [node[key] for key in keys]
        if not places:
            return draw.choice(RANDOM_BYTES)
        node, key = draw.choice(places)
        if draw.random() < 0.2:
            del node[key]
        else:
            node[key] = copy.deepcopy(draw.choice(RANDOM_BYTES))
    return value


SLOW = {"a YAML file"}  # PyYAML takes 1 ms for a line


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in DECODERS])
@pytest.mark.parametrize("num_inputs", [500, pytest.param(10_000, marks=pytest.mark.extended)])
def test_every_input_is_decoded_or_rejected(
    name: str, num_inputs: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Thousands of inputs, including nesting of 100,000, give a value or the error that the decoder promises."""
    caplog.set_level("CRITICAL")
    FOLDER[:] = [tmp_path]
    decoder = DECODERS[name]
    for data in make_inputs(decoder, num_inputs):
        try:
            decoder.decode(data)
        except decoder.raises:
            pass
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} for {len(data)} bytes: {data[:200]!r}") from error


def test_random_heartbeat_memory_is_readable() -> None:
    """Heartbeat memory overwritten with random bytes is read as some state."""
    draw = random.Random(7)
    board = Board.create(num_ranks=1)
    try:
        page = board.page(0).cast("B")
        for number in range(300):
            page[:] = draw.randbytes(len(page)) if number % 2 else bytes([number & 0xFF]) * len(page)
            page[8:16] = page[:8]
            board.read(0)
            board.timeouts(0)
        page.release()
    finally:
        board.close()


def test_decoding_modules_are_listed() -> None:
    """Depth is limited in one module, and every module that decodes bytes is in a list of this file."""
    root = Path(outlast.__file__).parent
    elsewhere, users = [], set()
    for path in root.rglob("*.py"):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in DECODING:
                elsewhere.append(f"{module}: {called}")
            if called in READING:
                users.add(module)
    assert {one.partition(":")[0] for one in elsewhere} == {"decoding"}
    assert users - {"decoding"} == LISTED | INSIDE
    assert not LISTED & INSIDE


NESTS = """
import sys, msgspec
from outlast.decoding import from_json, from_msgpack, parse_json
sys.setrecursionlimit(10**6)
from typing import Any
for read, data in (
    (from_json, b"[" * 100_000), (from_json, b'{"a":' * 100_000), (from_json, b'{"a":["]' + b'"]}'),
    (from_json, b'["' + b"[" * 100_000 + b'"]'), (from_json, b"[" + b"[]," * 100_000 + b"[]]"),
    (from_msgpack, b"\\x91" * 100_000), (from_msgpack, b"\\x81\\xa1a" * 100_000),
    (from_msgpack, b"\\xdd\\x00\\x01\\x86\\xa0" + b"\\x91\\xc0" * 100_000),
    (from_msgpack, b"\\xc6\\x00\\x01\\x86\\xa0" + b"\\x91" * 100_000),
    (from_msgpack, msgspec.msgpack.encode([[1.5, 300, -5, -300, 2**40, "x" * 300, b"y" * 70000, {"a": [None]}]] * 500)),
):
    try:
        read(data, Any)
        print("value")
    except msgspec.DecodeError:
        print("refused")
try:
    parse_json("[" * 100_000)
except ValueError:
    print("refused")
"""


@pytest.mark.process
def test_raised_recursion_limit_does_not_crash() -> None:
    """With a recursion limit of a million, nested bytes do not overflow the stack, and a long value that is not nested
    deeply is still read."""
    done = subprocess.run([sys.executable, "-c", NESTS], check=False, capture_output=True, text=True, timeout=250)
    expected = "refused refused value value value refused refused value value value refused"
    assert done.stdout.split() == expected.split(), (done.returncode, done.stderr[-2000:])
