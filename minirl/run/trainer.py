"""What every training program does around its loop.

It opens the folder of the run or resumes there, logs, saves, and writes the summary.
"""

import abc
import dataclasses
import functools
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from minirl.base.errors import CRASH, require
from minirl.base.files import write_whole
from minirl.base.log import Timer, say
from minirl.checkpoint import finding, run_folder
from minirl.checkpoint.exporting import Exporter, export_adapter
from minirl.checkpoint.state import LOWER_IS_BETTER, Saver, load_checkpoint, restore
from minirl.config.policy import PolicyConfig
from minirl.config.shared import EngineConfig, TrainingConfig
from minirl.config.validate import resolve_dtypes, resolve_learning_rates
from minirl.config.values import to_yaml
from minirl.model import causal
from minirl.parallel.mesh import Mesh
from minirl.plan.plan import Plan, announce, reference_of
from minirl.rollout import records
from minirl.run import results
from minirl.run.inputs import choose_dtype
from minirl.run.log import Log
from minirl.run.metrics import Meter, Progress
from minirl.run.trackers import Wandb
from minirl.train.frozen import Reference, copy_trained, is_base
from minirl.train.policy import Metrics, Policy
from minirl.train.skipped import check_finite

# Ends the last line of a stopped run.
HOW_TO_RESUME = "Resume with the same command and --resume"


class TrainingRun:
    """A run's folder, log, progress and checkpoints.

    Args:
        cfg: the config; with `resume`, policy and progress become those of the newest checkpoint.
        policy: the trained model; the run uses its mesh and timer.
        description: the data in a few words, for the first line of the log.
        row_hashes: what stands for the rows, as `check_same_rows` returns it.

    Raises:
        UserError: the checkpoint is of another model or optimizer.
    """

    def __init__(self, cfg: TrainingConfig, policy: Policy, description: str, row_hashes: str = ""):
        mesh = policy.mesh
        self.cfg = cfg
        self.policy = policy
        self.mesh = mesh
        self.timer = policy.timer
        self.output = Path(cfg.output)
        self.first_step = 0
        self.progress = Progress()
        self.resumed_from: Path | None = None
        load = functools.partial(load_checkpoint, policy=policy)
        if cfg.resume and (found := finding.resume(self.output, mesh, load)):
            self.resumed_from, saved = found
            self.first_step = saved["step"]
            self.progress = Progress(**saved["progress"])
        self.forget_other_rewards()
        held_out_before = self.progress.rows.split()[1:]
        other_rows = held_out_before not in ([], row_hashes.split()[1:])
        other_scores = False

        self.results: results.Results | None = None  # On rank 0.
        wandb: Wandb | None = None
        if mesh.rank == 0:
            run_folder.hold(self.output)
            finding.drop_partial(self.output / "checkpoints")
            finding.drop_partial(self.output / "references")
            if cfg.log.wandb:  # First, because it may be refused.
                wandb = Wandb(cfg.log, self.output, dataclasses.asdict(cfg))
                mesh.watch.close_logs = functools.partial(wandb.close, CRASH)
            # Write the config; drop what the run will write again.
            other_scores = run_folder.forget_best(cfg, other_rows=other_rows)
            text = run_folder.head_of(type(cfg)) + to_yaml(dataclasses.asdict(cfg))
            write_whole(self.output / "config.yaml", text)
            records.drop_steps(self.output / "rollouts", self.first_step)
            finding.drop_later_references(self.output, self.first_step)
            resumed = self.resumed_from is not None
            self.results = results.Results(self.output, self.first_step, resumed=resumed)
        if mesh.broadcast(other_scores, 0):
            self.progress.evaluations = {}
        mesh.watch.record_end = functools.partial(results.record_end, self.output)
        self.meter = Meter(policy, self.progress)
        self.num_steps = 0  # Of the whole run; 0 before `begin`.
        self.has_reached_goal = False  # An evaluation has reached `stop_at`: no step follows.
        self.saver = Saver(self.output, cfg.checkpoint, policy)

        def finish_writing() -> None:  # another thread ends the run
            if self.saver.pending:
                futures.wait([self.saver.pending], timeout=60)

        mesh.watch.finish_writing = finish_writing
        self.exporter = Exporter(mesh)
        self.outcomes: Callable[[], str] = str  # A curriculum's, for a checkpoint.
        repeated = self.first_step if self.resumed_from else -1  # The evaluation before all steps.
        open_wandb = (lambda: wandb) if wandb else None
        self.log = Log(self.output, rank=mesh.rank, first_step=repeated, open_wandb=open_wandb)
        if mesh.rank == 0 and self.resumed_from:
            self.show_warm_start_again()

        num_parameters = sum(t.numel() for t in policy.shards().values())
        adapters = ""
        if policy.adapters:
            num_trained = sum(p.numel() for p in causal.trained(policy.model).values())
            adapters = f" and {num_trained / 1e6:.2f}M in adapters, which are trained"
        ranks = f"{mesh.everyone.world_size} rank{'s' * (mesh.everyone.world_size > 1)}"
        if mesh.side == "trainers":
            ranks += f" ({mesh.everyone.world_size - mesh.world_size} generate)"
        self.log.say(
            f"{ranks} on {mesh.device.type}, {num_parameters / 1e6:.2f}M "
            f"parameters{adapters}, {description}; writing {self.output}"
        )
        if self.resumed_from:
            self.log.say(f"resuming at step {self.first_step} from {self.resumed_from}")
        elif cfg.resume:
            self.log.say("no finished checkpoint to resume from; starting at step 0")
        self.progress.data = description
        self.progress.rows = row_hashes

    def forget_other_rewards(self) -> None:
        """Forget what a resumed run knows of rewards, if other settings decide them now."""
        rewards = run_folder.fingerprint(self.cfg, run_folder.REWARDS)
        known = self.progress
        if known.rewards not in ("", rewards) and (known.reward_stats[0] or known.outcomes):
            known.reward_stats = Progress().reward_stats
            known.outcomes = ""
            if self.mesh.rank == 0:
                say(
                    "other settings decide the rewards than before: their mean and deviation "
                    "(reward.normalize) and the outcomes of prompts (rollout.curriculum_floor) "
                    "are counted from here on"
                )
        known.rewards = rewards

    def attach(self, name: str, model: Policy) -> None:
        """Keep another trained model in the checkpoints, and restore it if the run is resumed.

        Raises:
            UserError: the checkpoint has no such model, or another.
        """
        if self.resumed_from:
            restore(self.resumed_from, model, name)
        self.saver.others[name] = model
        self.meter.add(model)

    def begin(self, name: str, num_steps: int) -> None:
        """Begin the steps of training: `num_steps` in the whole run, `name` on the progress bar."""
        self.num_steps = num_steps
        self.log.progress(name, num_steps, self.first_step)
        self.meter.begin()

    def record_evaluation(
        self,
        step: int,
        scores: Metrics,
        shown: Iterable[str],
        name: str | None,
        result: dict,
    ) -> None:
        """Log held-out scores; they may make the checkpoint of that step the best one.

        Summary and answers are written again. Scores that reach `stop_at` before the last
        step set `has_reached_goal`.

        Args:
            step: the weights are those after so many steps.
            scores: held-out scores to log.
            shown: names of the scores to print on the console.
            name: keep `result` for the summary under this name; None: do not keep it.
            result: what the evaluation returned; `answers` in it are shown.

        Raises:
            UserError: `stop_at` names no score of this evaluation.
        """
        self.log.scalars("eval", step, scores)
        if self.cfg.checkpoint.best_metric:
            with self.timer.phase("checkpoint"):
                self.saver.score(step, scores)
        printed = ", ".join(f"{score} {scores[score]:.4g}" for score in shown)
        self.log.say(f"step {step}: held-out {printed}")
        goal = self.cfg.stop_at
        # Before a warm start (step -1) only the names are looked at.
        if goal and not self.has_reached_goal and step < self.num_steps:
            reached = []
            for metric, value in goal.items():
                missing = f"an evaluation has no score {metric!r}; it has {', '.join(scores)}"
                require(metric in scores, f"stop_at = {goal}: {missing}")
                sign = -1 if metric in LOWER_IS_BETTER else 1
                reached.append(sign * scores[metric] >= sign * value)
            if step >= 0 and all(reached):
                self.has_reached_goal = True
                asked = ", ".join(f"{metric} {value:g}" for metric, value in goal.items())
                self.log.say(f"step {step}: stop_at = {asked} is reached, training ends here")
        if name:
            self.progress.evaluations[name] = result
        answers = result.get("answers", [])
        samples = answers[: self.cfg.log.samples]
        if samples:
            self.log.say(f"step {step}: answers\n{results.describe(samples)}")
            self.log.text("answers", max(step, 0), results.full_text(samples))
        if self.results:
            if answers:
                self.results.add_answers(step, name, answers)
            self.results.held_out = scores
            self.results.held_out_step = step
            self.results.write(results.RUNNING, "", self.progress, step)

    def show_warm_start_again(self) -> None:
        """Write the end of the warm start's curves to TensorBoard, which has hidden it.

        It hides all that was of the run's first step or a later one, and counts imitation alike.
        """
        for row in results.rows_of(self.output / "metrics.jsonl"):
            step = row.pop("step")
            if row.pop("phase") == "sft" and step >= self.first_step:
                for name, value in row.items():
                    self.log.board.add_scalar(f"sft/{name}", value, step)

    def end(self, num_steps: int, reason: str) -> None:
        """Close the log and write the results of a run that a signal has stopped."""
        self.log.bar.close()
        self.log.say(reason)
        if self.results:
            results.write_curves(self.output)
            self.results.write(results.STOPPED, reason, self.progress, num_steps)
        self.log.close()

    def export(self, name: str, weights: Mapping[str, Tensor] | None = None) -> None:
        """Begin to export the model, as it is now, to a folder of the run. Collective.

        The folder is there after `wait_for_export`, `save` or the next export.

        Args:
            name: the folder's path in that of the run.
            weights: weights in place of the model's, by the same names.
        """
        with self.timer.phase("export"):
            self.exporter.start(self.policy, self.output / name, weights=weights)

    def wait_for_export(self) -> None:
        """Wait until the last export is finished, if one is under way. Collective.

        Raises:
            UserError: it could not be written.
        """
        if self.exporter.pending:
            with self.timer.phase("export"):
                self.exporter.wait()

    def save(self, num_steps: int) -> None:
        """Write a checkpoint of `num_steps` finished steps, and say so. Collective."""
        path = self._save(num_steps)
        verb = "writing" if self.cfg.checkpoint.background else "saved"
        self.log.say(f"step {num_steps}: {verb} {path}")

    def _save(self, num_steps: int) -> Path:
        self.wait_for_export()  # a run resumed from this checkpoint may need it
        with self.timer.phase("checkpoint"):
            self.progress.outcomes = self.outcomes()
            self.progress.reference = max(finding.finished(self.output, "references"), default=0)
            return self.saver.save(num_steps, dataclasses.asdict(self.progress))

    def stop(self, num_steps: int) -> None:
        """Save, if that is not done, and close the log. Collective.

        This ends a run that a signal has stopped. It can be resumed.

        Args:
            num_steps: finished steps.
        """
        if self.saver.step != num_steps:
            self._save(num_steps)
        with self.timer.phase("checkpoint"):
            self.saver.wait()
        newest = self.output / f"checkpoints/step-{num_steps}"
        where = f"after {num_steps} steps"
        self.end(num_steps, f"stopped by a signal {where}; saved {newest}. {HOW_TO_RESUME}")

    def export_result(self) -> None:
        """Begin to export the trained model, and the moving average of its weights. Collective.

        Call it after the last step; `finish` waits.

        Raises:
            UserError: weights are not finite.
        """
        check_finite(
            self.policy,
            "there is nothing to export; train again with a lower policy.lr, or resume from an "
            "earlier checkpoint",
        )
        self.export("model")
        if self.policy.adapters:
            export_adapter(self.policy, self.output / "adapter")
        if self.cfg.policy.ema_decay:
            with self.policy.state_awake():
                self.export("model_ema", self.policy.averages())

    def finish(self, scores: dict[str, float | None], sizes: dict[str, int]) -> None:
        """Wait for what is being written, close the log, write the summary. Collective.

        Args:
            scores: held-out scores by title, with which the summary begins.
            sizes: sizes that stay the same in the whole run, by title.
        """
        with self.timer.phase("checkpoint"):
            self.saver.wait()
        self.wait_for_export()
        self.progress.add(self.timer.take())
        self.log.close()
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak_mib = self.mesh.gather(round(kilobytes / 1024, 1))
        if self.results:
            common = {
                "sizes": sizes,
                "gpu_memory_gib": self.progress.gpu_memory,
                "peak_rss_mb": max(peak_mib),
                "peak_rss_mb_by_rank": peak_mib,
                "wall_seconds": time.perf_counter() - self.timer.began,
                "model": str(self.output / "model"),
            }
            results.finish(self.output, self.progress, scores, common)


class BaseTrainer(abc.ABC):
    """A training program: the constructor makes `policy` and `run`; `train` is the algorithm."""

    run: TrainingRun
    policy: Policy
    plan: Plan  # What `announce` has found.
    start: dict[str, Tensor] | None = None  # What the policy trains, as training begins.

    def __init__(self, cfg: TrainingConfig, mesh: Mesh):
        self.cfg = cfg
        resolve_learning_rates(cfg)
        cfg.policy.dtype = choose_dtype(cfg.policy.dtype, "policy.dtype", mesh)
        resolve_dtypes(cfg, mesh.default_dtype())  # A critic's.
        self.mesh = mesh
        self.timer = Timer(mesh.device)
        mesh.watch.phase = self.timer.current
        mesh.watch.unmapped_bytes = lambda: self.timer.unmapped_bytes()
        # What settings that are auto or 0 stand for; `announce` finds it out.
        self.tokens_per_rank = cfg.tokens_per_rank
        self.engine_config: EngineConfig | None = None

    def announce(self, configs: Mapping[str, Mapping[str, Any]]) -> None:
        """Say what the planner's formulas find; settle rows, sleep and activation checkpointing.

        Call it when the config is checked and no model is loaded yet.

        Args:
            configs: values of the models' configs, by role.

        Raises:
            UserError: weights, gradients and optimizer state do not fit the ranks' devices.
        """
        plan, lines = announce(self.cfg, configs, self.mesh)
        self.plan = plan
        self.tokens_per_rank = plan.workload.tokens_per_rank
        if plan.engine:
            is_cuda = self.mesh.device.type == "cuda"
            self.engine_config = plan.engine.config(plan.sleep) if is_cuda else plan.engine.cfg
        if self.mesh.rank == 0:
            for line in lines:
                say(line)

    def load_model(self, cfg: PolicyConfig, folder: Path, **options: Any) -> Policy:
        """Load a model onto the mesh of the run. The options are those of `Policy`.

        Where the policy's reference is its base with what training begins with, this is kept.
        """
        is_policy = cfg is self.cfg.policy
        if cfg.activation_checkpointing == "auto":
            cfg = dataclasses.replace(cfg, activation_checkpointing=self.plan.checkpointing)
        sequence_parallel = self.cfg.parallel.sequence
        options |= {"sequence_parallel": sequence_parallel, "timer": self.timer}
        options["offloads"] = self.plan.offloads
        model = Policy(cfg, folder, self.mesh, **options)
        lora = cfg.lora
        is_more = bool(lora.adapter or lora.modules_to_save)  # Than A and B that add nothing yet.
        if is_policy and model.adapters and is_more and reference_of(self.cfg) == "":
            self.start = copy_trained(model)
        return model

    def make_reference(self, folder: Path) -> Reference:
        """Return the reference with a folder's weights; the policy's base is not loaded again."""
        if self.start and folder == self.policy.folder:
            return Reference(self.policy, None, self.start)
        model = None
        if not is_base(self.policy, folder):
            model = self.load_model(self.cfg.policy, folder, trainable=False)
        return Reference(self.policy, model)

    @abc.abstractmethod
    def train(self) -> None:
        """Train from the first step of the run to the last, and write the results."""

    @classmethod
    def main(cls, cfg: TrainingConfig, mesh: Mesh) -> Self:
        """Make the program, train and return it; finish a checkpoint however training ends."""
        with run_folder.released(Path(cfg.output)):
            program = cls(cfg, mesh)
            mesh.watch.can_save = True  # from here on a signal asks to save, then to end
            if mesh.agree_to_stop():
                reason = f"stopped by a signal before the first step. {HOW_TO_RESUME}"
                program.run.end(program.run.first_step, reason)
            else:
                with program.run.saver:
                    program.train()
        return program
