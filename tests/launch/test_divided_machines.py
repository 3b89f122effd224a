"""Real agents on machines with a divided network: namespaces on bridges that drop packets. Needs root.

Each machine hosts an endpoint. Rank 0 of each world appends a line to one file after each all-reduce, so lines of two
concurrent worlds would alternate.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from outlast.incidents import EventKind
from outlast.journal import read

pytestmark = pytest.mark.slow
MAIN = (sys.executable, "-c", "import sys; from outlast.cli.main import main; sys.exit(main())")
LIMIT_S = 150.0
SILENCE_S = 2
HAS_PLACE = {"runs here", "is a spare", "is reached again"}
PLACES = re.compile("|".join(("^", "starting;", "hosts the coordinator", "waiting for", "out of reach", *HAS_PLACE)))
"""Log lines on an agent's place; the last one shows whether it has one."""
COORDINATORS = re.compile(r"(?:hosts the coordinator|the coordinator is reached again) at (\S+)")
TRAIN = """
import os, time, torch, torch.distributed as dist
from datetime import timedelta
os.environ["GLOO_SOCKET_IFNAME"] = "lan"
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
cycle = os.environ["OUTLAST_CYCLE"]
step, weight = 0, 0.0
if os.path.exists("weights"):
    saved = open("weights").read().split()
    step, weight = int(saved[0]), float(saved[1])
log = os.open("trained", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while True:
    values = torch.tensor([1.0, float(os.path.exists("enough"))])
    dist.all_reduce(values)
    world_size, num_ending = values.tolist()
    if num_ending:  # all of them leave in the same step
        break
    step, weight = step + 1, 0.9 * weight + world_size
    if dist.get_rank() == 0:
        with open("weights.new", "w") as new:
            new.write(f"{step} {weight!r}")
        os.replace("weights.new", "weights")
        os.write(log, f"{cycle} {int(world_size)} {os.environ['OUTLAST_NODE']}\\n".encode())
    time.sleep(0.02)
    dist.barrier()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=300)


class Machines:
    """Network namespaces, each on one of several bridges; machines on different bridges do not reach each other."""

    def __init__(self, folder: Path, num: int) -> None:
        self.folder, self.num = folder, num
        tag = f"{os.getpid() % 10000}{random.randrange(100)}"
        self.switch = f"ols{tag}"
        self.names = [f"oln{tag}x{number}" for number in range(num)]
        self.agents: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Machines:
        try:
            ip("netns", "add", self.switch)
            for bridge in range(self.num):
                ip("-n", self.switch, "link", "add", f"br{bridge}", "type", "bridge")
                ip("-n", self.switch, "link", "set", f"br{bridge}", "up")
            for number, name in enumerate(self.names):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
                ip(
                    "link",
                    "add",
                    "lan",
                    "netns",
                    name,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    f"p{number}",
                    "netns",
                    self.switch,
                )
                ip("-n", name, "addr", "add", f"10.9.0.{number + 1}/24", "dev", "lan")
                ip("-n", name, "link", "set", "lan", "up")
                ip("-n", self.switch, "link", "set", f"p{number}", "master", "br0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()
        for name in (*self.names, self.switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=300)

    def divide(self, parts: Sequence[int]) -> None:
        """Assign each machine to a part of the network; packets between parts are dropped."""
        for number, part in enumerate(parts):
            ip("-n", self.switch, "link", "set", f"p{number}", "master", f"br{part}")

    def heal(self) -> None:
        self.divide([0] * self.num)

    def start(self, nnodes: str, *options: str, is_first_host: bool = False) -> None:
        """Start an agent on each machine; with ``is_first_host`` the others start once the first one hosts the
        coordinator."""
        for number in range(self.num):
            self.start_agent(number, nnodes, *options, num_endpoints=self.num)
            if is_first_host:
                self.wait_for_line("n0", "hosts the coordinator")

    def start_agent(
        self, number: int, nnodes: str, *options: str, num_endpoints: int, name: str = "", log: str = ""
    ) -> subprocess.Popen[bytes]:
        """Start an agent on a machine, by default as the node ``n<number>``."""
        (self.folder / "train.py").write_text(TRAIN)
        endpoints = ",".join(f"10.9.0.{number + 1}:29400" for number in range(num_endpoints))
        name = name or f"n{number}"
        command = [
            *("ip", "netns", "exec", self.names[number], *MAIN, "run", f"--nnodes={nnodes}", "--nproc-per-node=1"),
            *("--rdzv-id=divided", f"--rdzv-endpoint={endpoints}", f"--node-name={name}"),
            *(f"--run-dir={self.folder / 'run'}", f"--ft-node-heartbeat-timeout={SILENCE_S}", "--no-health-check"),
            *("--max-restarts=1000", "--ft-max-no-progress-cycles=1000", "--ft-max-restart-delay=0"),
            *(*options, "train.py"),
        ]
        with open(self.folder / f"{log or name}.log", "wb") as output:
            agent = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, "OUTLAST_RUN_KEY": "the secret of this run"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.agents.append(agent)
        return agent

    def wait_for_line(self, log: str, text: str) -> None:
        """Wait until the log of an agent contains a text."""
        end_s = time.monotonic() + LIMIT_S
        while text not in (self.folder / f"{log}.log").read_text():
            assert time.monotonic() < end_s, self.logs()
            time.sleep(0.05)

    def lines(self) -> list[tuple[int, int, str]]:
        """Return cycle, world size and node of each step that was trained."""
        try:
            text = (self.folder / "trained").read_text()
        except FileNotFoundError:
            return []
        return [(int(cycle), int(size), node) for cycle, size, node in (line.split() for line in text.splitlines())]

    def wait_for_steps(self, *, after: int = 0, nodes: set[str] | None = None, size: int | None = None) -> int:
        """Return the number of steps once five more steps match the criteria."""
        end_s = time.monotonic() + LIMIT_S
        while True:
            lines = self.lines()
            matching = [
                line for line in lines[after:] if (nodes is None or line[2] in nodes) and size in (None, line[1])
            ]
            if len(matching) >= 5:
                return len(lines)
            assert time.monotonic() < end_s, f"nothing was trained\n{self.logs()}"
            time.sleep(0.1)

    def wait_for_places(self) -> None:
        """Wait until each agent has a place with one coordinator; an agent alone would wait for others after the end of
        the run."""
        end_s = time.monotonic() + LIMIT_S
        while True:
            logs = [path.read_text() for path in self.folder.glob("n*.log")]
            places = [PLACES.findall(log)[-1] for log in logs]
            coordinators = {found[-1] for log in logs if (found := COORDINATORS.findall(log))}
            if HAS_PLACE.issuperset(places) and len(coordinators) == 1:
                return
            assert time.monotonic() < end_s, f"the machines did not come together\n{self.logs()}"
            time.sleep(0.1)

    def wait_for_spare(self) -> int:
        """Return the number of steps once the spare is a member and all slot holders know about it."""
        end_s = time.monotonic() + LIMIT_S
        while "is a spare" not in self.logs():
            assert time.monotonic() < end_s, f"no spare came\n{self.logs()}"
            time.sleep(0.1)
        done = len(self.lines())
        for _ in range(5):  # membership takes two exchanges of a few bytes, without an event at its end
            done = self.wait_for_steps(after=done, size=2)
        return done

    def end(self) -> list[int]:
        """End training, and return the exit codes of the agents."""
        (self.folder / "enough").touch()
        try:
            return [agent.wait(LIMIT_S) for agent in self.agents]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"an agent did not end\n{self.logs()}") from None

    def holders(self) -> list[str]:
        """Return the nodes that started the first cycle, in the order of their names."""
        return sorted({e.node for e in read(self.folder / "run") if e.kind == EventKind.CYCLE_STARTED})

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("n*.log")))

    def check_weights(self, *, least_steps: int) -> None:
        """Check that two nodes trained all steps, without a lost one."""
        steps, weight = (self.folder / "weights").read_text().split()
        assert int(steps) >= least_steps
        expected = 0.0
        for _ in range(int(steps)):
            expected = 0.9 * expected + 2.0
        assert float(weight) == expected

    def check_detected(self, since_ns: int, *, victim: str) -> None:
        """Check that the other nodes detected the lost node, and then started exactly the next cycle."""
        later = [e for e in read(self.folder / "run") if e.wall_ns > since_ns and e.node != victim]
        lost = [e for e in later if e.kind == EventKind.INCIDENT and e.data["incident"]["kind"] == "node_lost"]
        started = [event for event in later if event.kind == EventKind.CYCLE_STARTED]
        assert lost, self.logs()
        assert {event.cycle for event in started} == {1}, self.logs()
        assert all(lost[0].mono_ns < event.mono_ns for event in started)
        print(f"noticed after {(lost[0].wall_ns - since_ns) / 1e9:.2f} s, the timeout is {SILENCE_S} s")

    def check_one_world(self) -> None:
        """Check that no step of an earlier cycle follows a step of a later one."""
        cycles = [cycle for cycle, _, _ in self.lines()]
        assert cycles == sorted(cycles), f"two worlds trained at once: {cycles}\n{self.logs()}"
        worlds = {(cycle, size) for cycle, size, _ in self.lines()}
        assert len(worlds) == len({cycle for cycle, _ in worlds}), self.logs()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    if os.geteuid() != 0 or subprocess.run(["ip", "netns"], check=False, capture_output=True).returncode:
        pytest.skip("no network namespace can be made here")
    with Machines(tmp_path, 3) as three:
        yield three


def test_the_majority_continues_without_the_coordinator(machines: Machines) -> None:
    """When the coordinator's machine is cut off, the two others continue with one slot fewer under another coordinator;
    once the network is restored the first one joins them, and all exit with 0."""
    machines.start("3", "--ft-min-nodes=2", "--rdzv-conf=join_timeout=600", is_first_host=True)
    done = machines.wait_for_steps(size=3)
    machines.divide([1, 0, 0])
    done = machines.wait_for_steps(after=done, size=2)
    machines.heal()
    machines.wait_for_steps(after=done)
    machines.wait_for_places()
    assert machines.end() == [0, 0, 0], machines.logs()
    machines.check_one_world()


@pytest.mark.extended
def test_a_stopped_coordinator_is_replaced(machines: Machines) -> None:
    """When the agent with the coordinator is stopped, the two other machines continue and exit as in an undisturbed
    run; continued afterwards, the agent exits with the same result."""
    machines.start("2:3", "--rdzv-conf=join_timeout=600", is_first_host=True)
    done = machines.wait_for_spare()
    stopped_ns = time.time_ns()
    machines.agents[0].send_signal(signal.SIGSTOP)
    try:
        machines.wait_for_steps(after=done, nodes={"n1", "n2"}, size=2)
        (machines.folder / "enough").touch()
        assert [agent.wait(LIMIT_S) for agent in machines.agents[1:]] == [0, 0], machines.logs()
    finally:
        machines.agents[0].send_signal(signal.SIGCONT)
    assert machines.agents[0].wait(LIMIT_S) == 0, machines.logs()
    assert "has ended without this node" in (machines.folder / "n0.log").read_text()
    machines.check_one_world()
    machines.check_detected(stopped_ns, victim="n0")
    machines.check_weights(least_steps=done)


@pytest.mark.extended
@pytest.mark.parametrize("number", [0, 1])
def test_a_machine_without_network_is_replaced(machines: Machines, number: int) -> None:
    """When the link of a training machine goes down without any connection being closed, its node is lost, the spare
    takes its slot, training continues from its last step, and the others exit as in an undisturbed run."""
    machines.start("2:3", "--rdzv-conf=join_timeout=600", is_first_host=True)
    done = machines.wait_for_spare()
    victim = machines.holders()[number]
    others = [name for name in ("n0", "n1", "n2") if name != victim]
    down_ns = time.time_ns()
    ip("-n", machines.names[int(victim[1:])], "link", "set", "lan", "down")
    machines.wait_for_steps(after=done, nodes=set(others), size=2)
    (machines.folder / "enough").touch()
    assert [machines.agents[int(name[1:])].wait(LIMIT_S) for name in others] == [0, 0], machines.logs()
    machines.check_one_world()
    machines.check_detected(down_ns, victim=victim)
    machines.check_weights(least_steps=done)


@pytest.mark.extended
def test_a_new_node_finds_the_successor_of_a_dead_host(machines: Machines) -> None:
    """After a takeover a node that starts with only the lost machine's endpoint finds the other endpoint in the run
    directory, takes the empty slot, and trains."""
    for number in range(2):
        machines.start_agent(number, "2:3", num_endpoints=2)
        machines.wait_for_line("n0", "hosts the coordinator")
    done = machines.wait_for_steps(size=2)
    machines.agents[0].kill()
    machines.wait_for_line("n1", "waiting for 1 of 2 nodes")
    ip("-n", machines.names[0], "link", "set", "lan", "down")
    late = machines.start_agent(2, "2:3", num_endpoints=1)
    machines.wait_for_steps(after=done, nodes={"n1", "n2"}, size=2)
    (machines.folder / "enough").touch()
    assert [machines.agents[1].wait(LIMIT_S), late.wait(LIMIT_S)] == [0, 0], machines.logs()
    assert "the run directory names more endpoints" in (machines.folder / "n2.log").read_text()
    machines.check_one_world()


@pytest.mark.extended
def test_a_survivor_joins_the_next_job_of_its_run(machines: Machines) -> None:
    """When the agent at the only endpoint is killed and started again, the other machine joins its new job at once, is
    rejected at most once, and training resumes with both."""
    for number in range(2):
        machines.start_agent(number, "2", num_endpoints=1)
    done = machines.wait_for_steps(size=2)
    machines.agents[0].kill()
    machines.wait_for_line("n1", "the coordinator is out of reach")
    again = machines.start_agent(0, "2", num_endpoints=1, log="n0-again")
    machines.wait_for_steps(after=done, size=2)
    (machines.folder / "enough").touch()
    assert [machines.agents[1].wait(LIMIT_S), again.wait(LIMIT_S)] == [0, 0], machines.logs()
    assert (machines.folder / "n0-again.log").read_text().count("was refused") <= 1
    jobs = {e.job: e.node for e in read(machines.folder / "run") if e.kind == EventKind.CYCLE_STARTED}
    assert len(jobs) == 2, machines.logs()
    machines.check_weights(least_steps=done)


@pytest.mark.extended
def test_a_replaced_agent_ends_its_workers(machines: Machines) -> None:
    """An agent whose name was taken while it was out of reach is stopped at once when the network is restored, ends its
    workers, and reports no end of the other node."""
    for number in range(2):
        machines.start_agent(number, "2", num_endpoints=1)
    done = machines.wait_for_steps(size=2)
    machines.divide([0, 1, 0])
    machines.wait_for_line("n0", "node n1 is lost")
    successor = machines.start_agent(2, "2", num_endpoints=1, name="n1", log="n1-again")
    done = machines.wait_for_steps(after=done, size=2)
    machines.heal()
    assert machines.agents[1].wait(LIMIT_S) == 1, machines.logs()
    assert "another agent has taken the place of node 'n1'" in (machines.folder / "n1.log").read_text()
    assert not [e for e in read(machines.folder / "run") if e.kind == EventKind.JOB_ENDED]
    machines.wait_for_steps(after=done, size=2)
    (machines.folder / "enough").touch()
    assert [machines.agents[0].wait(LIMIT_S), successor.wait(LIMIT_S)] == [0, 0], machines.logs()
    machines.check_one_world()


@pytest.mark.extended
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(1, 20))])
def test_random_network_partitions_have_one_world(machines: Machines, seed: int) -> None:
    """With random partitions and repairs two worlds never train concurrently, and in the end one finishes."""
    rng = random.Random(seed)
    machines.start(rng.choice(["2:3", "3"]), "--ft-min-nodes=2", "--rdzv-conf=join_timeout=600")
    machines.wait_for_steps()
    for _ in range(rng.randint(1, 3)):
        machines.divide([rng.randrange(rng.choice([2, 3])) for _ in range(3)])
        time.sleep(rng.uniform(0.2, 3 * SILENCE_S))
        if rng.random() < 0.5:
            machines.heal()
            time.sleep(rng.uniform(0.0, 2 * SILENCE_S))
    machines.heal()
    done = len(machines.lines())
    machines.wait_for_steps(after=done)
    machines.wait_for_places()
    codes = machines.end()
    assert set(codes) == {0}, f"{codes}\n{machines.logs()}"
    machines.check_one_world()
