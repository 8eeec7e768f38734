"""KTO: the loss is its formula and TRL's, every mesh is one process, the estimate of the KL pairs
the rows of a step in their order, programs resume and learn."""

import json
import random
import shutil
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import tiny
from harness import ranks
from in_memory import ALONE, memory_rows, read_all
from minirl import kto
from minirl.algo import preference
from minirl.base.errors import UserError
from minirl.batch.packing import pack
from minirl.config.parse import parse_flags
from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.config.supervised import KTOConfig, KTOLossConfig, LabelledConfig
from minirl.data import examples
from minirl.data.examples import Labelled
from minirl.data.formats import open_examples
from minirl.model.scratch import make_tokenizer
from minirl.train.frozen import Reference
from minirl.train.policy import Policy
from minirl.types.packed import Trajectory
from programs import ROOT, fork, rows_of
from test_gradients import exact_norm, worst

# --------------------------------------------------------------------------------------------------
# the loss


def judged(num: int, seed: int = 5) -> list[Trajectory]:
    """Ragged answers and, as episode 1, those of the row before; two of three are wanted."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(5, 250, 1 + 3 * group % 20) for group in range(num)]
    answers = [rng.integers(5, 250, rng.integers(1, 15)) for _ in range(num)]
    out = []
    for group, prompt in enumerate(prompts):
        for episode, answer in enumerate((answers[group], answers[group - 1])):
            tokens = np.concatenate([prompt, answer]).astype(np.int32)
            out.append(
                Trajectory(
                    tokens=tokens,
                    sampled=np.arange(len(tokens)) >= len(prompt),
                    logprobs=np.zeros(len(tokens), np.float32),
                    group=group,
                    episode=episode,
                    reward=-1.0 if group % 3 == 2 else 1.0,
                )
            )
    return out


def fake_batch(rows, logprobs, ref):
    """A packed batch whose answers have these log-probs in sum."""
    batch = pack(rows, torch.device("cpu"), single=True)
    num = len(batch.inputs)
    of_rows = torch.zeros(num, dtype=torch.float64)
    of_ref = torch.zeros(num, dtype=torch.float64)
    ends = np.cumsum(batch.sequences.lengths) - 1
    for sequence, ids in enumerate(batch.sequences.ids):
        if batch.sequences.loss_tokens[sequence]:
            of_rows[ends[sequence]] = logprobs[ids[0]]
            of_ref[ends[sequence]] = ref[ids[0]]
    return batch, of_rows, of_ref


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_the_loss_and_its_gradient_are_those_of_trl(loss):
    """TRL's own code, on a model that says the log-probs that it is to say."""
    # Late, because ranks import this file, and need no TRL.
    from trl.trainer.kto_trainer import KTOTrainer

    num = 12
    rows = judged(num)
    own_rows = [t for t in rows if t.episode == 0]
    wanted = [t.reward > 0 for t in own_rows]
    rng = np.random.default_rng(2)
    values = {name: rng.normal(size=num) * 3 - 9 for name in ("own", "ref", "kl", "ref_kl")}
    values["kl"] += 1.5  # so that the estimate is above 0
    cfg = KTOLossConfig(loss=loss, beta=0.3, desirable_weight=0.7, undesirable_weight=1.6)

    # 1. TRL: its loss is a method of its trainer, which asks for little of one.
    leaf = torch.tensor(values["own"], requires_grad=True)
    per_token = torch.zeros(num, 3, dtype=torch.float64)
    outputs = SimpleNamespace(
        log_probs=torch.cat([per_token, leaf[:, None]], 1),
        entropy=torch.zeros(num, 4),
        mean_logits=torch.zeros(num, 4),
    )
    mismatched = torch.tensor(values["kl"])
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=loss == "kto",
        loss_type=loss,
        beta=cfg.beta,
        desirable_weight=cfg.desirable_weight,
        undesirable_weight=cfg.undesirable_weight,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        state=SimpleNamespace(),
        _compute_kl_logps=lambda model, batch: mismatched if loss == "kto" else None,
    )
    batch = {
        "label": torch.tensor(wanted),
        "input_ids": torch.ones(num, 5, dtype=torch.int64),
        "attention_mask": torch.ones(num, 5, dtype=torch.int64),
        "completion_mask": torch.ones(num, 5, dtype=torch.int64),
        "ref_logps": torch.tensor(values["ref"]),
        "ref_KL_logps": torch.tensor(values["ref_kl"]),
    }
    theirs = KTOTrainer._compute_loss(trainer, lambda **_: outputs, batch, False)
    theirs.backward()

    # 2. Here.
    packed, logprobs, ref = fake_batch(own_rows, values["own"], values["ref"])
    others, of_others, ref_of_others = fake_batch(
        [t for t in rows if t.episode == 1], values["kl"], values["ref_kl"]
    )
    others.old_logprobs, others.ref_logprobs = of_others, ref_of_others
    packed.ref_logprobs = ref
    packed.preference.baseline = preference.kto_baseline([others], lambda sums: sums)
    own = logprobs.clone().requires_grad_()
    per_answer, metrics = preference.kto(cfg).token_loss(packed, own, None)
    per_answer.mean().backward()

    assert per_answer.mean().item() == pytest.approx(theirs.item(), rel=1e-12)
    parts = unpack_in_order(own.grad, packed)
    gradient = torch.stack([part.sum() for part in map(torch.as_tensor, parts)])
    assert torch.allclose(gradient, leaf.grad, rtol=1e-12, atol=0)
    assert packed.preference.baseline.item() == pytest.approx(
        (values["kl"] - values["ref_kl"]).mean()
    )
    if loss == "kto":
        assert metrics["kl"][0].item() == pytest.approx(trainer._metrics["train"]["kl"][0])


def unpack_in_order(values, batch):
    """The value at the end of each answer, by group."""
    ends = np.cumsum(batch.sequences.lengths) - 1
    found = {}
    for sequence, (group, _, _) in enumerate(batch.sequences.ids):
        if batch.sequences.loss_tokens[sequence]:
            found[group] = values[ends[sequence]]
    return [found[group] for group in sorted(found)]


def test_the_estimate_is_never_below_0_and_rows_without_any_are_0():
    rows = [t for t in judged(6) if t.episode == 1]
    batch, logprobs, ref = fake_batch(rows, np.full(6, -5.0), np.full(6, -3.0))
    batch.old_logprobs, batch.ref_logprobs = logprobs, ref
    assert preference.kto_baseline([batch], lambda sums: sums).item() == 0.0
    batch.old_logprobs, batch.ref_logprobs = ref, logprobs
    assert preference.kto_baseline([batch], lambda sums: sums).item() == pytest.approx(2.0)
    nothing = pack([], torch.device("cpu"), single=True)
    nothing.old_logprobs = nothing.ref_logprobs = torch.zeros(len(nothing.inputs))
    assert preference.kto_baseline([nothing], lambda sums: sums).item() == 0.0


# --------------------------------------------------------------------------------------------------
# every mesh


class Steps(kto.KTOTrainer):
    """The steps of the program, without its folder and its rows."""

    def __init__(self, cfg, mesh, folder):
        self.cfg = cfg
        self.mesh = mesh
        self.tokens_per_rank = cfg.tokens_per_rank
        self.policy = Policy(cfg.policy, folder, mesh, sequence_parallel=cfg.parallel.sequence)
        self.timer = self.policy.timer
        frozen = Policy(
            cfg.policy,
            folder.parent / "ref",
            mesh,
            trainable=False,
            sequence_parallel=cfg.parallel.sequence,
        )
        self.ref = Reference(self.policy, frozen)


def take_steps(mesh, folder, budget, parallel, num_steps):
    Qwen3RMSNorm.forward = exact_norm
    cfg = KTOConfig(
        tokens_per_rank=budget,
        parallel=parallel,
        policy=PolicyConfig(dtype="float64", max_grad_norm=0.0),
        algo=KTOLossConfig(beta=2.0, desirable_weight=0.8),
    )
    trainer = Steps(cfg, mesh, folder)
    taken = []
    step = trainer.policy.optimizer.step

    def keep_gradients():
        shards = trainer.policy.shards().items()
        taken.append({name: p.grad.full_tensor() for name, p in shards})
        step()

    trainer.policy.optimizer.step = keep_gradients
    metrics = []
    num_micro = []
    for number in range(num_steps):
        rows = judged(9, seed=number)
        batches = trainer.make_batches(
            rows[2 * mesh.rank :: mesh.world_size * 2]
            + rows[2 * mesh.rank + 1 :: mesh.world_size * 2]
        )
        num_micro.append(len(batches))
        metrics.append(
            trainer.name_metrics(trainer.policy.update(batches, trainer.make_loss(), 1e-3))
        )
    return {"gradients": taken, "metrics": metrics, "num_micro": num_micro}


MESHES = {
    "dp 2": (2, ParallelConfig()),
    "tp 2, sequence": (2, ParallelConfig(tensor=2, sequence=True)),
    "cp 2, ring": (2, ParallelConfig(context=2, context_engine="ring")),
    "hsdp 2 x tp 2": (4, ParallelConfig(replicate=2, tensor=2)),
}
NUM_STEPS = 2


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny.make(folder / "ref", dtype=torch.float64, tied=True)
    tiny.make(folder / "model", dtype=torch.float64, seed=1)
    (wanted,) = ranks(1, take_steps, folder / "model", 10_000, ParallelConfig(), NUM_STEPS)
    return folder / "model", wanted


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_is_one_process(one_process, mesh):
    folder, wanted = one_process
    world, parallel = MESHES[mesh]
    budget = 60 // parallel.context
    results = ranks(world, take_steps, folder, budget, parallel, NUM_STEPS, parallel=parallel)
    assert wanted["num_micro"] == [1, 1] and min(results[0]["num_micro"]) >= 2
    assert wanted["metrics"][0]["kl"] > 0 and wanted["metrics"][0]["grad_norm"] > 0
    for result in results:
        assert worst(result["gradients"][0], wanted["gradients"][0]) < 1e-11
        for step in range(1, NUM_STEPS):  # Adam divides by deviations of hardly more than rounding
            assert worst(result["gradients"][step], wanted["gradients"][step]) < 1e-7
        for name, value in wanted["metrics"][0].items():
            assert result["metrics"][0][name] == pytest.approx(value, rel=1e-11, abs=1e-13), name
        for name, value in wanted["metrics"][-1].items():
            assert result["metrics"][-1][name] == pytest.approx(value, rel=1e-7, abs=1e-9), name


# --------------------------------------------------------------------------------------------------
# rows

HI = {"role": "user", "content": "hi there"}
YO = {"role": "assistant", "content": "yo!"}


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(source, cfg):
    return list(read_all(open_examples(source, "data.train", cfg, ALONE)))


def test_every_layout_gives_the_same_row(tmp_path):
    wanted = {"messages": [HI, YO], "trained": [1], "label": True}
    for row in (
        {"prompt": "hi there", "completion": "yo!", "label": True},
        {"prompt": [HI], "completion": [YO], "label": True},  # TRL
        {"prompt": [HI], "completion": [YO], "label": 1},
        {"messages": [HI, YO], "label": True},
    ):
        assert load(written(tmp_path / "a.jsonl", [row]), LabelledConfig()) == [wanted]
    named = LabelledConfig(label_key="good")
    row = {"prompt": "hi there", "completion": "yo!", "good": False}
    assert load(written(tmp_path / "b.jsonl", [row]), named) == [wanted | {"label": False}]
    # An answer that only calls a tool.
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    (row,) = load(
        written(tmp_path / "c.jsonl", [{"messages": [HI, calls], "label": 1}]), LabelledConfig()
    )
    assert row["trained"] == [1] and row["messages"][1]["tool_calls"]
    generated = load("reasoning_gym:spell_backward?size=40&seed=1", LabelledConfig())
    right = [
        row["messages"][0]["content"].split()[-1][::-1] == row["messages"][1]["content"]
        for row in generated
    ]
    assert right == [row["label"] for row in generated] and 10 < sum(right) < 30


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "completion": "b"},
            "data.label_key = 'label' must name true or false .*the row has prompt, completion",
        ),
        (
            {"prompt": "a", "completion": "b", "label": "yes"},
            "must name true or false .* not 'yes'",
        ),
        ({"prompt": "a", "completion": "b", "label": 0.5}, "must name true or false .* not '0.5'"),
        ({"prompt": "a", "completion": "b", "label": 2}, "must name true or false .* not '2'"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "'chosen' and 'rejected' are for minirl.dpo",
        ),
        ({"text": "a", "label": True}, "a plain text has no answer to judge"),
        ({"prompt": "a", "completion": " ", "label": True}, "must be a text that is not empty"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                    {"role": "user", "content": "c"},
                    {"role": "assistant", "content": "d", "weight": 0},
                ],
                "label": True,
            },
            "the last assistant turn has the weight 0",
        ),
        (
            {"prompt": "a", "label": True},
            "data.messages_key = 'messages' must name messages, or",
        ),
    ],
)
def test_a_row_that_is_not_judged_is_refused_with_its_line(tmp_path, row, message):
    good = {"prompt": "a", "completion": "b", "label": True}
    with pytest.raises(UserError, match=rf"line 2.*{message}"):
        load(written(tmp_path / "a.jsonl", [good, row]), LabelledConfig())


def encode(mesh, rows, max_tokens):
    labelled = Labelled(
        memory_rows(rows),
        make_tokenizer([]),
        [1],
        LabelledConfig(max_tokens=max_tokens),
        mesh,
        ThreadPoolExecutor(1),
        seed=3,
    )
    tokenizer = make_tokenizer([])
    step = labelled.examples(range(len(rows)))
    return {
        "order": labelled.order.rows(0, len(rows)).tolist(),
        "lost": step.num_lost,
        "num_tokens": step.num_tokens,
        "examples": [
            (
                t.group,
                t.episode,
                t.reward,
                tokenizer.decode(t.tokens[~t.sampled]),
                tokenizer.decode(t.tokens[t.sampled]),
                len(t.tokens),
            )
            for t in step.here
        ],
    }


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_estimate_takes_the_answer_of_the_row_before_whatever_the_ranks(world):
    rows = []
    for number in range(7):
        content = chr(ord("a") + number) * (60 if number == 3 else 2)
        answer = {"role": "assistant", "content": content}
        question = {"role": "user", "content": str(number)}
        rows.append({"messages": [question, answer], "trained": [1], "label": number % 2 == 0})
    results = ranks(world, encode, rows, 40)
    order = [row for row in results[0]["order"] if row != 3]  # one is too long
    examples = sorted(e for result in results for e in result["examples"])
    assert all(result["lost"] == [1, 0] for result in results) and len(examples) == 12
    own = [e for e in examples if e[1] == 0]
    others = [e for e in examples if e[1] == 1]
    for place, row in enumerate(order):
        assert str(row) in own[place][3] and own[place][2] == (1.0 if row % 2 == 0 else -1.0)
        assert own[place][4].startswith(chr(ord("a") + row) * 2)
        assert others[place][3] == own[place][3] and others[place][4] == own[place - 1][4]
    assert all(result["num_tokens"] == sum(e[5] for e in own) for result in results)


def test_the_estimate_takes_an_answer_to_another_prompt():
    rows = []
    for number in range(8):
        answer = {"role": "assistant", "content": chr(ord("a") + number)}
        question = {"role": "user", "content": str(number // 4)}
        rows.append({"messages": [question, answer], "trained": [1], "label": True})
    (result,) = ranks(1, encode, rows, 40)
    others = [e for e in result["examples"] if e[1] == 1]
    assert len(others) == 8
    for _, _, _, prompt, answer, _ in others:
        assert ("0" in prompt) == (answer[0] in "efgh")


@pytest.mark.parametrize("world", [1, 2])
def test_it_is_the_nearest_such_row_before_it(world):
    """Many rows have one of three prompts, and some rows are too long."""
    rng = random.Random(5)
    questions = [rng.choice("001") if number % 7 else "2" for number in range(60)]
    rows = []
    for number, question in enumerate(questions):
        content = f"{number:02}" + "x" * 60 * (rng.random() < 0.2)
        answer = {"role": "assistant", "content": content}
        turns = [{"role": "user", "content": question}, answer]
        rows.append({"messages": turns, "trained": [1], "label": True})
    results = ranks(world, encode, rows, 40)
    found = {e[:2]: e for result in results for e in result["examples"]}
    order = results[0]["order"]
    is_kept = [(place, 0) in found for place in range(60)]
    assert 30 < sum(is_kept) < 60
    for place in np.flatnonzero(is_kept):
        before = place - 1
        while not is_kept[before] or questions[order[before]] == questions[order[place]]:
            before -= 1
        assert found[place, 1][4][:2] == f"{order[before]:02}"


def count_comparisons(mesh, num_rows: int) -> int:
    """How many prompts are taken from rows, nearly all of which have the same one."""
    asked = []
    prompt_of = examples._prompt_of
    with mock.patch.object(examples, "_prompt_of", lambda t: asked.append(0) or prompt_of(t)):
        rows = []
        for number in range(num_rows):
            answer = {"role": "assistant", "content": "a"}
            question = {"role": "user", "content": "q" if number else "other"}
            rows.append({"messages": [question, answer], "trained": [1], "label": True})
        encode(mesh, rows, 40)
    return len(asked)


def test_rows_of_one_prompt_are_not_walked_over_for_each_of_them():
    (few,) = ranks(1, count_comparisons, 50)
    (many,) = ranks(1, count_comparisons, 400)
    # Of this step, and as much of the next one as is encoded by then.
    assert few <= 10 * 50 and many <= 10 * 400


# --------------------------------------------------------------------------------------------------
# programs


def run(mesh, given):
    kto.KTOTrainer.main(parse_flags(KTOConfig, [str(x) for x in given]), mesh)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    tiny.make(folder / "model")
    rows = [
        {
            "prompt": f"say {n}",
            "completion": str(n) * 3 if n % 2 else "no" * (n % 5 + 1),
            "label": n % 2 == 1,
        }
        for n in range(30)
    ]
    written(folder / "judged.jsonl", rows)
    return folder


def flags(folder, output, *more):
    settings = {
        "--output": output,
        "--policy.model": folder / "model",
        "--policy.dtype": "float32",
        "--policy.lr": 1e-3,
        "--data.train": folder / "judged.jsonl",
        "--data.held-out": 6,
        "--data.max-tokens": 48,
        "--tokens-per-rank": 128,
        "--batch-size": 8,
        "--num-steps": 6,
        "--eval.every": 2,
    }
    return [x for pair in settings.items() for x in pair] + list(more)


@pytest.mark.parametrize(
    ("share", "desirable", "undesirable", "expected"),
    [
        (0.5, 1.0, -0.5, {"reward_desirable": 2.0, "reward_undesirable": -1.0, "margin": 3.0}),
        (1.0, 1.0, 0.0, {"reward_desirable": 1.0}),
        (0.0, 0.0, -1.0, {"reward_undesirable": -1.0}),
    ],
)
def test_answers_of_a_kind_that_is_not_there_have_no_mean(share, desirable, undesirable, expected):
    measured = {"share_desirable": share, "reward_desirable": desirable}
    measured["reward_undesirable"] = undesirable
    assert kto.KTOTrainer.name_metrics(None, measured) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="bitwise repeatable on CPU only")
def test_resumed_run_is_the_uninterrupted_run(folder, tmp_path):
    output, again = tmp_path / "run", tmp_path / "again"
    given = flags(folder, output, "--checkpoint.every", 2, "--checkpoint.best-metric", "margin")
    ranks(2, run, given)
    train, evaluations = rows_of(output, "train"), rows_of(output, "eval")
    assert [row["step"] for row in evaluations] == [0, 2, 4, 6]
    assert evaluations[0]["loss"] == pytest.approx(0.5, abs=1e-6)  # 1 - sigmoid(0)
    assert evaluations[0]["kl"] == pytest.approx(0.0, abs=1e-5)
    assert evaluations[-1]["loss"] < evaluations[0]["loss"] and evaluations[-1]["margin"] > 0
    assert {"accuracy", "margin", "kl", "reward_desirable", "reward_undesirable"} <= train[0].keys()
    shutil.copytree(output, again)
    for name in ("model", "checkpoints/step-6"):
        shutil.rmtree(again / name)
    ranks(2, run, ["--config", output / "config.yaml", "--output", again, "--resume"])
    assert rows_of(again, "train") == train and rows_of(again, "eval") == evaluations
    assert (again / "model" / "model.safetensors").read_bytes() == (
        output / "model" / "model.safetensors"
    ).read_bytes()


BAD = {
    "one row a batch": (
        ["--batch-size", 1],
        "algo.loss = 'kto': kto estimates the KL by answers of other rows",
    ),
    "no weight": (
        ["--algo.desirable-weight", 0, "--algo.undesirable-weight", 0],
        "nothing is left to learn",
    ),
    "no column": (["--data.label-key", "good"], "data.label_key = 'good' must name true or false"),
    "another vocabulary": (
        ["--reference", "{folder}/wide"],
        "take a model with the same tokenizer",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_one_message(folder, tmp_path, name):
    more, says = BAD[name]
    if not (folder / "wide").exists():
        tiny.make(folder / "wide", vocab_size=300)
    given = [str(x).format(folder=folder) for x in flags(folder, tmp_path / "out", *more)]
    ended = fork("minirl.kto", given, tmp_path / "log")
    assert ended.code == 2 and len(ended.errors()) == 1, ended.err
    assert says in ended.errors()[0]


def test_recipe_learns_the_rule_on_held_out_answers(tmp_path):
    """Half of its steps, of half as many shorter words."""
    words = "reasoning_gym:spell_backward?min_word_len=3&max_word_len=4&size=4000&seed=1"
    recipe = ROOT / "configs" / "kto_spell_backward.yaml"
    less = ["--num-steps", 96, "--batch-size", 64, "--data.train", words, "--eval.every", 0]
    less += ["--data.held-out", 128]
    # Low bits differ between CPUs, and move accuracies by 2 %: with this seed it is about 0.94.
    less += ["--seed", 3]
    ranks(2, run, ["--config", recipe, "--output", tmp_path / "out", *less])
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["accuracy_before"] == 0 and summary["accuracy_after"] >= 0.85
    assert summary["loss_after"] < 0.4 < summary["loss_before"] and summary["margin_after"] > 0.5
