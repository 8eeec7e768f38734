"""What a config names, found and checked before anything is trained or written.

Each function raises UserError at the first thing that is missing or cannot work.
"""

import contextlib
import glob
import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from minirl.base.errors import UserError, require
from minirl.base.files import (
    attempt,
    partial_of,
    publish_folder,
    remove,
    require_written,
    sync_files,
)
from minirl.base.log import say
from minirl.base.oversight import Oversight
from minirl.base.reading import is_file, read_json, read_text
from minirl.checkpoint import run_folder
from minirl.checkpoint.finding import Unreadable, finished
from minirl.checkpoint.state import read_description
from minirl.config.policy import Dtype, ParallelConfig
from minirl.config.rl import RLConfig
from minirl.config.shared import (
    DataConfig,
    EngineConfig,
    EvaluateConfig,
    RowsConfig,
    SamplingConfig,
    TrainingConfig,
)
from minirl.config.supervised import SupervisedConfig
from minirl.config.validate import check_settings, validate_warmup
from minirl.config.values import parse_yaml
from minirl.data.chat import Messages
from minirl.data.formats import has_calls
from minirl.data.lengths import LengthBound, check_lengths
from minirl.data.order import Mark, hash_of, read_rows
from minirl.data.prompts import Prompts, open_prompts
from minirl.data.rows import Rows, errors_at
from minirl.data.tokenizer import (
    THOUGHTS,
    check_template,
    check_tokens,
    forget_tokens,
    load_tokenizer,
    require_calls_shown,
    require_thoughts_shown,
    require_tools_shown,
    stop_token_ids,
    use_template,
)
from minirl.data.vision import Vision, read_vision
from minirl.envs import Agent, Env
from minirl.envs.registry import make_env
from minirl.model import build, causal, checks, families, scratch
from minirl.model.loading import open_weights
from minirl.parallel import tensor
from minirl.parallel.machines import (
    check_on_one_machine,
    check_same,
    check_shared,
    errors_of_all,
    ranks_of_node,
)
from minirl.parallel.mesh import World
from minirl.rewards.loading import make_rewards, try_rewards
from minirl.rewards.scoring import Rewards
from minirl.rollout import index, records
from minirl.run import user_algorithms
from minirl.run.metrics import Progress
from minirl.run.results import FINISHED

# Marks that a row of prompts gets while it is read.
UNGRADED = 1  # A reward function cannot grade it.
NO_ANSWER = 2
MAY_BE_LONG = 4
PROMPTLESS = 8  # The environment makes one.
# Marks of every row, about what a chat template has to show.
HAS_THOUGHTS = 32
HAS_TOOLS = 64
HAS_CALLS = 128
TRAINED_COLUMNS = ("messages", "chosen", "rejected")
MESSAGE_COLUMNS = (*TRAINED_COLUMNS, "prompt")
# Patterns of a model's files that have to be the same on every machine.
FILES_OF_MODELS = (
    "*.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "chat_template.jinja",
)


class ModelFiles(NamedTuple):
    """What a model's folder holds besides weights."""

    folder: Path
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    vision: Vision | None  # How the model reads images; None: it reads none.


class Inputs:
    """What the config of an RL run names, found and checked. Collective. Raises UserError.

    The order of the checks: first what is cheap, then what imports code of the user or reads files;
    rows come after models, because prompts need the tokenizer. Nothing is written before the last
    check, so a refused run leaves no files.

    Attributes:
        make_env: makes the environment of an episode.
        rewards: scores answers, in addition to the environment.
        estimator: the estimator of advantages.
        folders: folders of the models by role: policy, and those that the config names of
            reference, critic and reward model.
        prompts, held_out: rows to train on and to evaluate on, as token ids.
        num_steps: number of steps of the run.
        num_updates: optimizer steps of the policy in them.
        stop_ids: tokens that end an answer.
        description: the numbers of prompts, for the log.
        row_hashes: what stands for the rows in a checkpoint.
    """

    def __init__(self, cfg: RLConfig, mesh: World):
        # 1. Settings, and the output folder.
        check_settings(cfg, mesh.world_size)
        check_output(cfg, mesh)
        generators = cfg.parallel.generators or mesh.world_size
        check_engines(cfg.engine, mesh, first=mesh.world_size - generators)

        with errors_of_all(mesh, same_everywhere=True):
            # 2. Code of the user: environment, rewards, estimator and loss.
            code = (
                f"one of env.name = {cfg.env.name}, reward.function = {cfg.reward.function}, "
                f"algo.advantage = {cfg.algo.advantage}, algo.loss = {cfg.algo.loss}"
            )
            with limited(cfg, mesh.watch, f"to import {code}, or to make an environment,"):
                self.make_env = make_env(cfg.env.name)
                self.rewards = make_rewards(cfg.reward, mesh.watch)
                self.estimator = user_algorithms.check_methods(cfg, mesh.watch)
            if cfg.rollout.replay:
                records.check_steps(Path(cfg.rollout.replay), cfg.num_steps, resume=cfg.resume)
            env = self.make_env.example
            require(
                cfg.env.name != "single_turn" or cfg.env.max_turns == 1,
                f"env.max_turns = {cfg.env.max_turns}: single_turn has one answer; leave it at 1",
            )
            check_endpoint(cfg, env)
            if env.graded:
                self.rewards.check_supported()

            # 3. Models.
            files = find_model(cfg, mesh)
            if cfg.rollout.replay:
                check_replay(cfg, files.tokenizer)
            require(
                not files.vision or cfg.rollout.kv == "recompute",
                f"rollout.kv = keep: policy.model = {cfg.policy.model} reads images, and of a "
                "prompt that is read in parts the engine would lack an image when weights change; "
                "set rollout.kv recompute",
            )
            num_trainers = mesh.world_size - cfg.parallel.generators
            self.folders = find_rl_models(cfg, files, num_trainers)
        check_same_models(self.folders, mesh)

        # 4. Rows, which are read once, and prompts as token ids.
        checks = PromptChecks(self.rewards if env.graded else None, files.tokenizer, cfg.data)
        open_rows = partial(open_prompts, env_prompts=not env.needs_prompt)
        train, held_out = load_splits(open_rows, cfg.data, cfg.seed, mesh, checks.mark)
        checks.refuse_bad(train)
        checks.refuse_bad(held_out)
        require(
            not cfg.sft.num_steps or train.first_marked(NO_ANSWER) is None,
            f"sft.num_steps = {cfg.sft.num_steps} needs an answer in every row "
            f"(data.answer_key = {cfg.data.answer_key})",
        )
        require(
            not cfg.sft.num_steps or train.first_marked(PROMPTLESS) is None,
            f"sft.num_steps = {cfg.sft.num_steps} needs a prompt in every row (data.prompt_key = "
            f"{cfg.data.prompt_key}), and env.name = {cfg.env.name} makes some; set it to 0",
        )
        as_tokens = partial(
            Prompts, tokenizer=files.tokenizer, cfg=cfg.data, seed=cfg.seed, vision=files.vision
        )
        self.prompts = as_tokens(train)
        self.held_out = as_tokens(held_out, shuffle=False)
        num_dropped = check_lengths(self.prompts, mesh, MAY_BE_LONG, num_tickets(cfg))
        num_dropped += check_lengths(self.held_out, mesh, MAY_BE_LONG)
        self.description = (
            f"{len(self.prompts.rows)} training prompts, {len(self.held_out.rows)} held out "
            f"({num_dropped} dropped as too long)"
        )
        num_doubles = train.num_doubles + (held_out.num_doubles if cfg.data.eval else 0)
        if num_doubles:
            self.description += f", {num_doubles} left out because they equal others"

        # 5. What needs the rows.
        if env.graded and not cfg.rollout.replay:
            try_rewards(self.rewards, self.prompts, cfg.reward.threads, mesh)
        self.num_steps = num_rl_steps(cfg, len(self.prompts.rows))
        check_steps_left(cfg, self.num_steps)
        by_outcomes = cfg.rollout.curriculum_floor > 0
        self.row_hashes = check_same_rows(
            cfg, mesh, self.description, train, held_out, by_outcomes=by_outcomes
        )
        num_trained = self.num_steps
        if cfg.algo.advantage == "gae":
            num_trained -= cfg.critic.warmup_steps
        self.num_updates = num_trained * cfg.algo.num_epochs * cfg.algo.updates_per_step
        make_scratch(cfg, mesh)
        self.stop_ids = stop_token_ids(files.tokenizer, files.folder)
        torch.set_grad_enabled(True)  # A file of the user may have switched it off for itself.

    def model_configs(self) -> dict[str, dict[str, Any]]:
        """Return the values of the models' configs, by role."""
        folders = self.folders.items()
        return {role: build.read_config(folder).to_dict() for role, folder in folders}


def limited(
    cfg: TrainingConfig | EvaluateConfig, watch: Oversight, what: str
) -> AbstractContextManager[Any]:
    """End the run if a block takes longer than timeout_minutes; `what` names it in the message."""
    limit = f"timeout_minutes = {cfg.timeout_minutes:g}"
    message = f"{what} takes longer than {limit}; change it, or raise timeout_minutes"
    return watch.limit(60 * cfg.timeout_minutes, lambda: message)


def find_rl_models(cfg: RLConfig, policy: ModelFiles, num_trainers: int) -> dict[str, Path]:
    """Return the folders of all models of an RL run, by role, found and checked.

    Args:
        cfg: the config of the run.
        policy: the policy's files.
        num_trainers: how many ranks train.

    Raises:
        UserError: a model is missing or does not work with the policy or the settings.
    """
    # The rewards of dumped rollouts include the scores of a reward model already.
    scorer = "" if cfg.rollout.replay else cfg.reward.model
    others = {
        "reference": (cfg.ref.model, "ref.model"),
        "critic": (cfg.critic.model, "critic.model"),
        "reward model": (scorer, "reward.model"),
    }
    # A critic may begin with the head of a reward model.
    scores = {"reference": False, "critic": None, "reward model": True}
    folders = {"policy": policy.folder}
    configs = {"policy": policy.config}
    for role, (model, setting) in others.items():
        folder = find_other_model(
            model,
            policy.config,
            cfg.parallel,
            setting,
            scores=scores[role],
            tokenizer=policy.tokenizer,
        )
        if folder:
            folders[role] = folder
            configs[role] = build.read_config(folder)
    critic = configs.get("critic", policy.config)
    build.check_trained(policy.config, cfg.policy)
    build.check_trained(critic, cfg.critic, score=True)
    check_routers(cfg, policy.config, critic)
    # Trainers are the first ranks.
    checks.check_experts(configs, cfg.parallel, min(ranks_of_node(), num_trainers))
    return folders


def check_replay(cfg: RLConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse dumped rollouts with other tokens, or log-probs at another temperature.

    Args:
        cfg: the config of the run.
        tokenizer: the policy's.

    Raises:
        UserError: the run that wrote them had another tokenizer or temperature.
    """
    folder = Path(cfg.rollout.replay)
    dumped = folder / index.TOKENIZER
    if is_file(dumped):
        of_library = type(tokenizer.backend_tokenizer)
        require(
            of_library.from_file(str(dumped)).get_vocab() == tokenizer.get_vocab(),
            f"rollout.replay = {folder}: its tokens are not those of policy.model = "
            f"{cfg.policy.model}; take a model with the same tokenizer",
        )
    config = folder.parent / "config.yaml"
    if not is_file(config):
        return
    match parse_yaml(read_text(config, "rollout.replay:"), str(config)):
        case {"rollout": {"temperature": temperature}} if temperature != cfg.rollout.temperature:
            raise UserError(
                f"rollout.temperature = {cfg.rollout.temperature}: the log-probs in rollout.replay "
                f"= {folder} are of temperature {temperature}; set that"
            )


def num_rl_steps(cfg: RLConfig, num_prompts: int) -> int:
    """Return the number of steps of an RL run: num_steps, or as many as num_epochs takes.

    Args:
        cfg: the config of the run.
        num_prompts: number of prompts to train on.

    Raises:
        UserError: the critic's warm-up takes all of them.
    """
    if not cfg.num_epochs:
        return cfg.num_steps
    exact = cfg.num_epochs * num_prompts / cfg.rollout.prompts_per_step
    num_steps = max(1, math.ceil(exact - 1e-9))  # 0.1 * 30 is more than 3
    validate_warmup(cfg, num_steps)
    return num_steps


def num_tickets(cfg: RLConfig) -> int | None:
    """Return how many tickets a run draws at most; None: it may draw every row."""
    rollout = cfg.rollout
    if rollout.curriculum_floor or cfg.num_epochs:
        return None
    per_step = rollout.prompts_per_step + rollout.extra_prompts
    if rollout.extra_prompts:  # Groups that are begun ahead may be replaced, too.
        per_step += rollout.num_ahead
    # Groups that are begun ahead may be unfinished when the run ends.
    in_rollouts = (cfg.num_steps + 1 + rollout.max_staleness) * per_step + rollout.ahead
    return max(in_rollouts, cfg.sft.num_steps * cfg.sft.batch_size)


def check_engines(cfg: EngineConfig, mesh: World, first: int = 0) -> None:
    """Refuse an engine on several machines. Collective.

    Args:
        cfg: the engines' settings.
        mesh: the ranks.
        first: the first rank with an engine.

    Raises:
        UserError: there is one, on CPU, where its ranks share memory.
    """
    if mesh.device.type == "cpu":
        num_ranks = cfg.tensor_parallel_size
        check_on_one_machine(num_ranks, "engine.tensor_parallel_size", mesh, first)


def check_endpoint(cfg: RLConfig | EvaluateConfig, example: Env) -> None:
    """Refuse one port for the endpoints of several engines on this machine.

    Args:
        cfg: the program's config.
        example: an environment of the run.

    Raises:
        UserError: so it is.
    """
    num_ranks = ranks_of_node()
    if isinstance(cfg, RLConfig) and cfg.parallel.generators:
        num_ranks = min(num_ranks, cfg.parallel.generators)
    is_shared = isinstance(example, Agent) and num_ranks > cfg.engine.tensor_parallel_size
    require(
        not (is_shared and cfg.endpoint.port),
        f"endpoint.port = {cfg.endpoint.port}: this machine has several engines, and each has an "
        "endpoint; set it to 0, and each takes a free one",
    )


def check_same_models(folders: dict[str, Path], mesh: World) -> None:
    """Refuse models of which a file has another size on another machine. Collective.

    Args:
        folders: folders of the models by role. A hub's cache may be elsewhere on each machine. That
            of a scratch model may not exist yet.
        mesh: the ranks.

    Raises:
        UserError: for the first file that differs.
    """
    sizes = {}
    for role, folder in folders.items():
        for pattern in FILES_OF_MODELS:
            for file in sorted(folder.glob(pattern)):
                sizes[f"the size of {file.name} of the {role}"] = f"{file.stat().st_size} bytes"
    check_same(sizes, mesh)


def check_routers(cfg: RLConfig, policy: PretrainedConfig, critic: PretrainedConfig) -> None:
    """Refuse settings of routers where a model has none. Raises UserError."""
    checks.check_routers(policy, cfg.policy)
    checks.check_routers(critic, cfg.critic)
    require(
        not cfg.algo.router_replay or families.has_experts(policy),
        "algo.router_replay replays the routers of a mixture of experts, and policy.model = "
        f"{cfg.policy.model} is of family {policy.model_type}, which has none; set it to false",
    )


def check_output(cfg: TrainingConfig, mesh: World) -> None:
    """Refuse the folder of another run, and one that not all machines share. Collective.

    A resumed run's settings are compared with those that it was begun with.

    Raises:
        UserError: on all ranks.
    """
    output = Path(cfg.output)
    with errors_of_all(mesh):
        if mesh.rank == 0:  # alone, as check_shared demands
            _refuse_other_run(output, cfg.resume)
            run_folder.require_free(output)
            changed = []
            if cfg.resume:
                changed = run_folder.compare_settings(cfg, has_critic=_has_critic(output))
            if changed:
                say(f"resuming with other settings than before: {', '.join(changed)}")
    check_shared(output, "output", mesh)


def _has_critic(run: Path) -> bool:
    """Return whether the newest checkpoint of a run that can be read has a critic."""
    if not is_file(run / "config.yaml"):
        return False  # it ended before it began
    for checkpoint in reversed(finished(run).values()):
        with contextlib.suppress(Unreadable):
            return "critic" in read_description(checkpoint)
    return False


def check_steps_left(cfg: TrainingConfig, num_steps: int) -> None:
    """Refuse to resume a run that already has more steps than `num_steps`, the run's.

    Its newest weights would be evaluated and exported as those of an earlier step. Checkpoints
    whose settings nobody knows are refused, too.

    Raises:
        UserError: on all ranks, which see the same checkpoints.
    """
    newest = max(finished(Path(cfg.output)), default=0)
    require(
        not cfg.resume or newest <= num_steps,
        f"resume: the newest checkpoint of {cfg.output} is of step {newest}, and num_steps (or "
        f"num_epochs) ends the run at step {num_steps}; raise it, or remove the checkpoints after "
        f"step {num_steps} to resume from an earlier one",
    )
    require(
        not cfg.resume or not newest or is_file(Path(cfg.output) / "config.yaml"),
        f"resume: {cfg.output} holds checkpoints and no config.yaml, by which their settings are "
        "known; bring it there, too",
    )


def check_same_rows(
    cfg: RLConfig | SupervisedConfig,
    mesh: World,
    description: str,
    train: Rows,
    held_out: Rows,
    *,
    by_outcomes: bool = False,
) -> str:
    """Say if a resumed run has other rows than before. Collective.

    Args:
        cfg: the config.
        mesh: the ranks.
        description: the data in a few words.
        train: the rows to train on.
        held_out: the held-out rows.
        by_outcomes: the outcomes of rows in past steps, which a checkpoint has by their numbers,
            decide which ones come next.

    Returns:
        What stands for the rows in a checkpoint: a hash of those to train on, and of the others.

    Raises:
        UserError: on all ranks: the outcomes in the checkpoint are those of other rows.
    """
    rows = f"{hash_of(train)} {hash_of(held_out)}"
    with errors_of_all(mesh):
        before = _newest_progress(Path(cfg.output)) if cfg.resume and mesh.rank == 0 else None
        if before and before.rows not in ("", rows):  # Empty: older than these hashes.
            train_before, held_out_before = before.rows.split()
            train_now, held_out_now = rows.split()
            text = f"other data than before ({before.data})"
            effects = []
            if train_before != train_now:
                effects.append("its rows come in another order")
                require(
                    not by_outcomes or not before.outcomes,
                    f"resume: {text}, and rollout.curriculum_floor > 0 draws its rows by the "
                    "outcomes of the old ones; resume with the same data, or set it to 0",
                )
            if held_out_before != held_out_now:
                effects.append("other ones are held out")
                if not cfg.data.eval:
                    effects[-1] += (
                        ", which may have been trained on; write the old held-out rows into a file "
                        "and name it by data.eval"
                    )
            say(f"{text}: {', and '.join(effects)}")
    return rows


def _newest_progress(output: Path) -> Progress | None:
    """Return the progress in a run's newest checkpoint; None: there is none."""
    for checkpoint in reversed(finished(output).values()):
        # One that is damaged is set aside, with a message, when it is read as a whole.
        with contextlib.suppress(OSError, ValueError):
            description = json.loads((checkpoint / "progress.json").read_bytes())
            return Progress(**description["progress"])
    return None


# Files of a start that was killed while it made its model. A new start makes them again.
LEFT_BY_A_START = (
    "scratch",
    "scratch.partial",
    "scratch.replaced",
    "config.yaml.partial",
    run_folder.LOCK,
)


def _refuse_other_run(output: Path, resume: bool) -> None:
    """Raise UserError if the folder is that of another run."""
    if not os.path.lexists(output):
        return
    require(os.path.isdir(output), f"output = {output} is no folder; choose another one")
    if resume:
        summary = output / "summary.json"
        if is_file(summary) and not finished(output):
            result: Any = read_json(summary, "resume:")
            require(
                not isinstance(result, dict) or result.get("state") != FINISHED,
                f"resume: the run in {output} has ended and left no checkpoint, so that it would "
                f"begin again; to train its model further, set policy.model to {output}/model and "
                f"another output folder; to begin again, remove {summary}",
            )
        return
    try:
        names = os.listdir(output)
    except OSError as error:
        raise UserError(
            f"output = {output} cannot be read: {error}; choose another folder"
        ) from error
    in_the_way = [name for name in names if name not in LEFT_BY_A_START]
    if in_the_way:
        cure = "choose another folder with --output, or resume it by --resume"
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            cure = "ranks that torchrun starts again need --resume; above is why they ended before"
        raise UserError(f"output = {output} holds {in_the_way[0]} of another run; {cure}")


def find_model(
    cfg: RLConfig | EvaluateConfig | SupervisedConfig, mesh: World, *, chats: bool = True
) -> ModelFiles:
    """Find and check the model of a program; that of `scratch` is made by `make_scratch`.

    Args:
        cfg: the config; in a program that samples the model must work in the engine, too.
        mesh: the ranks.
        chats: whether there are chats to encode, for which the tokenizer needs a template.

    Raises:
        UserError: there is no such model, or it does not work with the settings.
    """
    if isinstance(cfg, EvaluateConfig):
        setting, model = "model", cfg.model
    else:
        setting, model = "policy.model", cfg.policy.model
    where = f"{setting} = {model}"
    tokenizer: PreTrainedTokenizerBase | None = None
    if model == "scratch" and not isinstance(cfg, EvaluateConfig):
        folder = Path(cfg.output) / "scratch"
        made = scratch.make_tokenizer(cfg.policy.scratch.phrases)
        config: PretrainedConfig = scratch.make_config(cfg.policy.scratch, made, longest(cfg))
        tokenizer = use_template(made, cfg.data)
    else:
        folder = build.find_folder(model, setting)
        config = build.read_config(folder)

    max_images = 0
    if isinstance(cfg, SamplingConfig):
        engine = cfg.engine
        max_images = engine.max_images
        # Replayed rollouts were sampled before and need no engine.
        device = None if cfg.rollout.replay else mesh.device.type
        trained_len = engine.max_model_len if isinstance(cfg, RLConfig) else 0
        checks.check_supported(config, where, engine.tensor_parallel_size, trained_len, device)
        cure = (
            "data.max_prompt_tokens + rollout.max_tokens (or eval.max_tokens), and it if it is set,"
        )
        checks.check_positions(config, where, "engine.max_model_len", longest(cfg), cure)
        if model != "scratch":
            check_head(folder, setting, scores=False)
    else:
        checks.check_supported(config, where)
        checks.check_positions(config, where, "data.max_tokens", longest(cfg), "it")
    vision = read_vision(folder, max_images) if families.reads_images(config) else None
    if isinstance(cfg, EvaluateConfig):
        require(
            glob.escape(str(folder)) == str(folder),
            f"{where}: the engine reads *, ? and [ in the path {folder} as a pattern of file "
            "names, and would find no weights; give a path without them (a symbolic link will do)",
        )
    else:
        _check_mesh(config, cfg.parallel)
        if vision:
            vision.check_ring(cfg.parallel.context_engine == "ring")
    with limited(cfg, mesh.watch, f"{where}: to render a first chat by its template"):
        if tokenizer is None:
            tokenizer = load_tokenizer(folder, cfg.data, chats=chats)
            vocab_size = config.get_text_config().vocab_size
            check_tokens(tokenizer, folder, vocab_size, where, chats=chats)
            forget_tokens(tokenizer, vocab_size)
        elif chats and cfg.data.chat_template:
            check_template(tokenizer, f"data.chat_template = {cfg.data.chat_template}")
    return ModelFiles(folder, config, tokenizer, vision)


def longest(cfg: RLConfig | EvaluateConfig | SupervisedConfig) -> int:
    """Return the most tokens of a sequence that the model reads."""
    if isinstance(cfg, SupervisedConfig):
        return cfg.data.max_tokens
    return cfg.engine.max_model_len + cfg.eval_extra_tokens


def _check_mesh(config: PretrainedConfig, parallel: ParallelConfig) -> None:
    """Refuse a mesh that does not divide a model. Raises UserError."""
    tensor.check_divides(families.divided(config), parallel.tensor)
    checks.check_heads(config, parallel.tensor, parallel.context)


def choose_dtype(asked: Dtype, setting: str, mesh: World) -> Dtype:
    """Return the dtype to compute in, and say what auto is if a CPU decides it. Collective.

    Args:
        asked: value of the setting.
        setting: name of the setting.
        mesh: the ranks.
    """
    if asked != "auto":
        return asked
    dtype = mesh.default_dtype()
    if dtype == "float32" and mesh.rank == 0:
        say(
            f"{setting} = auto is float32: not every CPU of the ranks has instructions for "
            "bfloat16 (avx512_bf16, AMX)"
        )
    return dtype


def find_other_model(
    model: str,
    policy: PretrainedConfig,
    parallel: ParallelConfig,
    setting: str,
    *,
    scores: bool | None = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path | None:
    """Find and check another model, which reads the same tokens as the policy.

    Args:
        model: folder or hub id; empty: there is none.
        policy: the policy's config.
        parallel: the mesh.
        setting: the setting that names the model, for errors.
        scores: whether it must have a score head (True: a reward model), must not, or may (None).
        tokenizer: the policy's. The vocabulary may then be padded by more rows than the policy's,
            as those of larger Qwen2.5 are. None: they are of one size.

    Returns:
        The model's folder; None: there is none.

    Raises:
        UserError: it cannot work.
    """
    if not model:
        return None
    folder = build.find_folder(model, setting)
    config = build.read_config(folder)
    checks.check_supported(config, f"{setting} = {model}")
    _check_mesh(config, parallel)
    require(
        families.reads_images(config) == families.reads_images(policy),
        f"{setting} = {model} is of family {config.model_type}, and the policy of "
        f"{policy.model_type}: only one of them reads images; take another model",
    )
    require(
        _patches(config) == _patches(policy),
        f"{setting} = {model} reads images in other patches ({_patches(config)}) than the policy "
        f"({_patches(policy)}), and they are cut once for all models; take one of its family",
    )
    size = config.get_text_config().vocab_size
    policy_size = policy.get_text_config().vocab_size
    there = here = {}
    if tokenizer and size >= policy_size:
        there = load_tokenizer(folder, chats=False).get_vocab()
        here = tokenizer.get_vocab()
    is_padded = bool(there) and there == here
    require(
        size == policy_size or is_padded,
        f"{setting} = {model} has a vocabulary of {size}, and the policy's is of {policy_size}: "
        "the policy's tokens mean nothing there; take a model with the same tokenizer",
    )
    moved = [token for token, number in there.items() if here.get(token, number) != number]
    require(
        not moved,
        f"{setting} = {model} has other numbers for {len(moved)} of the policy's tokens, as "
        f"{moved[:3]}: the policy's answers mean something else there; take a model with the same "
        "tokenizer",
    )
    check_head(folder, setting, scores=scores)
    if families.reads_images(config):
        read_vision(folder)  # It is refused now if its image processor cannot be read.
    return folder


def _patches(config: PretrainedConfig) -> dict[str, Any]:
    """Return how a model cuts images, as its config says; empty: it reads none."""
    if not families.reads_images(config):
        return {}
    tower = config.vision_config.to_dict()
    token = {"token": config.image_token_id}
    names = ("patch_size", "spatial_merge_size", "temporal_patch_size")
    return token | {name: tower[name] for name in names if name in tower}


def check_head(folder: Path, setting: str, *, scores: bool | None) -> None:
    """Refuse a model of the wrong kind by its files' score head, and a head that is not minirl's.

    A missing head would be filled with zeros. A critic can learn from there; all scores of a reward
    model would be 0.

    Args:
        folder: a Hugging Face folder.
        setting: the setting that names the model, for errors.
        scores: whether it must have a head, must not, or may (None).

    Raises:
        UserError: so it is, or a file cannot be read.
    """
    weights = open_weights(folder, setting)
    where = f"{setting} = {folder}"
    if causal.SCORE not in weights:
        require(
            not scores,
            f"{where} is no reward model: its weights have no {causal.SCORE}; train one with "
            "minirl.rm",
        )
        return
    require(
        scores is not False,
        f"{where} is a reward model, which gives scores and no answers: its weights have "
        f"{causal.SCORE}; name a language model",
    )
    num_scores = weights[causal.SCORE].get_shape()[0]
    bias = causal.SCORE.replace("weight", "bias")
    require(
        num_scores == 1 and bias not in weights,
        f"{where}: its {causal.SCORE} has {num_scores} rows{' and a bias' * (bias in weights)}; "
        "that of a reward model or critic has one, without a bias; train one with minirl.rm",
    )


def make_scratch(cfg: RLConfig | SupervisedConfig, mesh: World) -> None:
    """Lock the output folder, and write the model that `policy.model = scratch` asks for there.

    Collective. Call it after the last check: a program that refuses its config leaves no files. The
    model is there as a whole or not at all.

    Raises:
        UserError: another run is in the folder, or the model could not be written.
    """
    mesh.barrier()  # every rank has looked at the output folder
    output = Path(cfg.output)
    folder = output / "scratch"
    unfinished = partial_of(folder)

    def write() -> None:
        remove(unfinished)
        scratch.make_model(cfg.policy.scratch, unfinished, max_len=longest(cfg), seed=cfg.seed)
        sync_files(unfinished.iterdir())
        publish_folder(folder)

    with errors_of_all(mesh):
        if mesh.rank == 0:
            run_folder.hold(output)
            _refuse_other_run(output, cfg.resume)  # another run may have been here meanwhile
            # A run that has begun keeps the model: other weights would be another run.
            has_begun = (output / "config.yaml").exists()
            if cfg.policy.model == "scratch" and not (has_begun and folder.exists()):
                require_written(folder, unfinished, [attempt(write, 0)])


def marks_for_template(row: dict, columns: Sequence[str] = MESSAGE_COLUMNS) -> int:
    """Return the marks of a row about what its chat template has to show of these columns."""
    marks = HAS_TOOLS if "tools" in row.get("template_inputs", {}) else 0
    for name in columns:
        messages = row.get(name)
        if isinstance(messages, list):
            marks |= HAS_CALLS if has_calls(messages) else 0
            has_thoughts = name in TRAINED_COLUMNS and _thoughts_in(messages)
            marks |= HAS_THOUGHTS if has_thoughts else 0
    return marks


def _thoughts_in(messages: Messages) -> str:
    """Return the name under which an answer has thoughts; empty: none has some."""
    for message in messages:
        for name in THOUGHTS:
            if message["role"] == "assistant" and message.get(name):
                return name
    return ""


def require_shown(rows: Rows, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a chat template that leaves out tools, calls of tools or thoughts of rows.

    Args:
        rows: rows with the marks of `marks_for_template`.
        tokenizer: the tokenizer with the template.

    Raises:
        UserError: a row is not shown whole; it says which one is the first.
    """
    number = rows.first_marked(HAS_TOOLS)
    if number is not None:
        with errors_at(rows.place(number)):
            require_tools_shown(tokenizer, rows[number]["template_inputs"]["tools"])
    number = rows.first_marked(HAS_CALLS)
    if number is not None:
        with errors_at(rows.place(number)):
            tools = rows[number].get("template_inputs", {}).get("tools")
            require_calls_shown(tokenizer, tools)
    number = rows.first_marked(HAS_THOUGHTS)
    if number is not None:
        with errors_at(rows.place(number)):
            chats = [rows[number].get(name) for name in TRAINED_COLUMNS]
            names = [_thoughts_in(chat) for chat in chats if isinstance(chat, list)]
            require_thoughts_shown(tokenizer, next(filter(None, names)))


class PromptChecks:
    """Checks of rows of prompts, made while each row is read once."""

    def __init__(
        self, rewards: Rewards | None, tokenizer: PreTrainedTokenizerBase, cfg: DataConfig
    ):
        """Take what grades the answers: `rewards`, or None if the environment does."""
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.bound = LengthBound(tokenizer, cfg)

    def mark(self, row: dict) -> int:
        """Return the marks of a row."""
        marks = marks_for_template(row, ["prompt"])
        if self.bound.exceeds(row):
            marks |= MAY_BE_LONG
        if row.get("answer") is None:
            marks |= NO_ANSWER
        if not row["prompt"]:
            marks |= PROMPTLESS
        if self.rewards:
            try:
                self.rewards.check_row(row)
            except UserError:
                marks |= UNGRADED
        return marks

    def refuse_bad(self, rows: Rows) -> None:
        """Refuse rows that no reward function can grade, and tools that the template leaves out.

        Raises:
            UserError: for the first of them.
        """
        require_shown(rows, self.tokenizer)
        number = rows.first_marked(UNGRADED)
        if number is not None and self.rewards:
            with errors_at(rows.place(number)):
                self.rewards.check_row(rows[number])


def _places(sources: str | list[str]) -> set[str]:
    """Return the sources of rows: whole paths of files, without their options."""
    places = set()
    for source in [sources] if isinstance(sources, str) else sources:
        file = source.partition("?")[0]
        places.add(os.path.realpath(file) if is_file(file) else source)
    return places


def load_splits(
    open_rows: Callable[..., Rows],
    data: RowsConfig,
    seed: int,
    mesh: World,
    mark: Mark,
) -> tuple[Rows, Rows]:
    """Read all rows once; return those to train on and the held-out ones. Collective.

    Args:
        open_rows: opens rows as open_rows(source, setting, data, mesh); the setting is for errors.
        data: the sources. Without `data.eval`, `data.held_out` rows of `data.train` are held out.
        seed: seed of the choice of held-out rows.
        mesh: the ranks.
        mark: returns the marks of a row.

    Raises:
        UserError: a source cannot be read, or a row is malformed.
    """
    train = open_rows(data.train, "data.train", data, mesh)
    if not data.eval:
        return read_rows(train, mesh, seed, data.held_out, mark)
    both = _places(data.train) & _places(data.eval)
    if both and mesh.rank == 0:
        say(
            f"data.eval and data.train both name {', '.join(sorted(both))}: held-out scores are of "
            "rows that are trained on; data.held_out sets some rows aside instead"
        )
    held_out = open_rows(data.eval, "data.eval", data, mesh)
    held_out.missing.clear()  # Held-out rows need not have every column that is named.
    train, _ = read_rows(train, mesh, seed, mark=mark)
    held_out, _ = read_rows(held_out, mesh, seed, mark=mark)
    return train, held_out
