"""PPO, GRPO and their family.

    torchrun --nproc-per-node 2 -m minirl.rl --config configs/quickstart_rl.yaml

Every rank runs this program, holds a shard of the policy and has a vLLM engine (or a part of one).
`Trainer.train` is the whole algorithm; what it calls is one layer down. With parallel.generators
split.py runs in its place: there some ranks only train, by this trainer, and the others generate.
"""

if __name__ == "__main__":  # First the flags: the imports below take seconds. It does not return.
    from minirl.config.rl import RLConfig
    from minirl.supervise import cli

    cli.run(RLConfig, "minirl.rl:Trainer.main", "minirl.split:main")

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from minirl.algo import advantages, losses, shaping
from minirl.base.log import Timer
from minirl.batch.exchange import exchange
from minirl.batch.packing import pack
from minirl.checkpoint import finding
from minirl.config.rl import RLConfig
from minirl.config.shared import EngineConfig
from minirl.data.order import Curriculum
from minirl.data.vision import sampling_stops
from minirl.endpoint import open_endpoint
from minirl.engine.engine import RolloutEngine, Sampling
from minirl.envs import Agent
from minirl.parallel.mesh import Mesh
from minirl.refit.refit import Refit
from minirl.rollout import records
from minirl.rollout.sampler import Sampler, StepRollout
from minirl.run.dump import Dump
from minirl.run.evaluation import NUM_SHOWN, eval_sampling, evaluate
from minirl.run.inputs import Inputs
from minirl.run.metrics import Health, MismatchWatch, count_work, means_of_step
from minirl.run.results import accuracies
from minirl.run.supervised import warm_start
from minirl.run.trainer import HOW_TO_RESUME, BaseTrainer, TrainingRun
from minirl.train.frozen import Reference, RewardModel
from minirl.train.policy import Metrics, Minibatch, Policy
from minirl.train.updates import update_in_passes
from minirl.types.packed import Trajectory

# [minibatch][micro-batch] of this rank, as many on every rank. Each minibatch makes an optimizer
# step, each micro-batch a forward and a backward.
Minibatches = list[Minibatch]


class Trainer(BaseTrainer):
    """An RL run: `train` is the algorithm, and the methods after it are its steps."""

    cfg: RLConfig

    def __init__(self, cfg: RLConfig, mesh: Mesh):
        super().__init__(cfg, mesh)
        self.inputs = inputs = Inputs(cfg, mesh.everyone)
        self.num_steps = inputs.num_steps
        self.reward_model: RewardModel | None = None
        with self.timer.phase("start"):
            self.announce(inputs.model_configs())
            self.policy = self.load_model(cfg.policy, inputs.folders["policy"])
            # None: this rank has no engine, by rollout.replay or parallel.generators.
            self.generation: Generation | None = None
            if self.engine_config:
                self.generation = Generation(
                    cfg, inputs, self.engine_config, mesh, self.timer, self.policy
                )
            if scorer := inputs.folders.get("reward model"):
                self.reward_model = RewardModel(
                    self.load_model(cfg.policy, scorer, trainable=False, score=True),
                    inputs.stop_ids,
                    inputs.prompts.tokenizer.eos_token_id,
                    self.tokens_per_rank,
                    weight=cfg.reward.model_weight,
                )
            self.run = TrainingRun(cfg, self.policy, inputs.description, inputs.row_hashes)
        # The policy as RL starts with it.
        self.start_folder = inputs.folders["policy"]
        if cfg.sft.num_steps:
            self.start_folder = self.run.output / "sft"
        self.progress = self.run.progress
        if self.generation:  # A resumed run begins again what was unfinished.
            self.generation.sampler.waiting = self.progress.unfinished_tickets
            self.progress.add({}, discarded=self.progress.unfinished_tokens)
            self.progress.unfinished_tokens = 0

        self.algo = cfg.algo  # with the weight of the KL as it is adapted
        if cfg.algo.kl_target and self.progress.kl_coef is not None:
            self.algo = dataclasses.replace(cfg.algo, kl_coef=self.progress.kl_coef)
        self.curriculum: Curriculum | None = None
        if cfg.rollout.curriculum_floor:
            self.curriculum = Curriculum(
                inputs.prompts.order, cfg.rollout.curriculum_floor, self.progress.outcomes
            )
            inputs.prompts.order = self.curriculum
            self.run.outcomes = self.curriculum.save
        # `train` loads these two after the warm start, because they may start as its result. They
        # are offloaded unless they compute. Then their shards are on the device together with the
        # policy's, but never together with its optimizer state.
        self.ref: Reference | None = None
        self.critic: Policy | None = None
        self.num_extra_prompts = 0  # Prompts that dynamic sampling took in this step.
        self.num_discarded_tokens = 0  # Tokens that this step sampled and threw away.
        # Steps of the engine in this step's rollout, and seconds in which they waited on CUDA.
        self.engine_counts = (0.0, 0.0)
        self.mismatch = MismatchWatch(cfg)
        self.health = Health(cfg.debug, inputs.estimator.compares_answers)
        self.dump: Dump | None = None
        if cfg.rollout.dump and not cfg.rollout.replay:
            self.dump = Dump(self.run.output, self.policy, inputs.prompts.tokenizer)

    def train(self) -> None:
        """Train from the first step of the run to the last. All ranks take each step together."""
        cfg = self.cfg
        first_step = self.run.first_step
        if cfg.sft.num_steps and not self.run.resumed_from and not self.warm_start():
            return
        self.policy.replays_routes = cfg.algo.router_replay
        self.load_reference(first_step)
        if cfg.algo.advantage == "gae":
            self.load_critic()
        self.run.begin("rl", self.num_steps)

        for step in range(first_step, self.num_steps):
            # This comes after the checkpoint of these weights, so that a resumed run does it, too.
            # The new reference is written while the engine samples.
            is_refresh = cfg.ref.every and step and step % cfg.ref.every == 0
            if is_refresh:
                self.export_reference(step)
            trajectories = self.collect(step)  # refit the engine, sample, score
            if self.run.has_reached_goal:
                break
            if trajectories is None:  # a signal has interrupted it
                self.stop(step)
                return
            if is_refresh or step == first_step:
                self.run.wait_for_export()  # the reference's, or the warm start's
            if is_refresh:
                self.load_reference(step)
            minibatches = self.to_minibatches(trajectories)
            metrics = self.update(step, minibatches)  # an optimizer step for each, in each pass
            self.report(step, trajectories, minibatches, metrics)
            self.adapt_kl_coef(metrics)
            if cfg.checkpoint.every and (step + 1) % cfg.checkpoint.every == 0:
                self.save(step + 1)
            if self.mesh.agree_to_stop():  # a signal has asked to save and leave
                self.stop(step + 1)
                return
        self.finish()

    def save(self, num_steps: int) -> None:
        """Write a checkpoint of `num_steps` finished steps. Collective."""
        self.run.save(num_steps)

    def stop(self, num_steps: int) -> None:
        """End the run with a checkpoint, because a signal has asked for it. Collective."""
        self.run.stop(num_steps)

    def collect(self, step: int) -> list[Trajectory] | None:
        """Return this rank's part of the step's episodes, scored. Collective.

        If an evaluation is due, it comes first, while the engine is awake anyway. A ticket is the
        number of a prompt in the run. A signal that asks to stop interrupts an evaluation, and with
        rollout.ahead the rollout, too: then this returns None, and a resumed run begins the step
        again. It also returns None if the evaluation has reached `stop_at`. Raises UserError if no
        rank has an episode to train on.
        """
        cfg = self.cfg
        generation = self.generation
        if generation is None:
            with self.timer.phase("prepare"):
                return records.load_step(Path(cfg.rollout.replay), step, self.mesh)

        first_ticket = step * cfg.rollout.prompts_per_step + self.progress.extra_tickets
        with generation.awake():
            is_due = step == 0 or (cfg.eval.every and step % cfg.eval.every == 0)
            name = "before_rl" if step == 0 else None
            # By `is`: an evaluation of the user's that returns nothing is none that a signal ended.
            if is_due and self.evaluate(generation, step, name) is False:
                return None
            with self.timer.phase("rollout"):
                if self.curriculum:
                    self.curriculum.start(first_ticket)
                generation.engine.take_counts()  # Those of an evaluation.
                rollout = generation.sampler.collect_step(
                    first_ticket, generation.sampling, version=self.policy.num_updates
                )
                self.engine_counts = generation.engine.take_counts()
        if rollout is None:
            return None
        trajectories = self.take(step, rollout)
        if self.dump:
            self.dump.begin(step, trajectories)
        return trajectories

    def take(self, step: int, rollout: StepRollout) -> list[Trajectory]:
        """Note what there is to note of a step's rollout, or of a part of it. Collective.

        Returns:
            This rank's trajectories, with their final scores.
        """
        self.num_discarded_tokens += rollout.discarded_tokens
        if rollout.is_last:
            num_extra = rollout.next_ticket - (step + 1) * self.cfg.rollout.prompts_per_step
            num_begun = len(self.progress.unfinished_tickets) - len(rollout.unfinished)
            self.num_extra_prompts = num_extra - self.progress.extra_tickets + num_begun
            self.progress.extra_tickets = num_extra
            self.progress.unfinished_tickets = rollout.unfinished
            self.progress.unfinished_tokens = rollout.unfinished_tokens
        # Some episodes may have failed.
        if rollout.trouble:
            self.run.log.say(f"step {step}: {rollout.trouble}")
        # Add the scores of a reward model; other rewards were computed during generation.
        if self.reward_model:
            with self.timer.phase("prepare"):
                self.reward_model.grade(rollout.trajectories)
        return rollout.trajectories

    def to_minibatches(self, trajectories: list[Trajectory]) -> Minibatches:
        """Make of trajectories what the models train on, with advantages. Collective."""
        with self.timer.phase("prepare"):
            self.shape(trajectories)  # scores -> rewards
            minibatches = self.make_batches(trajectories)  # even over the ranks, packed
        with self.timer.phase("annotate"):
            self.annotate(minibatches)  # old and reference log-probs, values
            self.assign_advantages(minibatches, trajectories)
        return minibatches

    def shape(self, trajectories: list[Trajectory]) -> None:
        """Turn scores into rewards, as the section `reward` of the config says. Collective.

        The score of each episode stays in `info["score"]`; the curriculum uses it.
        """
        cfg = self.cfg
        # The segments of an episode have the same reward and `info`; one of them represents it.
        episodes = {(t.group, t.episode): t for t in trajectories}
        oldest = {key: t.version for key, t in episodes.items()}
        for t in trajectories:
            key = t.group, t.episode
            oldest[key] = min(oldest[key], t.version)
        for t in trajectories:
            t.info["score"] = t.reward
            t.info["staleness"] = self.policy.num_updates - oldest[t.group, t.episode]
        if self.curriculum:
            results = [
                (self.row_of(t.group), t.reward >= cfg.eval.threshold) for t in episodes.values()
            ]
            results_here = np.array(results, np.int64).reshape(-1, 2)
            self.record_outcomes(self.mesh.gather_array(results_here))

        asked = cfg.reward
        depends_on_length = asked.unstopped != "keep" or asked.overlong_tokens
        if not (depends_on_length or asked.normalize or asked.clip):
            return  # a score is the reward
        table = torch.tensor(
            [(t.reward, t.info["answer_tokens"], t.info["stopped"]) for t in episodes.values()],
            dtype=torch.float64,
        ).reshape(-1, 3)
        scores, num_tokens, stopped = table.unbind(1)
        rewards, scales, self.progress.reward_stats = shaping.shape(
            scores,
            num_tokens,
            stopped.bool(),
            cfg.reward,
            cfg.env.max_tokens,
            self.progress.reward_stats,
            self.mesh.sums,
        )
        pairs = torch.stack([rewards, scales], 1).tolist()
        shaped = dict(zip(episodes, pairs, strict=True))
        for t in trajectories:
            t.reward, scale = shaped[t.group, t.episode]
            if t.turn_rewards is not None:
                t.turn_rewards = t.turn_rewards * np.float32(scale)

    def row_of(self, ticket: int) -> int:
        """Return the row that the curriculum has drawn for a ticket of this step."""
        assert self.curriculum
        return self.curriculum[ticket]

    def record_outcomes(self, results: np.ndarray) -> None:
        """Let the curriculum learn from a step: int64 [N, 2], a row and 1 if it was right."""
        assert self.curriculum
        self.curriculum.record(results)

    def make_batches(self, trajectories: list[Trajectory]) -> Minibatches:
        """Spread the trajectories evenly over all ranks, and pack this rank's. Collective."""
        cfg = self.cfg
        # All models read the same batches.
        layout = self.policy.layout.joined([m.layout for m in (self.ref, self.critic) if m])
        device = self.mesh.device
        temperature = cfg.rollout.temperature
        minibatches = []
        for minibatch in exchange(
            trajectories, self.mesh, self.tokens_per_rank, cfg.algo.updates_per_step
        ):
            packed = [pack(micro, device, temperature, layout=layout) for micro in minibatch]
            minibatches.append(packed)
            if self.dump:
                self.dump.add(minibatch, packed)
        return minibatches

    def annotate(self, minibatches: Minibatches) -> None:
        """Add the models' log-probs and values before the step's first update. Collective."""
        if advantages.need_old_logprobs(self.algo, self.inputs.estimator):
            self.policy.annotate(minibatches, "old_logprobs")
        if self.ref:
            self.ref.annotate(minibatches)
        if self.critic:
            self.critic.sleeper.wake_parameters()
            self.critic.annotate(minibatches, "values")
            self.critic.sleeper.sleep_parameters()

    def assign_advantages(self, minibatches: Minibatches, found: Sequence[Trajectory] = ()) -> None:
        """Give every token its advantage, and choose the tokens of high entropy. Collective.

        Args:
            minibatches: what `make_batches` returned.
            found: the step's trajectories; those without tokens count in the means of their groups.
        """
        advantages.assign(
            sum(minibatches, []),
            self.inputs.estimator,
            self.algo,
            dtype=self.policy.output_dtype,
            without_tokens=[t for t in found if not len(t.tokens)],
            sum_over_ranks=self.mesh.data_sums,
            max_over_ranks=self.mesh.maxima,
            gather_rows=self.mesh.gather_rows,
        )
        if self.algo.entropy_share:
            for minibatch in minibatches:
                shaping.mark_high_entropy(minibatch, self.algo.entropy_share, self.mesh.sums)

    def update(self, step: int, minibatches: Minibatches) -> Metrics:
        """Train the critic, if there is one, and the policy, unless the critic still warms up.

        Returns:
            Means over the updates of the policy's metrics and of the critic's (`critic_*`).
        """
        cfg = self.cfg
        start = cfg.critic.warmup_steps if self.critic else 0  # Of the policy's training.
        policy_metrics: Metrics = {}
        critic_metrics: Metrics = {}
        if self.critic:
            self.critic.sleeper.wake_parameters()
            loss = losses.value(cfg.critic.value_clip)
            updates = update_in_passes(self.critic, minibatches, loss, cfg, step, self.num_steps)
            critic_metrics = {f"critic_{name}": value for name, value in updates.items()}
            self.critic.sleeper.sleep()
        if step >= start:
            loss = losses.policy(self.algo, cfg.env.max_tokens)
            if self.dump:
                loss = self.dump.noting(loss)
            policy_metrics = update_in_passes(
                self.policy, minibatches, loss, cfg, step, self.num_steps, start
            )
        return policy_metrics | critic_metrics

    def report(
        self, step: int, trajectories: list[Trajectory], minibatches: Minibatches, metrics: Metrics
    ) -> None:
        """Log means over the episodes of all ranks, and the metrics of the updates. Collective."""
        if self.dump:
            self.dump.finish()
        row = means_of_step(trajectories, self.cfg.eval.threshold, self.mesh)
        row |= {"extra_prompts": self.num_extra_prompts, "kl_coef": self.algo.kl_coef, **metrics}
        generated_by = self.describe_generation()
        if generated_by:
            row |= generated_by
            row["rollout/discarded_tokens"] = self.num_discarded_tokens
            self.progress.add({}, discarded=self.num_discarded_tokens)
        self.num_discarded_tokens = 0

        work = count_work(minibatches * self.algo.num_epochs, self.mesh)
        num_sampled = sum(int(t.sampled.sum()) for t in trajectories)
        generated = int(self.mesh.sums(torch.tensor([num_sampled])))
        row |= self.run.meter.end_step(work, generated=generated, trained=work.rows)
        self.run.log.scalars("rl", step, row, ("reward", "answer_tokens", "mismatch"))
        if generated_by:  # tokens of a replay may be of other weights
            self.mismatch.check(step, row)
        for message in self.health.check(step, row):
            self.run.log.say(message)

    def describe_generation(self) -> Metrics:
        """Return metrics of what generated the step; empty: it is a replay. Collective."""
        if not self.generation:
            return {}
        engine = self.generation.engine
        row: Metrics = {
            "refit_bytes": self.generation.refit.bytes_received,
            "kv_cache_tokens": engine.kv_cache_tokens,
        }
        if engine.on_cuda:
            num_steps, waiting = self.mesh.maxima(torch.tensor(self.engine_counts)).tolist()
            row |= {"rollout/steps": num_steps, "rollout/waiting": waiting}
        return row

    def adapt_kl_coef(self, metrics: Metrics) -> None:
        """Move the weight of the KL towards `algo.kl_target`, if the policy was updated."""
        target = self.algo.kl_target
        if target and "ref_kl" in metrics:
            kl_coef = losses.adapt_kl_coef(self.algo.kl_coef, metrics["ref_kl"], target)
            self.algo = dataclasses.replace(self.algo, kl_coef=kl_coef)
            self.progress.kl_coef = kl_coef

    def evaluate(self, generation: "Generation", step: int, name: str | None) -> bool:
        """Score held-out prompts; return False if a signal interrupts it, or `stop_at` is reached.

        Args:
            generation: with the engine awake.
            step: number of finished steps.
            name: keep the result for the summary under this name; None: do not keep it.
        """
        sampling = eval_sampling(self.cfg, generation.sampling.stop_token_ids)
        with self.timer.phase("evaluate"):
            result = evaluate(
                generation.sampler,
                self.inputs.held_out,
                self.cfg.eval,
                sampling,
                self.reward_model,
                max(NUM_SHOWN, self.cfg.log.samples),
            )
        if result:
            self.record_evaluation(step, name, result)
            if self.run.has_reached_goal:
                self.progress.evaluations["after_rl"] = result
        return bool(result) and not self.run.has_reached_goal

    def record_evaluation(self, step: int, name: str | None, result: dict) -> None:
        """Log what `score` returned for the weights of a step."""
        self.run.record_evaluation(step, result["scores"], ("accuracy", "reward"), name, result)

    def warm_start(self) -> bool:
        """Imitate the training rows' answers for `sft.num_steps` steps, and export the result.

        Returns:
            False if a signal has asked to stop.
        """
        if self.generation:
            with self.generation.awake():
                self.evaluate(self.generation, -1, "before_sft")  # warm_start stops if this did
        self.progress.add(self.timer.take())
        with self.timer.phase("sft"):
            num_tokens = warm_start(
                self.cfg, self.inputs, self.policy, self.run.log, self.tokens_per_rank
            )
        if num_tokens is None:
            self.run.end(0, f"stopped by a signal in the warm start. {HOW_TO_RESUME}")
            return False
        # One phase, because its forward and backward do not belong to RL.
        self.progress.add({"sft": sum(self.timer.take().values())}, sft=num_tokens)
        self.run.export("sft")  # written while RL begins, unless it begins with loading it
        return True

    def load_critic(self) -> None:
        """Load the critic, from the checkpoint if the run is resumed."""
        cfg = self.cfg.critic
        self.run.wait_for_export()  # the critic may start as the result of the warm start
        folder = self.inputs.folders.get("critic", self.start_folder)
        base = None
        if cfg.share_base:
            folder = self.policy.folder
            base = self.policy
        self.critic = self.load_model(cfg, folder, score=True, base=base)
        self.run.attach("critic", self.critic)
        self.critic.sleeper.sleep()

    def load_reference(self, step: int) -> None:
        """Load the frozen model that the KL is taken to, if the config asks for one.

        It is `ref.model`, or the policy as RL started with it or as it was at the last refresh
        before `step`. If that is the base of a policy with adapters, nothing is loaded.
        """
        folder = self.inputs.folders.get("reference", self.start_folder)
        if not self.cfg.algo.kl_coef and "reference" not in self.inputs.folders:
            return
        self.run.wait_for_export()  # it may be the result of the warm start
        if self.mesh.rank == 0:
            # The first checkpoint may still be under way, and need the first reference.
            finding.drop_references(self.run.output, 0 if self.cfg.checkpoint.every else step)
        self.mesh.barrier()
        refreshed = finding.newest_reference(self.run.output, step, self.progress.reference)
        self.ref = self.make_reference(refreshed or folder)

    def export_reference(self, step: int) -> None:
        """Begin to write the policy, as it is after `step` steps, as the reference. Collective."""
        self.run.export(f"references/step-{step}")
        if self.cfg.ref.reset_optimizer:
            self.policy.forget_optimizer_state()
        self.ref = None  # frees its memory before the next one is loaded

    def finish(self) -> None:
        """Evaluate for the last time, export, write the summary. Collective."""
        self.run.export_result()  # written while the model is evaluated
        if self.evaluate_result() is False:
            self.stop(self.num_steps)
            return
        sizes = {}
        if kv_cache_tokens := self.describe_generation().get("kv_cache_tokens"):
            # What a later step would have continued is lost, now that none follows.
            self.progress.add({}, discarded=self.progress.unfinished_tokens)
            sizes["KV cache of an engine, tokens"] = int(kv_cache_tokens)
        self.run.finish(accuracies(self.progress.evaluations), sizes)
        if self.generation:
            self.generation.close()

    def evaluate_result(self) -> bool:
        """Evaluate what the run has trained, if that is not done; False if a signal interrupts."""
        if not self.generation or self.run.has_reached_goal:
            return True
        with self.generation.awake():
            return self.evaluate(self.generation, self.num_steps, "after_rl")


class Generation:
    """The engine of this rank, the refit that writes the policy's weights into it, the sampler.

    Args:
        cfg: the config of the run.
        inputs: what the config names.
        engine: settings of the engine, as a plan has settled them.
        mesh: the ranks that generate.
        timer: gets the seconds of refits, and of waking and sleeping.
        policy: the trained model, if these ranks have it, which gives the engine its weights.
        make_sampler: the class of the sampler.
    """

    def __init__(
        self,
        cfg: RLConfig,
        inputs: Inputs,
        engine: EngineConfig,
        mesh: Mesh,
        timer: Timer,
        policy: Policy | None = None,
        make_sampler: type[Sampler] = Sampler,
    ):
        dtype: str = cfg.engine.dtype
        if dtype == "auto":
            dtype = cfg.policy.dtype.replace("float64", "float32")  # vLLM has no float64
        self.policy = policy
        if policy:
            # vLLM demands that its share of the device is free when it starts. So the policy sleeps
            # meanwhile, and wakes when the engine is asleep.
            policy.sleeper.sleep()
        self.engine = RolloutEngine(
            engine,
            inputs.folders["policy"],
            mesh,
            dtype=dtype,
            vision=inputs.prompts.vision,
            num_answers=cfg.rollout.samples_per_prompt
            * (cfg.rollout.prompts_per_step + cfg.rollout.extra_prompts + cfg.rollout.num_ahead),
            guides=isinstance(inputs.make_env.example, Agent),
            routes=cfg.algo.router_replay,
            timer=timer,
        )
        self.refit = Refit(
            cfg.refit,
            policy.shards() if policy else {},
            policy.parts() if policy else {},
            self.engine,
            read=policy.merged if policy else None,
            check=cfg.debug.check_refit,
        )
        self.engine.sleep()
        if policy:
            policy.sleeper.wake_parameters()
        # The progress of the run, for reward functions of TRL.
        self.state = inputs.rewards.state
        self.state.max_steps = inputs.num_updates
        self.state.is_world_process_zero = mesh.rank == 0
        num_drawn = inputs.num_steps * cfg.rollout.prompts_per_step
        self.state.num_train_epochs = num_drawn / len(inputs.prompts.rows)
        self.sampler = make_sampler(
            self.engine, inputs.make_env, inputs.rewards, inputs.prompts, cfg, open_endpoint
        )
        self.sampling = Sampling(
            max_tokens=cfg.rollout.max_tokens,
            stop_token_ids=sampling_stops(inputs.stop_ids, inputs.prompts.vision),
            temperature=cfg.rollout.temperature,
            context_tokens=cfg.engine.max_model_len,
        )

    def awake(self) -> contextlib.AbstractContextManager[None]:
        """Give the engine the policy's weights; inside the block it may generate. Collective."""
        assert self.policy
        self.note_updates(self.policy.num_updates)
        return self.engine.awake(self.refit, self.policy.sleeper)

    def note_updates(self, num_updates: int) -> None:
        """Let engine and reward functions know how many optimizer steps the weights have seen."""
        self.sampler.engine_loop.version = num_updates
        self.state.global_step = num_updates
        self.state.epoch = self.state.num_train_epochs * num_updates / max(1, self.state.max_steps)

    def close(self) -> None:
        """Stop the sampler and the engine."""
        self.sampler.close()
        self.engine.close()
