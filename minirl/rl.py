"""PPO, GRPO and their family: every rank holds a shard of the policy and its own vLLM engine, and
runs this program.

    torchrun --nproc-per-node 2 -m minirl.rl --config configs/quickstart_rl.yaml

`train` is the whole algorithm; what it calls is one layer down.
"""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import torch

from minirl import checkpoint, cli, report
from minirl.algo import advantages, correction, losses, shaping
from minirl.config.rl import RLConfig
from minirl.config.shared import PolicyConfig
from minirl.config.validate import resolve_lengths, validate_rl
from minirl.data import chat
from minirl.data.curriculum import Curriculum
from minirl.data.images import sampling_stops
from minirl.data.packing import exchange, pack
from minirl.data.prompts import Prompts, load_rows
from minirl.data.rows import split
from minirl.envs.registry import make_env
from minirl.errors import UserError
from minirl.evaluation import breakdown, evaluate
from minirl.inputs import check_output, find_model, find_teacher, make_scratch
from minirl.log import Timer
from minirl.parallel.mesh import Mesh
from minirl.policy import Policy, learning_rate
from minirl.rewards.functions import make_rewards
from minirl.rewards.model import RewardModel
from minirl.rollout import records
from minirl.rollout.engine import RolloutEngine, Sampling
from minirl.rollout.refit import Refit
from minirl.rollout.sampler import Sampler
from minirl.supervised import warm_start
from minirl.trainer import Program, TrainingRun
from minirl.types import Packed, Trajectory


class Trainer(Program):
    """The parts of a run; `train` is the algorithm."""

    def __init__(self, cfg: RLConfig, mesh: Mesh):
        self.cfg, self.mesh, self.timer = cfg, mesh, Timer(mesh.device)
        about = self.find_inputs()
        with self.timer.phase("start"):
            self.policy = Policy(
                cfg.policy,
                self.folder,
                mesh,
                sequence_parallel=cfg.parallel.sequence,
                timer=self.timer,
            )
            if not cfg.rollout.replay:
                self.make_engine()
            reward_model = self.others["reward.model"]
            self.reward_model = (
                RewardModel(
                    cfg.policy,
                    reward_model,
                    mesh,
                    self.stop_ids,
                    self.prompts.tokenizer.eos_token_id,
                    cfg.tokens_per_rank,
                    weight=cfg.reward.model_weight,
                    sequence_parallel=cfg.parallel.sequence,
                    timer=self.timer,
                )
                if reward_model
                else None
            )
            self.run = TrainingRun(cfg, self.policy, mesh, self.timer, about)
        if cfg.rollout.ahead:
            self.run.saver.rollouts = self.sampler.state
            self.sampler.load(
                checkpoint.load_rollouts(self.run.found) if self.run.found else [], self.sampling
            )
        self.log, self.progress = self.run.log, self.run.progress
        adapted = self.progress.kl_coef if cfg.algo.kl_target else None
        self.kl_coef = cfg.algo.kl_coef if adapted is None else adapted
        if cfg.rollout.curriculum_floor:
            self.prompts.order = Curriculum(
                self.prompts, cfg.rollout.curriculum_floor, self.progress.outcomes
            )
        self.ref = self.critic = None  # each a Policy where it is needed
        self.layout, self.num_extra = self.policy.layout, 0

    def find_inputs(self) -> str:
        """What the config names, found and checked before anything is trained or written; returned
        is what the log says about it. Raises UserError at the first thing that is missing or cannot
        work.
        """
        cfg, mesh = self.cfg, self.mesh
        resolve_lengths(cfg)
        validate_rl(cfg, mesh.world_size)
        check_output(Path(cfg.output), cfg.resume)
        rows = load_rows(cfg.data.train, "data.train", cfg.data)
        rows, held_out = (
            (rows, load_rows(cfg.data.eval, "data.eval", cfg.data))
            if cfg.data.eval
            else split(rows, cfg.data.held_out, cfg.seed)
        )
        self.make_env, self.rewards, self.estimator = (
            make_env(cfg.env.name),
            make_rewards(cfg.reward),
            advantages.find(cfg.algo.advantage),
        )
        if self.make_env().graded:
            self.rewards.check_rows(itertools.chain(rows, held_out))
        if cfg.sft.num_steps and any(row.get("answer") is None for row in rows):
            raise UserError(
                f"sft.num_steps = {cfg.sft.num_steps} needs an answer in every row (data.answer_key = {cfg.data.answer_key})"
            )
        correction.resolve(cfg.algo.correction)
        self.folder, model, tokenizer, vision = find_model(
            cfg, cfg.engine.max_model_len, engine_on=mesh.device.type
        )
        # Dumped rewards have the scores of a reward model in them.
        others = {
            "ref.model": cfg.ref.model,
            "critic.model": cfg.critic.model,
            "reward.model": "" if cfg.rollout.replay else cfg.reward.model,
        }
        self.others = {
            setting: find_teacher(
                name, model, cfg.parallel.tensor, setting, scores=setting == "reward.model"
            )
            if name
            else None
            for setting, name in others.items()
        }
        self.prompts = Prompts(rows, tokenizer, cfg.data, seed=cfg.seed, vision=vision)
        self.held_out = Prompts(
            held_out, tokenizer, cfg.data, seed=cfg.seed, shuffle=False, vision=vision
        )
        num_dropped = self.prompts.check_lengths("data.train", mesh) + self.held_out.check_lengths(
            "data.eval" if cfg.data.eval else "data.train", mesh
        )
        make_scratch(cfg, cfg.engine.max_model_len, mesh)
        self.stop_ids = chat.stop_token_ids(tokenizer, self.folder)
        return f"{len(self.prompts.rows)} training prompts, {len(self.held_out.rows)} held out ({num_dropped} dropped as too long)"

    def make_engine(self) -> None:
        cfg, mesh = self.cfg, self.mesh
        dtype = (
            cfg.engine.dtype
            if cfg.engine.dtype != "auto"
            else cfg.policy.dtype.replace("float64", "float32")
        )
        self.engine = RolloutEngine(
            cfg.engine,
            self.folder,
            mesh,
            dtype=dtype,
            reads_images=self.policy.vision is not None,
            timer=self.timer,
        )
        self.refit = Refit(
            cfg.refit,
            self.policy.shards(),
            self.policy.parts(),
            self.engine,
            mesh,
            check=cfg.debug.check_refit,
        )
        self.sampler = Sampler(self.engine, self.make_env, self.rewards, self.prompts, cfg)
        self.sampling = Sampling(
            max_tokens=cfg.rollout.max_tokens,
            stop_token_ids=sampling_stops(self.stop_ids, self.prompts.vision),
            temperature=cfg.rollout.temperature,
        )

    def train(self) -> None:
        cfg, mesh, policy, timer = self.cfg, self.mesh, self.policy, self.timer
        if (
            cfg.sft.num_steps
            and self.run.first_step == 0
            and "before_rl" not in self.progress.evaluations
        ):
            self.warm_start()
        self.load_reference(self.run.first_step)
        if cfg.algo.advantage == "gae":
            self.critic = self.load_other(cfg.critic, self.others["critic.model"], score=True)
        num_updates = (
            cfg.num_steps - (cfg.critic.warmup_steps if self.critic else 0)
        ) * cfg.algo.updates_per_step
        self.log.progress("rl", cfg.num_steps, self.run.first_step)
        self.progress.add(timer.take())
        for step in range(self.run.first_step, cfg.num_steps):
            if (
                cfg.ref.every and step and step % cfg.ref.every == 0
            ):  # after the checkpoint of these weights, so that a resumed run does it, too
                self.refresh_reference(step)
            trajectories = self.collect(step)
            with timer.phase("prepare"):
                self.shape(trajectories)
                minibatches = [
                    [
                        pack(micro, mesh.device, cfg.rollout.temperature, layout=self.layout)
                        for micro in minibatch
                    ]
                    for minibatch in exchange(
                        trajectories, mesh, cfg.tokens_per_rank, cfg.algo.updates_per_step
                    )
                ]
            with timer.phase("annotate"):
                if (
                    cfg.algo.updates_per_step > 1
                    or cfg.algo.entropy_share
                    or advantages.need_old_logprobs(cfg.algo)
                ):
                    policy.annotate(minibatches, "old_logprobs")
                for model, field in ((self.ref, "ref_logprobs"), (self.critic, "values")):
                    if model:
                        model.sleeper.wake_parameters()
                        model.annotate(minibatches, field)
                        model.sleeper.sleep_parameters()
                advantages.assign(
                    [b for m in minibatches for b in m],
                    self.estimator,
                    cfg.algo,
                    self.kl_coef,
                    sum_over_ranks=mesh.data_sums,
                    max_over_ranks=mesh.maxima,
                    gather=mesh.gather,
                )
                for minibatch in minibatches if cfg.algo.entropy_share else ():
                    losses.mark_high_entropy(minibatch, cfg.algo.entropy_share, mesh.gather)
            loss = losses.policy(cfg.algo, cfg.env.max_tokens, self.kl_coef)
            critic_metrics = self.train_critic(minibatches) if self.critic else {}
            moves = not self.critic or step >= cfg.critic.warmup_steps
            updates = _update(policy, minibatches, loss, num_updates) if moves else {}
            self.report(step, trajectories, minibatches, updates | critic_metrics)
            if cfg.algo.kl_target and moves:
                self.kl_coef = self.progress.kl_coef = losses.adapt_kl_coef(
                    self.kl_coef, updates["ref_kl"], cfg.algo.kl_target
                )
            self.run.save_if_due(step + 1)
        self.finish()

    def collect(self, step: int) -> list[Trajectory]:
        """This rank's part of the step's episodes; before them, an evaluation if one is due."""
        cfg = self.cfg
        if cfg.rollout.replay:
            with self.timer.phase("rollout"):
                return records.load_step(Path(cfg.rollout.replay), step, self.mesh)
        with self.engine.awake(self.refit, self.policy.sleeper):
            if step == 0 or (cfg.eval.every and step % cfg.eval.every == 0):
                self.evaluate(step, "before_rl" if step == 0 else None)
            with self.timer.phase("rollout"):
                first = step * cfg.rollout.prompts_per_step + self.progress.extra_tickets
                if cfg.rollout.curriculum_floor:
                    self.prompts.order.start(first)
                trajectories, end = self.sampler.collect_step(
                    first, self.sampling, version=self.policy.num_updates
                )
            with self.timer.phase("idle"):
                failures = [
                    message
                    for part in self.mesh.gather(self.sampler.runner.failures)
                    for message in part
                ]
        if failures:
            self.log.say(
                f"step {step}: {len(failures)} episodes failed, the first because {failures[0]}"
            )
        if not sum(self.mesh.gather(len(trajectories))):
            raise UserError(
                f"step {step}: no episode can be trained on"
                + (
                    f", the first because {failures[0]}"
                    if failures
                    else ": in none the policy said anything"
                )
            )
        self.num_extra = end - first - cfg.rollout.prompts_per_step
        self.progress.extra_tickets += self.num_extra
        if self.reward_model:
            with self.timer.phase("prepare"):
                self.reward_model.grade(trajectories)
        if cfg.rollout.dump:
            records.write_step(trajectories, self.run.output / "rollouts", step, self.mesh)
        return trajectories

    def shape(self, trajectories: list[Trajectory]) -> None:
        """The score of each episode stays in `info`, and tells the curriculum."""
        once = {(t.group, t.episode): t for t in trajectories}
        for t in trajectories:
            t.info["score"], t.info["staleness"] = t.reward, self.policy.num_updates - t.version
        if self.cfg.rollout.curriculum_floor:
            order = self.prompts.order
            own = [(order[t.group], t.reward >= self.cfg.eval.threshold) for t in once.values()]
            order.record(list(itertools.chain(*self.mesh.gather(own))))
        table = torch.tensor(
            [(t.reward, t.info["answer_tokens"], t.info["stopped"]) for t in once.values()],
            dtype=torch.float64,
        ).reshape(-1, 3)
        rewards, num_tokens, stopped = table.unbind(1)
        rewards, self.progress.reward_stats = shaping.shape(
            rewards,
            num_tokens,
            stopped.bool(),
            self.cfg.reward,
            self.cfg.env.max_tokens,
            self.progress.reward_stats,
            self.mesh.sums,
        )
        shaped = dict(zip(once, rewards.tolist(), strict=True))
        for t in trajectories:
            t.reward = shaped[t.group, t.episode]

    def evaluate(self, step: int, name: str | None = None) -> None:
        """Score held-out prompts; the engine must be awake. `name`: keep the result for the
        summary.
        """
        sampling = dataclasses.replace(self.sampling, temperature=self.cfg.eval.temperature)
        with self.timer.phase("evaluate"):
            result = evaluate(
                self.sampler, self.held_out, self.cfg.eval, sampling, self.mesh, self.reward_model
            )
        self.run.evaluated(step, result["scores"], ("accuracy", "reward"), name, result)

    def warm_start(self) -> None:
        with self.engine.awake(self.refit, self.policy.sleeper):
            self.evaluate(-1, "before_sft")
        self.progress.add(self.timer.take())
        with self.timer.phase("sft"):
            num_tokens = warm_start(
                self.cfg, self.policy, self.prompts, self.stop_ids, self.mesh, self.log
            )
            checkpoint.export(self.policy, self.run.output / "sft", self.mesh)
        self.progress.add(
            {"sft": sum(self.timer.take().values())}, sft=num_tokens
        )  # its forward and backward are not RL's

    def load_reference(self, step: int) -> None:
        """The frozen copy for the KL: the teacher, or the policy as RL found it or as it was at the
        last refresh by that step.
        """
        if self.cfg.algo.kl_coef or self.others["ref.model"]:
            refreshed = [n for n in checkpoint.finished(self.run.output, "references") if n <= step]
            folder = (
                self.run.output / "references" / f"step-{max(refreshed)}"
                if refreshed
                else self.others["ref.model"]
            )
            self.ref = self.load_other(self.cfg.policy, folder, trainable=False)

    def load_other(self, cfg: PolicyConfig, folder: Path | None, **kind: bool) -> Policy:
        """A model beside the policy; None: the policy as RL found it. Asleep but while it works:
        with the policy's shards on the device, and never with its optimizer's state.
        """
        folder = folder or (self.run.output / "sft" if self.cfg.sft.num_steps else self.folder)
        model = Policy(
            cfg,
            folder,
            self.mesh,
            sequence_parallel=self.cfg.parallel.sequence,
            timer=self.timer,
            **kind,
        )
        if model.trainable:
            self.run.attach("critic", model)
        model.sleeper.sleep()
        self.layout = dataclasses.replace(
            self.layout, windowed=self.layout.windowed or model.layout.windowed
        )
        return model

    def refresh_reference(self, step: int) -> None:
        """From here on the reference is the policy after `step` steps."""
        checkpoint.export(self.policy, self.run.output / "references" / f"step-{step}", self.mesh)
        if self.mesh.rank == 0:
            checkpoint.drop_references(
                self.run.output, 0 if self.cfg.checkpoint.every else step
            )  # the first one may still be under way
        self.mesh.barrier()
        if self.cfg.ref.reset_optimizer:
            self.policy.forget_optimizer_state()
        self.ref = None  # its memory first
        self.load_reference(step)

    def train_critic(self, minibatches: list[list[Packed]]) -> dict[str, float]:
        self.critic.sleeper.wake_parameters()
        updates = _update(
            self.critic,
            minibatches,
            losses.value(self.cfg.critic.value_clip),
            self.cfg.num_steps * self.cfg.algo.updates_per_step,
        )
        self.critic.sleeper.sleep()
        return {f"critic_{name}": value for name, value in updates.items()}

    def report(
        self,
        step: int,
        trajectories: list[Trajectory],
        minibatches: list[list[Packed]],
        updates: dict[str, float],
    ) -> None:
        """Means over all ranks to the log."""
        once = [t for t in trajectories if t.segment == 0]
        own = [
            (name, float(t.info[name]))
            for t in once
            for name in ("answer_tokens", "stopped", "staleness")
        ]
        own += [
            pair
            for t in once
            for pair in (("reward", t.info["score"]), ("shaped_reward", t.reward))
        ]
        own += [
            ("equal_groups", float(len({t.reward for t in group}) == 1))
            for _, group in itertools.groupby(
                sorted(once, key=lambda t: t.group), lambda t: t.group
            )
        ]
        metrics = (
            breakdown(once, self.cfg.eval.threshold, self.mesh, own)
            | {"extra_prompts": self.num_extra, "kl_coef": self.kl_coef}
            | updates
        )
        metrics |= {} if self.cfg.rollout.replay else {"refit_bytes": self.refit.bytes_received}
        num_tokens = (
            sum(int(t.sampled.sum()) for t in trajectories),
            sum(sum(b.lengths) for m in minibatches for b in m),
        )
        generated, trained = np.sum(self.mesh.gather(num_tokens), axis=0).tolist()
        self.run.report(
            "rl",
            step,
            metrics,
            ("reward", "answer_tokens", "mismatch"),
            generated=generated,
            trained=trained // self.mesh.tensor.size(),
        )

    def finish(self) -> None:
        """Last evaluation, export, summary."""
        if not self.cfg.rollout.replay:
            with self.engine.awake(self.refit, self.policy.sleeper):
                self.evaluate(self.cfg.num_steps, "after_rl")
        self.log.bar.close()  # the console is for answers now
        found = {
            name: evaluation["scores"]["accuracy"]
            for name, evaluation in self.progress.evaluations.items()
        }
        if self.mesh.rank == 0:
            report.write_answers(self.run.output, self.progress.evaluations)
        self.run.finish(
            {
                "accuracy before SFT": found.get("before_sft"),
                "accuracy after SFT": found.get("before_rl") if "before_sft" in found else None,
                "accuracy before RL": found.get("before_rl"),
                "accuracy after RL": found.get("after_rl"),
            }
        )
        if not self.cfg.rollout.replay:
            self.sampler.close()
            self.engine.close()


def _update(
    model: Policy, minibatches: list[list[Packed]], loss: losses.Loss, num_updates: int
) -> dict[str, float]:
    """An optimizer step on each, of `num_updates` in the run. Returns means of what they tell."""
    updates = [
        model.update(minibatch, loss, learning_rate(model.cfg, model.num_updates, num_updates))
        for minibatch in minibatches
    ]
    return {
        name: max(u[name] for u in updates)
        if name.endswith("_max")
        else float(np.mean([u[name] for u in updates]))
        for u in updates[:1]
        for name in u
    }


if __name__ == "__main__":
    cli.run(RLConfig, Trainer.main)
