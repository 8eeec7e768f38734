"""Two machines of two ranks each: what they agree on, what each must have, and what is left when a
rank or a whole agent is killed."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
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
from minirl.errors import UserError
from minirl.inputs import check_output
from minirl.parallel.launch import agree_on_name
from minirl.parallel.machines import check_on_one_machine, check_same
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
    cores = len(psutil.Process().cpu_affinity())
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


# case -> (what only the first node has, flags of both, flags of the second, what the message says)
CASES = {
    "output": (
        None,
        ["--output", "mine"],
        [],
        ["output = mine is not one folder for all machines", "is not seen on", "(ranks 2, 3)"],
    ),
    "model": (
        "model",
        ["--policy.model", "./model"],
        [],
        ["policy.model = './model' is neither a folder", "(ranks 2, 3), and not on"],
    ),
    "data": (
        "rows.jsonl",
        ["--data.train", "rows.jsonl"],
        [],
        ["data.train = 'rows.jsonl': no such file", "(ranks 2, 3), and not on"],
    ),
    "another setting": (None, [], ["--seed", 1], ["seed is 0 on", "and 1 on", "(ranks 2, 3)"]),
    "config": (
        None,
        [],
        ["--config", "none.yaml"],
        ["--config 'none.yaml': no such file", "(ranks 2, 3), and not on"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_one_node_lacks_is_one_message(world, case):
    lacking, of_both, of_second, texts = CASES[case]
    if lacking:
        source = world.folder / lacking
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, world.nodes[0].folder / lacking)
    name = f"no {case}"
    flags = [*world.flags(name), *of_both]
    job = Job(world.nodes, "minirl.rl", [flags, [*flags, *of_second]], world.folder / name)
    ended = job.end()
    assert ended.code == 1, ended.err
    assert len(ended.errors()) == 1 and "crashed" not in ended.err, ended.err
    for text in texts:
        assert text in ended.errors()[0], ended.errors()
    # Nothing is left behind.
    assert not (world.folder / name / "out").exists()
    assert not any((node.folder / "mine").exists() for node in world.nodes)


def on_two_hosts(mesh) -> list[str]:
    """What is said of ranks 0 and 1, as if each had a machine of its own."""
    sizes = {"the size of config.json": 10}
    if mesh.rank == 0:
        sizes["the size of model.safetensors"] = 1
    calls = {
        "files": lambda: check_same(sizes, mesh),
        "values": lambda: check_same({"seed": mesh.rank, "lr": 1}, mesh),
        "engine": lambda: check_on_one_machine(2, "engine.tensor_parallel_size", mesh),
        "lone": lambda: check_on_one_machine(1, "engine.tensor_parallel_size", mesh),
    }
    said = []
    with mock.patch.object(socket, "gethostname", lambda: f"host-{mesh.rank}"):
        for call in calls.values():
            try:
                said.append(str(call() or ""))
            except UserError as error:
                said.append(str(error))
    return said


def test_ranks_of_two_hosts_are_compared():
    told = ranks(2, on_two_hosts)
    assert told[0] == told[1]
    files, values, engine, lone = told[0]
    assert "model.safetensors is 1 on host-0 (rank 0) and missing on host-1 (rank 1)" in files
    assert "seed is 0 on host-0 (rank 0) and 1 on host-1 (rank 1); every machine" in values
    assert "engine.tensor_parallel_size = 2 puts ranks of host-0 (rank 0), host-1" in engine
    assert lone == ""


def use_output(mesh, folder: Path) -> tuple[str, str, list[str]]:
    """What is said of a good folder and of one that cannot be, and what is left."""
    said = []
    for output in (folder / "a/b", folder / "file/b"):
        try:
            said.append(str(check_output(output, False, mesh) or ""))
        except UserError as error:
            said.append(str(error))
    return *said, sorted(path.name for path in folder.iterdir())


def test_a_look_at_the_output_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    for good, bad, left in ranks(2, use_output, tmp_path):
        assert good == "" and left == ["file"]
        assert f"output = {tmp_path}/file/b cannot be written to" in bad
        assert "choose another folder" in bad


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


def test_the_batch_script_restarts_and_resumes(tmp_path):
    """With stand-ins for what SLURM has."""
    for name, body in {"scontrol": "printf 'n7\\nn8\\n'", "srun": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "n[7-8]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_JOB_ID": "123456",
    }
    script = ROOT / "launch/slurm.sbatch"
    command = ["bash", script, "--config", "a b.yaml"]
    out = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    launcher, flags = out.split("-m\nminirl.rl\n")
    assert flags.splitlines() == ["--config", "a b.yaml", "--resume"]
    srun, _, given = launcher.partition(".venv/bin/torchrun\n")
    assert srun.splitlines() == ["--kill-on-bad-exit=1"]
    arguments = run.parse_args([*given.splitlines(), "-m", "minirl.rl"])
    config, _, _ = run.config_from_args(arguments)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 4)
    assert config.max_restarts == 3 and config.run_id == "123456"
    assert config.rdzv_endpoint == "n7:23456"
    for line in ("--requeue", "--open-mode=append", "--ntasks-per-node=1"):
        assert f"#SBATCH {line}\n" in script.read_text()
