"""What every training program does around its loop: find the model, open the run's folder or go on in it, save, close."""

import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from minirl import checkpoint, report
from minirl.config_rl import RLConfig
from minirl.config_supervised import SFTConfig
from minirl.data import chat
from minirl.data.images import Vision
from minirl.flags import save
from minirl.log import Log, Timer, truncate
from minirl.model import build, families, scratch
from minirl.parallel import tensor
from minirl.parallel.mesh import Mesh
from minirl.policy import Policy
from minirl.types import UserError


@dataclass(kw_only=True)
class Progress:
    """What the summary needs and a checkpoint carries, beside weights."""

    evaluations: dict[str, dict] = field(default_factory=dict)  # before_sft, before_rl, after_rl, ... -> what the program found
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    extra_tickets: int = 0  # prompts that dynamic sampling took beyond those of the steps themselves
    kl_coef: float | None = None  # what the adaptive controller made of algo.kl_coef
    reward_stats: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # count, mean and squares about it of all rewards, for reward.normalize
    outcomes: dict[str, list[int]] = field(default_factory=dict)  # of the curriculum's prompts: number of the row -> [answers, right ones]

    def add(self, seconds: dict[str, float], **tokens: int) -> None:
        for total, new in ((self.seconds, seconds), (self.tokens, tokens)):
            total |= {name: total.get(name, 0) + value for name, value in new.items()}


class Run:
    """A run's folder, log, progress and checkpoints."""

    def __init__(self, cfg: RLConfig | SFTConfig, policy: Policy, mesh: Mesh, timer: Timer, about: str):
        """Go on from the newest checkpoint if asked; `about` is told in the first line of the log. Raises UserError."""
        self.cfg, self.policy, self.mesh, self.timer, self.output = cfg, policy, mesh, timer, Path(cfg.output)
        self.first_step, self.progress = 0, Progress()
        self.found = found = checkpoint.find(self.output) if cfg.resume else None
        if found:
            saved = checkpoint.load(found, policy, mesh)
            self.first_step, self.progress = saved["step"], Progress(**saved["progress"])
        if mesh.rank == 0:
            self.output.mkdir(parents=True, exist_ok=True)
            save(cfg, self.output / "config.yaml")
            truncate(self.output / "metrics.jsonl", keep_before=self.first_step, keep_sft=found is not None)
        self.saver = checkpoint.Saver(self.output, cfg.checkpoint, policy, mesh)
        self.log = Log(self.output, rank=mesh.rank, first_step=self.first_step)
        self.log.say(f"{mesh.world_size} ranks on {mesh.device.type}, {sum(p.numel() for p in policy.model.parameters()) / 1e6:.2f}M parameters, "
                     f"{about}; writing {self.output}")
        if cfg.resume:
            self.log.say(f"resuming at step {self.first_step} from {found}" if found else "no finished checkpoint to resume from; starting at step 0")

    def attach(self, name: str, model: Policy) -> None:
        """Keep another trained model in the checkpoints; take its state from the one that is gone on with. Raises UserError."""
        if self.found:
            checkpoint.restore(self.found, model, name)
        self.saver.others[name] = model

    def report(self, phase: str, step: int, metrics: dict[str, float], shown: Iterable[str], **tokens: int) -> None:
        """Log a step of training and the phases that it took; on the progress bar, those of its metrics that are `shown`. `tokens`: of all ranks."""
        seconds = self.timer.take()
        self.log.scalars(phase, step, metrics | report.slowest(self.mesh.gather(seconds), **tokens), shown)
        self.progress.add(seconds, **tokens)

    def evaluated(self, step: int, scores: dict[str, float], shown: Iterable[str], name: str | None, found: dict) -> None:
        """Log held-out scores of the weights after `step` steps, on the console those that are `shown`; they may make the checkpoint of that step the best.
        `name`: keep what was `found` for the summary."""
        self.log.scalars("eval", step, scores)
        self.saver.score(step, scores)
        self.log.say(f"step {step}: held-out " + ", ".join(f"{what} {scores[what]:.4g}" for what in shown))
        if name:
            self.progress.evaluations[name] = found

    def save_if_due(self, step: int) -> None:
        """`step`: how many are finished."""
        if self.cfg.checkpoint.every and step % self.cfg.checkpoint.every == 0:
            with self.timer.phase("checkpoint"):
                path = self.saver.save(step, vars(self.progress))
            self.log.say(f"step {step}: {'writing' if self.cfg.checkpoint.background else 'saved'} {path}")

    def finish(self, scores: dict[str, float | None]) -> None:
        """Export the model, close the log, write the summary, which begins with held-out `scores`."""
        with self.timer.phase("checkpoint"):
            self.saver.wait()
        with self.timer.phase("export"):
            checkpoint.export(self.policy, self.output / "model", self.mesh)
            if self.cfg.policy.ema_decay:
                with self.policy.state_awake():
                    checkpoint.export(self.policy, self.output / "model_ema", self.mesh, weights=self.policy.averages())
        self.progress.add(self.timer.take())
        self.log.close()
        memory = self.mesh.gather(round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1))  # MiB
        seconds = {name: round(value, 3) for name, value in sorted(self.progress.seconds.items(), key=lambda item: -item[1])}
        if self.mesh.rank == 0:
            report.write(self.output, scores, self.progress.tokens, seconds,
                         {"peak_rss_mb": max(memory), "peak_rss_mb_by_rank": memory, "wall_seconds": time.perf_counter() - self.timer.began,
                          "model": str(self.output / "model")})


class Program:
    """What `cli.run` runs for those who train: it makes its `run`, and `train` is the algorithm."""

    run: Run

    @classmethod
    def main(cls, cfg: RLConfig | SFTConfig, mesh: Mesh) -> None:
        """A checkpoint under way is finished, however training ends."""
        trainer = cls(cfg, mesh)
        with trainer.run.saver:
            trainer.train()


def check_output(output: Path, resume: bool) -> None:
    """Refuse the folder of another run. Raises UserError."""
    in_the_way = [p.name for p in output.iterdir() if p.name != "scratch"] if output.is_dir() else [output.name] * output.exists()
    if in_the_way and not (resume and output.is_dir()):
        raise UserError(f"output = {output} holds {in_the_way[0]} of another run; choose another folder with --output, or go on with it by --resume")


def find_model(cfg: RLConfig | SFTConfig, max_len: int, *, engine_on: str | None = None,
               chats: bool = True) -> tuple[Path, PretrainedConfig, PreTrainedTokenizerBase, Vision | None]:
    """(folder, config, tokenizer, how it reads images) of policy.model, checked, also for an engine on that type of device; the folder of
    a scratch model is still to be made. Raises UserError."""
    templates = cfg.data.chat_template, cfg.data.input_template
    if cfg.policy.model == "scratch":
        folder, tokenizer = Path(cfg.output) / "scratch", chat.use_template(scratch.make_tokenizer(cfg.policy.scratch.phrases), *templates)
        config = scratch.make_config(cfg.policy.scratch, tokenizer, max_len)
    else:
        folder = build.resolve(cfg.policy.model, "policy.model")
        config, tokenizer = build.read_config(folder), None
    engine = (cfg.engine.tensor_parallel_size, cfg.engine.max_model_len, engine_on) if engine_on else ()
    families.check(config, f"policy.model = {cfg.policy.model}", *engine)
    tensor.check(families.divided(config), cfg.parallel.tensor)
    vision = Vision(folder, cfg.engine.max_images if engine_on else 0) if families.reads_images(config) else None
    return folder, config, tokenizer or chat.load_tokenizer(folder, chats=chats, template=templates[0], plain=templates[1]), vision


def find_teacher(model: str, policy: PretrainedConfig, tensor_parallel: int, setting: str, *, scores: bool = False) -> Path:
    """The folder of a model that is to read the policy's tokens, checked. `scores`: by a head of its own. Raises UserError."""
    folder = build.resolve(model, setting)
    config = build.read_config(folder)
    families.check(config, f"{setting} = {model}")
    tensor.check(families.divided(config), tensor_parallel)
    if families.reads_images(config) != families.reads_images(policy):
        raise UserError(f"{setting} = {model} is of family {config.model_type}, and the policy of {policy.model_type}: one of them reads images; take another model")
    sizes = [c.get_text_config().vocab_size for c in (config, policy)]
    if len(set(sizes)) > 1:
        raise UserError(f"{setting} = {model} has a vocabulary of {sizes[0]}, and the policy's is of {sizes[1]}: the policy's "
                        "tokens mean nothing there; take a model with the same tokenizer")
    return check_head(folder, setting) if scores else folder


def check_head(folder: Path, setting: str) -> Path:
    """A language model's would be made of zeros, which a critic can learn from and nobody else. Raises UserError."""
    if build.SCORE not in build.Weights(folder).slices:
        raise UserError(f"{setting} = {folder} is no reward model: its weights have no {build.SCORE}; train one with minirl.rm")
    return folder


def make_scratch(cfg: RLConfig | SFTConfig, max_len: int, mesh: Mesh) -> None:
    """Write the model that `policy.model = scratch` asks for. Collective; call it when nobody can find a mistake any more."""
    mesh.barrier()  # nobody looks at the output folder any more
    folder = Path(cfg.output) / "scratch"
    if cfg.policy.model == "scratch":
        if mesh.rank == 0 and not (cfg.resume and folder.exists()):  # other weights would be another run
            scratch.make_model(cfg.policy.scratch, folder, max_len=max_len, seed=cfg.seed)
        mesh.barrier()
