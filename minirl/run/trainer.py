"""What every training program does around its loop.

It opens the folder of the run or resumes there, logs, saves, and writes the summary.
"""

import abc
import contextlib
import dataclasses
import functools
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from minirl.base.errors import require
from minirl.base.files import remove, write_whole
from minirl.base.log import Timer, say
from minirl.checkpoint import changes, finding, lock
from minirl.checkpoint.exporting import Exporter, export_adapter
from minirl.checkpoint.state import LOWER_IS_BETTER, Saver, load_checkpoint, restore
from minirl.config.parse import save_config
from minirl.config.policy import Checkpointing, PolicyConfig
from minirl.config.shared import TrainingConfig
from minirl.config.validate import resolve_dtypes, resolve_learning_rates
from minirl.model import causal
from minirl.parallel.mesh import Mesh
from minirl.plan.page import announce
from minirl.plan.workload import Workload
from minirl.rollout import records
from minirl.run import metrics, results
from minirl.run.inputs import choose_dtype
from minirl.run.log import Log
from minirl.run.trackers import open_trackers
from minirl.train.policy import Metrics, Policy, Reference, is_base

# Ends the last line of a stopped run.
HOW_TO_RESUME = "Resume with the same command and --resume"


@dataclass(kw_only=True)
class Progress:
    """What a checkpoint and the summary need besides weights."""

    # Name (before_sft, before_rl, after_rl, before, after) -> result of that evaluation.
    evaluations: dict[str, dict] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # Of each phase.
    tokens: dict[str, int] = field(default_factory=dict)  # Generated, trained, ...
    # Prompts that dynamic sampling took beyond rollout.prompts_per_step, in all steps.
    extra_tickets: int = 0
    # Prompts whose groups earlier steps began and no step has trained on (rollout.ahead), and the
    # tokens that were sampled for them. A resumed run begins them again, before new prompts.
    unfinished_tickets: list[int] = field(default_factory=list)
    unfinished_tokens: int = 0
    gpu_memory: dict[str, float] = field(default_factory=dict)  # Most GiB of a rank, by phase.
    kl_coef: float | None = None  # As adapted for algo.kl_target; None: it was not adapted.
    # Count, mean and squares about the mean of all rewards, for reward.normalize.
    reward_stats: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    outcomes: str = ""  # Outcomes of prompts in past steps, as a curriculum saves them.

    def add(self, seconds: dict[str, float], **tokens: int) -> None:
        """Add seconds by phase, and tokens by kind."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0) + value
        for name, num in tokens.items():
            self.tokens[name] = self.tokens.get(name, 0) + num


class TrainingRun:
    """A run's folder, log, progress and checkpoints.

    Args:
        cfg: the config; with `resume`, policy and progress become those of the newest checkpoint.
        policy: the trained model; the run uses its mesh and timer.
        description: the data in a few words, for the first line of the log.

    Raises:
        UserError: the checkpoint is of another model or optimizer.
    """

    def __init__(self, cfg: TrainingConfig, policy: Policy, description: str):
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

        self.results: results.Results | None = None  # On rank 0.
        if mesh.rank == 0:
            # Write the config; drop what the run will write again.
            lock.hold(self.output)
            unfinished = self.output / "config.yaml.partial"
            remove(unfinished)
            save_config(cfg, unfinished)
            text = changes.head_of(type(cfg)) + unfinished.read_text()
            write_whole(self.output / "config.yaml", text)
            records.drop_steps(self.output / "rollouts", self.first_step)
            resumed = self.resumed_from is not None
            self.results = results.Results(self.output, self.first_step, resumed=resumed)
        mesh.watch.record_end = functools.partial(results.record_end, self.output)
        self.utilisation = metrics.Utilisation(mesh)
        self.utilisation.add(policy.folder, score=policy.score)
        self.mark = time.perf_counter()  # When the last step was reported.
        self.is_stopping = False  # A signal asks to save after this step and to end the run.
        self.num_steps = 0  # Of the whole run; 0 before `begin`.
        self.has_reached_goal = False  # An evaluation has reached `stop_at`: no step follows.
        self.saver = Saver(self.output, cfg.checkpoint, policy)
        mesh.watch.finish_writing = self._finish_writing
        self.exporter = Exporter(mesh)
        self.outcomes: Callable[[], str] = str  # A curriculum's, for a checkpoint.
        self.log = Log(
            self.output,
            rank=mesh.rank,
            first_step=self.first_step,
            trackers=lambda: open_trackers(cfg.log, self.output, dataclasses.asdict(cfg)),
        )

        num_parameters = sum(t.numel() for t in policy.shards().values())
        adapters = ""
        if policy.adapters:
            num_trained = sum(p.numel() for p in causal.trained(policy.model).values())
            adapters = f" and {num_trained / 1e6:.2f}M in adapters, which are trained"
        self.log.say(
            f"{mesh.world_size} rank{'s' * (mesh.world_size > 1)} on {mesh.device.type}, "
            f"{num_parameters / 1e6:.2f}M "
            f"parameters{adapters}, {description}; writing {self.output}"
        )
        if self.resumed_from:
            self.log.say(f"resuming at step {self.first_step} from {self.resumed_from}")
        elif cfg.resume:
            self.log.say("no finished checkpoint to resume from; starting at step 0")

    def attach(self, name: str, model: Policy) -> None:
        """Keep another trained model in the checkpoints, and restore it if the run is resumed.

        Raises:
            UserError: the checkpoint has no such model, or another.
        """
        if self.resumed_from:
            restore(self.resumed_from, model, name)
        self.saver.others[name] = model
        self.utilisation.add(model.folder, score=model.score)

    def begin(self, name: str, num_steps: int) -> None:
        """Begin the steps of training: `num_steps` in the whole run, `name` on the progress bar."""
        self.num_steps = num_steps
        self.log.progress(name, num_steps, self.first_step)
        self.progress.add(self.timer.take())
        self.mark = time.perf_counter()

    def report(
        self,
        phase: str,
        step: int,
        values: Metrics,
        shown: Iterable[str],
        work: metrics.StepWork | None = None,
        **tokens: int,
    ) -> None:
        """Log a step of training with the seconds of its phases. Collective.

        Here all ranks agree whether a signal has asked for the end: see `is_stopping`.

        Args:
            phase: name of the rows in metrics.jsonl.
            step: number of the step.
            values: metrics of the step.
            shown: names of the metrics that the progress bar shows.
            work: what the models were trained on, on all ranks.
            tokens: numbers of tokens on all ranks, by kind.
        """
        self.is_stopping = self.mesh.agree_to_stop()
        seconds = self.timer.take()
        in_step = time.perf_counter() - self.mark - metrics.outside_steps(seconds)
        self.mark = time.perf_counter()
        self.progress.add(seconds, **tokens)
        speeds = metrics.slowest(self._by_rank(seconds | {"step": in_step}), **tokens)

        gpu_memory = self.timer.take_memory()
        memory = metrics.host_memory()
        memory |= {f"gpu_gib/{name}": value for name, value in gpu_memory.items()}
        memory = metrics.highest(self._by_rank(memory))
        in_run = self.progress.gpu_memory
        for name in gpu_memory:
            in_run[name] = max(in_run.get(name, 0.0), memory[f"gpu_gib/{name}"])

        in_training = [speeds.get(f"time/{name}", 0.0) for name in ("forward", "backward")]
        row = values | speeds | self.utilisation.metrics(work, sum(in_training))
        row |= {f"total/{kind}": float(self.progress.tokens[kind]) for kind in tokens}
        self.log.scalars(phase, step, row | memory, shown)

    def _by_rank(self, values: dict[str, float]) -> list[dict[str, float]]:
        """Return the named numbers of each rank. Collective."""
        by_rank = self.mesh.gather_named(values.items())
        return [{name: part.item() for name, part in on_rank.items()} for on_rank in by_rank]

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
        if 0 <= step < self.num_steps and self._reaches_goal(scores):
            self.has_reached_goal = True
            goal = ", ".join(f"{metric} {value:g}" for metric, value in self.cfg.stop_at.items())
            self.log.say(f"step {step}: stop_at = {goal} is reached, so that training ends here")
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
            self.results.write(results.RUNNING, "", self._summary(step))

    def _reaches_goal(self, scores: Metrics) -> bool:
        """Return whether scores are those that `stop_at` waits for; no if it names none."""
        reached = []
        for metric, value in self.cfg.stop_at.items():
            require(
                metric in scores,
                f"stop_at = {self.cfg.stop_at}: an evaluation has no score {metric!r}; it has "
                f"{', '.join(scores)}",
            )
            sign = -1 if metric in LOWER_IS_BETTER else 1
            reached.append(sign * scores[metric] >= sign * value)
        return bool(reached) and all(reached)

    def _summary(self, num_steps: int) -> dict:
        """Return what summary.json says of an unfinished run after so many finished steps."""
        progress = self.progress
        held_out = self.results.held_out if self.results else {}
        common = {"step": num_steps, "held_out": held_out, "tokens": progress.tokens}
        return results.summarise({}, progress.tokens, dict(progress.seconds), common)

    def end(self, num_steps: int, reason: str) -> None:
        """Close the log and write the results of a run that a signal has stopped."""
        self.log.bar.close()
        self.log.say(reason)
        if self.results:
            results.write_curves(self.output)
            self.results.write(results.STOPPED, reason, self._summary(num_steps))
        self.log.close()

    def export(self, name: str, weights: Mapping[str, Tensor] | None = None) -> None:
        """Begin to export the model, as it is now, to a folder of the run. Collective.

        The folder is there after `wait_for_export`, `save_if_due` or the next export.

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

    def save_if_due(self, num_steps: int) -> None:
        """Write a checkpoint if one is due after `num_steps` finished steps. Collective."""
        every = self.cfg.checkpoint.every
        if every and num_steps % every == 0:
            path = self._save(num_steps)
            verb = "writing" if self.cfg.checkpoint.background else "saved"
            self.log.say(f"step {num_steps}: {verb} {path}")

    def _save(self, num_steps: int) -> Path:
        """Write a checkpoint of `num_steps` finished steps; return its folder. Collective."""
        self.wait_for_export()  # a run resumed from this checkpoint may need it
        with self.timer.phase("checkpoint"):
            self.progress.outcomes = self.outcomes()
            return self.saver.save(num_steps, dataclasses.asdict(self.progress))

    def _finish_writing(self) -> None:
        """Give the checkpoint under way a minute; called when another thread ends the run."""
        pending = self.saver.pending
        if pending:
            with contextlib.suppress(TimeoutError):
                pending.exception(60)

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
        self.policy.check_finite(
            "there is nothing to export; train again with a lower policy.lr, or resume from an "
            "earlier checkpoint"
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
            longest_first = sorted(self.progress.seconds.items(), key=lambda item: -item[1])
            common = {
                "sizes": sizes,
                "gpu_memory_gib": self.progress.gpu_memory,
                "peak_rss_mb": max(peak_mib),
                "peak_rss_mb_by_rank": peak_mib,
                "wall_seconds": time.perf_counter() - self.timer.began,
                "model": str(self.output / "model"),
            }
            seconds = {name: round(value, 3) for name, value in longest_first}
            summary = results.summarise(scores, self.progress.tokens, seconds, common)
            results.write_curves(self.output)
            self.results.write(results.FINISHED, "", summary)
            results.show(self.output, summary, scores)


class BaseTrainer(abc.ABC):
    """A training program: the constructor makes `policy` and `run`; `train` is the algorithm."""

    run: TrainingRun
    policy: Policy

    def __init__(self, cfg: TrainingConfig, mesh: Mesh):
        self.cfg = cfg
        resolve_learning_rates(cfg)
        cfg.policy.dtype = choose_dtype(cfg.policy.dtype, "policy.dtype", mesh)
        resolve_dtypes(cfg, mesh.default_dtype())  # A critic's.
        self.mesh = mesh
        self.timer = Timer(mesh.device)
        mesh.watch.phase = self.timer.current
        mesh.watch.unmapped_bytes = lambda: self.timer.unmapped_bytes()
        # What policy.activation_checkpointing = auto stands for; `announce` finds it out.
        self.checkpointing: Checkpointing = "off"

    def announce(self, workload: Workload) -> None:
        """Say what the planner's formulas find, and settle the kind of activation checkpointing.

        Call it when the config is checked and no model is loaded yet.

        Raises:
            UserError: weights, gradients and optimizer state do not fit the ranks' devices.
        """
        plan, lines = announce(workload, self.mesh)
        self.checkpointing = plan.checkpointing
        if self.mesh.rank == 0:
            for line in lines:
                say(line)

    def load_model(
        self,
        cfg: PolicyConfig,
        folder: Path,
        *,
        trainable: bool = True,
        score: bool = False,
        base: Policy | None = None,
    ) -> Policy:
        """Load a model onto the mesh of the run. The arguments are those of `Policy`."""
        if cfg.activation_checkpointing == "auto":
            cfg = dataclasses.replace(cfg, activation_checkpointing=self.checkpointing)
        return Policy(
            cfg,
            folder,
            self.mesh,
            trainable=trainable,
            score=score,
            sequence_parallel=self.cfg.parallel.sequence,
            base=base,
            timer=self.timer,
        )

    def make_reference(self, folder: Path) -> Reference:
        """Return the reference with a folder's weights; the policy's base is not loaded again."""
        model = None
        if not is_base(self.policy, folder):
            model = self.load_model(self.cfg.policy, folder, trainable=False)
        return Reference(self.policy, model)

    @abc.abstractmethod
    def train(self) -> None:
        """Train from the first step of the run to the last, and write the results."""

    @classmethod
    def main(cls, cfg: TrainingConfig, mesh: Mesh) -> None:
        """Make the program and train; finish a checkpoint under way however training ends."""
        with lock.released(Path(cfg.output)):
            program = cls(cfg, mesh)
            mesh.watch.can_save = True  # from here on a signal asks to save, then to end
            if mesh.agree_to_stop():
                reason = f"stopped by a signal before the first step. {HOW_TO_RESUME}"
                program.run.end(program.run.first_step, reason)
                return
            with program.run.saver:
                program.train()
