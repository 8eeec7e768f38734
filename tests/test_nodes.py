"""Two machines of two ranks each: what they agree on, what each must have, and what is left when a
rank or a whole agent is killed."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import run

import tiny
from harness import ranks
from minirl import evaluate
from minirl.base.errors import UserError
from minirl.config.parse import parse_flags
from minirl.config.rl import RLConfig
from minirl.config.shared import EvaluateConfig
from minirl.parallel import machines
from minirl.parallel.machines import check_same
from minirl.run.inputs import Inputs, check_output
from minirl.supervise import lifecycle
from minirl.supervise.lifecycle import agree_on_name
from nodes import Job, Node, two_nodes
from programs import ROOT, Ended, fork
from test_program import read, repeatable

NUM_STEPS = 3
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="four ranks, each with an engine")

# Notes what a rank is, and holds the run behind a checkpoint until the test has done its deed.
REWARD = """
import json, os, socket, time
from pathlib import Path
import torch

here = Path(__file__).parent
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE")
facts = {name: int(os.environ.get(name, 0)) for name in names}
facts |= {"host": socket.gethostname(), "threads": torch.get_num_threads()}
(here / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(facts))

def length(prompt, completion, row):
    while (here / "hold").read_text() in checkpoints():
        time.sleep(0.01)
    return len(completion) / 10

def checkpoints():
    return [path.name for path in here.glob("out/checkpoints/step-?")]
"""


@dataclass
class World:
    """Two nodes, and what they both see."""

    nodes: list[Node]
    folder: Path

    def flags(self, name: str) -> list:
        """Of a run with a folder of its own, where it has its reward function and its output."""
        folder = self.folder / name
        folder.mkdir()
        (folder / "reward.py").write_text(REWARD)
        (folder / "hold").write_text("nothing")
        given = {
            "output": folder / "out",
            "policy.model": self.folder / "model",
            "policy.dtype": "float32",
            "data.train": self.folder / "rows.jsonl",
            "data.held-out": 2,
            "data.max-prompt-tokens": 32,
            "reward.function": f"{folder}/reward.py:length",
            "num-steps": NUM_STEPS,
            "rollout.prompts-per-step": 4,
            "rollout.samples-per-prompt": 2,
            "rollout.max-tokens": 6,
            "eval.every": NUM_STEPS,
            "checkpoint.every": 1,
            "checkpoint.keep": NUM_STEPS,
            # Shards and engines stay on a node.
            "parallel.replicate": 2,
            "engine.tensor-parallel-size": 2,
            "engine.kv-cache-gb": 0.01,
            "timeout-minutes": 2,
        }
        pairs = [[f"--{name}", value] for name, value in given.items()]
        return [*sum(pairs, []), "--resume"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    tiny.make(folder / "model")
    rows = [json.dumps({"prompt": f"{i} times {i}", "answer": str(i * i)}) for i in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    with two_nodes(folder) as nodes:
        yield World(nodes, folder)


@dataclass
class Killed:
    """A run that was killed in the middle and has come to its end."""

    folder: Path
    flags: list
    ended: Ended

    def rows(self, phase: str) -> list[dict]:
        rows = read(self.folder / "out/metrics.jsonl")
        return repeatable([row for row in rows if row["phase"] == phase])


def start_and_hold(world: World, name: str, step: int) -> tuple[Job, list]:
    """Start a run that can be restarted once, and wait until it is held behind a checkpoint."""
    flags = world.flags(name)
    (world.folder / name / "hold").write_text(f"step-{step}")
    job = Job(world.nodes, "minirl.rl", [flags, flags], world.folder / name, max_restarts=1)
    job.wait_for((world.folder / name / f"out/checkpoints/step-{step}").exists)
    return job, flags


def let_go(world: World, name: str) -> None:
    (world.folder / name / "hold").write_text("nothing")


@pytest.fixture(scope="module")
def rank_killed(world):
    job, flags = start_and_hold(world, "rank", step=1)
    job.agents[1].ranks()[3].kill()
    let_go(world, "rank")
    return Killed(world.folder / "rank", flags, job.end())


@pytest.fixture(scope="module")
def agent_killed(world):
    """Another one takes its place, which takes this variable of torch's."""
    variable = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    nodes = [dataclasses.replace(node, environment=variable) for node in world.nodes]
    job, flags = start_and_hold(World(nodes, world.folder), "agent", step=2)
    ranks = list(job.agents[1].ranks().values())
    job.agents[1].kill()
    _, alive = psutil.wait_procs(ranks, timeout=20)
    job.start(1)
    let_go(world, "agent")
    ended = job.end()
    assert not alive, "ranks of a killed agent live on"
    return Killed(world.folder / "agent", flags, ended)


def test_ranks_know_their_node(world, rank_killed):
    facts = [json.loads((rank_killed.folder / f"rank-{r}.json").read_text()) for r in range(4)]
    assert [fact["LOCAL_RANK"] for fact in facts] == [0, 1, 0, 1]
    assert [fact["GROUP_RANK"] for fact in facts] == [0, 0, 1, 1]
    assert all(fact["LOCAL_WORLD_SIZE"] == 2 and fact["WORLD_SIZE"] == 4 for fact in facts)
    # The cores and the memory of a machine are divided by its own ranks.
    cores = machines.num_cores()
    assert {fact["threads"] for fact in facts} == {max(1, cores // 2)}
    assert "this machine's memory over its 2 ranks" in rank_killed.ended.err
    assert "4 ranks on cpu" in rank_killed.ended.err
    if world.nodes[0].namespaces:
        assert [fact["host"] for fact in facts] == ["node-0", "node-0", "node-1", "node-1"]


def test_a_killed_rank_is_started_again_with_all_others(rank_killed):
    assert rank_killed.ended.code == 0, rank_killed.ended.err
    assert "resuming at step 1" in rank_killed.ended.err
    assert [row["step"] for row in rank_killed.rows("rl")] == list(range(NUM_STEPS))
    assert (rank_killed.folder / "out/model/model.safetensors").exists()


def test_a_killed_agent_takes_its_ranks_along_and_can_be_replaced(agent_killed):
    assert agent_killed.ended.code == 0, agent_killed.ended.err
    assert "resuming at step 2" in agent_killed.ended.err


def test_restarts_do_not_show_in_the_results(rank_killed, agent_killed):
    """One was interrupted after step 1, the other after step 2."""
    for phase in ("rl", "eval"):
        assert rank_killed.rows(phase) == agent_killed.rows(phase)


def test_a_checkpoint_of_two_nodes_resumes_on_one_rank(world, rank_killed):
    folder = world.folder / "one"
    shutil.copytree(rank_killed.folder / "out", folder)
    flags = [
        *rank_killed.flags,
        *("--output", folder, "--num-steps", NUM_STEPS + 1),
        *("--parallel.replicate", 1, "--engine.tensor-parallel-size", 1),
    ]
    ended = fork("minirl.rl", flags, world.folder / "log-one", world=1)
    assert ended.code == 0, ended.err
    assert f"resuming at step {NUM_STEPS}" in ended.err
    rows = read(folder / "metrics.jsonl")
    assert [row["step"] for row in rows if row["phase"] == "rl"] == list(range(NUM_STEPS + 1))
    # Held-out prompts get the same answers of the same weights.
    scores = [row for row in rows if row["phase"] == "eval" and row["step"] == NUM_STEPS]
    before = [row for row in rank_killed.rows("eval") if row["step"] == NUM_STEPS]
    assert scores[0]["reward"] == pytest.approx(before[0]["reward"], abs=1e-6)


# --------------------------------------------------------------------------------------------------
# what every machine must have


# case -> (flags of both nodes, flags of the second, what the message says)
CASES = {
    "output": (
        ["--output", "mine"],
        [],
        ["output = mine is not one folder for all machines", "is not seen on", "(ranks 2, 3)"],
    ),
    "flag": (
        [],
        ["--num-step", 9],
        ["wrong flags", "Unrecognized options: --num-step, 9", "(ranks 2, 3), and not on"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_on_one_node_is_one_message(world, case):
    of_both, of_second, texts = CASES[case]
    name = f"no {case}"
    flags = [*world.flags(name), *of_both]
    job = Job(world.nodes, "minirl.rl", [flags, [*flags, *of_second]], world.folder / name)
    ended = job.end()
    assert ended.code == 1, ended.err
    assert len(ended.errors()) == 1 and "crashed" not in ended.err, ended.err
    for text in texts:
        assert text in ended.err, ended.err
    # Nothing is left behind.
    assert not (world.folder / name / "out").exists()
    assert not any((node.folder / "mine").exists() for node in world.nodes)


def test_two_torchruns_of_one_machine_end_together(world, tmp_path):
    """As SLURM starts them with a task for each GPU. Ranks that all leave with 0 would look
    finished to theirs, which would wait for the other one."""
    flags = world.flags("one machine")
    reward = "import os\nif os.environ['RANK'] == '3': os._exit(4)\n"
    (world.folder / "one machine" / "reward.py").write_text(reward)
    nodes = [Node(f"127.0.0.{i}", tmp_path) for i in (1, 2)]
    job = Job(nodes, "minirl.rl", [flags, flags], tmp_path / "log")
    ended = job.end(60)
    assert ended.code == 1, ended.err
    (error,) = ended.errors()
    assert "rank 3" in error and "called os._exit(4)" in error


def what_is_said(
    mesh,
    folders: list[Path],
    check: Callable,
    config: type,
    cases: dict[str, list[str]],
) -> dict[str, str]:
    """What check(cfg, mesh) says of the flags of each case where a rank has a host name and a
    working folder of its own."""
    os.chdir(folders[mesh.rank])
    said = {}
    with mock.patch.object(socket, "gethostname", lambda: f"host-{mesh.rank}"):
        for name, flags in cases.items():
            try:
                check(parse_flags(config, flags), mesh)
                said[name] = ""
            except UserError as error:
                said[name] = str(error)
    return said


def test_files_of_another_machine_are_looked_at(world, tmp_path):
    folders = [tmp_path / "host-0", tmp_path / "host-1"]
    rows = (world.folder / "rows.jsonl").read_text()
    for rank, folder in enumerate(folders):
        shutil.copytree(world.folder / "model", folder / "model")
        shutil.copytree(world.folder / "model", folder / "other")
        (folder / "rows.jsonl").write_text(rows)
        (folder / "more.jsonl").write_text(rows + "\n" * rank)
        (folder / "longer.csv").write_text(f"prompt,answer\n1 + 1?,2{' ' * rank}\n")
    shutil.copytree(world.folder / "model", folders[0] / "lone")
    (folders[0] / "lone.jsonl").write_text(rows)
    config = folders[1] / "other/config.json"
    config.write_text(config.read_text() + " ")

    good = world.flags("files") + ["--engine.tensor-parallel-size", 1]
    good += ["--policy.model", "./model", "--data.train", "rows.jsonl"]
    changed = {
        "good": [],
        "no model": ["--policy.model", "./lone"],
        "another model": ["--policy.model", "./other"],
        "no rows": ["--data.train", "lone.jsonl"],
        "more rows": ["--data.train", "more.jsonl"],
        "longer rows": ["--data.train", "longer.csv"],
        "apart": ["--engine.tensor-parallel-size", 2],
    }
    cases = {name: [str(flag) for flag in [*good, *own]] for name, own in changed.items()}
    told, by_second = ranks(2, what_is_said, folders, Inputs, RLConfig, cases)
    assert told == by_second and told["good"] == ""
    where = "(so on host-1 (rank 1), and not on host-0 (rank 0); every machine"
    assert "policy.model = './lone' is neither a folder" in told["no model"]
    assert where in told["no model"]
    assert "the size of config.json of the policy is" in told["another model"]
    assert "bytes on host-0 (rank 0) and" in told["another model"]
    assert "data.train = 'lone.jsonl': no such file" in told["no rows"]
    assert where in told["no rows"]
    assert "data.train = more.jsonl: the ranks see files of" in told["more rows"]
    longer = "the size of data.train = longer.csv is 23 bytes on host-0 (rank 0) and 24 bytes on"
    assert longer in told["longer rows"]
    assert "engine.tensor_parallel_size = 2 puts ranks of host-0 (rank 0), host-1" in told["apart"]


def test_an_evaluation_looks_at_other_machines(world, tmp_path):
    folders = [tmp_path / "host-0", tmp_path / "host-1"]
    for folder in folders:
        shutil.copytree(world.folder / "model", folder / "model")
        shutil.copy(world.folder / "rows.jsonl", folder)
    config = folders[1] / "model/generation_config.json"
    config.write_text('{"eos_token_id": 3}')
    flags = ["--model", "./model", "--data.eval", "rows.jsonl", "--reward.function", "exact"]
    cases = {"another model": flags, "apart": [*flags, "--engine.tensor-parallel-size", "2"]}
    told, by_second = ranks(2, what_is_said, folders, evaluate.main, EvaluateConfig, cases)
    assert told == by_second
    assert told["another model"].startswith("the size of generation_config.json of the model is")
    assert "engine.tensor_parallel_size = 2 puts ranks of host-0 (rank 0), host-1" in told["apart"]


def test_functions_and_templates_of_another_machine_are_compared(tmp_path):
    folders = [tmp_path / "host-0", tmp_path / "host-1"]
    for rank, folder in enumerate(folders):
        folder.mkdir()
        (folder / "rows.jsonl").write_text("{}\n")
        for name in ("same.py", "same.jinja"):
            (folder / name).write_text("")
        for name in ("other.py", "other.jinja"):
            (folder / name).write_text(f"# {rank}")
    (folders[0] / "lone.py").write_text("")
    cases = {
        "good": ["--reward.function", "same.py:f", "--data.chat-template", "same.jinja"],
        "reward": ["--reward.function", "other.py:f"],
        "loss": ["--algo.loss", "other.py:f?x=1"],
        "template": ["--data.chat-template", "other.jinja"],
        "lone": ["--env.name", "lone.py:Env"],
    }
    always = ["--data.train", "rows.jsonl", "--policy.model", "scratch"]
    cases = {name: [*always, *flags] for name, flags in cases.items()}
    told, by_second = ranks(2, what_is_said, folders, lifecycle.check_files, RLConfig, cases)
    assert told == by_second and told["good"] == ""
    for name, file in (
        ("reward", "reward.function = other.py"),
        ("loss", "algo.loss = other.py"),
        ("template", "data.chat_template = other.jinja"),
    ):
        assert told[name].startswith(f"the content (SHA-256) of {file} is"), told[name]
        assert "on host-0 (rank 0) and" in told[name]
    assert "env.name = lone.py:Env: no file lone.py (so on host-1 (rank 1)" in told["lone"]


def compare(mesh) -> list[str]:
    """What is said of values, as if each rank had a machine of its own."""
    cfg = RLConfig(seed=mesh.rank)
    cfg.endpoint.host = f"host-{mesh.rank}"
    alike = dict.fromkeys(["a", "b"], 1)
    lacking = dict.fromkeys(["a", "b"][: mesh.rank + 1], 1)
    said = []
    with mock.patch.object(socket, "gethostname", lambda: f"host-{mesh.rank}"):
        for values in (alike, lacking, lifecycle.settings(cfg)):
            try:
                said.append(str(check_same(values, mesh) or ""))
            except UserError as error:
                said.append(str(error))
    return said


def test_values_of_two_hosts_are_compared():
    told, by_second = ranks(2, compare)
    assert told == by_second
    alike, lacking, settings = told
    assert alike == ""
    assert "b is missing on host-0 (rank 0) and 1 on host-1 (rank 1); every machine" in lacking
    # A rank's own address may differ, and is not told.
    assert settings.startswith("seed is 0 on host-0 (rank 0) and 1 on host-1 (rank 1); every")


def use_output(mesh, folder: Path) -> tuple[list[str], list[str]]:
    """What is said of a good folder and of those that cannot be, and what is left."""
    said = []
    read_only = mock.patch.object(os, "access", lambda path, mode: mesh.rank == 0)
    for output, machine in (
        (folder / "a/b", contextlib.nullcontext()),
        (folder / "file/b", contextlib.nullcontext()),
        (folder / "a/b", read_only),
    ):
        try:
            with machine:
                said.append(str(check_output(RLConfig(output=str(output)), mesh) or ""))
        except UserError as error:
            said.append(str(error))
    mesh.barrier()
    return said, sorted(path.name for path in folder.iterdir())


def test_a_look_at_the_output_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    for (good, bad, read_only), left in ranks(2, use_output, tmp_path):
        assert good == "" and left == ["file"]
        assert f"output = {tmp_path}/file/b cannot be written to" in bad
        assert "choose another folder" in bad
        assert f"output = {tmp_path}/a/b cannot be written to on" in read_only
        assert "(rank 1); every rank writes" in read_only


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 4),
        ("800000 100000", 4),
        ("200000 100000", 2),
        ("250000 100000", 3),
        ("50000 100000", 1),
        (None, 4),
    ],
)
def test_a_container_has_the_cores_of_its_quota(quota, cores, tmp_path):
    file = tmp_path / "cpu.max"
    if quota:
        file.write_text(f"{quota}\n")
    four = mock.patch.object(os, "sched_getaffinity", return_value=set(range(4)))
    with four, mock.patch.object(machines, "CPU_QUOTA", file):
        assert machines.num_cores() == cores


def test_a_rank_may_be_the_child_of_a_containers_first_process():
    assert lifecycle.is_this_python(os.getpid())
    with subprocess.Popen(["sleep", "60"]) as other:
        assert not lifecycle.is_this_python(other.pid)
        other.kill()


# --------------------------------------------------------------------------------------------------
# how ranks of an attempt find each other


def test_dead_ranks_do_not_mislead_the_living():
    """Whoever comes first, and whatever earlier attempts left half done in the store."""
    timeout = timedelta(seconds=20)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout)
    names = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        found: dict[int, str] = {}

        def join(rank: int, found: dict[int, str] = found) -> None:
            own = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timeout)
            found[rank] = agree_on_name(own, rank, 3, timeout)

        threads = [Thread(target=join, args=(rank,)) for rank in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == [0, 1, 2] and len(set(found.values())) == 1
        names.append(found[0])
        # The next attempt finds one that rank 0 announced and nobody has joined.
        store.set("minirl/newest", "never joined")
    assert len(set(names)) == 3


def test_a_rank_that_is_alone_gives_up():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=1))
    for rank in (0, 1):
        with pytest.raises(dist.DistStoreError):
            agree_on_name(store, rank, 2, timedelta(seconds=0.2))


# --------------------------------------------------------------------------------------------------
# SLURM


# Stand-ins. srun passes signals on to its tasks and ends with their code, as SLURM's does; torchrun
# notes what it was called with and starts a rank, which is stopped by SIGUSR1 only.
STAND_INS = {
    "scontrol": """
        echo "$@" >> calls
        printf 'n7\\nn8\\n'""",
    "srun": """
        while [[ $1 == -* ]]; do shift; done
        "$@" & task=$!
        trap 'kill -USR1 $task' USR1
        while kill -0 $task 2> /dev/null; do wait $task; done
        wait $task""",
    ".venv/bin/torchrun": """
        printf '%s\\n' "$@" > arguments
        python3 rank.py & rank=$!
        [[ -e hold ]] || kill -KILL $rank
        wait $rank""",
}


RANK = """
import signal, sys
from pathlib import Path

def stop(number, frame):
    with open("calls", "a") as calls:
        print("saved", file=calls)
    sys.exit(0)

signal.signal(signal.SIGUSR1, stop)  # also where it was ignored, which a shell could not
Path("up").touch()
while True:
    signal.pause()
"""


def batch(folder: Path, *arguments: str) -> subprocess.Popen:
    """The batch script under way in a folder, with its stand-ins."""
    for name, body in STAND_INS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{textwrap.dedent(body)}\n")
        path.chmod(0o755)
    (folder / "rank.py").write_text(RANK)
    env = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "n[7-8]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_JOB_ID": "123456",
    }
    command = ["bash", ROOT / "launch/slurm.sbatch", *arguments]
    return subprocess.Popen(command, env=env, cwd=folder)


@pytest.mark.parametrize("program", [[], ["minirl.sft"], ["minirl.evaluate"]])
def test_the_batch_script_restarts_and_resumes(tmp_path, program):
    job = batch(tmp_path, *program, "--config", "a b.yaml")
    assert job.wait(60) == 128 + signal.SIGKILL  # as the rank; the job fails, and is not requeued
    assert (tmp_path / "calls").read_text() == "show hostnames n[7-8]\n"
    given = (tmp_path / "arguments").read_text().splitlines()
    module = given.index("-m")
    assert given[module + 1] == (program or ["minirl.rl"])[0]
    resume = [] if program == ["minirl.evaluate"] else ["--resume"]
    assert given[module + 2 :] == ["--config", "a b.yaml", *resume]
    config, _, _ = run.config_from_args(run.parse_args(given))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 4)
    assert config.max_restarts == (3 if resume else 0) and config.run_id == "123456"
    assert config.rdzv_endpoint == "n7:23456"
    assert config.logs_specs.root_log_dir == "logs/123456"
    script = (ROOT / "launch/slurm.sbatch").read_text()
    options = ("--requeue", "--open-mode=append", "--ntasks-per-node=1", "--signal=B:USR1@300")
    options += ("--exclusive", "--mem=0")
    for option in options:
        assert f"#SBATCH {option}\n" in script


def test_the_batch_script_lets_an_evaluation_end(tmp_path):
    (tmp_path / "hold").touch()
    job = batch(tmp_path, "minirl.evaluate")
    end = time.monotonic() + 60
    while not (tmp_path / "up").exists() and time.monotonic() < end:
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    assert job.poll() is None and "saved" not in (tmp_path / "calls").read_text()
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 0
    assert "requeue" not in (tmp_path / "calls").read_text()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_the_batch_script_stops_its_ranks_and_queues_itself(tmp_path, number):
    (tmp_path / "hold").touch()
    job = batch(tmp_path)
    end = time.monotonic() + 60
    while not (tmp_path / "up").exists() and time.monotonic() < end:
        time.sleep(0.05)
    job.send_signal(number)
    assert job.wait(60) == 0
    requeued = ["requeue 123456"] if number == signal.SIGUSR1 else []
    assert (tmp_path / "calls").read_text().splitlines()[1:] == ["saved", *requeued]
