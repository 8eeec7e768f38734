"""Optimizers on every mesh against themselves on whole tensors, and everything that may sleep, rest
or live elsewhere in between."""

import json
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tiny
from harness import RankFailed, ranks, two_at_once
from minirl.algo import losses
from minirl.batch.exchange import exchange
from minirl.checkpoint import exporting
from minirl.checkpoint.state import Saver, load_checkpoint, state_dict_of
from minirl.config.parse import parse_flags
from minirl.config.policy import LoraConfig, ParallelConfig, PolicyConfig
from minirl.config.rl import AlgoConfig, RLConfig
from minirl.config.shared import CheckpointConfig
from minirl.model import build
from minirl.model.adapters.lora import is_adapter
from minirl.parallel.fsdp import local
from minirl.parallel.muon import Muon, orthogonalize
from minirl.parallel.optimizer import ShardAdamW
from minirl.parallel.storage import HostMemory, dequantize, dynamic_code, quantize
from minirl.parallel.tensor import LORA_B
from minirl.rl import Trainer
from minirl.train.policy import Policy
from programs import QUICKSTART
from run_folders import newest_checkpoint
from sharded import whole
from test_checkpoint import differences
from test_gradients import batches_of, exact_norm, trajectories

LR, DECAY = 1e-2, 0.1
MESHES = {
    "dp2": (2, ParallelConfig()),
    "tp2": (2, ParallelConfig(tensor=2)),
    "dp2xtp2": (4, ParallelConfig(tensor=2)),
    "hsdp": (4, ParallelConfig(replicate=2)),
    "cp2xtp2": (4, ParallelConfig(context=2, tensor=2)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """45 rows of the feed-forward on each of two tensor ranks: nothing that two more ranks could
    split evenly."""
    return tiny.make(
        tmp_path_factory.mktemp("model") / "model",
        "llama",
        dtype=torch.float64,
        intermediate_size=90,
    )


def make(mesh, folder, settings) -> Policy:
    LlamaRMSNorm.forward = exact_norm
    policy = Policy(PolicyConfig(dtype="float64", **settings), folder, mesh)
    policy.optimizer.elements_at_once = 30_000  # some matrices at a time
    return policy


def update(policy: Policy, mesh, num: int = 1) -> list[dict]:
    (micros,) = exchange(trajectories()[mesh.rank :: mesh.world_size], mesh, 200)
    batches = batches_of(micros, policy)
    return [policy.update(batches, losses.policy(AlgoConfig(), 20), lr=LR) for _ in range(num)]


def storages(policy: Policy) -> dict[str, int]:
    """Bytes of the local storages of state entries as large as a matrix."""
    names = {p: n for n, p in policy.shards().items()}
    return {
        f"{names[p]}.{key}": local(value).untyped_storage().nbytes()
        for part in policy.optimizer.parts
        for p, state in part.state.items()
        for key, value in state.items()
        if value.ndim and p.numel() >= 4096
    }


# --------------------------------------------------------------------------------------------------
# AdamW


def end_with_each_adamw(mesh, folder) -> list[dict]:
    """Return weights and moments after three steps with ours, and with torch's on DTensors."""
    ends = []
    for kind in (ShardAdamW, torch.optim.AdamW):
        build.ShardAdamW = kind
        policy = make(mesh, folder, {"weight_decay": DECAY})
        update(policy, mesh, 3)
        end = whole(policy.shards())
        for part in policy.optimizer.parts:
            assert type(part) is kind
            for p, state in part.state.items():
                end |= whole({f"{len(end)} {p.shape} {key}": t for key, t in state.items()})
        ends.append(end)
    return ends


@pytest.mark.parametrize("name", ["dp2", "dp2xtp2"])
def test_adamw_of_shards_is_torchs_of_dtensors(folder, name):
    world, parallel = MESHES[name]
    for ours, torchs in ranks(world, end_with_each_adamw, folder, parallel=parallel):
        assert ours.keys() == torchs.keys() and len(ours) > 3 * 20
        assert all(torch.equal(ours[key], torchs[key]) for key in ours)


# --------------------------------------------------------------------------------------------------
# Muon


def plain_muon(p, grad, buffer, lr, weight_decay):
    """One matrix, as the papers write it. Changes `buffer`; returns the new matrix."""
    buffer.mul_(0.95).add_(grad, alpha=0.05)
    x = 0.05 * grad + 0.95 * buffer
    x = x / x.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    return (1 - lr * weight_decay) * p - lr * 0.2 * math.sqrt(max(p.shape)) * x


def watched(mesh, folder, settings, num_steps):
    """Whole weights before the first and after each step, and the gradients of each."""
    policy = make(mesh, folder, settings)
    weights, grads, take = [whole(policy.shards())], [], policy.optimizer.step

    def step():
        grads.append(whole({n: p.grad for n, p in policy.shards().items()}))
        take()

    policy.optimizer.step = step
    for _ in range(num_steps):
        update(policy, mesh)
        weights.append(whole(policy.shards()))
    return weights, grads


@pytest.mark.parametrize("name", MESHES)
def test_muon_on_every_mesh_is_muon_on_whole_matrices(folder, name):
    world, parallel = MESHES[name]
    results = ranks(
        world, watched, folder, {"optimizer": "muon", "weight_decay": DECAY}, 3, parallel=parallel
    )
    weights, grads = results[-1]
    expected = {n: w.clone() for n, w in weights[0].items()}
    hidden = {
        n: torch.zeros_like(w) for n, w in expected.items() if ".layers." in n and w.ndim == 2
    }
    assert len(hidden) == 14
    # Embedding and head; last norm; two layers of seven matrices and two norms.
    assert len(expected) == 2 + 1 + 18
    others = [nn.Parameter(w) for n, w in expected.items() if n not in hidden]
    groups = [{"params": [w], "weight_decay": DECAY * (w.ndim > 1)} for w in others]
    adam = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), foreach=False)
    for grad, after in zip(grads, weights[1:], strict=True):
        for n, w in zip([n for n in expected if n not in hidden], others, strict=True):
            w.grad = grad[n]
        adam.step()
        for n, buffer in hidden.items():
            expected[n] = plain_muon(expected[n], grad[n], buffer, LR, DECAY)
        for n, w in after.items():
            assert (w - expected[n]).abs().max() < 1e-12, n
    assert all(differences(result[0][-1], weights[-1]) == [] for result in results)


def stacks(mesh, shapes):
    """Muon alone over matrices and stacks of them, of which some ranks have nothing."""
    torch.manual_seed(1)
    parallel = mesh.fsdp
    params = [
        nn.Parameter(
            distribute_tensor(
                torch.randn(shape, dtype=torch.float64),
                parallel,
                src_data_rank=None,
                placements=make_placements(parallel),
            )
        )
        for shape in shapes
    ]
    start = [p.full_tensor().detach().clone() for p in params]
    optimizer = Muon(params, mesh, lr=LR, weight_decay=DECAY)
    all_grads = []
    for _ in range(3):
        all_grads.append([torch.randn(shape, dtype=torch.float64) for shape in shapes])
        for p, grad in zip(params, all_grads[-1], strict=True):
            p.grad = distribute_tensor(
                grad, parallel, placements=make_placements(parallel), src_data_rank=None
            )
        optimizer.step()
    return start, all_grads, [p.full_tensor().detach() for p in params]


def make_placements(mesh):
    return [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]


@pytest.mark.parametrize(
    ("world", "parallel"),
    [(1, ParallelConfig()), (4, ParallelConfig()), (4, ParallelConfig(replicate=2))],
)
def test_muon_takes_stacks_of_matrices_and_uneven_shards(world, parallel):
    shapes = [(7, 5), (3, 10), (5, 5), (3, 4, 6), (1, 8), (2, 8, 3)]
    for start, grads, end in ranks(world, stacks, shapes, parallel=parallel):
        for i, shape in enumerate(shapes):
            for layer in range(shape[0] if len(shape) == 3 else 1):

                def pick(t, layer=layer, shape=shape):
                    return t[layer] if len(shape) == 3 else t

                p, buffer = pick(start[i]), torch.zeros(shape[-2:], dtype=torch.float64)
                for grad in grads:
                    p = plain_muon(p, pick(grad[i]), buffer, LR, DECAY)
                assert (p - pick(end[i])).abs().max() < 1e-12


def test_orthogonalize_brings_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((40, 90), (90, 40), (3, 20, 50)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, dtype=torch.float64)))
        assert values.min() > 0.3
        assert values.max() < 1.3
        assert values.median() > 0.65
    assert orthogonalize(torch.zeros(4, 4)).abs().max() == 0


# --------------------------------------------------------------------------------------------------
# checkpoints


def save(mesh, folder, run, settings):
    policy = make(mesh, folder, settings)
    update(policy, mesh, 2)
    saved = state(policy)
    # Written while the two updates overwrite what it copied.
    with Saver(run, CheckpointConfig(), policy) as saver:
        saver.save(2, {})
        return saved, update(policy, mesh, 2)[-1]["loss"], whole(policy.shards())


def resume(mesh, folder, run, settings):
    policy = make(mesh, folder, settings)
    load_checkpoint(newest_checkpoint(run), policy)
    return state(policy), update(policy, mesh, 2)[-1]["loss"], whole(policy.shards())


def state(policy):
    with policy.state_awake():
        return whole(state_dict_of(policy))


def test_muon_and_average_resume_on_another_mesh(folder, tmp_path):
    settings = {"optimizer": "muon", "optimizer_state": "offload", "ema_decay": 0.9}
    saved, loss, _ = ranks(4, save, folder, tmp_path, settings, parallel=MESHES["dp2xtp2"][1])[0]
    keys = {key for entry in saved["optimizer"]["state"].values() for key in entry}
    assert keys == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step", "ema"}
    for name, rest in (("dp2", "offload"), ("hsdp", "device")):
        world, parallel = MESHES[name]
        resumed, resumed_loss, _ = ranks(
            world,
            resume,
            folder,
            tmp_path,
            {**settings, "optimizer_state": rest},
            parallel=parallel,
        )[0]
        assert differences(saved, resumed) == []
        assert resumed_loss == pytest.approx(loss, rel=1e-10)


def test_8bit_state_resumes_bitwise_on_the_same_mesh_and_nearly_on_others(folder, tmp_path):
    settings = {"optimizer_state": "8bit"}
    saved, _, weights = ranks(2, save, folder, tmp_path, settings)[0]
    resumed, _, same = ranks(2, resume, folder, tmp_path, settings)[0]
    assert differences(saved, resumed) == [] and differences(weights, same) == []
    for name, wanted in (("tp2", settings), ("dp2", {"optimizer_state": "device"})):
        world, parallel = MESHES[name]
        other, _, moved = ranks(world, resume, folder, tmp_path, wanted, parallel=parallel)[0]
        assert differences(saved["model"], other["model"]) == []
        for n, entry in saved["optimizer"]["state"].items():
            for key in ("exp_avg", "exp_avg_sq"):
                difference = entry[key] - other["optimizer"]["state"][n][key]
                assert difference.abs().max() <= 0.05 * entry[key].abs().max(), (n, key)
        # Two steps of at most LR each.
        assert max((weights[n] - moved[n]).abs().max() for n in weights) < LR


def test_another_optimizer_than_the_checkpoint_s_is_refused(folder, tmp_path):
    ranks(1, save, folder, tmp_path, {"ema_decay": 0.9})
    with pytest.raises(
        RankFailed,
        match="adamw with a moving average, and "
        "policy.optimizer and policy.ema_decay now ask for muon;",
    ) as failed:
        ranks(1, resume, folder, tmp_path, {"optimizer": "muon"})
    assert failed.value.kind == "UserError"


# --------------------------------------------------------------------------------------------------
# where the state rests


def train(mesh, folder, settings, num_steps=3):
    policy = make(mesh, folder, settings)
    done = update(policy, mesh, num_steps)
    codes = policy.optimizer._codes.values()
    on_host = policy.optimizer._host_memory._places.values()
    resting = sum(t.nbytes for kept in (*codes, *on_host) for t in kept)
    return {
        "metrics": done[-1],
        "weights": whole(policy.shards()),
        "storages": storages(policy),
        "resting": resting,
        "state": state(policy),
    }


@pytest.mark.parametrize(("name", "optimizer"), [("tp2", "adamw"), ("dp2", "muon")])
def test_offloaded_state_takes_no_memory_between_steps_and_changes_nothing(folder, name, optimizer):
    world, parallel = MESHES[name]
    settings = {"optimizer": optimizer, "ema_decay": 0.9}
    here = ranks(world, train, folder, settings, parallel=parallel)
    away = ranks(
        world, train, folder, {**settings, "optimizer_state": "offload"}, parallel=parallel
    )
    for a, b in zip(here, away, strict=True):
        assert (
            set(b["storages"].values()) == {0}
            and a["storages"].keys() == b["storages"].keys()
            and min(a["storages"].values()) > 0
        )
        assert b["resting"] >= sum(a["storages"].values()) and a["resting"] == 0
        assert (
            differences(
                {k: a[k] for k in ("metrics", "weights", "state")},
                {k: b[k] for k in ("metrics", "weights", "state")},
            )
            == []
        )


def test_an_empty_shard_goes_to_host_memory_and_comes_back():
    """A rank has no row of a parameter with fewer rows than there are ranks."""
    shard = torch.empty(0, 3)
    memory = HostMemory()
    memory.keep("bias", shard)
    memory.bring_back("bias", shard)
    assert shard.shape == (0, 3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_8bit_state_takes_a_byte_an_element_and_trains_like_the_full_one(folder, optimizer):
    settings = {"optimizer": optimizer, "ema_decay": 0.9}
    full = ranks(2, train, folder, settings, 5)[0]
    small = ranks(2, train, folder, {**settings, "optimizer_state": "8bit"}, 5)[0]
    at_rest = {n: size for n, size in small["storages"].items() if not n.endswith(".ema")}
    assert set(at_rest.values()) == {0}
    # An average of that precision would not move.
    assert all(
        size == full["storages"][n] for n, size in small["storages"].items() if n.endswith(".ema")
    )
    num_elements = sum(full["storages"][n] for n in at_rest) / 8
    assert num_elements < small["resting"] < 1.06 * num_elements  # a float64 scale per 256
    assert (
        0
        < abs(full["metrics"]["loss"] - small["metrics"]["loss"])
        < 0.02 * abs(full["metrics"]["loss"])
    )
    start = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    moved, apart = (
        math.sqrt(sum((full["weights"][n] - other[n]).square().sum() for n in full["weights"]))
        for other in (start, small["weights"])
    )
    assert apart < 0.1 * moved


@pytest.mark.parametrize("signed", [True, False])
def test_quantize(signed):
    torch.manual_seed(0)
    levels = dynamic_code(signed, torch.device("cpu"), torch.float32)
    assert (
        len(levels) == 255
        and levels.max() == 1
        and levels.min() == (-1 if signed else 0)
        and 0 in levels
        and (levels.diff() > 0).all()
    )
    t = torch.randn(33, 77) * torch.logspace(-6, 3, 77)  # blocks that span decades
    t = t if signed else t.square()
    t[:8] = 0
    codes, scales = quantize(t, signed=signed)
    assert codes.dtype == torch.uint8 and codes.shape == (10, 256) and scales.shape == (10,)
    back = dequantize(codes, scales, t, signed=signed)
    again = quantize(back, signed=signed)
    # Or every checkpoint would wear the state down.
    assert torch.equal(codes, again[0])
    assert torch.equal(scales, again[1])
    root, root_back = (x if signed else x.sqrt() for x in (t, back))
    blocks, blocks_back = (
        nn.functional.pad(x.flatten(), (0, -x.numel() % 256)).view(-1, 256)
        for x in (root, root_back)
    )
    gap = levels.diff().max() / 2
    assert ((blocks - blocks_back).abs().amax(1) <= gap * 1.001 * blocks.abs().amax(1)).all()
    relative = blocks.abs() / blocks.abs().amax(1, keepdim=True)
    for decade in range(6):  # half of the levels in each decade further down
        assert ((blocks - blocks_back).abs() <= 0.075 * 2**decade * blocks.abs())[
            relative > 10.0 ** -(decade + 1)
        ].all()
    assert quantize(t[:0], signed=signed)[0].shape == (0, 256)


# --------------------------------------------------------------------------------------------------
# moving average


def average(mesh, folder, settings, num_steps, out):
    policy = make(mesh, folder, settings)
    with policy.state_awake():
        assert all(policy.averages()[n] is p for n, p in policy.shards().items())
    weights = []
    for _ in range(num_steps):
        update(policy, mesh)
        weights.append(whole(policy.shards()))
    with policy.state_awake():
        averages = policy.averages()
        assert all(averages[n].placements == p.placements for n, p in policy.shards().items())
        exporting.export(policy, out, weights=averages)
        return weights, whole(averages)


@pytest.mark.parametrize(
    ("name", "rest"), [("dp2", "device"), ("tp2", "8bit"), ("dp2xtp2", "offload")]
)
def test_the_average_is_its_formula(folder, tmp_path, name, rest):
    world, parallel = MESHES[name]
    settings = {"ema_decay": 0.3, "optimizer_state": rest}
    weights, averages = ranks(
        world, average, folder, settings, 6, tmp_path / "ema", parallel=parallel
    )[0]
    decays = [min(0.3, (1 + n) / (10 + n)) for n in range(6)]
    assert decays[2] < 0.3
    assert decays[4] == 0.3
    shares = [
        (1 - d) * math.prod(decays[i + 1 :]) if i else math.prod(decays[1:])
        for i, d in enumerate(decays)
    ]
    assert sum(shares) == pytest.approx(1)
    for n, value in averages.items():
        assert (
            value - sum(share * w[n] for share, w in zip(shares, weights, strict=True))
        ).abs().max() < 1e-14, n
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "ema").state_dict()
    assert all(torch.equal(exported[n], value) for n, value in averages.items())


# --------------------------------------------------------------------------------------------------
# offload and sleep


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dp2", {"optimizer": "muon", "reshard_after_forward": False}),
        ("dp2xtp2", {"activation_checkpointing": "full"}),
    ],
)
def test_cpu_offload_changes_no_bit(folder, name, settings):
    world, parallel = MESHES[name]
    here = ranks(world, train, folder, settings, 2, parallel=parallel)[0]
    there = ranks(world, train, folder, {**settings, "cpu_offload": True}, 2, parallel=parallel)[0]
    assert (
        differences(
            {k: here[k] for k in ("metrics", "weights", "state")},
            {k: there[k] for k in ("metrics", "weights", "state")},
        )
        == []
    )


def sizes(policy):
    """bytes on the device of the tensors of the optimizer's state, and of the parameters, sorted"""
    tensors = {
        "optimizer": policy.optimizer.tensors(),
        "parameters": [local(p) for p in policy.model.parameters()],
    }
    return {k: sorted(t.untyped_storage().nbytes() for t in ts) for k, ts in tensors.items()}


def sleep(mesh, folder, settings):
    awake, sleepy = make(mesh, folder, settings), make(mesh, folder, settings)
    sleepy.sleeper.active = True
    for num in range(2):
        assert update(awake, mesh) == update(sleepy, mesh)
        before = state(sleepy)
        full = sizes(awake)
        assert sizes(sleepy) == full and any(full["optimizer"]) and all(full["parameters"])
        for _ in range(2):  # the second finds nothing to move
            sleepy.sleeper.sleep_optimizer()
            assert not any(sizes(sleepy)["optimizer"])
            assert sizes(sleepy)["parameters"] == full["parameters"]
        for _ in range(2):
            sleepy.sleeper.sleep_parameters()
            assert not any(sizes(sleepy)["optimizer"] + sizes(sleepy)["parameters"])
        sleepy.sleeper.wake_parameters()
        if num:  # else the next step wakes the optimizer
            assert differences(before, state(sleepy)) == []
    # On CPU there is nowhere to go.
    awake.sleeper.sleep()
    assert sizes(awake) == full
    update(awake, mesh)
    update(sleepy, mesh)
    assert differences(state(awake), state(sleepy)) == []


@pytest.mark.parametrize(
    ("name", "rest"), [("dp2", "8bit"), ("tp2", "device"), ("dp2xtp2", "8bit")]
)
def test_sleep_frees_everything_and_changes_nothing(folder, name, rest):
    world, parallel = MESHES[name]
    ranks(
        world,
        sleep,
        folder,
        {"optimizer": "muon", "ema_decay": 0.9, "optimizer_state": rest},
        parallel=parallel,
    )


def program(mesh, given: list[str], sleepy: bool) -> list[list[dict]]:
    """minirl.rl's loop; all that a GPU would move moves, if `sleepy`. Returns the metrics of its
    updates."""
    done = []

    def asleep(policy: Policy) -> bool:
        return all(local(p).untyped_storage().nbytes() == 0 for p in policy.model.parameters())

    class Watched(Trainer):
        def load_reference(self, step):
            self.policy.sleeper.active = sleepy
            super().load_reference(step)
            self.ref.model.sleeper.active = sleepy
            self.ref.model.sleeper.sleep_parameters()

        def report(self, step, trajectories, minibatches, updates):
            assert asleep(self.ref.model) == sleepy and not asleep(self.policy)
            done.append(updates)
            super().report(step, trajectories, minibatches, updates)

    trainer = Watched(parse_flags(RLConfig, given), mesh)
    collect_step = trainer.generation.sampler.collect_step

    def watched(*args, **more):
        assert asleep(trainer.policy) == asleep(trainer.ref.model) == sleepy
        assert not sleepy or not any(
            t.untyped_storage().nbytes() for t in trainer.policy.optimizer.tensors()
        )
        return collect_step(*args, **more)

    trainer.generation.sampler.collect_step = watched
    trainer.train()
    return done


def test_the_program_is_bitwise_the_same_with_sleep_between_its_phases(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"word {i}", "answer": str(i)}) + "\n" for i in range(40))
    )
    (tmp_path / "reward.py").write_text(
        "def vowels(prompt, completion, row):\n"
        "    return sum(letter in 'aeiou' for letter in completion) / 10\n"
    )
    common = [
        "--config",
        QUICKSTART,
        "--data.train",
        tmp_path / "rows.jsonl",
        "--data.held-out",
        8,
        "--reward.function",
        f"{tmp_path}/reward.py:vowels",
        "--sft.num-steps",
        2,
        "--num-steps",
        3,
        "--eval.every",
        0,
        "--checkpoint.every",
        2,
        "--rollout.prompts-per-step",
        4,
        "--rollout.samples-per-prompt",
        4,
        "--algo.kl-coef",
        0.1,
        "--algo.updates-per-step",
        2,
        "--policy.ema-decay",
        0.9,
    ]
    calls = {
        str(sleepy): (
            1,
            program,
            [str(flag) for flag in [*common, "--output", tmp_path / str(sleepy)]],
            sleepy,
        )
        for sleepy in (False, True)
    }
    with two_at_once(calls) as results:
        runs = [value for future in results.values() for value in future.result()]
    assert runs[0] == runs[1] and len(runs[0]) == 3
    for name in ("model", "model_ema"):
        here, there = (
            AutoModelForCausalLM.from_pretrained(tmp_path / str(sleepy) / name).state_dict()
            for sleepy in (False, True)
        )
        assert differences(here, there) == []
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "True" / "model").state_dict()
    assert differences(here, model) != []


def read_while_base_sleeps(mesh, folder, quantization):
    lora = LoraConfig(rank=4, quantization=quantization)
    policy = Policy(PolicyConfig(dtype="float32", lora=lora), folder, mesh)
    policy.sleeper.active = True
    for name, p in policy.model.named_parameters():
        if name.endswith(LORA_B):
            local(p).data.normal_()
    before = {name: local(t).clone() for name, t in policy.merged().items()}
    for _ in range(2):
        policy.sleeper.sleep_base()
        parameters = policy.model.named_parameters()
        awake = [name for name, p in parameters if local(p).untyped_storage().nbytes()]
        assert awake and all(map(is_adapter, awake))
        merged = policy.merged()
        for name, values in before.items():
            assert local(merged[name]).equal(values), name
        policy.sleeper.sleep_parameters()  # of which some sleep already
        assert not any(sizes(policy)["parameters"])
        policy.sleeper.wake_parameters()
    assert all(local(t).equal(before[name]) for name, t in policy.merged().items())


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_adapters_are_merged_into_a_base_that_sleeps(tmp_path, quantization):
    even = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}
    folder = tiny.make(tmp_path / "m", "qwen3", **even)
    ranks(2, read_while_base_sleeps, folder, quantization)
