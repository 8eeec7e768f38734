"""What every training program does around its loop.

It opens the folder of the run or goes on in it, logs, saves, and writes the summary.
"""

import abc
import contextlib
import dataclasses
import functools
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torch import Tensor

from minirl import checkpoint
from minirl.base.errors import require
from minirl.base.files import remove, write_whole
from minirl.base.log import Timer, say
from minirl.checkpoint import changes, lock
from minirl.checkpoint.exporting import export_adapter
from minirl.checkpoint.state import LOWER_IS_BETTER
from minirl.config.parse import save_config
from minirl.config.policy import Checkpointing, PolicyConfig
from minirl.config.shared import TrainingConfig
from minirl.config.validate import resolve_dtypes, resolve_learning_rates
from minirl.model.adapters import lora
from minirl.parallel.mesh import Mesh
from minirl.plan.announce import announce
from minirl.plan.workload import Workload
from minirl.rollout import records
from minirl.run import report, results, throughput
from minirl.run.inputs import choose_dtype
from minirl.run.log import Log, truncate
from minirl.run.progress import Progress
from minirl.run.throughput import Utilisation, Work
from minirl.run.trackers import open_trackers
from minirl.train.policy import Metrics, Policy
from minirl.train.reference import Reference, is_base

# What whoever reads the last line of a stopped run has to know.
GO_ON = "Go on with the same command and --resume"


class TrainingRun:
    """A run's folder, log, progress and checkpoints.

    Args:
        cfg: the config; with `resume`, policy and progress become those of the newest checkpoint.
        policy: the trained model; its mesh and timer are those of the run.
        description: what the first line of the log says of the data.

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
        self.resumed_from = None
        if cfg.resume:
            self.resumed_from = checkpoint.find_whole(self.output, mesh)
        if self.resumed_from:
            saved = checkpoint.load_checkpoint(self.resumed_from, policy)
            self.first_step = saved["step"]
            self.progress = Progress(**saved["progress"])

        self.results: results.Results | None = None  # On rank 0.
        if mesh.rank == 0:
            self._open_folder()
            resumed = self.resumed_from is not None
            self.results = results.Results(self.output, self.first_step, resumed=resumed)
        mesh.watch.record_end = functools.partial(results.record_end, self.output)
        self.utilisation = Utilisation(mesh)
        self.utilisation.add(policy.folder, score=policy.score)
        self.mark = time.perf_counter()  # When the last step was reported.
        self.is_stopping = False  # A signal asks to save after this step, and to leave.
        self.num_steps = 0  # Of the whole run; 0 before `begin`.
        self.has_reached_goal = False  # An evaluation has reached `stop_at`: no step follows.
        self.saver = checkpoint.Saver(self.output, cfg.checkpoint, policy)
        mesh.watch.finish_writing = self._finish_writing
        self.exporter = checkpoint.Exporter(mesh)
        self.outcomes: Callable[[], str] = str  # A curriculum's, for a checkpoint.
        self.log = Log(
            self.output,
            rank=mesh.rank,
            first_step=self.first_step,
            trackers=lambda: open_trackers(cfg.log, self.output, dataclasses.asdict(cfg)),
        )

        num_parameters = sum(t.numel() for t in policy.shards().values())
        of_which = ""
        if policy.adapters:
            num_trained = sum(p.numel() for p in lora.trained(policy.model).values())
            of_which = f" and {num_trained / 1e6:.2f}M in adapters, which are trained"
        self.log.say(
            f"{mesh.world_size} rank{'s' * (mesh.world_size > 1)} on {mesh.device.type}, "
            f"{num_parameters / 1e6:.2f}M "
            f"parameters{of_which}, {description}; writing {self.output}"
        )
        if self.resumed_from:
            self.log.say(f"resuming at step {self.first_step} from {self.resumed_from}")
        elif cfg.resume:
            self.log.say("no finished checkpoint to resume from; starting at step 0")

    def _open_folder(self) -> None:
        """Write the config; drop what the run will write again. On rank 0."""
        lock.hold(self.output)
        unfinished = self.output / "config.yaml.partial"
        remove(unfinished)
        save_config(self.cfg, unfinished)
        text = changes.head_of(type(self.cfg)) + unfinished.read_text()
        write_whole(self.output / "config.yaml", text)
        truncate(
            self.output / "metrics.jsonl",
            keep_before=self.first_step,
            keep_sft=self.resumed_from is not None,
        )
        records.drop_steps(self.output / "rollouts", self.first_step)

    def attach(self, name: str, model: Policy) -> None:
        """Keep another trained model in the checkpoints, and restore it if the run is resumed.

        Raises:
            UserError: the checkpoint has no such model, or another.
        """
        if self.resumed_from:
            checkpoint.restore(self.resumed_from, model, name)
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
        metrics: Metrics,
        highlights: Iterable[str],
        work: Work | None = None,
        **tokens: int,
    ) -> None:
        """Log a step of training with the seconds of its phases. Collective.

        Here all ranks agree whether a signal has asked for the end: see `is_stopping`.

        Args:
            phase: name of the rows in metrics.jsonl.
            step: number of the step.
            metrics: what to log.
            highlights: metrics to show on the progress bar.
            work: what models were trained on, on all ranks.
            tokens: of all ranks, by kind.
        """
        seconds = self.timer.take()
        seconds["step"] = time.perf_counter() - self.mark - report.outside_steps(seconds)
        self.mark = time.perf_counter()
        gpu_memory = self.timer.take_memory()
        own_memory = throughput.host_memory()
        own_memory |= {f"gpu_gib/{name}": value for name, value in gpu_memory.items()}
        # The request travels with the seconds.
        of_ranks = self._of_ranks(seconds | {"is_requested": float(self.mesh.watch.requested)})
        requests = [of_rank.pop("is_requested") for of_rank in of_ranks]
        self.is_stopping = any(requests)
        speeds = report.slowest(of_ranks, **tokens)
        memory = report.highest(self._of_ranks(own_memory))
        background = {f"time/{name}": value for name, value in self._take_background().items()}
        del seconds["step"]  # the sum of others
        self.progress.add(seconds, **tokens)
        self.progress.add_memory({name: memory[f"gpu_gib/{name}"] for name in gpu_memory})
        in_training = [speeds.get(f"time/{name}", 0.0) for name in ("forward", "backward")]
        row = metrics | speeds | background | self.utilisation.metrics(work, sum(in_training))
        row |= {f"total/{kind}": float(self.progress.tokens[kind]) for kind in tokens}
        self.log.scalars(phase, step, row | memory, highlights)

    def _of_ranks(self, values: dict[str, float]) -> list[dict[str, float]]:
        """Return the named numbers of each rank. Collective."""
        by_rank = self.mesh.gather_named(values.items())
        return [{name: part.item() for name, part in of_rank.items()} for of_rank in by_rank]

    def _take_background(self) -> dict[str, float]:
        """Return the seconds that writes have taken beside training, of those waited for since."""
        seconds = {
            "checkpoint_background": self.saver.background_seconds,
            "export_background": self.exporter.background_seconds,
        }
        self.saver.background_seconds = 0.0
        self.exporter.background_seconds = 0.0
        taken = {name: value for name, value in seconds.items() if value}
        for name, value in taken.items():
            total = self.progress.background_seconds
            total[name] = total.get(name, 0.0) + value
        return taken

    def record_evaluation(
        self,
        step: int,
        scores: Metrics,
        highlights: Iterable[str],
        name: str | None,
        result: dict,
    ) -> None:
        """Log held-out scores; they may make the checkpoint of that step the best one.

        Summary, curves and answers are written anew. Scores that reach `stop_at` before the last
        step set `has_reached_goal`.

        Args:
            step: the weights are those after so many steps.
            scores: what to log.
            highlights: scores to print on the console.
            name: keep `result` for the summary under this name; None: do not keep it.
            result: of the evaluation; `answers` in it are shown.

        Raises:
            UserError: `stop_at` names no score of this evaluation.
        """
        self.log.scalars("eval", step, scores)
        if self.cfg.checkpoint.best_metric:
            with self.timer.phase("checkpoint"):
                self.saver.score(step, scores)
        printed = ", ".join(f"{score} {scores[score]:.4g}" for score in highlights)
        self.log.say(f"step {step}: held-out {printed}")
        if 0 <= step < self.num_steps and self._reaches_goal(scores):
            self.has_reached_goal = True
            goal = ", ".join(f"{metric} {value:g}" for metric, value in self.cfg.stop_at.items())
            self.log.say(f"step {step}: stop_at = {goal} is reached, so that training ends here")
        if name:
            self.progress.evaluations[name] = result
        answers = result.get("answers", [])
        shown = answers[: self.cfg.log.samples]
        if shown:
            self.log.say(f"step {step}: answers\n{results.describe(shown)}")
            self.log.text("answers", max(step, 0), results.full_text(shown))
        if self.results:
            if answers:
                self.results.add_answers(step, name, answers)
            self.results.held_out = scores
            self.results.write(results.RUNNING, "", self._summary(step))
            self.results.draw()

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
        """Return what summary.json says of a run that goes on, after so many finished steps."""
        progress = self.progress
        held_out = self.results.held_out if self.results else {}
        common = {"step": num_steps, "held_out": held_out, "tokens": progress.tokens}
        return report.summarise({}, progress.tokens, dict(progress.seconds), common)

    def end(self, num_steps: int, reason: str) -> None:
        """Close the log and write the results of a run that a signal has stopped."""
        self.log.bar.close()
        self.log.say(reason)
        if self.results:
            self.results.draw()
            self.results.wait()
            self.results.write(results.STOPPED, reason, self._summary(num_steps))
        self.log.close()

    def export(self, name: str, weights: Mapping[str, Tensor] | None = None) -> None:
        """Begin to export the model, as it is now, to a folder of the run. Collective.

        The folder is there after `wait_for_export`, `save_if_due` or the next export.

        Args:
            name: the folder's path in that of the run.
            weights: others than the model's, by the same names.
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

    def stop(self, num_steps: int, *, is_interrupted: bool = False) -> None:
        """Save, if that is not done, and close the log. Collective.

        This is the end of a run that a signal has asked to leave. It can be resumed.

        Args:
            num_steps: finished steps.
            is_interrupted: the next one has begun, so that there is more to save.
        """
        if self.saver.step != num_steps or is_interrupted:
            self._save(num_steps)
        with self.timer.phase("checkpoint"):
            self.saver.wait()
        newest = self.output / f"checkpoints/step-{num_steps}"
        where = f"after {num_steps} steps"
        if is_interrupted:
            where += " and in the rollout of the next, whose episodes are kept"
        self.end(num_steps, f"stopped by a signal {where}; saved {newest}. {GO_ON}")

    def export_result(self) -> None:
        """Begin to export the trained model, and the moving average of its weights. Collective.

        Call it after the last step; `finish` waits.

        Raises:
            UserError: weights are not finite.
        """
        self.policy.check_finite(
            "there is nothing to export; train again with a lower policy.lr, or go on from a "
            "checkpoint before"
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
            sizes: by title, what has one size in the whole run.
        """
        with self.timer.phase("checkpoint"):
            self.saver.wait()
        self.wait_for_export()
        self.progress.add(self.timer.take())
        self._take_background()
        self.log.close()
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak_mib = self.mesh.gather(round(kilobytes / 1024, 1))
        if self.results:
            longest_first = sorted(self.progress.seconds.items(), key=lambda item: -item[1])
            common = {
                "background_seconds": self.progress.background_seconds,
                "sizes": sizes,
                "gpu_memory_gib": self.progress.gpu_memory,
                "peak_rss_mb": max(peak_mib),
                "peak_rss_mb_by_rank": peak_mib,
                "wall_seconds": time.perf_counter() - self.timer.began,
                "model": str(self.output / "model"),
            }
            seconds = {name: round(value, 3) for name, value in longest_first}
            summary = report.summarise(scores, self.progress.tokens, seconds, common)
            self.results.wait()
            report.write_curves(self.output)  # with the rows since the last evaluation
            self.results.write(results.FINISHED, "", summary)
            report.show(self.output, summary, scores)


class Program(abc.ABC):
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
        """Load a model onto the mesh of the run; arguments as `Policy` has them."""
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
        """Return the reference that a folder has, loaded unless it is the policy's base."""
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
            mesh.watch.can_save = True  # before they agree: from here on a signal is a request
            if mesh.agree_to_stop():
                run = program.run
                run.end(run.first_step, f"stopped by a signal before the first step. {GO_ON}")
                return
            with program.run.saver:
                program.train()
