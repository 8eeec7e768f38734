"""What a config names, found and checked before anything is trained or written.

Each function raises UserError at the first thing that is missing or cannot work.
"""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from minirl.base.errors import UserError, require
from minirl.base.files import partial_of, publish_folder, remove, sync_files
from minirl.base.log import say
from minirl.base.oversight import Oversight
from minirl.checkpoint import changes, lock
from minirl.checkpoint.failures import attempt, require_written
from minirl.checkpoint.finding import finished
from minirl.config.lengths import eval_extra_tokens
from minirl.config.policy import Dtype, ParallelConfig
from minirl.config.rl import RLConfig
from minirl.config.shared import TrainingConfig
from minirl.config.supervised import SupervisedConfig
from minirl.config.validate import resolve_lengths, validate_rl
from minirl.data import chat
from minirl.data.prompts import Prompts, open_prompts
from minirl.data.vision import read_vision
from minirl.data.vision_base import Vision
from minirl.envs.registry import make_env
from minirl.model import build, families, loading, scratch
from minirl.model.hybrid import delta_net
from minirl.model.mixture import mixtures, routing
from minirl.model.weight_files import open_weights
from minirl.parallel import tensor
from minirl.parallel.machines import (
    check_on_one_machine,
    check_same,
    check_shared,
    errors_of_all,
    errors_of_machines,
)
from minirl.parallel.mesh import Mesh, ranks_of_node
from minirl.plan.shape import count_frozen
from minirl.rewards.first_call import try_rewards
from minirl.rewards.functions import make_rewards
from minirl.rollout import records
from minirl.rollout.time_limits import in_time, limited_imports, limited_template, make_in_time
from minirl.run import user_algorithms
from minirl.run.row_checks import MAY_BE_LONG, NO_ANSWER, PromptChecks, load_splits
from minirl.train.schedule import num_rl_steps, num_tickets


class ModelFiles(NamedTuple):
    """What the folder of a model holds beside weights."""

    folder: Path
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    vision: Vision | None  # How the model reads images; None: it reads none.


class Inputs:
    """What the config of an RL run names, found and checked. Collective. Raises UserError.

    Attributes:
        prompts, held_out: rows to train on and to evaluate on, as token ids.
        make_env: makes the environment of an episode.
        rewards: scores answers, beside what the environment gives.
        estimator: of advantages.
        folder: of policy.model.
        ref, critic, reward_model: folders of the models beside the policy; None where the config
            names none.
        stop_ids: tokens that end an answer.
        num_steps: of the run.
        description: the numbers of prompts, for the log.
    """

    def __init__(self, cfg: RLConfig, mesh: Mesh):
        resolve_lengths(cfg)
        validate_rl(cfg, mesh.world_size)
        check_output(cfg, mesh)
        if mesh.device.type == "cpu":  # where an engine's ranks share memory
            num_ranks = cfg.engine.tensor_parallel_size
            check_on_one_machine(num_ranks, "engine.tensor_parallel_size", mesh)
        with errors_of_machines(mesh):
            # What scores the answers.
            with limited_imports(cfg, mesh.watch):
                self.make_env = make_env(cfg.env.name)
                self.rewards = make_rewards(cfg.reward, mesh.watch)
                found = user_algorithms.check_methods(cfg)
                limited = in_time(found.function, cfg, mesh.watch)
                self.estimator = replace(found, function=limited)
            if cfg.rollout.replay:
                records.check_steps(Path(cfg.rollout.replay), cfg.num_steps, resume=cfg.resume)
            env = make_in_time(self.make_env, cfg.env, mesh.watch)
            graded = env.graded
            if graded:
                self.rewards.check_supported()

            # Models. The rewards of dumped rollouts have the scores of a reward model in them.
            max_len = cfg.engine.max_model_len + eval_extra_tokens(cfg)
            files = find_model(cfg, max_len, mesh.watch, engine_on=mesh.device.type)
            find = partial(find_other_model, policy=files.config, parallel=cfg.parallel)
            self.folder = files.folder
            self.ref = find(cfg.ref.model, setting="ref.model")
            self.critic = find(cfg.critic.model, setting="critic.model")
            count_frozen(files.config, cfg.policy)
            critic = build.read_config(self.critic) if self.critic else files.config
            count_frozen(critic, cfg.critic, score=True)
            check_routers(cfg, files.config, critic)
            scorer = "" if cfg.rollout.replay else cfg.reward.model
            self.reward_model = find(scorer, setting="reward.model", scores=True)
            others = {role: build.read_config(folder) for role, folder in self.others().items()}
            check_experts({"policy": files.config} | others, cfg)
        check_same_models(cfg, self.folders(), mesh)

        # Rows, each of which is read once, and prompts as token ids.
        checks = PromptChecks(self.rewards if graded else None, files.tokenizer, cfg.data)
        open_rows = partial(open_prompts, own_prompts=not env.needs_prompt)
        train, held_out = load_splits(open_rows, cfg.data, cfg.seed, mesh, checks.mark)
        checks.refuse_bad(train)
        checks.refuse_bad(held_out)
        if cfg.sft.num_steps and train.first_marked(NO_ANSWER) is not None:
            raise UserError(
                f"sft.num_steps = {cfg.sft.num_steps} needs an answer in every row "
                f"(data.answer_key = {cfg.data.answer_key})"
            )
        as_tokens = partial(
            Prompts, tokenizer=files.tokenizer, cfg=cfg.data, seed=cfg.seed, vision=files.vision
        )
        self.prompts = as_tokens(train)
        self.held_out = as_tokens(held_out, shuffle=False)
        num_dropped = self.prompts.check_lengths(mesh, MAY_BE_LONG, num_tickets(cfg))
        num_dropped += self.held_out.check_lengths(mesh, MAY_BE_LONG)
        if graded and not cfg.rollout.replay:
            try_rewards(self.rewards, self.prompts, cfg.reward.threads, mesh)
        self.num_steps = num_rl_steps(cfg, len(self.prompts.rows))
        check_steps_left(cfg, self.num_steps, mesh)
        num_doubles = train.num_doubles + (held_out.num_doubles if cfg.data.eval else 0)
        self.description = self._describe(num_dropped, num_doubles)
        make_scratch(cfg, max_len, mesh)
        self.stop_ids = chat.stop_token_ids(files.tokenizer, files.folder)

    def _describe(self, num_dropped: int, num_doubles: int) -> str:
        """Return how many rows are used, and what becomes of the others."""
        text = (
            f"{len(self.prompts.rows)} training prompts, {len(self.held_out.rows)} held out "
            f"({num_dropped} dropped as too long)"
        )
        if num_doubles:
            text += f", {num_doubles} left out because they equal others"
        return text

    def folders(self) -> dict[str, Path]:
        """Return the folders of the models, by their roles."""
        return {"policy": self.folder} | self.others()

    def others(self) -> dict[str, Path]:
        """Return the folders of the models beside the policy, by their roles."""
        found = {
            "reference": self.ref,
            "critic": self.critic,
            "reward model": self.reward_model,
        }
        return {role: folder for role, folder in found.items() if folder}

    def model_configs(self) -> dict[str, PretrainedConfig]:
        """Return the configs of the models, by their roles."""
        return {role: build.read_config(folder) for role, folder in self.folders().items()}


def check_experts(models: dict[str, PretrainedConfig], cfg: TrainingConfig) -> None:
    """Refuse expert parallelism of models, by their roles, that it does not suit.

    Raises:
        UserError: with the numbers.
    """
    mixtures.check_experts(
        models,
        cfg.parallel,
        ranks_of_node=ranks_of_node(),
        tokens_per_rank=cfg.tokens_per_rank,
    )


def check_same_models(
    cfg: RLConfig | SupervisedConfig, folders: dict[str, Path], mesh: Mesh
) -> None:
    """Refuse models whose weights or config have other sizes on another machine. Collective.

    Args:
        cfg: the folder of a scratch model, which is still to be made, is left out.
        folders: of the models, by their roles. A hub's cache may be elsewhere on each machine.
        mesh: the ranks.

    Raises:
        UserError: for the first file that differs.
    """
    sizes = {}
    for role, folder in folders.items():
        if role == "policy" and cfg.policy.model == "scratch":
            continue
        for file in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
            sizes[f"the size of {file.name} of the {role}"] = f"{file.stat().st_size} bytes"
    check_same(sizes, mesh)


def check_routers(cfg: RLConfig, policy: PretrainedConfig, critic: PretrainedConfig) -> None:
    """Refuse settings of routers where a model has none. Raises UserError."""
    routing.check(policy, cfg.policy)
    routing.check(critic, cfg.critic)
    require(
        not cfg.algo.router_replay or routing.is_mixture(policy),
        "algo.router_replay replays the routers of a mixture of experts, and policy.model = "
        f"{cfg.policy.model} is of family {policy.model_type}, which has none; set it to false",
    )


def check_output(cfg: TrainingConfig, mesh: Mesh) -> None:
    """Refuse the folder of another run, and one that not all machines share. Collective.

    A resumed run's settings are compared with those that it was begun with.

    Raises:
        UserError: on all ranks.
    """
    output = Path(cfg.output)
    with errors_of_all(mesh):
        if mesh.rank == 0:  # alone, as check_shared demands
            _refuse_other_run(output, cfg.resume)
            lock.require_free(output)
            changed = changes.compare_settings(cfg) if cfg.resume else []
            if changed:
                say(f"resuming with other settings than before: {', '.join(changed)}")
    check_shared(output, "output", mesh)


def check_steps_left(cfg: TrainingConfig, num_steps: int, mesh: Mesh) -> None:
    """Refuse to resume a run that is longer already than it is now asked to be. Collective.

    Its newest weights would be evaluated and exported as those of an earlier step.

    Args:
        cfg: the config; without `resume` there is nothing to check.
        num_steps: of the run: `cfg.num_steps`, or as many as `cfg.num_epochs` takes.
        mesh: the ranks.

    Raises:
        UserError: on all ranks.
    """
    if not cfg.resume:
        return
    with errors_of_all(mesh):
        if mesh.rank == 0:
            newest = max(finished(Path(cfg.output)), default=0)
            require(
                newest <= num_steps,
                f"resume: the newest checkpoint of {cfg.output} is of step {newest}, and num_steps "
                f"(or num_epochs) ends the run at step {num_steps}; raise it to step {newest} or "
                f"later, or remove the checkpoints after step {num_steps} to go on from an earlier "
                "one",
            )


# What a start that was killed while it made its model leaves. A new start makes them anew.
LEFT_BY_A_START = (
    "scratch",
    "scratch.partial",
    "scratch.replaced",
    "config.yaml.partial",
    lock.NAME,
)


def _refuse_other_run(output: Path, resume: bool) -> None:
    """Raise UserError if the folder is that of another run."""
    in_the_way = [output.name] if os.path.lexists(output) else []
    if os.path.isdir(output):
        if resume:
            return
        try:
            names = os.listdir(output)
        except OSError as error:
            raise UserError(
                f"output = {output} cannot be read: {error}; choose another folder"
            ) from error
        in_the_way = [name for name in names if name not in LEFT_BY_A_START]
    if in_the_way:
        raise UserError(
            f"output = {output} holds {in_the_way[0]} of another run; choose another folder with "
            "--output, or go on with it by --resume"
        )


def find_model(
    cfg: RLConfig | SupervisedConfig,
    max_len: int,
    watch: Oversight,
    *,
    engine_on: str = "cpu",
    chats: bool = True,
) -> ModelFiles:
    """Find and check policy.model; the folder of a scratch model is made by `make_scratch`.

    Args:
        cfg: of RL, the model must work in the engine, too.
        max_len: longest sequence of a scratch model.
        watch: of this process, for the time limit of a chat template.
        engine_on: the engine's type of device.
        chats: there are chats to encode, so the tokenizer needs a template.

    Raises:
        UserError: there is no such model, or it does not work with the settings.
    """
    tokenizer: PreTrainedTokenizerBase | None = None
    if cfg.policy.model == "scratch":
        folder = Path(cfg.output) / "scratch"
        made = scratch.make_tokenizer(cfg.policy.scratch.phrases)
        config: PretrainedConfig = scratch.make_config(cfg.policy.scratch, made, max_len)
        tokenizer = chat.use_template(made, cfg.data)
    else:
        folder = build.find_folder(cfg.policy.model, "policy.model")
        config = build.read_config(folder)

    where = f"policy.model = {cfg.policy.model}"
    max_images = 0
    if isinstance(cfg, RLConfig):
        engine = cfg.engine
        max_images = engine.max_images
        # Replayed rollouts have been sampled by an engine, and need none any more.
        device = None if cfg.rollout.replay else engine_on
        families.check_supported(
            config, where, engine.tensor_parallel_size, engine.max_model_len, device
        )
        longest = engine.max_model_len + eval_extra_tokens(cfg)
        families.check_positions(config, where, "engine.max_model_len", longest)
    else:
        families.check_supported(config, where)
    _check_mesh(config, cfg.parallel)

    vision = read_vision(folder, max_images) if families.reads_images(config) else None
    if vision:
        is_ring = cfg.parallel.context > 1 and cfg.parallel.context_engine == "ring"
        vision.check_ring(is_ring)
    with limited_template(cfg, where, watch):
        if tokenizer is None:
            tokenizer = chat.load_tokenizer(folder, cfg.data, chats=chats)
            check_tokens(tokenizer, folder, config, where, chats=chats)
        elif chats and cfg.data.chat_template:
            chat.check_template(tokenizer, f"data.chat_template = {cfg.data.chat_template}")
    return ModelFiles(folder, config, tokenizer, vision)


def _check_mesh(config: PretrainedConfig, parallel: ParallelConfig) -> None:
    """Refuse a mesh that does not divide a model. Raises UserError."""
    tensor.check_divides(families.divided(config), parallel.tensor)
    delta_net.check_heads(config, parallel.tensor, parallel.context)


def check_tokens(
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    config: PretrainedConfig,
    where: str,
    *,
    chats: bool = True,
) -> None:
    """Refuse a tokenizer, or eos tokens, beyond the model's vocabulary.

    Args:
        tokenizer: of the model.
        folder: of the model.
        config: of the model.
        where: begins an error message.
        chats: there are chats, whose answers must end.

    Raises:
        UserError: for what lies beyond, or if answers have no end.
    """
    stop_ids = chat.stop_token_ids(tokenizer, folder) if chats else []
    chat.check_tokens(tokenizer, stop_ids, config.get_text_config().vocab_size, where)


def choose_dtype(asked: Dtype, setting: str, mesh: Mesh) -> Dtype:
    """Return the dtype to compute in, and say what auto is where a CPU decides. Collective.

    Args:
        asked: what the setting says.
        setting: its name.
        mesh: of the run.
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
    scores: bool = False,
) -> Path | None:
    """Find and check a model beside the policy, which reads the same tokens.

    Args:
        model: folder or hub id; empty: there is none.
        policy: the policy's config.
        parallel: the mesh.
        setting: what names the model, for errors.
        scores: it is a reward model: its weights have a score head.

    Returns:
        Its folder, or None.

    Raises:
        UserError: it cannot work.
    """
    if not model:
        return None
    folder = build.find_folder(model, setting)
    config = build.read_config(folder)
    families.check_supported(config, f"{setting} = {model}")
    _check_mesh(config, parallel)
    require(
        families.reads_images(config) == families.reads_images(policy),
        f"{setting} = {model} is of family {config.model_type}, and the policy of "
        f"{policy.model_type}: only one of them reads images; take another model",
    )
    size = config.get_text_config().vocab_size
    policy_size = policy.get_text_config().vocab_size
    require(
        size == policy_size,
        f"{setting} = {model} has a vocabulary of {size}, and the policy's is of {policy_size}: "
        "the policy's tokens mean nothing there; take a model with the same tokenizer",
    )
    if scores:
        check_head(folder, setting)
    return folder


def check_head(folder: Path, setting: str) -> None:
    """Refuse a model without a score head. Raises UserError.

    A head that is missing would be made of zeros. A critic can learn from there; the scores of a
    reward model would all be 0.
    """
    require(
        loading.SCORE in open_weights(folder),
        f"{setting} = {folder} is no reward model: its weights have no {loading.SCORE}; train one "
        "with minirl.rm",
    )


def make_scratch(cfg: RLConfig | SupervisedConfig, max_len: int, mesh: Mesh) -> None:
    """Lock the output folder, and write the model that `policy.model = scratch` asks for there.

    Collective. Call it after the last check: a program that refuses its config leaves nothing
    behind.

    Raises:
        UserError: another run is in the folder, or the model could not be written.
    """
    mesh.barrier()  # every rank has looked at the output folder
    output = Path(cfg.output)
    folder = output / "scratch"
    failure = ""
    with errors_of_all(mesh):
        if mesh.rank == 0:
            lock.hold(output)
            _refuse_other_run(output, cfg.resume)  # another run may have been here meanwhile
            # A run that has begun keeps the model: other weights would be another run.
            has_begun = (output / "config.yaml").exists()
            if cfg.policy.model == "scratch" and not (has_begun and folder.exists()):
                failure = attempt(lambda: _write_scratch(cfg, folder, max_len), 0)
            require_written(folder, partial_of(folder), [failure])


def _write_scratch(cfg: RLConfig | SupervisedConfig, folder: Path, max_len: int) -> None:
    """Write the scratch model as a whole or not at all."""
    partial_folder = partial_of(folder)
    remove(partial_folder)
    scratch.make_model(cfg.policy.scratch, partial_folder, max_len=max_len, seed=cfg.seed)
    sync_files(partial_folder)
    publish_folder(folder)
