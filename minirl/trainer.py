"""What every training program does around its loop: find the model, open the run's folder or go on
in it, save, close.
"""

import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from minirl import checkpoint, report
from minirl.config.parse import save_config
from minirl.config.rl import RLConfig
from minirl.config.supervised import SFTConfig
from minirl.log import Log, Timer, truncate
from minirl.parallel.mesh import Mesh
from minirl.policy import Policy


@dataclass(kw_only=True)
class Progress:
    """What the summary needs and a checkpoint carries, beside weights."""

    evaluations: dict[str, dict] = field(
        default_factory=dict
    )  # before_sft, before_rl, after_rl, ... -> what the program found
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    extra_tickets: int = (
        0  # prompts that dynamic sampling took beyond those of the steps themselves
    )
    kl_coef: float | None = None  # what the adaptive controller made of algo.kl_coef
    reward_stats: list[float] = field(
        default_factory=lambda: [0.0, 0.0, 0.0]
    )  # count, mean and squares about it of all rewards, for reward.normalize
    outcomes: dict[str, list[int]] = field(
        default_factory=dict
    )  # of the curriculum's prompts: number of the row -> [answers, right ones]

    def add(self, seconds: dict[str, float], **tokens: int) -> None:
        for total, new in ((self.seconds, seconds), (self.tokens, tokens)):
            total |= {name: total.get(name, 0) + value for name, value in new.items()}


class TrainingRun:
    """A run's folder, log, progress and checkpoints."""

    def __init__(
        self, cfg: RLConfig | SFTConfig, policy: Policy, mesh: Mesh, timer: Timer, about: str
    ):
        """Go on from the newest checkpoint if asked; `about` is told in the first line of the log.
        Raises UserError.
        """
        self.cfg, self.policy, self.mesh, self.timer, self.output = (
            cfg,
            policy,
            mesh,
            timer,
            Path(cfg.output),
        )
        self.first_step, self.progress = 0, Progress()
        self.found = found = checkpoint.find(self.output) if cfg.resume else None
        if found:
            saved = checkpoint.load_checkpoint(found, policy, mesh)
            self.first_step, self.progress = saved["step"], Progress(**saved["progress"])
        if mesh.rank == 0:
            self.output.mkdir(parents=True, exist_ok=True)
            save_config(cfg, self.output / "config.yaml")
            truncate(
                self.output / "metrics.jsonl",
                keep_before=self.first_step,
                keep_sft=found is not None,
            )
        self.saver = checkpoint.Saver(self.output, cfg.checkpoint, policy, mesh)
        self.log = Log(self.output, rank=mesh.rank, first_step=self.first_step)
        self.log.say(
            f"{mesh.world_size} ranks on {mesh.device.type}, {sum(p.numel() for p in policy.model.parameters()) / 1e6:.2f}M parameters, "
            f"{about}; writing {self.output}"
        )
        if cfg.resume:
            self.log.say(
                f"resuming at step {self.first_step} from {found}"
                if found
                else "no finished checkpoint to resume from; starting at step 0"
            )

    def attach(self, name: str, model: Policy) -> None:
        """Keep another trained model in the checkpoints; take its state from the one that is gone
        on with. Raises UserError.
        """
        if self.found:
            checkpoint.restore(self.found, model, name)
        self.saver.others[name] = model

    def report(
        self, phase: str, step: int, metrics: dict[str, float], shown: Iterable[str], **tokens: int
    ) -> None:
        """Log a step of training and the phases that it took; on the progress bar, those of its
        metrics that are `shown`. `tokens`: of all ranks.
        """
        seconds = self.timer.take()
        self.log.scalars(
            phase, step, metrics | report.slowest(self.mesh.gather(seconds), **tokens), shown
        )
        self.progress.add(seconds, **tokens)

    def evaluated(
        self,
        step: int,
        scores: dict[str, float],
        shown: Iterable[str],
        name: str | None,
        found: dict,
    ) -> None:
        """Log held-out scores of the weights after `step` steps, on the console those that are
        `shown`; they may make the checkpoint of that step the best. `name`: keep what was `found`
        for the summary.
        """
        self.log.scalars("eval", step, scores)
        self.saver.score(step, scores)
        self.log.say(
            f"step {step}: held-out " + ", ".join(f"{what} {scores[what]:.4g}" for what in shown)
        )
        if name:
            self.progress.evaluations[name] = found

    def save_if_due(self, step: int) -> None:
        """`step`: how many are finished."""
        if self.cfg.checkpoint.every and step % self.cfg.checkpoint.every == 0:
            with self.timer.phase("checkpoint"):
                path = self.saver.save(step, vars(self.progress))
            self.log.say(
                f"step {step}: {'writing' if self.cfg.checkpoint.background else 'saved'} {path}"
            )

    def finish(self, scores: dict[str, float | None]) -> None:
        """Export the model, close the log, write the summary, which begins with held-out
        `scores`.
        """
        with self.timer.phase("checkpoint"):
            self.saver.wait()
        with self.timer.phase("export"):
            checkpoint.export(self.policy, self.output / "model", self.mesh)
            if self.cfg.policy.ema_decay:
                with self.policy.state_awake():
                    checkpoint.export(
                        self.policy,
                        self.output / "model_ema",
                        self.mesh,
                        weights=self.policy.averages(),
                    )
        self.progress.add(self.timer.take())
        self.log.close()
        memory = self.mesh.gather(
            round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
        )  # MiB
        seconds = {
            name: round(value, 3)
            for name, value in sorted(self.progress.seconds.items(), key=lambda item: -item[1])
        }
        if self.mesh.rank == 0:
            report.write(
                self.output,
                scores,
                self.progress.tokens,
                seconds,
                {
                    "peak_rss_mb": max(memory),
                    "peak_rss_mb_by_rank": memory,
                    "wall_seconds": time.perf_counter() - self.timer.began,
                    "model": str(self.output / "model"),
                },
            )


class Program:
    """What `cli.run` runs for those who train: it makes its `run`, and `train` is the algorithm."""

    run: TrainingRun

    @classmethod
    def main(cls, cfg: RLConfig | SFTConfig, mesh: Mesh) -> None:
        """A checkpoint under way is finished, however training ends."""
        trainer = cls(cfg, mesh)
        with trainer.run.saver:
            trainer.train()
