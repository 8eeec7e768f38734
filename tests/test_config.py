"""File and flags make one config; what is wrong in either is told by its name; settings that cannot
work are refused before anything runs."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from minirl.base.errors import UserError
from minirl.config.parse import fill_config, load_config, parse_flags, program_of
from minirl.config.policy import PolicyConfig
from minirl.config.rl import RLConfig
from minirl.config.shared import EvalConfig, EvaluateConfig, ExportConfig, SamplingConfig
from minirl.config.supervised import DPOConfig, KTOConfig, RMConfig, SFTConfig
from minirl.config.validate import (
    resolve_lengths,
    validate_rl,
    validate_sampling,
    validate_supervised,
)
from minirl.config.values import to_yaml
from minirl.envs import Agent, Env
from minirl.run.evaluation import eval_sampling
from minirl.run.inputs import check_endpoint
from run_folders import save_config


def check_rl(cfg, world_size):
    """What minirl.rl does with its config first."""
    resolve_lengths(cfg)
    validate_rl(cfg, world_size)


def check_sampling(cfg):
    """What minirl.evaluate does with its config first."""
    resolve_lengths(cfg)
    validate_sampling(cfg)


CONFIGS = Path(__file__).parent.parent / "configs"
PROGRAMS = {
    "rl": RLConfig,
    "evaluate": EvaluateConfig,
    "sft": SFTConfig,
    "rm": RMConfig,
    "dpo": DPOConfig,
    "kto": KTOConfig,
}


def written(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return str(path)


# --------------------------------------------------------------------------------------------------
# file and flags


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    file = written(
        tmp_path,
        "num_steps: 7\nseed: 3\npolicy:\n  lr: 1e-4\n  betas: [0.8, 0.9]\n"
        "data:\n  train: a.jsonl\n",
    )
    cfg = parse_flags(
        RLConfig,
        [
            "--seed",
            "5",
            "--config",
            file,
            "--policy.lr",
            "3e-5",
            "--policy.scratch.phrases",
            "a b",
            "c",
        ],
    )
    assert (cfg.seed, cfg.policy.lr, cfg.policy.scratch.phrases) == (5, 3e-5, ["a b", "c"])
    assert (cfg.num_steps, cfg.policy.betas, cfg.data.train) == (7, (0.8, 0.9), "a.jsonl")
    assert (cfg.policy.weight_decay, cfg.rollout) == (0.0, RLConfig().rollout)
    assert parse_flags(RLConfig, [f"--config={file}"]).seed == 3
    assert parse_flags(RLConfig, []) == RLConfig()


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--rollout.dump"], True),
        (["--rollout.dump=True"], True),
        (["--rollout.dump", "true"], True),
        (["--rollout.dump", "no"], False),
        (["--rollout.dump=False"], False),
        (["--rollout.no-dump"], False),
        (["--rollout.dump=true", "--rollout.dump", "false"], False),
    ],
)
def test_a_switch_takes_a_value(argv, value):
    cfg = parse_flags(RLConfig, [*argv, "--seed", "5"])
    assert (cfg.rollout.dump, cfg.seed) == (value, 5)


def test_a_switch_of_two_words_takes_a_value_in_either_spelling():
    for flag in ("--policy.cpu-offload", "--policy.cpu_offload"):
        assert not parse_flags(RLConfig, [f"{flag}=false"]).policy.cpu_offload
        assert parse_flags(RLConfig, [flag, "true"]).policy.cpu_offload


def test_a_value_that_is_no_boolean_is_refused():
    with pytest.raises(UserError, match=r"--rollout.dump = '2' is no boolean; give true or false"):
        parse_flags(RLConfig, ["--rollout.dump=2"])


def test_the_names_of_a_file_have_no_dashes(tmp_path):
    with pytest.raises(UserError, match=r"setting num-steps; did you mean num_steps\?"):
        parse_flags(RLConfig, ["--config", written(tmp_path, "num-steps: 3\n")])


def test_numbers_in_yaml_s_own_spellings(tmp_path):
    """YAML 1.1 reads 1e-4 as a text and 1 as an integer."""
    assert yaml.safe_load("1e-4") == "1e-4"
    policy = load_config(
        RLConfig, written(tmp_path, "policy: {lr: 1e-4, weight_decay: 1, max_grad_norm: 1.0e-2}")
    ).policy
    assert (policy.lr, policy.weight_decay, policy.max_grad_norm) == (1e-4, 1.0, 1e-2)
    assert {type(policy.lr), type(policy.weight_decay)} == {float}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_step: 3", r"unknown setting num_step; did you mean num_steps\?"),
        (
            "rollout: {max_token: 3}",
            r"unknown setting rollout.max_token; did you mean rollout.max_tokens\?",
        ),
        (
            "policy: {scratch: {layers: 2}}",
            r"unknown setting policy.scratch.layers; did you mean policy.scratch.num_layers\?",
        ),
        ("checkpoint: {zzz: 2}", r"unknown setting checkpoint.zzz; known here: every, keep"),
        ("1: 2", r"unknown setting 1;"),
        ("num_steps: many", r"num_steps = 'many' should be a valid integer"),
        ("num_steps: 3.0", r"num_steps = 3.0 should be a valid integer"),
        ("num_steps: true", r"num_steps = True should be a valid integer"),
        ("policy: {lr: fast}", r"policy.lr = 'fast' should be a valid number"),
        ("policy: {lr: true}", r"policy.lr = True should be a valid number"),
        ("policy: {lr: [1]}", r"policy.lr = \[1\] should be a valid number"),
        ("policy: {adam_eps: }", r"policy.adam_eps = None should be a valid number"),
        ("policy: {model: 3}", r"policy.model = 3 should be a valid string"),
        ("resume: 1", r"resume = 1 should be a valid boolean"),
        ("policy: {betas: 0.9}", r"policy.betas = 0.9 should be a valid array"),
        ("policy: {betas: [0.9]}", r"policy.betas = \[0.9\] has too few values"),
        ("policy: {betas: [0.9, 0.9, 1]}", r"policy.betas = \[0.9, 0.9, 1\] has too many values"),
        (
            "policy: {default_l: 1}",
            r"unknown setting policy.default_l; known here: model, .*, max_grad_norm$",
        ),
        (
            "algo: {correction: {preset: off}}",
            r"algo.correction.preset = False should be .*; YAML reads off, .* unless they are in",
        ),
        ("policy: {betas: [0.9, x]}", r"policy.betas = \[0.9, 'x'\] should be a valid number"),
        (
            "policy: {scratch: {phrases: [1]}}",
            r"policy.scratch.phrases = \[1\] should be a valid string",
        ),
        (
            "policy: {dtype: float16}",
            r"policy.dtype = 'float16' should be 'auto', 'float32', 'bfloat16' or 'float64'",
        ),
        ("engine: {sleep_level: true}", r"engine.sleep_level = True should be a valid integer"),
        ("policy: 3", r"policy = 3 must be a mapping of settings"),
        ("policy:", r"policy = None must be a mapping of settings"),
        ("- policy", r"the file = \['policy'\] must be a mapping of settings"),
        ("policy: {lr: 1", r"not valid YAML"),
    ],
)
def test_a_bad_file_is_refused_with_file_and_setting(tmp_path, text, message):
    with pytest.raises(UserError, match=rf"c\.yaml: {message}"):
        parse_flags(RLConfig, ["--config", written(tmp_path, text)])


@pytest.mark.parametrize("argv", [["--config", "none.yaml"], ["--config=none.yaml"], ["--config"]])
def test_a_missing_file_is_refused(argv):
    with pytest.raises(UserError, match=r"--config '(none\.yaml)?': no such file"):
        parse_flags(RLConfig, argv)


def test_an_empty_file_is_the_defaults(tmp_path):
    assert load_config(RLConfig, written(tmp_path, "# nothing\n")) == RLConfig()


@pytest.mark.parametrize(
    "argv",
    [
        ["--num-stepz", "3"],
        ["--num-steps", "many"],
        ["--policy.dtype", "float16"],
        ["--policy.betas", "0.9"],
    ],
)
def test_a_bad_flag_is_an_error_of_the_user(argv, capsys):
    with pytest.raises(UserError, match=f"wrong flags\n(.|\n)*{argv[0]}"):
        parse_flags(RLConfig, argv)
    assert "".join(capsys.readouterr()) == ""  # the program tells it, once for all ranks


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_alone_prints_the_help(rank, monkeypatch, capsys):
    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(SystemExit) as stop:
        parse_flags(RLConfig, ["--help"])
    assert stop.value.code == 0
    assert ("--num-steps" in "".join(capsys.readouterr())) == (rank == 0)


@pytest.mark.parametrize(
    "cls", [RLConfig, EvaluateConfig, SFTConfig, RMConfig, DPOConfig, KTOConfig]
)
def test_a_saved_config_loads_back_equal(tmp_path, cls):
    cfg = cls(seed=4)
    cfg.data.train, cfg.data.system_prompt = "a: b.jsonl", "line\n  two: # é\u2028"
    if issubclass(cls, SamplingConfig):
        cfg.rollout.temperature, cfg.engine.dtype = 1e-7, "float32"
    if cls is not EvaluateConfig:
        cfg.policy.betas, cfg.policy.scratch.phrases, cfg.policy.lr, cfg.policy.model = (
            (0.5, 1e-3),
            ["", " x: ", "yes"],
            1e22,
            "1e-4",
        )
    save_config(cfg, tmp_path / "config.yaml")
    again = load_config(cls, str(tmp_path / "config.yaml"))
    assert again == cfg
    assert parse_flags(cls, ["--config", str(tmp_path / "config.yaml")]) == cfg
    if cls is not EvaluateConfig:
        assert (
            load_config(PolicyConfig, str(tmp_path / "config.yaml"), section="policy") == cfg.policy
        )


def test_a_program_may_want_words_before_its_flags():
    assert parse_flags(ExportConfig, ["export", "runs/a", "--step", "3"]) == ExportConfig(
        command="export", run="runs/a", step=3
    )
    for argv in ([], ["export"], ["import", "runs/a"]):
        with pytest.raises(UserError, match="python -m minirl.checkpoint --help"):
            parse_flags(ExportConfig, argv)


def test_a_section_of_a_file_is_checked_like_the_whole(tmp_path):
    for text, message in (
        ("policy: {modle: a}", "unknown setting policy.modle; did you mean policy.model"),
        ("- a", r"policy = \['a'\] must be a mapping"),
        ("policy: 3", "policy = 3 must be a mapping"),
        ("policy: {lr: -1}", "c.yaml: policy.lr = -1 should be greater than or equal to 0"),
    ):
        with pytest.raises(UserError, match=message):
            load_config(PolicyConfig, written(tmp_path, text), section="policy")


def leaves(cfg, prefix=""):
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        yield from (
            leaves(value, f"{prefix}{f.name}.")
            if dataclasses.is_dataclass(value)
            else [(prefix + f.name, value)]
        )


@pytest.mark.parametrize(
    "cls", [RLConfig, EvaluateConfig, SFTConfig, RMConfig, DPOConfig, KTOConfig]
)
def test_a_file_with_any_one_setting_at_its_default_changes_nothing(tmp_path, cls):
    """Every setting can be written in a file, and none disturbs another."""
    for name, value in leaves(cls()):
        nested = list(value) if isinstance(value, tuple) else value
        for part in reversed(name.split(".")):
            nested = {part: nested}
        assert load_config(cls, written(tmp_path, yaml.safe_dump(nested))) == cls(), name


# --------------------------------------------------------------------------------------------------
# the recipes


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.name)
def test_every_recipe_loads_and_can_work_on_its_ranks(path):
    """Its own head says with which program it runs, and on how many ranks; those without, on 2."""
    commands = re.findall(
        rf"(?:--nproc-per-node (\d+) )?-m minirl\.(\w+) --config configs/{re.escape(path.name)}\b",
        path.read_text(),
    )
    assert commands, "the recipe does not say how to run it"
    num_ranks = int(commands[0][0] or 2)
    program = PROGRAMS[commands[0][1]]
    cfg = load_config(program, str(path))
    {
        RLConfig: lambda: check_rl(cfg, num_ranks),
        SFTConfig: lambda: validate_supervised(cfg, num_ranks),
        RMConfig: lambda: validate_supervised(cfg, num_ranks),
        DPOConfig: lambda: validate_supervised(cfg, num_ranks),
        KTOConfig: lambda: validate_supervised(cfg, num_ranks),
        EvaluateConfig: lambda: check_sampling(cfg),
    }[type(cfg)]()
    assert cfg.output != program().output  # two recipes would otherwise write to one folder


# --------------------------------------------------------------------------------------------------
# impossible settings


def changed(cls, **settings):
    cfg = cls()
    cfg.data.train = cfg.data.eval = "rows.jsonl"
    if cls is not EvaluateConfig:
        cfg.policy.model = "scratch"
    for name, value in settings.items():
        *path, last = name.split("__")
        target = cfg
        for part in path:
            target = getattr(target, part)
        assert hasattr(target, last)
        setattr(target, last, value)
    return cfg


def test_the_defaults_can_work_and_the_engine_s_length_is_filled_in():
    cfg = changed(RLConfig, data__max_prompt_tokens=100, rollout__max_tokens=28)
    check_rl(cfg, world_size=2)
    assert cfg.engine.max_model_len == 128
    check_rl(cfg, world_size=2)  # and twice is as good as once


IMPOSSIBLE = [
    ({"num_steps": -1}, "num_steps = -1 should be greater than or equal to 0"),
    ({"seed": -1}, "seed = -1 should be greater than or equal to 0"),
    ({"data__train": ""}, "data.train = ''"),
    (
        {"policy__model": ""},
        "policy.model = '': name the folder or hub id of the model to train by --policy.model",
    ),
    (
        {"data__apply_chat_template": False, "data__chat_template_kwargs": {"a": 1}},
        r"data.chat_template_kwargs = {'a': 1}, data.apply_chat_template = False: texts",
    ),
    (
        {"data__eval": "", "data__held_out": 0},
        "data.held_out = 0, data.eval = '': hold out at least 1",
    ),
    (
        {"data__eval": "", "data__held_out": -3},
        "data.held_out = -3 should be greater than or equal to 0",
    ),
    ({"data__max_prompt_tokens": 0}, "data.max_prompt_tokens = 0 should be greater than 0"),
    ({"rollout__max_tokens": 0}, "rollout.max_tokens = 0 should be greater than 0"),
    ({"rollout__prompts_per_step": 0}, "rollout.prompts_per_step = 0 should be greater than 0"),
    ({"rollout__samples_per_prompt": 0}, "rollout.samples_per_prompt = 0 should be greater than 0"),
    (
        {"rollout__samples_per_prompt": 1},
        "rollout.samples_per_prompt = 1, algo.advantage = 'grpo': the method compares the samples "
        "of one prompt, so it needs at least 2",
    ),
    ({"reward__weights": [float("nan")]}, "reward.weights = [nan] should be a finite number"),
    ({"rollout__temperature": 0.0}, "rollout.temperature = 0.0 should be greater than 0"),
    ({"rollout__temperature": float("nan")}, "rollout.temperature = nan should be a finite number"),
    ({"rollout__top_p": 0.9}, "rollout.top_p = 0.9"),
    ({"rollout__top_k": 20}, "top_k = 20"),
    ({"rollout__min_p": 0.1}, "min_p = 0.1"),
    ({"eval__samples": 0}, "eval.samples = 0 should be greater than 0"),
    ({"eval__temperature": -1.0}, "eval.temperature = -1.0 should be greater than or equal to 0"),
    ({"eval__every": -1}, "eval.every = -1 should be greater than or equal to 0"),
    ({"reward__threads": 0}, "reward.threads = 0 should be greater than 0"),
    (
        {"engine__max_num_seqs": -1},
        "engine.max_num_seqs = -1 should be greater than or equal to 0",
    ),
    (
        {"engine__tensor_parallel_size": 0},
        "engine.tensor_parallel_size = 0 should be greater than 0",
    ),
    (
        {"engine__tensor_parallel_size": 3},
        "engine.tensor_parallel_size = 3: it does not divide the 2 ranks",
    ),
    ({"parallel__context": 0}, "parallel.context = 0 should be greater than 0"),
    (
        {"parallel__context": 4},
        "parallel.replicate = 1, parallel.context = 4, parallel.tensor = 1: their product, 4, does "
        "not divide the 2 ranks",
    ),
    (
        {"parallel__tensor": 3, "parallel__replicate": 2},
        "parallel.replicate = 2, parallel.context = 1, parallel.tensor = 3: their product, 6, does "
        "not divide the 2 ranks",
    ),
    (
        {"parallel__sequence": True},
        "parallel.sequence = True, parallel.tensor = 1: tokens are divided over",
    ),
    (
        {"parallel__experts": 3},
        "parallel.experts = 3, parallel.replicate = 1: the first does not divide the 2 ranks of a "
        "copy; use 1, 2",
    ),
    (
        {"parallel__experts": 2, "parallel__replicate": 2},
        "parallel.experts = 2, parallel.replicate = 2: the first does not divide the 1 ranks of a "
        "copy; use 1",
    ),
    (
        {"algo__correction__low": 0.5},
        "algo.correction.preset = 'tis', algo.correction.mode = None, algo.correction.low = 0.5: ",
    ),
    (
        {"algo__correction__preset": "icepop", "algo__correction__divergence": 0.1},
        "algo.correction.preset = 'icepop', algo.correction.gate = None, "
        "algo.correction.divergence = 0.1: the gate looks at the ratio; set gate",
    ),
    (
        {"algo__correction__preset": "off", "algo__correction__high": 3.0},
        "algo.correction.preset = 'off', algo.correction.level = None, algo.correction.low = None,",
    ),
    (
        {"parallel__experts_across_nodes": True},
        "parallel.experts_across_nodes = True, parallel.experts = 1: it is about",
    ),
    (
        {"parallel__context_engine": "ring"},
        "parallel.context_engine = 'ring', parallel.context = 1: it needs parallel.context above 1",
    ),
    (
        {"parallel__context": 2, "tokens_per_rank": 200},
        "tokens_per_rank = 200, parallel.context = 2: the product, 400, cannot hold one sequence "
        "of engine.max_model_len = 512",
    ),
    (
        {"engine__max_model_len": 300, "data__max_prompt_tokens": 256, "rollout__max_tokens": 64},
        "engine.max_model_len = 300, data.max_prompt_tokens = 256, rollout.max_tokens = 64: it is "
        "less than the sum, 320; set it to 0",
    ),
    (
        {"tokens_per_rank": 500},
        "the product, 500, cannot hold one sequence of engine.max_model_len = 512 tokens",
    ),
    ({"algo__updates_per_step": 0}, "algo.updates_per_step = 0 should be greater than 0"),
    (
        {"algo__updates_per_step": 3},
        "algo.updates_per_step = 3, rollout.prompts_per_step = 16: the first does not divide",
    ),
    ({"algo__dual_clip": 1.0}, "algo.dual_clip = 1.0: it must be 0 (off) or above 1"),
    ({"algo__dual_clip": -3.0}, "algo.dual_clip = -3.0: it must be 0 (off) or above 1"),
    ({"algo__clip_low": 1.1}, "algo.clip_low = 1.1 should be less than or equal to 1"),
    ({"algo__clip_low": -0.1}, "algo.clip_low = -0.1 should be greater than or equal to 0"),
    ({"algo__clip_high": -0.1}, "clip_high = -0.1 should be greater than or equal to 0"),
    ({"algo__kl_target": -1.0}, "algo.kl_target = -1.0"),
    ({"algo__kl_target": 0.1}, "algo.kl_target = 0.1, algo.kl_coef = 0.0: no KL is computed"),
    ({"algo__kl_in": "reward"}, "algo.kl_in = 'reward', algo.kl_coef = 0.0: no KL is computed"),
    (
        {"ref__every": 5},
        "ref.every = 5, algo.kl_coef = 0.0: no KL is computed and no reference is loaded",
    ),
    ({"ref__model": "teacher"}, "ref.model = 'teacher', algo.kl_coef = 0.0: no KL is computed"),
    (
        {"ref__model": "teacher", "ref__every": 5, "algo__kl_coef": 0.1},
        "ref.every = 5, ref.model = 'teacher': the policy would replace",
    ),
    (
        {"algo__advantage": "on_policy_distill"},
        "ref.model = '': the method learns from a teacher; name it with ref.model",
    ),
    (
        {
            "algo__advantage": "on_policy_distill",
            "ref__model": "teacher",
            "algo__kl_coef": 0.1,
            "algo__kl_in": "reward",
        },
        "the method takes no rewards",
    ),
    (
        {"algo__kl_coef": 0.1, "algo__kl_in": "reward", "algo__kl_estimator": "unbiased"},
        "algo.kl_in = 'reward': unbiased is about the gradient",
    ),
    (
        {"algo__whiten_tokens": True},
        "algo.whiten_tokens = True, algo.advantage = 'grpo': it belongs to reinforce_pp_baseline",
    ),
    (
        {"algo__loss": "cispo", "algo__dual_clip": 3.0},
        "algo.dual_clip = 3.0, algo.loss = 'cispo': cispo has its bound",
    ),
    ({"algo__entropy_share": 1.2}, "algo.entropy_share = 1.2 should be less than or equal to 1"),
    (
        {"critic__model": "judge"},
        "critic.model = 'judge', algo.advantage = 'grpo': only gae has a critic",
    ),
    (
        {"algo__advantage": "gae", "critic__model": "scratch"},
        "critic.model = 'scratch': leave it empty",
    ),
    ({"algo__gae_lambda": 1.1}, "algo.gae_lambda = 1.1 should be less than or equal to 1"),
    (
        {"critic__warmup_steps": 100},
        "critic.warmup_steps = 100: it leaves the policy none of the run's 100 steps",
    ),
    ({"critic__value_clip": -1.0}, "critic.value_clip = -1.0 should be greater than or equal to 0"),
    ({"critic__ema_decay": 0.9}, "critic.ema_decay = 0.9: a critic is not exported"),
    ({"critic__scratch__hidden_size": 8}, "critic.scratch = ScratchConfig"),
    ({"algo__gamma": 0.0}, "algo.gamma = 0.0 should be greater than 0"),
    ({"rollout__keep_inside": (0.5, 0.5)}, "rollout.keep_inside = (0.5, 0.5): its first number"),
    (
        {"rollout__keep_inside": (0.1, 0.9)},
        "rollout.keep_inside = (0.1, 0.9), rollout.extra_prompts = 0: it says which prompts extra",
    ),
    (
        {"debug__end_on_collapse": True, "debug__collapse_steps": 0},
        "debug.end_on_collapse = True, debug.collapse_steps = 0: nothing is looked for",
    ),
    (
        {"checkpoint__save_hf": True, "checkpoint__every": 0},
        "checkpoint.save_hf = True, checkpoint.every = 0: there are no checkpoints",
    ),
    (
        {"rollout__extra_prompts": -1},
        "rollout.extra_prompts = -1 should be greater than or equal to 0",
    ),
    (
        {"reward__overlong_tokens": 300},
        "reward.overlong_tokens = 300, env.max_tokens = 256: the first must not be more",
    ),
    (
        {
            "rollout__extra_prompts": 4,
            "rollout__samples_per_prompt": 1,
            "algo__advantage": "reinforce_pp",
        },
        "rollout.samples_per_prompt = 1: prompts are replaced if",
    ),
    (
        {"rollout__curriculum_floor": 1.5},
        "rollout.curriculum_floor = 1.5 should be less than or equal to 1",
    ),
    (
        {"rollout__curriculum_floor": 0.1, "rollout__extra_prompts": 4},
        "rollout.curriculum_floor = 0.1, rollout.extra_prompts = 4",
    ),
    (
        {"rollout__curriculum_floor": 0.1, "rollout__ahead": 4},
        "rollout.ahead = 4, rollout.replay = '': a curriculum learns from all prompts",
    ),
    (
        {"rollout__ahead": 33, "rollout__prompts_per_step": 16, "rollout__max_staleness": 2},
        "rollout.ahead = 33, rollout.prompts_per_step = 16, rollout.max_staleness = 2: the",
    ),
    (
        {"reward__model": "judge", "rollout__extra_prompts": 4},
        "a reward model scores after it; serve it",
    ),
    (
        {"reward__model": "judge", "reward__model_weight": float("inf")},
        "reward.model_weight = inf should be a finite number",
    ),
    (
        {"reward__model": "judge", "tokens_per_rank": 512},
        "the product, 512, cannot hold one sequence of engine.max_model_len + 1, for the end that "
        "reward.model reads",
    ),
    (
        {"ref__reset_optimizer": True},
        "ref.reset_optimizer = True, ref.every = 0: the state is forgotten when the reference is "
        "replaced; set ref.every",
    ),
    (
        {
            "ref__reset_optimizer": True,
            "ref__every": 5,
            "algo__kl_coef": 0.1,
            "policy__ema_decay": 0.9,
        },
        "policy.ema_decay = 0.9: the moving average would be forgotten too",
    ),
    ({"reward__clip": -1.0}, "reward.clip = -1.0 should be greater than or equal to 0"),
    (
        {"rollout__samples_per_prompt": 1, "algo__advantage": "rloo"},
        "algo.advantage = 'rloo': the method compares the samples of one prompt",
    ),
    ({"algo__kl_coef": -0.1}, "algo.kl_coef = -0.1 should be greater than or equal to 0"),
    ({"policy__lr": -1e-6}, "policy.lr = -1e-06 should be greater than or equal to 0"),
    ({"policy__lr": float("nan")}, "policy.lr = nan should be a finite number"),
    (
        {"policy__max_grad_norm": -1.0},
        "policy.max_grad_norm = -1.0 should be greater than or equal to 0",
    ),
    ({"policy__scratch__num_layers": 0}, "policy.scratch.num_layers = 0 should be greater than 0"),
    ({"checkpoint__every": -1}, "checkpoint.every = -1 should be greater than or equal to 0"),
    ({"checkpoint__keep": 0}, "checkpoint.keep = 0 should be greater than 0"),
    (
        {"checkpoint__best_metric": "loss"},
        "checkpoint.best_metric = 'loss': it is no held-out score; use one of accuracy, reward",
    ),
    (
        {"checkpoint__best_metric": "reward"},
        "checkpoint.best_metric = 'reward', checkpoint.every = 0, eval.every = 10: every "
        "checkpoint needs an evaluation",
    ),
    (
        {"checkpoint__best_metric": "reward", "checkpoint__every": 15},
        "checkpoint.every = 15, eval.every = 10: every checkpoint needs an evaluation",
    ),
    (
        {"stop_at": {"accuracy": 90.0}},
        "['accuracy'] is a share, of 1 at most; write 90 % as 0.9",
    ),
    (
        {"stop_at": {"acuracy": 0.9}},
        "['acuracy'] is no held-out score; use one of accuracy, reward, pass@1",
    ),
    (
        {"stop_at": {"accuracy": 0.9}, "eval__every": 0},
        "eval.every = 0: it needs evaluations during training",
    ),
    ({"stop_at": {"accuracy": float("nan")}}, "stop_at"),
    ({"sft__num_steps": -1}, "sft.num_steps = -1 should be greater than or equal to 0"),
    ({"sft__batch_size": 0}, "sft.batch_size = 0 should be greater than 0"),
    ({"sft__lr": -1.0}, "sft.lr = -1.0 should be greater than or equal to 0"),
    # A share given as a percentage would spoil every answer; betas of 1 or a negative decay are
    # refused by the optimizer, in a traceback.
    ({"sft__wrong_character": 60.0}, "sft.wrong_character = 60.0"),
    ({"policy__betas": (1.0, 0.9)}, "policy.betas = (1.0, 0.9)"),
    ({"policy__weight_decay": -0.1}, "policy.weight_decay = -0.1"),
    ({"policy__ema_decay": 1.0}, "policy.ema_decay = 1.0 should be less than 1"),
    ({"policy__ema_decay": -0.5}, "policy.ema_decay = -0.5 should be greater than or equal to 0"),
    (
        {"policy__cpu_offload": True, "policy__optimizer_state": "offload"},
        "policy.optimizer_state = 'offload': the first moves the state to the host already",
    ),
]


@pytest.mark.parametrize(
    ("settings", "message"),
    IMPOSSIBLE,
    ids=lambda v: ", ".join(f"{k}={x}" for k, x in v.items()) if isinstance(v, dict) else "",
)
def test_impossible_settings_are_refused_with_the_arithmetic(settings, message):
    with pytest.raises(UserError) as error:
        check_rl(
            fill_config(RLConfig, dataclasses.asdict(changed(RLConfig, **settings))), world_size=2
        )
    assert message in str(error.value)


def test_an_evaluation_samples_as_eval_says_and_else_as_rollout():
    cfg = RLConfig()
    resolve_lengths(cfg)
    assert cfg.eval_extra_tokens == 0
    plain = eval_sampling(cfg, (2,))
    assert (plain.max_tokens, plain.top_p, plain.top_k) == (256, 1.0, -1)
    assert (plain.episode_tokens, plain.context_tokens) == (256, 512)

    cfg = RLConfig()
    cfg.data.train = "a.jsonl"
    cfg.policy.model = "scratch"
    cfg.env.max_turns = 3
    cfg.eval = EvalConfig(top_p=0.7, top_k=20, max_tokens=1000, temperature=0.6)
    resolve_lengths(cfg)
    longer = eval_sampling(cfg, (2,))
    assert (longer.max_tokens, longer.top_p, longer.top_k) == (1000, 0.7, 20)
    assert (longer.temperature, longer.min_p) == (0.6, 0.0)
    assert (longer.episode_tokens, longer.context_tokens) == (3 * 1000, 256 + 3 * 1000)
    assert cfg.engine.max_model_len == 256 + 3 * 256  # of training, as before
    check_rl(cfg, 1)

    cfg = EvaluateConfig()
    cfg.rollout.top_p = 0.9
    cfg.rollout.max_tokens = 2000
    cfg.eval.max_tokens = 500
    resolve_lengths(cfg)
    shorter = eval_sampling(cfg, (2,))
    assert (shorter.max_tokens, shorter.top_p) == (500, 0.9)
    assert cfg.eval_extra_tokens == 0


def test_an_episode_may_have_fewer_tokens_than_an_answer():
    """A context has room for both, whichever is more."""
    for most, longest in ((100, 512), (1000, 1256)):
        cfg = changed(RLConfig, env__max_tokens=most, data__train="a.jsonl", policy__model="x")
        check_rl(cfg, 1)
        assert cfg.engine.max_model_len == longest


def test_one_port_is_not_for_several_engines(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    cfg = changed(RLConfig, endpoint__port=8000)
    check_endpoint(cfg, Env())
    with pytest.raises(UserError, match="endpoint.port = 8000: this machine has several engines"):
        check_endpoint(cfg, Agent())
    check_endpoint(changed(RLConfig), Agent())
    check_endpoint(changed(RLConfig, endpoint__port=8000, parallel__generators=1), Agent())
    check_endpoint(changed(RLConfig, endpoint__port=8, engine__tensor_parallel_size=2), Agent())


def test_sampling_may_be_truncated_where_nothing_is_trained():
    check_sampling(
        changed(EvaluateConfig, rollout__top_p=0.9, rollout__top_k=20, eval__temperature=0.0)
    )
    with pytest.raises(UserError, match="rollout.max_tokens = 0 should be greater than 0"):
        parse_flags(EvaluateConfig, ["--rollout.max-tokens", "0"])


@dataclasses.dataclass(kw_only=True)
class Needed(RLConfig):
    needed: float


def test_a_setting_of_the_user_s_without_a_default_is_named():
    with pytest.raises(UserError, match="needed has no default and is not set there; give it a"):
        fill_config(Needed, {"seed": 1})
    assert fill_config(Needed, {"needed": 0.5}).needed == 0.5


def test_a_path_of_the_user_s_is_written_as_a_text():
    assert to_yaml({"file": Path("a/b")}) == "file: a/b\n"


def test_a_config_of_the_user_s_may_have_further_settings():
    @dataclasses.dataclass(kw_only=True)
    class Mine(RLConfig):
        """Costs each token."""

        length_cost: float = 0.001

    cfg = parse_flags(Mine, ["--length-cost", "0.1", "--policy.lr", "1e-4"])
    assert cfg.length_cost == 0.1 and cfg.policy.lr == 1e-4
    assert program_of(Mine) == program_of(RLConfig) == "minirl.rl"
