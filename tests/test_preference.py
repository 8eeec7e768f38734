"""Reward models and DPO: losses are their formulas, every mesh is one process, exports score alike,
programs resume and learn."""

import contextlib
import json
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import tiny
from harness import RankFailed, ranks
from in_memory import ALONE, encoded_rows, memory_rows, read_all
from minirl import dpo, rm
from minirl.algo import losses, preference
from minirl.base.errors import UserError
from minirl.batch.exchange import exchange
from minirl.batch.packing import pack, unpack
from minirl.checkpoint import exporting
from minirl.checkpoint.__main__ import export_checkpoint
from minirl.config.parse import parse_flags
from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.config.shared import ExportConfig, RewardConfig
from minirl.config.supervised import (
    DPOConfig,
    DPOLossConfig,
    PairsConfig,
    RewardModelLossConfig,
    RMConfig,
)
from minirl.data.examples import Pairs
from minirl.data.formats import open_examples
from minirl.data.tokenizer import filling_token_id
from minirl.model.scratch import make_tokenizer
from minirl.rewards.http import RemoteReward
from minirl.run.supervised import make_minibatch
from minirl.train import frozen
from minirl.train.frozen import Reference
from minirl.train.policy import Policy
from minirl.types.packed import Trajectory
from programs import ROOT, alone, as_flags, fork, hold_port, rows_of
from test_gradients import exact_norm, worst

# --------------------------------------------------------------------------------------------------
# formulas


def log_sigmoid(x):
    return -np.log1p(np.exp(-x))


def value_and_gradient(function, *inputs):
    """Of the sum over pairs, by the tensor function; float64."""
    leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in inputs]
    out = function(*leaves)
    return out.detach().numpy(), [g.numpy() for g in torch.autograd.grad(out.sum(), leaves)]


def by_difference(function, *inputs, h=1e-5):
    """The same by the numpy formula; its gradient by central differences of fourth order."""
    grads = []
    for i, x in enumerate(inputs):

        def at(d, i=i, x=x):
            return function(*inputs[:i], x + d, *inputs[i + 1 :])

        grads.append((8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h))
    return function(*inputs), grads


def same(tensors, arrays):
    np.testing.assert_allclose(tensors[0], arrays[0], rtol=1e-12, atol=1e-12)
    for got, wanted in zip(tensors[1], arrays[1], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-10)


def random(*shape, seed=0, scale=2.0):
    return np.random.default_rng(seed).normal(size=shape) * scale


def test_reward_model_losses_are_their_formulas():
    chosen, rejected, margins = random(3, 40)
    for loss, center in (("sigmoid", 0.0), ("sigmoid", 0.1), ("logexp", 0.0), ("logexp", 0.3)):
        cfg = RewardModelLossConfig(loss=loss, center_coef=center)

        def formula(c, r, loss=loss, center=center):
            first = (
                -log_sigmoid(c - r - margins) if loss == "sigmoid" else np.log(1 + np.exp(r - c))
            )
            return first + center * (c + r) ** 2

        same(
            value_and_gradient(
                lambda c, r, cfg=cfg: preference.reward_pair(c, r, torch.tensor(margins), cfg),
                chosen,
                rejected,
            ),
            by_difference(formula, chosen, rejected),
        )
    far = preference.reward_pair(
        torch.tensor([-800.0, 800.0]),
        torch.tensor([800.0, -800.0]),
        torch.zeros(2),
        RewardModelLossConfig(loss="logexp"),
    )
    assert far.tolist() == [1600.0, 0.0]  # stable


@pytest.mark.parametrize(
    ("loss", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0), ("hinge", 0.0)]
)
def test_dpo_losses_are_their_formulas(loss, smoothing):
    z, beta = random(40, scale=4.0), 0.3
    formula = {
        "sigmoid": lambda z: (
            -(1 - smoothing) * log_sigmoid(beta * z) - smoothing * log_sigmoid(-beta * z)
        ),
        "ipo": lambda z: (z - 1 / (2 * beta)) ** 2,
        "hinge": lambda z: np.maximum(0, 1 - beta * z),
    }[loss]
    cfg = DPOLossConfig(loss=loss, beta=beta, label_smoothing=smoothing)
    same(value_and_gradient(lambda z: preference.dpo_pair(z, cfg), z), by_difference(formula, z))


def pairs_of(num: int, *, score: bool) -> list[Trajectory]:
    """Ragged pairs, as `Pairs.examples` makes them; prompts of one token to 20."""
    rng, out = np.random.default_rng(5), []
    for group in range(num):
        prompt = rng.integers(5, 250, 1 + group * 3 % 20)
        for episode in range(2):
            tokens = np.concatenate(
                [prompt, rng.integers(5, 250, rng.integers(1, 15) + score)]
            ).astype(np.int32)
            out.append(
                Trajectory(
                    tokens=tokens,
                    sampled=np.arange(len(tokens)) >= len(prompt),
                    logprobs=np.zeros(len(tokens), np.float32),
                    group=group,
                    episode=episode,
                    reward=0.0 if episode else group / 7,
                )
            )
    return out


@pytest.mark.parametrize("normalized", [False, True])
def test_dpo_of_a_packed_batch_is_the_formula_on_its_sequences(normalized):
    rows = pairs_of(5, score=False)
    batch = pack(rows, torch.device("cpu"), pairs=True)
    num = len(batch.inputs)
    logprobs, ref = (
        random(num, seed=1) * batch.loss_mask.numpy(),
        random(num, seed=2) * batch.loss_mask.numpy(),
    )
    batch.ref_logprobs = torch.tensor(ref)
    cfg = DPOLossConfig(beta=0.2, nll_coef=0.5, length_normalized=normalized)
    leaf = torch.tensor(logprobs, requires_grad=True)
    loss, metrics = preference.dpo(cfg).token_loss(batch, leaf, None)
    policy, reference = (
        [
            v.sum() / (len(v) if normalized else 1)
            for v in (
                u[t.sampled]
                for u, t in zip(unpack(torch.tensor(x), rows, batch), rows, strict=True)
            )
        ]
        for x in (logprobs, ref)
    )
    mean = [
        v[t.sampled].mean()
        for v, t in zip(unpack(torch.tensor(logprobs), rows, batch), rows, strict=True)
    ]
    z = np.array(
        [policy[i] - reference[i] - policy[i + 1] + reference[i + 1] for i in range(0, 10, 2)]
    )
    np.testing.assert_allclose(
        loss.detach().numpy(), -log_sigmoid(0.2 * z) - 0.5 * np.array(mean[::2]), atol=1e-12
    )
    np.testing.assert_allclose(metrics["margin"].numpy(), 0.2 * z, atol=1e-12)
    loss.sum().backward()
    slope = -0.2 * (1 - 1 / (1 + np.exp(-0.2 * z)))  # d loss / d z of a pair
    for i, (t, got) in enumerate(zip(rows, unpack(leaf.grad, rows, batch), strict=True)):
        length = t.sampled.sum()
        wanted = slope[i // 2] * (1 - 2 * (i % 2)) / (length if normalized else 1) - (
            0 if i % 2 else 0.5 / length
        )
        np.testing.assert_allclose(got, wanted * t.sampled, atol=1e-12)


# --------------------------------------------------------------------------------------------------
# every mesh


def step(mesh, folder, budget, sequence, score):
    Qwen3RMSNorm.forward = exact_norm
    cfg = PolicyConfig(dtype="float64", max_grad_norm=0.0)
    policy = Policy(cfg, folder, mesh, score=score, sequence_parallel=sequence)
    if score:  # it starts at 0, which gives the body no gradient
        with torch.no_grad():
            for p in (p for n, p in policy.shards().items() if n == "score.weight"):
                assert not p.full_tensor().any()
                whole = torch.linspace(-1, 1, p.numel(), dtype=p.dtype).reshape(p.shape)
                p.copy_(
                    torch.distributed.tensor.distribute_tensor(whole, p.device_mesh, p.placements)
                )
        loss = preference.reward_model(RewardModelLossConfig(center_coef=0.1))
    else:
        ref = Policy(cfg, folder.parent / "ref", mesh, trainable=False, sequence_parallel=sequence)
        loss = preference.dpo(DPOLossConfig(nll_coef=0.3, length_normalized=True, beta=2.0))
    grads, take = {}, policy.optimizer.step
    policy.optimizer.step = lambda: (
        grads.update({n: p.grad.full_tensor() for n, p in policy.shards().items()}),
        take(),
    )
    rows = pairs_of(9, score=score)
    own = (
        rows[: 3 + 15 * mesh.rank][3 * mesh.rank :]
        if mesh.world_size == 2
        else rows[mesh.rank :: mesh.world_size]
    )
    if budget:
        (micros,) = exchange(own, mesh, budget, whole_groups=True)
    else:
        micros = [rows[i : i + 2] for i in range(0, len(rows), 2)]
    batches = [pack(m, mesh.device, layout=policy.layout, pairs=True) for m in micros]
    if not budget:  # the oracle: a pair at a time, and nothing shared
        for batch, m in zip(batches, micros, strict=True):
            batch.__dict__.update(vars(pack_apart(m, mesh.device)))
    if not score:
        ref.annotate([batches], "ref_logprobs")
    scores = []
    if score:
        judge = rm.RewardModel(policy, [9], 1, budget or 1000)
        policy.sleeper.wake_parameters()
        scores = [((t.group, t.episode), x) for t, x in zip(own, judge(own), strict=True)]
    measured = policy.measure(batches, loss)
    metrics = policy.update(batches, loss, lr=1e-3)
    assert all(measured[name] == metrics[name] for name in measured)
    return {
        "scores": dict(scores),
        "grads": grads,
        "metrics": metrics,
        "micros": [[(t.group, t.episode) for t in m] for m in micros],
    }


def pack_apart(pair, device):
    from minirl.batch import packing

    lay_out = packing._lay_out
    packing._lay_out = lambda rows, layout: [
        packing.Sequence(t, 0, len(t.tokens) - 1) for t in rows
    ]
    try:
        return pack(pair, device, pairs=True)
    finally:
        packing._lay_out = lay_out


def reference_apart(mesh, folder, other):
    """Log-probs of a reference in the policy's batches, and in batches for it alone."""
    policy = Policy(PolicyConfig(dtype="float32"), folder, mesh)
    model = Policy(PolicyConfig(dtype="float32"), other, mesh, trainable=False)
    ref = Reference(policy, model)
    rows = pairs_of(6, score=False)
    found = []
    for batches in (
        make_minibatch(rows, policy, 80, ref=ref, pairs=True),
        make_minibatch(rows, model, 80, pairs=True),
    ):
        ref.annotate([batches])
        found.append(torch.cat([batch.ref_logprobs[batch.loss_mask] for batch in batches]))
    policy.measure(make_minibatch(rows, policy, 80, ref=ref, pairs=True), losses.sft())
    return found


@pytest.mark.parametrize("family", ["mistral", "qwen3_next"])
def test_a_reference_may_have_windows_or_states_that_the_policy_has_not(tmp_path, family):
    policy, other = tiny.make(tmp_path / "policy"), tiny.make(tmp_path / "other", family)
    ((with_policy, alone),) = ranks(1, reference_apart, policy, other)
    assert with_policy.abs().max() > 1
    torch.testing.assert_close(with_policy, alone)


MESHES = {
    "dp 2": (2, ParallelConfig(), False),
    "tp 2, sequence": (2, ParallelConfig(tensor=2, sequence=True), True),
    "cp 2, ring": (2, ParallelConfig(context=2, context_engine="ring"), False),
    "hsdp 2 x cp 2": (4, ParallelConfig(replicate=2, context=2), False),
}


@pytest.fixture(scope="module", params=[True, False], ids=["reward model", "DPO"])
def one_process(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny.make(folder / "ref", dtype=torch.float64, seed=1)
    tiny.make(folder / "model", dtype=torch.float64, tied=True)
    (wanted,) = ranks(1, step, folder / "model", 0, False, request.param)
    return folder / "model", request.param, wanted


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_is_one_process(one_process, mesh):
    folder, score, wanted = one_process
    world, parallel, sequence = MESHES[mesh]
    results = ranks(world, step, folder, 80 // parallel.context, sequence, score, parallel=parallel)
    for result in results:
        assert len(result["micros"]) >= 2 and wanted["metrics"]["grad_norm"] > 0
        for micro in result["micros"]:  # pairs are whole
            assert len(micro) % 2 == 0 and sorted(micro) == sorted(
                (g, e) for g in {g for g, _ in micro} for e in range(2)
            )
        assert worst(result["grads"], wanted["grads"]) < 1e-12
        for name, value in wanted["metrics"].items():
            assert result["metrics"][name] == pytest.approx(value, rel=1e-11, abs=1e-13), name
    found = {key: x for result in results for key, x in result["scores"].items()}
    assert (
        found == {key: pytest.approx(x, rel=1e-11) for key, x in wanted["scores"].items()}
        and len(found) == 18 * score
    )


# --------------------------------------------------------------------------------------------------
# rows

HI, YO, NO, BYE = (
    {"role": role, "content": content}
    for role, content in (
        ("user", "hi there"),
        ("assistant", "yo!"),
        ("assistant", "go away"),
        ("user", "bye"),
    )
)


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load_pairs(source, cfg):
    return read_all(open_examples(source, "data.train", cfg, ALONE))


def test_every_layout_gives_the_same_pair(tmp_path):
    wanted = {"prompt": [HI], "chosen": [YO], "rejected": [NO], "margin": 0.0}
    for row in (
        {"prompt": "hi there", "chosen": "yo!", "rejected": "go away"},
        {"prompt": [HI], "chosen": [YO], "rejected": [NO]},  # TRL
        {"chosen": [HI, YO], "rejected": [HI, NO]},
        {"prompt": "hi there", "chosen": [HI, YO], "rejected": [HI, NO]},
        {"instruction": "hi", "input": "there", "chosen": "yo!", "rejected": "go away"},
        {"input": "hi there", "chosen": "yo!", "rejected": "go away"},
        {"messages": [HI, YO], "chosen": "yo!", "rejected": "go away"},  # of a chat to imitate
        {"messages": [HI, YO], "chosen": [HI, YO], "rejected": [HI, NO]},
    ):  # without a prompt; OpenRLHF
        asked = HI | {"content": "hi\n\nthere"} if "instruction" in row else HI
        found = load_pairs(written(tmp_path / "a.jsonl", [row]), PairsConfig())[0]
        assert found == wanted | {"prompt": [asked]}
    system = {"role": "system", "content": "be kind"}
    whole = {"prompt": "hi there", "chosen": [system, HI, YO], "rejected": [system, HI, NO]}
    path = written(tmp_path / "whole.jsonl", [whole])
    for cfg in (PairsConfig(), PairsConfig(system_prompt="be brief")):
        assert load_pairs(path, cfg)[0] == wanted | {"prompt": [system, HI]}
    long = {"chosen": [HI, YO, BYE, YO, HI, YO], "rejected": [HI, YO, BYE, NO], "margin": 2}
    texts = {"chosen": "Human: hi Assistant: yo", "rejected": "Human: hi Assistant: no"}
    rows = load_pairs(
        written(tmp_path / "b.jsonl", [long, texts]),
        PairsConfig(system_prompt="be brief"),
    )
    assert rows[0] == {
        "prompt": [{"role": "system", "content": "be brief"}, HI, YO, BYE],
        "chosen": [YO, HI, YO],
        "rejected": [NO],
        "margin": 2.0,
    }
    assert rows[1] == {**texts, "margin": 0.0}
    named = PairsConfig(prompt_key="q", chosen_key="good", rejected_key="bad", margin_key="by")
    assert load_pairs(
        written(
            tmp_path / "c.jsonl", [{"q": "hi there", "good": "yo!", "bad": "go away", "by": 0.5}]
        ),
        named,
    )[0] == wanted | {"margin": 0.5}
    gym = load_pairs("reasoning_gym:spell_backward?size=5&seed=1", PairsConfig())
    assert (
        len(gym) == 5
        and all(row["chosen"] != row["rejected"] for row in gym)
        and {row["rejected"][0]["content"] for row in gym}
        <= {row["chosen"][0]["content"] for row in gym}
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "chosen": "b"},
            r"line 2: data.rejected_key = 'rejected' must name a text or messages, not empty \(the "
            r"row has prompt, chosen\); correct the row, or set data.rejected_key",
        ),
        (
            {"prompt": "a", "chosen": " ", "rejected": "b"},
            "line 2: data.chosen_key = 'chosen' must name a text or messages, not empty, not ' '",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": []},
            "line 2: data.rejected_key = 'rejected' must name a text or messages",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": [NO]},
            "line 2: one side of the pair is a text and the other a list of messages",
        ),
        (
            {"prompt": 7, "chosen": "b", "rejected": "c"},
            "line 2: data.prompt_key = 'prompt' must name a text or messages",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"},
            "line 2: data.margin_key = 'margin' must name a finite number, not 'much'",
        ),
        (
            {"chosen": [YO], "rejected": [NO]},
            "line 2: the chosen side must answer the prompt that both share, and end by an "
            "assistant's turn",
        ),
        ({"chosen": [HI, YO], "rejected": [HI]}, "line 2: the rejected side must answer"),
        (
            {"chosen": [HI, YO], "rejected": [HI, {**YO, "content": "b", "weight": 0}]},
            "line 2: rejected: the last assistant turn has the weight 0",
        ),
        (
            {"prompt": [HI], "chosen": [{"role": "assistant", "content": ""}], "rejected": [NO]},
            "line 2: the chosen side must answer .* not empty",
        ),
        (["a"], "line 2: a row must be an object of named values, not a list"),
    ],
)
def test_a_row_that_is_no_pair_is_refused_with_its_line(tmp_path, row, message):
    with pytest.raises(UserError, match=rf"data.train = .*a.jsonl: {message}"):
        load_pairs(
            written(tmp_path / "a.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}, row]),
            PairsConfig(),
        )


def encode(mesh, rows, max_tokens, score):
    pairs = Pairs(
        memory_rows(rows),
        make_tokenizer([]),
        [1],
        PairsConfig(max_tokens=max_tokens),
        mesh,
        ThreadPoolExecutor(1),
        score=score,
        seed=3,
    )
    step = pairs.examples(range(2 * len(pairs)))
    return {
        "kept": list(encoded_rows(pairs)),
        "lost": step.num_lost,
        "num_rows": step.num_rows,
        "examples": [
            (t.group, t.episode, t.tokens.tolist(), t.sampled.tolist(), t.reward) for t in step.here
        ],
    }


def test_a_side_of_a_single_token_is_refused_where_it_would_be_trained_on():
    """Nothing is sampled after no token; a score is given to it all the same."""
    rows = [{"chosen": "a yes", "rejected": "<|end|>", "margin": 0.0}]
    [scored] = ranks(1, encode, rows, 40, True)
    assert len(scored["examples"]) == 4
    with pytest.raises(RankFailed, match="a side of the pair is a single token"):
        ranks(1, encode, rows, 40, False)


def test_equal_and_long_pairs_are_dropped_and_counted():
    pair = {"prompt": [HI], "chosen": [YO], "rejected": [NO], "margin": 1.5}
    text = {"chosen": "a yes", "rejected": "a no", "margin": 0.0}
    rows = [
        pair,
        pair | {"rejected": [YO]},
        text,
        pair | {"chosen": [{"role": "assistant", "content": "x" * 50}]},
    ]
    for score in (False, True):
        results = ranks(2, encode, rows, 40, score)
        assert sorted(results[0]["kept"] + results[1]["kept"]) == [0, 2]
        assert all(r["lost"] == [2, 2] and r["num_rows"] == 4 for r in results)  # two epochs
        examples = sorted(e for r in results for e in r["examples"])
        assert [e[1] for e in examples] == 4 * [0, 1]
        ids = {True: [], False: []}
        for _, _, tokens, sampled, reward in examples:
            prompt, answer = tokens[: sampled.index(True)], tokens[sampled.index(True) :]
            assert (
                all(sampled[len(prompt) :])
                and answer[-1] == 1
                and (not score or answer[-2:] == [1, 1])
            )
            ids[reward == 1.5] += [prompt]
        assert len(ids[True]) == 2
    assert (
        ids[True]
        == [
            make_tokenizer([]).apply_chat_template(
                [HI], add_generation_prompt=True, return_dict=True
            )["input_ids"]
        ]
        * 2
    )
    with pytest.raises(
        RankFailed,
        match=(
            r"of 2 rows none is left \(pairs_too_long 1, pairs_equal 1\); correct them or raise "
            "data.max_tokens = 40"
        ),
    ):
        ranks(2, encode, rows[1::2], 40, True)


# --------------------------------------------------------------------------------------------------
# export


def scored(mesh, folder, output, rows):
    """Train a little, export, load the export; the scores of all three."""
    policy = Policy(PolicyConfig(dtype="float32"), folder, mesh, score=True)
    (micros,) = exchange(rows[mesh.rank :: mesh.world_size], mesh, 200, whole_groups=True)
    batches = [pack(m, mesh.device, layout=policy.layout, pairs=True) for m in micros]
    for _ in range(3):
        policy.update(batches, preference.reward_model(RewardModelLossConfig()), 1e-3)
    exporting.export(policy, output)
    out = []
    for model in (
        policy,
        Policy(PolicyConfig(dtype="float32"), output, mesh, score=True, trainable=False),
    ):
        model.annotate([batches], "values")
        found = {
            (t.group, t.episode): float(v[-1])
            for b, m in zip(batches, micros, strict=True)
            for t, v in zip(m, unpack(b.values, m, b), strict=True)
        }
        out.append({k: v for part in mesh.gather(found) for k, v in part.items()})
    return out


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mixtral"])
def test_transformers_gives_the_same_scores(tmp_path, family):
    folder = tiny.make(tmp_path / "model", family)
    rows = pairs_of(6, score=False)
    for t in rows:  # the end, and one more, which nobody reads
        t.tokens, t.sampled = (
            np.append(t.tokens, [1, 9]).astype(np.int32),
            np.append(t.sampled, [True, True]),
        )
        t.logprobs = np.zeros(len(t.tokens), np.float32)
    trained, loaded = ranks(2, scored, folder, tmp_path / "out", rows)[0]
    assert trained == loaded and len(trained) == 12
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token_id == 0
    lengths = [len(t.tokens) - 1 for t in rows]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    for row, t in zip(ids, rows, strict=True):
        row[: len(t.tokens) - 1] = torch.from_numpy(t.tokens[:-1].astype(np.int64))
    with torch.no_grad():
        scores = model.eval()(ids, attention_mask=(ids != 0).long()).logits[:, 0].tolist()
    wanted = [trained[t.group, t.episode] for t in rows]
    assert scores == pytest.approx(wanted, rel=1e-5, abs=1e-6) and np.std(wanted) > 1e-3


def test_a_token_that_ends_answers_does_not_fill_up():
    tokenizer = make_tokenizer([])
    assert filling_token_id(tokenizer, [1], "m") == 0
    tokenizer.pad_token = "<|end|>"
    with pytest.raises(
        UserError, match="m: its tokenizer has no pad token other than what ends an answer"
    ):
        filling_token_id(tokenizer, [1], "m")
    tokenizer.bos_token = "<|user|>"
    assert filling_token_id(tokenizer, [1], "m") == 3
    # As Qwen3: no bos, and pad ends answers, too; another special token ends nothing.
    tokenizer.bos_token = None
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    assert filling_token_id(tokenizer, [1], "m") == 3


# --------------------------------------------------------------------------------------------------
# programs


def run(mesh, module, given):
    trainer, config = {
        "minirl.rm": (rm.RewardModelTrainer, RMConfig),
        "minirl.dpo": (dpo.DPOTrainer, DPOConfig),
    }[module]
    trainer.main(parse_flags(config, [str(x) for x in given]), mesh)


def export(mesh, run, output):
    export_checkpoint(ExportConfig(command="export", run=str(run), output=str(output)), mesh)


def flags(folder, output, *more):
    return [
        *as_flags(f"""
        --output {output} --policy.model {folder}/model --policy.dtype float32
        --policy.lr 1e-3 --data.train {folder}/pairs.jsonl --data.held-out 6
        --data.max-tokens 48 --tokens-per-rank 128 --batch-size 8 --num-steps 6 --eval.every 2
    """),
        *more,
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    tiny.make(folder / "model")
    written(
        folder / "pairs.jsonl",
        [
            {
                "prompt": f"say {n}",
                "chosen": str(n) * 3,
                "rejected": "no" * (n % 5 + 1),
                "margin": 0.1,
            }
            for n in range(30)
        ],
    )
    return folder


def test_held_out_pairs_that_are_lost_are_said_once(folder, tmp_path):
    pairs = [{"prompt": "say", "chosen": str(n), "rejected": "no" * n} for n in (2, 40, 50)]
    held_out = written(tmp_path / "held_out.jsonl", pairs)
    more = ["--data.eval", held_out, "--num-steps", 2, "--eval.every", 1]
    ended = fork("minirl.dpo", flags(folder, tmp_path / "run", *more), tmp_path / "log")
    said = "step 0: of 3 held-out rows, up to data.max_tokens = 48: pairs_too_long 2, pairs_equal 0"
    assert ended.code == 0 and ended.err.count(said) == 1 and ended.err.count("of 3") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="bitwise repeatable on CPU only")
@pytest.mark.parametrize("module", ["minirl.rm", "minirl.dpo"])
def test_resumed_run_is_the_uninterrupted_run(folder, tmp_path, module):
    output, again = tmp_path / "run", tmp_path / "again"
    ranks(
        2,
        run,
        module,
        flags(folder, output, "--checkpoint.every", 2, "--checkpoint.best-metric", "accuracy"),
    )
    train, evaluations = rows_of(output, "train"), rows_of(output, "eval")
    assert [row["step"] for row in evaluations] == [0, 2, 4, 6] and evaluations[-1][
        "loss"
    ] < evaluations[0]["loss"] == pytest.approx(
        np.log(2), abs=1e-6 if module == "minirl.dpo" else 0.1
    )
    assert {"accuracy", "margin", "loss", "grad_norm"} <= train[0].keys()
    assert (
        json.loads((output / "summary.json").read_text())["accuracy_after"]
        == evaluations[-1]["accuracy"]
    )
    shutil.copytree(output, again)
    for name in ("model", "checkpoints/step-6"):
        shutil.rmtree(again / name)
    ranks(2, run, module, ["--config", output / "config.yaml", "--output", again, "--resume"])
    ranks(1, export, output, tmp_path / "exported")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "exported" / name).read_bytes() == (output / "model" / name).read_bytes()
    assert rows_of(again, "train") == train and rows_of(again, "eval") == evaluations
    assert (again / "model" / "model.safetensors").read_bytes() == (
        output / "model" / "model.safetensors"
    ).read_bytes()


BAD = {
    "one-sided": (
        "rm",
        ["--data.rejected-key", "no"],
        ["line 1: data.rejected_key = 'no' must name", "or set data.rejected_key to another"],
    ),
    "pair does not fit": (
        "dpo",
        ["--tokens-per-rank", 95],
        ["tokens_per_rank = 95", "2 * data.max_tokens = 96"],
    ),
    "smoothing of another loss": (
        "dpo",
        ["--algo.loss", "ipo", "--algo.label-smoothing", 0.1],
        ["algo.label_smoothing = 0.1, algo.loss = 'ipo': it belongs to the loss sigmoid"],
    ),
    "no beta": ("dpo", ["--algo.beta", 0], ["algo.beta = 0.0 should be greater than 0"]),
    "nobody loads it": (
        "rm",
        ["--policy.model", "{folder}/cohere"],
        ["no sequence classification model of family 'cohere'"],
    ),
    "another vocabulary": (
        "dpo",
        ["--reference", "{folder}/wide"],
        ["reference = ", "vocabulary of 300", "take a model with the same tokenizer"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_one_message(folder, tmp_path, name):
    program, more, says = BAD[name]
    for family, config in (("cohere", {}), ("wide", {"vocab_size": 300})):
        if not (folder / family).exists():
            tiny.make(folder / family, family if family == "cohere" else "qwen3", **config)
    given = flags(
        folder,
        tmp_path / "out",
        *(x.format(folder=folder) if isinstance(x, str) else x for x in more),
    )
    ended = fork(f"minirl.{program}", given, tmp_path / "log")
    assert ended.code == 2 and len(ended.errors()) == 1, ended.err
    assert all(text in ended.errors()[0] for text in says), ended.errors()


@pytest.mark.parametrize("program", ["rm", "dpo"])
def test_recipe_learns_the_rule_on_held_out_pairs(tmp_path, program):
    """A sixth of its steps, on shorter words. Held-out accuracy: share of pairs with the chosen
    answer's score (DPO: rewarded margin) on the right side."""
    words = "reasoning_gym:spell_backward?min_word_len=3&max_word_len=4&size=4000&seed=1"
    ranks(
        2,
        run,
        f"minirl.{program}",
        as_flags(f"""
            --config {ROOT}/configs/{program}_spell_backward.yaml --output {tmp_path}/out
            --num-steps 32 --policy.lr-warmup-steps 10 --data.train {words} --data.held-out 128
            --eval.every 0
        """),
    )
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (
        summary["accuracy_before"] == 0
        and summary["accuracy_after"] >= 0.9
        and summary["loss_after"] < 0.4 < summary["loss_before"]
    )


# --------------------------------------------------------------------------------------------------
# serving


def export_scored(mesh, folder, out):
    """A reward model whose head is not 0."""
    policy = Policy(PolicyConfig(dtype="float32"), folder, mesh, score=True)
    with torch.no_grad():
        policy.shards()["score.weight"].normal_(generator=torch.Generator().manual_seed(3))
    exporting.export(policy, out)


def scores_of_equal_answers(mesh, folder):
    """Of three different answers to two prompts, each several times, in micro-batches of few."""
    policy = Policy(PolicyConfig(dtype="float32"), folder, mesh, trainable=False, score=True)
    judge = rm.RewardModel(policy, [9], 1, 20)
    policy.sleeper.wake_parameters()
    rows = []
    for number in range(12):
        tokens = [[5, 6, 7, 8, 10], [5, 6, 7, 11], [5, 6, 7, 8, 10, 12]][number % 3]
        rows.append(
            Trajectory(
                tokens=np.array(tokens, np.int32),
                sampled=np.arange(len(tokens)) > 1,
                logprobs=np.zeros(len(tokens), np.float32),
                group=2 * mesh.rank + number // 6,
                episode=number,
            )
        )
    alone = [judge([row] if mesh.rank == 0 else []) for row in rows[:3]]
    num_read = []

    def counting(examples, *args):
        num_read.append(len(examples))
        return exchange(examples, *args)

    frozen.exchange = counting
    return judge(rows), [score for scores in alone for score in scores], num_read


def test_equal_answers_of_a_group_have_the_same_score_to_the_bit(tmp_path):
    """They are read once: in other micro-batches their scores would differ by rounding."""
    ranks(1, export_scored, tiny.make(tmp_path / "model"), tmp_path / "scored")
    results = ranks(2, scores_of_equal_answers, tmp_path / "scored")
    alone = results[0][1]
    for found, _, num_read in results:
        assert num_read == [6]
        np.testing.assert_allclose(found, alone * 4, rtol=1e-5)
        assert len(set(found[:6])) == len(set(found[6:])) == 3


def test_a_served_model_gives_the_scores_of_transformers(tmp_path):
    """The program itself, asked by the reward that minirl.rl would ask with."""
    ranks(1, export_scored, tiny.make(tmp_path / "model"), tmp_path / "scored")
    held, port = hold_port("127.0.0.1")
    server = alone(
        "minirl.rm",
        as_flags(f"""
            serve {tmp_path}/scored --port {port} --dtype float32 --max-tokens 64
            --tokens-per-batch 100
        """),
        tmp_path / "log",
    )

    def up():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True

    try:
        server.wait_for(up, 120)
        reward = RemoteReward(f"http://127.0.0.1:{port}/get_reward", RewardConfig())
        answers = [("ask", "yes"), ("ask", "no <|end|>"), ("other" * 20, "long"), ("", "z")]
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda a: reward("", a[1], {"rendered_prompt": a[0]}), answers))
    finally:
        server.process.kill()
        server.end(10)
        held.close()
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "scored", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "scored")
    with torch.no_grad():
        for (prompt, answer), score in zip(answers, got, strict=True):
            ids = tokenizer(prompt + answer, add_special_tokens=False)["input_ids"][-63:]
            ids = ids if ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]
            assert score == pytest.approx(
                model(torch.tensor([ids])).logits.item(), abs=1e-4
            )  # scores are about 5; norms round inside
    assert len({round(x, 4) for x in got}) == 4
