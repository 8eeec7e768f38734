"""Every recipe as the whole program on one rank; what only a run shows: prompts replaced or drawn
by their success, a reference refreshed, a reward model beside the policy, all of it resumed, and
again on two ranks."""

import asyncio
import base64
import io
import json
import math
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoConfig, AutoModelForSequenceClassification

import tiny
from benchmarks import fits
from harness import ranks, two_at_once
from minirl import dpo, kto, rl, rm, split
from minirl.base.errors import UserError
from minirl.base.log import Timer
from minirl.base.oversight import Oversight
from minirl.checkpoint import finding
from minirl.config.parse import load_config, parse_flags
from minirl.config.policy import ParallelConfig
from minirl.config.rl import RLConfig
from minirl.config.shared import RolloutConfig
from minirl.config.supervised import DPOConfig, KTOConfig, RMConfig, SFTConfig
from minirl.config.validate import check_settings
from minirl.data.sources import open_source
from minirl.data.tokenizer import load_tokenizer
from minirl.engine.loop import EngineLoop
from minirl.envs.registry import make_env
from minirl.plan import __main__ as planner
from minirl.plan.cards import GIB
from minirl.rollout import pacing, records
from minirl.rollout.episode import EpisodeRunner
from minirl.rollout.pacing import Goal, pull
from minirl.rollout.sampler import Group, GroupScheduler, Sampler
from minirl.run.inputs import find_other_model
from minirl.run.supervised import SupervisedTrainer
from minirl.train.frozen import RewardModel
from minirl.types.packed import Trajectory
from programs import ROOT, WORDS, as_flags, fork

SCRATCH = [
    *as_flags("""
    --policy.model scratch --policy.dtype float32 --policy.scratch.phrases
"""),
    "Spell this word backward (example: sun -> nus): ",
]
RECIPES = {
    "rloo": [],
    "dr_grpo": [],
    "gspo": [],
    "cispo": [],
    "dapo": [],
    "reinforce_pp": [],
    "reinforce_pp_baseline": [],
    "quickstart_rl": [],
    "quickstart_split": [],
    "ppo": ["--critic.warmup-steps", 0],
    "on_policy_distill": ["--ref.model", "{folder}/teacher/model"],
    "smollm2_products": SCRATCH,
    "lora": ["--policy.model", "{folder}/teacher/model", "--policy.lora.rank", 4],
}
ENVIRONMENTS = (
    "sft_guess",
    "search",
    "arithmetic",
    "math",
    "countdown",
    "guess",
    "python_tool",
    "images",
    "qwen3_1.7b_1gpu",
    "qwen3_8b_8gpu",
    "qwen3_4b_split_8gpu",
    "qwen3_32b_8gpu",
    "qwen3_30b_a3b_8gpu",
    "qwen3_8b_qlora_1gpu",
    "qwen3_32b_lora_4gpu",
    "llama_70b_lora_8gpu",
)  # run by test_envs.py and test_images.py
# Recipe -> (GPUs, of which card, model of benchmarks/fits.py).
SIZED = {
    "qwen3_1.7b_1gpu": (1, "h100", "Qwen3-1.7B"),
    "qwen3_8b_8gpu": (8, "h100", "Qwen3-8B"),
    "qwen3_4b_split_8gpu": (8, "h100", "Qwen3-4B"),
    "qwen3_32b_8gpu": (8, "h100", "Qwen3-32B"),
    "qwen3_30b_a3b_8gpu": (8, "h200", "Qwen3-30B-A3B"),
    "qwen3_8b_qlora_1gpu": (1, "rtx4090", "Qwen3-8B"),
    "qwen3_32b_lora_4gpu": (4, "h100", "Qwen3-32B"),
    "llama_70b_lora_8gpu": (8, "h100", "Llama-3.3-70B"),
}
SUPERVISED = {
    "sft": (SupervisedTrainer, SFTConfig),
    "rm": (rm.RewardModelTrainer, RMConfig),
    "dpo": (dpo.DPOTrainer, DPOConfig),
    "kto": (kto.KTOTrainer, KTOConfig),
}
EARNED = """
def vowels(prompt, completion, row):
    return sum(letter in "aeiou" for letter in completion) / 10
"""
TALKS = """
from minirl.envs import Env, Result

class Talk(Env):
    def reset(self, row):
        self.long = len(row["answer"]) > 4
        return row["prompt"]

    def step(self, state):
        return Result(
            observation="go on",
            reward=len(set(state.answer)) / 10,
            done=state.turn == (3 if self.long else 1),
            sampling={"max_tokens": 14 if self.long else 3},
            info={"long": float(self.long)},
        )
"""
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="CPU engines: bitwise repeatable there only"
)


def flags(folder: Path, name: str, *more: object, config: str = "rloo") -> list[str]:
    given = as_flags(f"""
        --config {ROOT}/configs/{config}.yaml --output {folder}/{name} --num-steps 2
        --eval.every 0 --data.held-out 2 --data.train {WORDS} --policy.scratch.num-layers 1
        --policy.scratch.hidden-size 32 --policy.lr-warmup-steps 0
        --policy.lr-schedule constant --checkpoint.every 0
    """)
    if not config.endswith("_spell_backward"):
        given += as_flags(f"""
            --sft.num-steps 0 --reward.function {folder}/reward.py:vowels
            --rollout.prompts-per-step 8 --engine.max-model-len 128
        """)
    return [str(flag).replace("{folder}", str(folder)) for flag in (*given, *more)]


STATES = as_flags("""
    --num-steps 5 --checkpoint.every 2 --rollout.extra-prompts 3
    --rollout.keep-inside 0.06 1.0 --reward.normalize --algo.kl-coef 0.1
    --algo.kl-target 0.001 --ref.every 3 --rollout.samples-per-prompt 4
    --algo.entropy-share 0.3 --algo.entropy-coef 0.01
""")
JUDGED = as_flags("""
    --num-steps 5 --checkpoint.every 2 --reward.model {folder}/judge/model
    --reward.model-weight 0.5 --eval.threshold 0.2 --rollout.curriculum-floor 0.1
    --algo.kl-coef 0.1 --ref.every 2 --ref.reset-optimizer --rollout.samples-per-prompt 4
    --policy.lr 0.003 --rollout.dump --eval.every 4
""")
TEACH = as_flags("""
    --num-steps 16 --algo.advantage on_policy_distill --policy.lr 0.005 --algo.kl-estimator k1
    --rollout.samples-per-prompt 1 --rollout.prompts-per-step 32
    --ref.model {folder}/teacher/model
""")


PARTIAL = as_flags("""
    --num-steps 5 --checkpoint.every 2 --env.name {folder}/talk.py:Talk --env.max-turns 4
    --rollout.ahead 3 --rollout.max-tokens 8 --engine.max-model-len 160
    --rollout.prompts-per-step 4 --rollout.samples-per-prompt 3 --rollout.dump
    --policy.lr 0.003
""")


def train(mesh, cases: list[list[str]]) -> None:
    """Run one after the other with one engine, whose start would be most of the time."""
    make, engines = rl.RolloutEngine, []

    def shared(cfg, folder, mesh, *, dtype, timer, vision, num_answers, guides, routes):
        if not engines:
            engines.append(make(cfg, folder, mesh, dtype=dtype, timer=timer))
            engines[0].close = lambda: None
        engines[0].timer = timer
        return engines[0]

    rl.RolloutEngine = shared
    for given in cases:
        name = Path(given[1]).stem.split("_")[0]  # of the recipe
        program, config = SUPERVISED.get(name, (rl.Trainer, RLConfig))
        program.main(parse_flags(config, given), mesh)


def train_apart(mesh, given: list[str]) -> None:
    split.main(parse_flags(RLConfig, given), mesh)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folder with a folder of each run."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "reward.py").write_text(EARNED)
    (folder / "talk.py").write_text(TALKS)
    taught = ("on_policy_distill", "lora")  # recipes that need the teacher
    split_recipe = "quickstart_split"  # needs two ranks
    judged = [
        flags(
            folder,
            name,
            "--eval.every",
            1,
            "--checkpoint.every",
            1,
            config=f"{name}_spell_backward",
        )
        for name in SUPERVISED
    ]
    judged += [flags(folder, "judge", "--policy.lr", 0.03, config="rm_spell_backward")]
    judged += [
        flags(folder, "judged", *JUDGED),
        flags(folder, "judged_parts", *JUDGED, "--num-steps", 4),
        flags(folder, "judged_parts", *JUDGED, "--resume"),
        flags(folder, "only_judge", *JUDGED, "--reward.function", "", "--num-steps", 1),
    ]
    judged += [
        flags(folder, name, *more, config=name)
        for name, more in RECIPES.items()
        if name not in (*taught, split_recipe)
    ]
    judged += [
        flags(folder, "ppo_annotated", *RECIPES["ppo"], "--algo.entropy-share", 1.0, config="ppo")
    ]
    cases = [
        flags(folder, "teacher", "--num-steps", 0, "--sft.num-steps", 25, "--sft.batch-size", 32),
        flags(folder, "student", *TEACH),
    ]
    cases += [flags(folder, name, *RECIPES[name], config=name) for name in taught]
    cases += [
        flags(folder, "whole", *STATES),
        flags(folder, "parts", *STATES, "--num-steps", 4),
        flags(folder, "parts", *STATES, "--resume"),
    ]
    cases += [
        flags(folder, "partial", *PARTIAL),
        flags(
            folder,
            "replayed",
            *PARTIAL[:4],
            "--rollout.replay",
            "{folder}/partial/rollouts",
            *PARTIAL[4:8],
            "--policy.lr",
            3e-3,
        ),
    ]
    with two_at_once({"judged": (1, train, judged), "others": (1, train, cases)}) as results:
        for future in results.values():
            future.result()
    ranks(2, train, [flags(folder, "judged_2", *JUDGED), flags(folder, "student_2", *TEACH)])
    given = flags(folder, split_recipe, config=split_recipe)
    ranks(2, train_apart, given, parallel=ParallelConfig(generators=1))
    return folder


def rows(folder: Path, phase: str = "rl") -> list[dict]:
    return [
        row
        for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        if row["phase"] == phase
    ]


def repeatable(rows: list[dict]) -> list[dict]:
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(("time/", "tokens_per_second/", "host_gib/"))
        }
        for row in rows
    ]


def test_the_recipe_of_a_real_model_fits_any_cpu_and_draws_no_more_than_it_needs():
    cfg = load_config(RLConfig, str(ROOT / "configs" / "smollm2_products.yaml"))
    assert (cfg.policy.dtype, cfg.engine.dtype) == ("auto", "auto")
    questions = [row["question"] for row in open_source(cfg.data.train, "data.train").rows]
    assert len(set(questions)) == 100 and len(set(questions[:-1])) == 99


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_trains_two_steps(runs, name):
    assert {p.stem for p in (ROOT / "configs").glob("*.yaml")} == RECIPES.keys() | {
        f"{name}_spell_backward" for name in SUPERVISED
    } | set(ENVIRONMENTS)
    found = rows(runs / name)
    assert [row["step"] for row in found] == [0, 1]
    for row in found:
        assert all(math.isfinite(v) for v in row.values() if not isinstance(v, str)), row
        assert row["grad_norm"] > 0 and row["skipped_updates"] == 0
    if name == "reinforce_pp":
        assert (
            found[0]["ref_kl"] == pytest.approx(0, abs=1e-4)
            and found[1]["ref_kl"] != found[0]["ref_kl"]
        )


@pytest.mark.parametrize("name", SUPERVISED)
def test_supervised_recipe_trains_two_steps(runs, name):
    found = rows(runs / name, "train")
    assert [row["step"] for row in found] == [0, 1] and all(
        row["grad_norm"] > 0 and math.isfinite(row["loss"]) for row in found
    )


@pytest.mark.parametrize("name", SIZED)
def test_sized_recipe_fits_by_the_planner(name, tmp_path):
    """And is the best that the planner knows for its model; its head says what the planner does."""
    num_gpus, card, model = SIZED[name]
    path = ROOT / "configs" / f"{name}.yaml"
    command = f"--config configs/{name}.yaml --gpus {num_gpus} --gpu {card}"
    head = path.read_text().partition("output:")[0]
    assert f"-m minirl.plan {command}\n" in head

    fits.MODELS[model].save_pretrained(tmp_path)
    given = command.replace("configs/", f"{path.parent}/").split()
    plan, advised, _ = planner.plan_of_flags([*given, "--policy.model", str(tmp_path)])
    assert plan.lacks == ""
    gib = f"{plan.peak / GIB:.1f} of {plan.limit / GIB:.1f} GiB"
    assert f"at most {gib} a GPU, {plan.step_seconds:.0f} s a step." in head
    assert advised[0].changes == ()


def test_printed_plan_is_what_the_planner_says(tmp_path, monkeypatch, capsys):
    page = (ROOT / "minirl" / "plan" / "README.md").read_text()
    shown = page.partition("```text\n")[2].partition("```")[0].splitlines()
    fits.MODELS["Qwen3-32B"].save_pretrained(tmp_path)
    flags = ["--config", str(ROOT / "configs" / "math.yaml"), "--policy.model", str(tmp_path)]
    flags += ["--gpus", "8", "--gpu", "h100"]
    monkeypatch.setattr("sys.argv", ["plan", *flags])
    assert planner.main() == 2
    out = capsys.readouterr().out.replace(str(tmp_path), "Qwen/Qwen3-32B").splitlines()
    for line in shown:
        begin, _, end = line.partition("[...]")
        assert any(real.startswith(begin) and real.endswith(end) for real in out), line


def test_ppo_without_annotation_is_ppo_with_it(runs):
    """With one update a step old log-probs are the update's own; a share of 1 of the tokens asks
    for them all the same."""
    weights = [
        (runs / name / "model" / "model.safetensors").read_bytes()
        for name in ("ppo", "ppo_annotated")
    ]
    assert weights[0] == weights[1]


def test_resumed_run_with_every_state_is_the_uninterrupted_one(runs):
    """Extra tickets, the adapted KL weight, running reward statistics and the refreshed reference
    all come back."""
    whole, resumed = rows(runs / "whole"), rows(runs / "parts")
    assert any(row["extra_prompts"] > 0 for row in whole) and all(
        row["extra_prompts"] <= 3 for row in whole
    )
    assert whole[1]["kl_coef"] != whole[0]["kl_coef"] and any(
        row["shaped_reward"] != row["reward"] for row in whole
    )
    assert [row["ref_kl"] > 1e-6 for row in whole] == [
        False,
        True,
        True,
        False,
        True,
    ]  # refreshed after 3 steps
    assert repeatable(resumed) == repeatable(whole) and len(whole) == 5
    weights = [
        (runs / name / "model" / "model.safetensors").read_bytes() for name in ("parts", "whole")
    ]
    assert weights[0] == weights[1]
    assert [p.name for p in (runs / "whole" / "references").iterdir()] == ["step-3"]


def test_what_saves_take_of_training(runs):
    """A checkpoint's time is in the row after it; a reference is waited for in its step."""
    whole = rows(runs / "whole")
    assert [row["step"] for row in whole if row.get("time/checkpoint", 0) > 0] == [2, 4]
    assert whole[3]["time/export"] > 0


def test_resumed_run_with_a_curriculum_and_a_reset_optimizer_is_the_uninterrupted_one(
    runs, tmp_path
):
    """Resumed at a step that refreshes the reference and resets the optimizer first."""
    whole, resumed = rows(runs / "judged"), rows(runs / "judged_parts")
    assert repeatable(resumed) == repeatable(whole) and len(whole) == 5
    assert [row["ref_kl"] > 1e-6 for row in whole] == [False, True, False, True, False]
    assert [p.name for p in sorted((runs / "judged" / "references").iterdir())] == [
        "step-2",
        "step-4",
    ]
    weights = [
        (runs / name / "model" / "model.safetensors").read_bytes()
        for name in ("judged", "judged_parts")
    ]
    assert weights[0] == weights[1]
    outcomes = [
        json.loads((runs / name / "checkpoints" / "step-4" / "progress.json").read_text())[
            "progress"
        ]["outcomes"]
        for name in ("judged", "judged_parts")
    ]
    assert outcomes[0] == outcomes[1]
    with np.load(io.BytesIO(base64.b64decode(outcomes[0]))) as saved:
        tries, right = saved["outcomes"]
        assert len(saved["rows"]) == len(tries)
    assert tries.sum() == 4 * 8 * 4 and right.sum() > 0
    dcp_to_torch_save(runs / "judged" / "checkpoints" / "step-4" / "state", tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")["optimizer"]["state"]
    assert {int(s["step"]) for s in state.values()} == {2}  # of 4 updates, those after the reset
    assert len(tries) < 4 * 8  # some prompt was drawn again before all 98 were seen once


def test_two_ranks_train_as_one(runs):
    """A reference refreshed, an optimizer reset, a curriculum, a reward model; and a teacher."""
    for name, keys in (
        ("judged", ("reward", "reward/model", "ref_kl", "loss", "lr")),
        ("student", ("ref_kl", "loss")),
    ):
        one, two = rows(runs / name), rows(runs / f"{name}_2")
        assert len(one) == len(two) >= 5
        for a, b in zip(one, two, strict=True):
            assert {k: b[k] for k in keys} == {
                k: pytest.approx(a[k], rel=2e-3, abs=2e-5) for k in keys
            }
    assert [x["reward/model"] for x in rows(runs / "judged", "eval")] == pytest.approx(
        [x["reward/model"] for x in rows(runs / "judged_2", "eval")], rel=1e-2, abs=1e-4
    )


def test_a_reward_model_scores_what_transformers_does(runs):
    """Of every answer, with an end behind those that were cut; its weighted score is in the sum, in
    training and held out."""
    model = AutoModelForSequenceClassification.from_pretrained(
        runs / "judge" / "model", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    sampled = [
        json.loads(line)
        for line in (runs / "judged" / "rollouts" / "step-0-rank-0.jsonl").read_text().splitlines()
    ]
    assert len(sampled) == 32 and any(not t["info"]["stopped"] for t in sampled)
    with torch.no_grad():
        for t in sampled:
            info, ids = (
                t["info"],
                t["tokens"] + [model.config.eos_token_id] * (not t["info"]["stopped"]),
            )
            assert info["rewards"]["model"] == pytest.approx(
                model(torch.tensor([ids])).logits.item(), abs=1e-5
            )
            assert t["reward"] == pytest.approx(
                sum(letter in "aeiou" for letter in info["completion"]) / 10
                + 0.5 * info["rewards"]["model"]
            )
    scores = [t["info"]["rewards"]["model"] for t in sampled]
    assert np.std(scores) > 1e-3 and rows(runs / "judged")[0]["reward/model"] == pytest.approx(
        np.mean(scores), rel=1e-6
    )
    for row in rows(runs / "only_judge") + rows(runs / "only_judge", "eval"):
        assert row["reward"] == pytest.approx(0.5 * row["reward/model"]) and row["reward"] != 0


def test_references_that_no_checkpoint_needs_are_dropped(tmp_path):
    for name in (
        "checkpoints/step-20",
        "checkpoints/step-30",
        *(f"references/step-{n}" for n in (5, 15, 25, 35)),
    ):
        (tmp_path / name).mkdir(parents=True)
    finding.drop_references(tmp_path, 35)
    assert sorted(p.name for p in (tmp_path / "references").iterdir()) == [
        "step-15",
        "step-25",
        "step-35",
    ]
    for old in ("checkpoints/step-20", "checkpoints/step-30"):
        (tmp_path / old).rmdir()
    finding.drop_references(tmp_path, 35)
    assert sorted(p.name for p in (tmp_path / "references").iterdir()) == ["step-35"]


def test_references_of_later_steps_are_not_of_a_resumed_run(tmp_path):
    for n in (3, 6, 9):
        (tmp_path / f"references/step-{n}").mkdir(parents=True)
    finding.drop_later_references(tmp_path, 6)
    left = sorted(p.name for p in (tmp_path / "references").iterdir())
    assert left == ["step-3", "step-6"]


def test_a_reference_that_a_checkpoint_knows_must_be_there(tmp_path):
    assert finding.newest_reference(tmp_path, 5) is None
    for n in (3, 6):
        (tmp_path / f"references/step-{n}").mkdir(parents=True)
    assert finding.newest_reference(tmp_path, 5, 3).name == "step-3"
    with pytest.raises(UserError, match="references/step-4, to which the KL was taken, is missing"):
        finding.newest_reference(tmp_path, 5, 4)


def test_references_between_a_kept_checkpoint_and_the_newest_are_dropped(tmp_path):
    """The one that scored best may be from long ago."""
    for n in (2, 20):
        (tmp_path / f"checkpoints/step-{n}").mkdir(parents=True)
    for n in (1, 2, 4, 10, 18, 22, 24):
        (tmp_path / f"references/step-{n}").mkdir(parents=True)
    finding.drop_references(tmp_path, 24)
    left = sorted(int(p.name[5:]) for p in (tmp_path / "references").iterdir())
    assert left == [2, 18, 22, 24]


def test_a_teacher_teaches(runs):
    """An untrained student's KL to a teacher that has seen words falls by more than two thirds,
    though no reward is ever earned."""
    kl = [row["ref_kl"] for row in rows(runs / "student")]
    assert sum(kl[:3]) > 0.15 and sum(kl[-3:]) < 0.33 * sum(kl[:3]), kl


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path):
    tiny.make(tmp_path / "model")
    with pytest.raises(
        UserError, match=r"ref.model = .*model has a vocabulary of \d+, and the policy's is of 99"
    ):
        find_other_model(
            str(tmp_path / "model"),
            AutoConfig.for_model("qwen3", vocab_size=99),
            ParallelConfig(),
            "ref.model",
        )
    with pytest.raises(UserError, match="ref.model = .*nowhere"):
        find_other_model(
            str(tmp_path / "nowhere"),
            AutoConfig.for_model("qwen3", vocab_size=99),
            ParallelConfig(),
            "ref.model",
        )


def test_a_teacher_has_the_policys_tokens_and_reads_the_same_patches(tmp_path):
    """Its vocabulary may have more rows at the end, as that of a larger Qwen2.5 has."""

    def find(folder, policy):
        config = AutoConfig.from_pretrained(policy)
        tokenizer = load_tokenizer(policy)
        return find_other_model(
            str(folder), config, ParallelConfig(), "ref.model", tokenizer=tokenizer
        )

    policy = tiny.make(tmp_path / "policy")
    larger = tiny.make(tmp_path / "larger", vocab_size=320)
    assert find(larger, policy) == larger
    with pytest.raises(UserError, match="has a vocabulary of .*, and the policy's is of 320"):
        find(policy, larger)
    path = larger / "tokenizer.json"
    path.write_text(path.read_text().replace('"a":', '"qq":'))
    with pytest.raises(UserError, match="has a vocabulary of 320, and the policy's is of"):
        find(larger, policy)

    same_size = tiny.make(tmp_path / "same_size")
    path = same_size / "tokenizer.json"
    text = path.read_text().replace('"a":', '"qq":').replace('"b":', '"a":')
    path.write_text(text.replace('"qq":', '"b":'))
    with pytest.raises(
        UserError, match="other numbers for 2 of the policy's tokens, as .'[ab]', '[ab]'"
    ):
        find(same_size, policy)

    sees, otherwise = (tiny.make(tmp_path / name, name) for name in ("qwen2_5_vl", "qwen3_vl"))
    with pytest.raises(UserError, match="reads images in other patches .*'patch_size': 16"):
        find(otherwise, sees)
    assert find(tiny.make(tmp_path / "alike", "qwen2_vl"), sees)


QWEN = "Qwen/Qwen3-0.6B"
HEADS = {
    "sft_spell_backward": ("minirl.sft", {"prompt": "a" * 60, "completion": "b" * 60}),
    "dpo_spell_backward": ("minirl.dpo", {"prompt": "a" * 60, "chosen": "b", "rejected": "c"}),
    "rm_spell_backward": ("minirl.rm", {"prompt": "a" * 60, "chosen": "b", "rejected": "c"}),
    "kto_spell_backward": ("minirl.kto", {"prompt": "a" * 60, "completion": "b", "label": True}),
    "on_policy_distill": ("minirl.rl", {"prompt": "a" * 60, "answer": "b"}),
    "smollm2_products": ("minirl.rl", {"prompt": "a" * 60, "answer": "1"}),
    "arithmetic": ("minirl.rl", {}),
    "countdown": ("minirl.rl", {}),
}


@pytest.mark.parametrize("name", HEADS)
def test_flags_in_the_head_of_a_recipe_take_ones_own_rows(tmp_path, name):
    """And a model of one's own. Of a warm start on wrong answers it gets none."""
    program, row = HEADS[name]
    recipe = ROOT / "configs" / f"{name}.yaml"
    lines = [line[1:] for line in recipe.read_text().splitlines() if line.startswith("#")]
    text = " ".join(lines)
    begin = re.search("Your own rows|Another .* or |A model that can reason", text).end()
    flags = shlex.split(text[text.index(" --", begin) :])
    model = tiny.make(tmp_path / "model", max_position_embeddings=8192)
    rows = [row | {"prompt": f"{n} {row['prompt']}"} for n in range(16)] if row else []
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [path if flag.endswith(".jsonl") else flag for flag in flags]
    given = [model if flag in ("FOLDER", "LARGER_FOLDER", QWEN) else flag for flag in given]
    less = ["--output", tmp_path / "run", "--num-steps", 1, "--data.held-out", 4]
    if program == "minirl.rl":
        check_settings(parse_flags(RLConfig, [str(x) for x in ["--config", recipe, *given]]), 1)
        less += ["--rollout.max-tokens", 8]
        less += ["--rollout.prompts-per-step", 2, "--rollout.samples-per-prompt", 2]
    else:
        less += ["--batch-size", 4]
    ended = fork(program, ["--config", recipe, *given, *less], tmp_path / "log", world=1)
    assert ended.code == 0, ended.err


def test_what_is_no_reward_model_of_the_policy_is_refused(tmp_path):
    folder = tiny.make(tmp_path / "model")
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    for vocab_size, says in (
        (99, r"has a vocabulary of \d+, and the policy's is of 99"),
        (size, "is no reward model: its weights have no score.weight; train one with minirl.rm"),
    ):
        with pytest.raises(UserError, match=f"reward.model = .*model {says}"):
            find_other_model(
                str(folder),
                AutoConfig.for_model("qwen3", vocab_size=vocab_size),
                ParallelConfig(),
                "reward.model",
                scores=True,
            )


SCORE_HEADS = {
    "two scores": (2, False, None, ": its score.weight has 2 rows; that of a reward model"),
    "a bias": (1, True, True, ": its score.weight has 1 rows and a bias; that of"),
    "for a reference": (1, False, False, " is a reward model, which gives scores and no answers"),
}


@pytest.mark.parametrize("name", SCORE_HEADS)
def test_a_score_head_that_does_not_fit_is_refused_before_a_run_begins(tmp_path, name):
    num_scores, bias, scores, says = SCORE_HEADS[name]
    folder = tiny.make(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    width = tensors["model.norm.weight"].numel()
    tensors["score.weight"] = torch.ones(num_scores, width)
    if bias:
        tensors["score.bias"] = torch.ones(num_scores)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = AutoConfig.from_pretrained(folder)
    with pytest.raises(UserError, match=f"critic.model = .*model{says}"):
        find_other_model(str(folder), config, ParallelConfig(), "critic.model", scores=scores)


class Told(RewardModel):
    """Gives the scores that it was made with."""

    def __init__(self, *scores):
        sleeper = SimpleNamespace(wake_parameters=lambda: None, sleep_parameters=lambda: None)
        self.model, self.weight, self.scores = (
            SimpleNamespace(sleeper=sleeper, folder="judge"),
            0.5,
            scores,
        )

    def __call__(self, rows):
        return list(self.scores)


def said(text, episode, segment=0):
    return Trajectory(
        tokens=np.array([5, 6, 7]),
        sampled=np.array([False, True, True]),
        logprobs=np.zeros(3, np.float32),
        reward=1.0,
        episode=episode,
        segment=segment,
        info={"prompt": "two and two", "completion": text},
    )


def test_an_episode_earns_the_score_of_its_end():
    answers = [said("four", 0), said("fiv", 1, 0), said("five", 1, 1)]
    none = said("", 2)
    none.tokens = none.tokens[:0]  # Its agent asked for nothing: there is no answer to score.
    failed = said("six", 3)  # It keeps env.error_reward.
    failed.info["error"] = "the server is gone"
    Told(4.0, 7.0, -2.0).grade([*answers, none, failed])
    assert [t.reward for t in answers] == [3.0, 0.0, 0.0] and [
        t.info["rewards"] for t in answers
    ] == [{"model": 4.0}, {"model": -2.0}, {"model": -2.0}]
    for other in (none, failed):
        assert other.reward == 1.0 and "rewards" not in other.info


def test_a_score_that_is_no_number_ends_the_run():
    with pytest.raises(
        UserError,
        match="reward.model = judge scored nan for prompt 'two and two', completion 'five'",
    ):
        Told(0.5, math.nan).grade([said("four", 0), said("five", 1)])


# --------------------------------------------------------------------------------------------------
# dynamic sampling


class Recorded(Sampler):
    """Two ranks whose answers to ticket n earn means[n], one rank at a time."""

    def __init__(self, means: dict[int, float], rank: int, extra: int):
        self.means, self.rank, self.asked, self.mesh = means, rank, [], self
        self.cfg = RLConfig(rollout=RolloutConfig(prompts_per_step=4, extra_prompts=extra))
        self.runner = EpisodeRunner(None, None, RLConfig(), make_env("single_turn"))  # type: ignore[arg-type]
        self.training = GroupScheduler(self.runner)
        self.begun, self.waiting, self.prompts = {}, [], None
        self.watch = Oversight()  # Of the mesh, which hears no signal.
        self.engine = SimpleNamespace(timer=Timer(torch.device("cpu")))
        self.engine_loop = EngineLoop(self.engine, repeatable=True)

    def _run_groups(self, scheduler, make_group, tickets, num_samples, goals):
        self.asked.append(tickets)
        assert goals == [Goal(0, len(tickets))] and not self.begun
        return [
            Answered(n, 0, [self.means[n] + (-1) ** e for e in range(2)])
            for n in tickets
            if n % 2 == self.rank
        ]

    def gather_array(self, own):
        others = [n for n in self.asked[-1] if n % 2 != self.rank]
        rows = [(n, 0, 1, self.is_varied(n), 1 - self.rank) for n in others]
        other = np.array(rows, np.int64).reshape(-1, 5)
        return np.concatenate([own, other] if self.rank == 0 else [other, own])

    def is_varied(self, number):
        return not self.cfg.rollout.extra_prompts or 0 < self.means[number] < 1

    def sums(self, values):
        return values + torch.tensor([1, 0, 0, 0, 0])  # The other rank has a trajectory.


class Answered(Group):
    def num_sampled(self):
        return 10

    def trajectories(self):
        return [
            Trajectory(
                tokens=np.array([5, 6]),
                sampled=np.array([False, True]),
                logprobs=np.zeros(2, np.float32),
                reward=reward,
                group=self.ticket,
                info={"answer_tokens": 1},
                episode=e,
            )
            for e, reward in enumerate(self.episodes)
        ]


@pytest.mark.parametrize(
    ("means", "extra", "kept", "end", "rounds"),
    [
        ([0.5] * 4, 8, [0, 1, 2, 3], 4, 1),
        ([0.0, 0.5, 1.0, 0.5, 0.5, 0.5], 8, [1, 3, 4, 5], 6, 2),
        (
            [0.0, 0.5, 1.0, 0.5, 1.0, 0.5, 0.0, 0.5],
            8,
            [1, 3, 5, 7],
            8,
            4,
        ),  # one of two is missing again, twice
        (
            [0.0, 0.5, 1.0, 0.5, 1.0, 0.5],
            2,
            [0, 1, 3, 5],
            6,
            2,
        ),  # no more: the earliest of the others
        ([0.0] * 4, 0, [0, 1, 2, 3], 4, 1),
    ],
)
def test_groups_outside_the_range_are_replaced(means, extra, kept, end, rounds):
    given = dict(enumerate(means, start=10))
    got = []
    for rank in (0, 1):
        sampler = Recorded(given, rank, extra)
        rollout = sampler.collect_step(10, None, version=0)
        stop = rollout.next_ticket
        assert stop == 10 + end and len(sampler.asked) == rounds
        left_out = [n for n in range(end) if n not in kept and n % 2 == rank]
        assert rollout.discarded_tokens == 10 * len(left_out)  # of this rank: `sums` adds none
        assert [n for tickets in sampler.asked for n in tickets] == list(
            range(10, stop)
        )  # none twice, none left out
        got += [(t.group - 10, t.episode) for t in rollout.trajectories]
    assert sorted(got) == [(n, e) for n in kept for e in (0, 1)]


def test_who_has_just_got_a_completion_is_waited_for():
    """Other ranks may have done enough in the very turn in which the engine answers."""
    engine = SimpleNamespace(timer=Timer(torch.device("cpu")))
    loop = EngineLoop(engine, repeatable=False)

    async def play(episode):
        await loop.generate_for_episode(None)
        await asyncio.sleep(0.05)  # Its environment is at work.
        await loop.generate_for_episode(None)

    def is_enough(versions):
        for _, future in loop._waiting:
            future.set_result(None)
        is_answered = bool(loop._waiting)
        loop._waiting = []
        return is_answered

    async def one_run():
        episode = SimpleNamespace(number=0, ticket=0, row={})
        runner = SimpleNamespace(engine_loop=loop, makes_agents=False, run=play)
        finished = await GroupScheduler(runner).run(iter([Group(0, 0, [episode])]), 1, is_enough)
        return finished, loop.active_episodes, len(loop._waiting)

    assert asyncio.run(one_run()) == ([], 0, 1)


class Store(dict):
    num_asked = 0

    def add(self, key, number):
        self.num_asked += 1
        self[key] = self.get(key, 0) + number
        return self[key]


def test_engines_pull_from_one_queue_after_one_of_them_had_no_room_for_a_ticket():
    store = Store()
    (_, idle), (queue, busy) = [pull(range(4), [Goal(0, 4)], store, 0) for _ in range(2)]
    assert list(queue) == [0, 1, 2, 3] and busy([0] * 4) and idle([])
    (queue, first), (other, second) = [pull(range(4, 8), [Goal(0, 4)], store, 1) for _ in range(2)]
    assert [next(queue), next(other), *queue] == [4, 5, 6, 7]
    assert not first([0]) and second([0] * 3)


def test_the_store_is_asked_when_a_group_has_finished_and_else_now_and_then(monkeypatch):
    monkeypatch.setattr(pacing, "SECONDS_BETWEEN_LOOKS", 1e9)
    store = Store()
    (_, here), (_, there) = [pull(range(4), [Goal(3, 1), Goal(5, 2)], store, 0) for _ in range(2)]
    assert not any(here([]) for _ in range(1000)) and store.num_asked == 2  # one for each goal
    assert not here([5]) and not here([5]) and not there([5, 5]) and store.num_asked == 6
    assert there([5, 5, 2])  # one of them is old enough
    assert not here([5])  # it has not looked again
    monkeypatch.setattr(pacing, "SECONDS_BETWEEN_LOOKS", 0.0)
    (_, here) = pull([], [Goal(5, 2)], store, 1)
    assert not here([])
    store.add("minirl/finished/1/0", 2)
    assert here([]) and here([])


# --------------------------------------------------------------------------------------------------
# partial rollouts, dump and replay


def test_unfinished_episodes_continue_in_later_steps(runs):
    whole = rows(runs / "partial")
    assert len(whole) == 5
    assert whole[0]["staleness"] == 0 and any(row["staleness"] > 0 for row in whole)
    assert whole[0]["env/turns"] > 1 and {row["env/long"] for row in whole} != {0.0}
    # None is begun in place of another.
    assert [row["extra_prompts"] for row in whole] == [0, 0, 0, 0, 0]


def test_a_replay_without_an_engine_trains_the_same_weights(runs):
    model, replayed = (
        runs / name / "model" / "model.safetensors" for name in ("partial", "replayed")
    )
    assert replayed.read_bytes() == model.read_bytes()


def test_dumped_episodes_are_read(runs):
    file = runs / "partial" / "rollouts" / "step-1-rank-0.jsonl"
    found = list(records.read_file(file))
    assert len({(t.group, t.episode) for t in found}) == 12
    everything = [
        t for path in sorted(file.parent.glob("*.jsonl")) for t in records.read_file(path)
    ]
    assert len(everything) == 60 and any(
        len(set(t.versions.tolist())) > 2 for t in everything
    )  # -1, and two steps' weights
    assert any("<|user|>go on<|end|>" in t.info["completion"] for t in found)
    with pytest.raises(UserError, match="no such file"):
        list(records.read_file(runs / "none"))
    with pytest.raises(UserError, match="is not a trajectory"):
        list(records.read_file(runs / "reward.py"))
    with pytest.raises(
        UserError,
        match=r"rollout.replay = .* has no step-7-rank-\*.jsonl; lower num_steps, or give",
    ):
        records.load_step(file.parent, 7, SimpleNamespace(rank=0, world_size=1))
