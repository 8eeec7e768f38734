"""Expert parallelism: on every mesh as in one process, whatever else is on."""

import pytest
import torch
from transformers import AutoConfig

import test_checkpoint
import test_nf4
import tiny
from harness import RankFailed, ranks
from minirl.algo import losses
from minirl.base.errors import UserError
from minirl.batch.exchange import exchange
from minirl.checkpoint.exporting import export
from minirl.checkpoint.state import Saver, load_checkpoint, state_dict_of
from minirl.config.parse import parse_flags
from minirl.config.policy import LoraConfig, ParallelConfig, PolicyConfig
from minirl.config.rl import AlgoConfig
from minirl.config.shared import CheckpointConfig
from minirl.config.supervised import SFTConfig
from minirl.model import experts
from minirl.model.checks import check_experts
from minirl.model.families import experts_of_token
from minirl.run.supervised import SupervisedTrainer
from minirl.train.policy import Policy
from sharded import whole
from test_families import assert_same_files, stay_float64
from test_gradients import batches_of, grpo, rows_of_micro, trajectories, worst
from test_lora import two_steps
from test_optimizer import sleep
from test_sft import conversations, flags, rows_of, written

WHOLE = {"lora": LoraConfig()}  # All weights are trained themselves.
ADAPTERS = {"lora": LoraConfig(rank=4, alpha=8)}
MUON = WHOLE | {"optimizer": "muon"}

# By name: number of ranks, and their axes.
MESHES = {
    "ep2": (2, ParallelConfig(experts=2)),
    "ep2_efsdp2": (4, ParallelConfig(experts=2)),
    "ep4": (4, ParallelConfig(experts=4)),
    "hsdp_ep2": (4, ParallelConfig(replicate=2, experts=2)),
    "tp2_ep2": (2, ParallelConfig(tensor=2, experts=2)),
    "tp2_ep4": (4, ParallelConfig(tensor=2, experts=4)),
    "tp4_ep2": (4, ParallelConfig(tensor=4, experts=2)),
    "tp2_sequence_ep2": (4, ParallelConfig(tensor=2, sequence=True, experts=2)),
    "cp2_ep4": (4, ParallelConfig(context=2, experts=4)),
    "ring_ep2": (2, ParallelConfig(context=2, context_engine="ring", experts=2)),
}
# By name: a mesh, and settings that change nothing.
SAME = {
    "full, offload": (
        "ep4",
        {
            "activation_checkpointing": "full",
            "accumulate": "sharded",
            "optimizer_state": "offload",
        },
    ),
    "selective": ("ep2", {"activation_checkpointing": "selective"}),
    "keep": ("hsdp_ep2", {"reshard_after_forward": False, "accumulate": "whole"}),
    "offload_all": ("ep2_efsdp2", {"cpu_offload": True}),
}
# By name: a mesh, and settings of other results, which one process has too.
OTHER = {
    "adapters of tensor ranks": ("tp2_ep4", ADAPTERS | {"activation_checkpointing": "full"}),
    "muon": ("ep2_efsdp2", MUON),
}
WHAT = ("grads", "merged", "averages")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make(
        tmp_path_factory.mktemp("moe") / "m", "qwen3_moe", dtype=torch.float64, num_experts=8
    )


@pytest.fixture(scope="module")
def alone(folder):
    (one,) = ranks(1, two_steps, folder, False, WHOLE)
    return one


def compare(got, alone):
    for what in WHAT:
        assert got[what].keys() == alone[what].keys()
        assert worst(got[what], alone[what]) < 1e-12, what


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_trains_as_one_process(name, folder, alone):
    world, parallel = MESHES[name]
    got = ranks(world, two_steps, folder, parallel.sequence, WHOLE, parallel=parallel)[0]
    compare(got, alone)


@pytest.mark.parametrize("name", SAME)
def test_settings_of_memory_change_nothing(name, folder, alone):
    mesh, settings = SAME[name]
    world, parallel = MESHES[mesh]
    got = ranks(world, two_steps, folder, False, WHOLE | settings, parallel=parallel)[0]
    compare(got, alone)


@pytest.mark.parametrize("name", OTHER)
def test_adapters_and_muon_are_those_of_one_process(name, folder):
    mesh, settings = OTHER[name]
    world, parallel = MESHES[mesh]
    (one,) = ranks(1, two_steps, folder, False, settings)
    got = ranks(world, two_steps, folder, False, settings, parallel=parallel)[0]
    compare(got, one)


def test_sleep_frees_everything_and_changes_nothing(folder):
    world, parallel = MESHES["ep2_efsdp2"]
    settings = {"optimizer": "muon", "ema_decay": 0.9, "optimizer_state": "8bit"}
    ranks(world, sleep, folder, settings, parallel=parallel)


def grpo_in_float64(mesh, folder):
    stay_float64()
    return grpo(mesh, folder, False)


def test_three_steps_of_grpo_with_a_reference(folder):
    """Losses, norms of clipped gradients and weights, and a frozen mixture beside the policy."""
    ((history, params),) = ranks(1, grpo_in_float64, folder)
    assert history[0]["grad_norm"] > 0.05  # it is clipped
    world, parallel = MESHES["ep2"]
    for got, got_params in ranks(world, grpo_in_float64, folder, parallel=parallel):
        assert worst(got_params, params) < 1e-10
        for step, wanted in zip(got, history, strict=True):
            for name in ("loss", "grad_norm", "ref_kl", "entropy", "clip_fraction"):
                assert step[name] == pytest.approx(wanted[name], rel=1e-10, abs=1e-14)


def critic_step(mesh, folder):
    """Return what a critic learns from one update."""
    stay_float64()
    cfg = PolicyConfig(model=str(folder), dtype="float64", max_grad_norm=0.0, adam_eps=1e-3)
    critic = Policy(cfg, folder, mesh, score=True)
    own = trajectories()[mesh.rank :: mesh.world_size]
    (micros,) = (
        exchange(own, mesh, rows_of_micro(mesh.data_size))
        if mesh.world_size > 1
        else [[[t] for t in own]]
    )
    history = []
    for _ in range(2):
        batches = batches_of(micros, critic)
        critic.annotate([batches], "values")
        for batch in batches:
            batch.returns = batch.turn_rewards
        history.append(critic.update(batches, losses.value(0.2), lr=1e-2))
    return whole(critic.shards()), history


def test_a_critic_learns_as_in_one_process(folder):
    ((params, history),) = ranks(1, critic_step, folder)
    world, parallel = MESHES["ep2"]
    got, got_history = ranks(world, critic_step, folder, parallel=parallel)[0]
    assert worst(got, params) < 1e-12
    for name in ("loss", "grad_norm"):
        assert got_history[1][name] == pytest.approx(history[1][name], rel=1e-12)


# --------------------------------------------------------------------------------------------------
# what travels


def counted(mesh, folder):
    """Return how many rows this rank computes in a forward, waits of the host, and held experts."""
    rows, waits = [], []
    multiply = experts._one_by_one
    to_host = experts._to_host

    def counting_multiply(x, weight, ends):
        assert ends[-1] == len(x)  # none of another rank's
        rows.append(len(x))
        return multiply(x, weight, ends)

    def counting_to_host(*counts):
        waits.append(counts)
        return to_host(*counts)

    experts._one_by_one = counting_multiply
    experts._to_host = counting_to_host
    policy = Policy(PolicyConfig(dtype="float32"), folder, mesh, trainable=False)
    own = trajectories()
    if mesh.tensor.size() == 1:
        own = own[mesh.rank :: mesh.world_size]
    policy.annotate([batches_of([own], policy)], "old_logprobs")
    held = sum(whole.to_local().numel() for n, whole in policy.shards().items() if "experts" in n)
    return sum(rows) // 2, len(waits), held


@pytest.mark.parametrize("name", ["tp2_ep2", "ep2"])
def test_every_row_is_computed_once_where_its_expert_is(name, folder):
    (alone,) = ranks(1, counted, folder)
    world, parallel = MESHES[name]
    results = ranks(world, counted, folder, parallel=parallel)
    num_layers = 2
    for num_rows, num_waits, held in results:
        assert 0 < num_rows < alone[0]
        assert num_waits == num_layers
        assert held == alone[2] // 2
    # Shared prompts are computed where their sequences are, so that data ranks have some twice.
    total = sum(num_rows for num_rows, _, _ in results)
    assert total == alone[0] if parallel.tensor > 1 else total >= alone[0]


def no_token_for_some(mesh, folder):
    """Return gradients where all tokens choose the experts of the first rank."""
    stay_float64()
    cfg = PolicyConfig(model=str(folder), dtype="float64", max_grad_norm=0.0)
    policy = Policy(cfg, folder, mesh)
    for module in policy.model.modules():
        if "Router" in type(module).__name__:
            module.register_forward_hook(lambda m, args, out: (*out[:2], out[2] % 2))
    grads = {}
    policy.optimizer.step = lambda: grads.update(
        whole({n: p.grad for n, p in policy.shards().items()})
    )
    own = trajectories()[mesh.rank :: mesh.world_size]
    (micros,) = (
        exchange(own, mesh, rows_of_micro(mesh.data_size))
        if mesh.world_size > 1
        else [[[t] for t in own]]
    )
    policy.update(batches_of(micros, policy), losses.policy(AlgoConfig(), 20), lr=0.0)
    return grads


def test_a_rank_whose_experts_nobody_chooses(folder):
    (expected,) = ranks(1, no_token_for_some, folder)
    unused = expected["model.layers.0.mlp.experts.down_proj"][2:]
    assert unused.abs().max() == 0
    world, parallel = MESHES["ep4"]
    got = ranks(world, no_token_for_some, folder, parallel=parallel)[0]
    assert worst(got, expected) < 1e-12


# --------------------------------------------------------------------------------------------------
# checkpoints


def save_or_go_on(mesh, folder, run, resume):
    """Make two updates, with a checkpoint between them; or resume from it and make the second.

    Returns:
        What the checkpoint holds, the loss of the second update, weights and averages after it.
    """
    stay_float64()
    cfg = PolicyConfig(
        model=str(folder), dtype="float64", max_grad_norm=0.0, adam_eps=1e-3, ema_decay=0.5
    )
    policy = Policy(cfg, folder, mesh)

    def update():
        own = trajectories()[mesh.rank :: mesh.world_size]
        (micros,) = exchange(own, mesh, rows_of_micro(mesh.data_size))
        batches = batches_of(micros, policy, 0.7)
        return policy.update(batches, losses.policy(AlgoConfig(), 20), lr=1e-2)["loss"]

    if resume:
        load_checkpoint(run / "checkpoints/step-1", policy)
    else:
        update()
        with Saver(run, CheckpointConfig(every=1), policy) as saver:
            saver.save(1, {})
    with policy.state_awake():
        state = whole(state_dict_of(policy))
    export(policy, run / (resume or "saved"))
    loss = update()
    with policy.state_awake():
        averages = whole(dict(policy.averages()))
    return state, loss, whole(policy.shards()), averages


SAVED = MESHES["ep2_efsdp2"]
# Where its checkpoint is resumed.
TARGETS = {"ep4": MESHES["ep4"], "none": (2, ParallelConfig()), "tp2_ep2": MESHES["tp2_ep2"]}


def test_checkpoints_move_between_meshes(tmp_path, folder):
    """Every bit of weights and optimizer state, and the update behind them."""
    world, parallel = SAVED
    state, loss, *after = ranks(world, save_or_go_on, folder, tmp_path, "", parallel=parallel)[0]
    assert state["optimizer"]["state"]["model.layers.0.mlp.experts.down_proj"]["exp_avg"].any()
    for name, (world, parallel) in TARGETS.items():
        resumed, resumed_loss, *got = ranks(
            world, save_or_go_on, folder, tmp_path, name, parallel=parallel
        )[0]
        assert test_checkpoint.differences(state, resumed) == [], name
        assert resumed_loss == pytest.approx(loss, rel=1e-12), name
        for mine, wanted in zip(got, after, strict=True):
            assert worst(mine, wanted) < 1e-12, name
        assert_same_files(tmp_path / "saved", tmp_path / name)


# --------------------------------------------------------------------------------------------------
# other forms of weights, and a whole program


def test_experts_in_four_bits(tmp_path):
    folder, rounded = test_nf4.make(tmp_path, "qwen3_moe")
    (one,) = ranks(1, two_steps, rounded, False, {})
    world, parallel = MESHES["ep2_efsdp2"]
    got = ranks(world, two_steps, folder, False, test_nf4.NF4, parallel=parallel)[0]
    compare(got, one)


LEARNS = MESHES["ep2"]


def train_in_float64(mesh, given):
    stay_float64()
    SupervisedTrainer.main(parse_flags(SFTConfig, given), mesh)


def flags_of(folder, tmp_path, output):
    source = written(tmp_path / "a.jsonl", conversations(30))
    return flags(folder, source, tmp_path / output, "--policy.dtype", "float64")


def test_a_mixture_learns_from_chats_as_in_one_process(tmp_path, folder):
    ranks(1, train_in_float64, flags_of(folder, tmp_path, "one"))
    world, parallel = LEARNS
    given = [*flags_of(folder, tmp_path, "many"), "--parallel.experts", str(parallel.experts)]
    ranks(world, train_in_float64, given, parallel=parallel)
    for phase in ("train", "eval"):
        one = [row["loss"] for row in rows_of(tmp_path / "one", phase)]
        many = [row["loss"] for row in rows_of(tmp_path / "many", phase)]
        assert len(one) > 3 and many == pytest.approx(one, rel=1e-10)
    assert one[-1] < one[0]


def test_a_model_without_experts_is_refused_before_it_is_read(tmp_path):
    dense = tiny.make(tmp_path / "dense", "qwen3")
    world, parallel = LEARNS
    given = [*flags_of(dense, tmp_path, "out"), "--parallel.experts", str(parallel.experts)]
    with pytest.raises(RankFailed) as failure:
        ranks(world, train_in_float64, given, parallel=parallel)
    assert failure.value.kind == "UserError"
    assert "no model here has any (policy qwen3); set it to 1" in failure.value.text


# --------------------------------------------------------------------------------------------------
# what is refused


def config_of(family, **values):
    return AutoConfig.for_model(family, **values)


DENSE = config_of("qwen3")
SMALL = config_of("qwen3_moe", num_experts=8)
BIG = config_of(  # Qwen3-235B-A22B
    "qwen3_moe",
    hidden_size=4096,
    moe_intermediate_size=1536,
    num_experts=128,
    num_experts_per_tok=8,
)
# By name: models, axes, ranks of a node, what the message says.
REFUSED = {
    "no mixture": (
        {"policy": DENSE, "critic": DENSE},
        ParallelConfig(experts=2),
        8,
        r"parallel.experts = 2 divides .* no model here has any \(policy qwen3, critic qwen3\)",
    ),
    "experts of one": (
        {"policy": SMALL},
        ParallelConfig(experts=3),
        6,
        "parallel.experts = 3 does not divide num_experts = 8 of the policy; use 1, 2, 4, 8",
    ),
    "experts of another": (
        {"policy": DENSE, "reference": config_of("mixtral", num_local_experts=6)},
        ParallelConfig(experts=4),
        8,
        "does not divide num_local_experts = 6 of the reference; use 1, 2, 3, 6",
    ),
    "two nodes": (
        {"policy": BIG},
        ParallelConfig(experts=16),
        8,
        "does not fit into nodes of 8 ranks, so that tokens would travel between nodes in every "
        ".*; use 1, 2, 4, 8, or add --parallel.experts-across-nodes",
    ),
    "a part of two nodes": (
        {"policy": SMALL},
        ParallelConfig(experts=4),
        6,
        "does not fit into nodes of 6 ranks.*use 1, 2, or add",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_or_does_not_pay_is_refused(name):
    models, parallel, ranks_of_node, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        check_experts(models, parallel, ranks_of_node)


def test_what_is_allowed():
    """A mixture beside a dense model, and tokens between nodes if somebody insists."""
    for models, parallel in (
        ({"policy": DENSE, "reference": SMALL}, ParallelConfig(experts=8)),
        ({"policy": BIG}, ParallelConfig(experts=16, experts_across_nodes=True)),
        ({"policy": DENSE}, ParallelConfig()),
    ):
        check_experts(models, parallel, 8)


def test_a_number_for_each_layer_is_one_for_all():
    """As Hunyuan's config gives it."""
    assert experts_of_token(config_of("hunyuan_v1_moe", moe_topk=[2, 2])) == 2
    with pytest.raises(UserError, match=r"\[2, 1\], differs between layers"):
        experts_of_token(config_of("hunyuan_v1_moe", moe_topk=[2, 1]))
