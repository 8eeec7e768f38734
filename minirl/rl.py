"""GRPO and its family: every rank holds a shard of the policy and its own vLLM engine, and runs this program.

    torchrun --nproc-per-node 2 -m minirl.rl --config configs/quickstart_rl.yaml

`train` is the whole algorithm; what it calls is one layer down. Left out so far: a critic, several turns, more than one
reward, context parallelism.
"""

import dataclasses
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from minirl import checkpoint, cli, report
from minirl.algo import advantages, losses
from minirl.checks import check_rl
from minirl.config import RLConfig
from minirl.data import chat
from minirl.data.datasets import Prompts, load_rows, split
from minirl.data.packing import exchange, pack
from minirl.evaluate import evaluate
from minirl.flags import save
from minirl.log import Log, Timer, truncate
from minirl.model import build, families, scratch
from minirl.parallel import tensor
from minirl.parallel.mesh import Mesh
from minirl.policy import Policy, learning_rate
from minirl.rollout.engine import RolloutEngine, Sampling
from minirl.rollout.env import SingleTurn, check_rows, make_env
from minirl.rollout.refit import Refit
from minirl.rollout.sampler import Sampler
from minirl.sft import warm_start
from minirl.types import Packed, Trajectory, UserError


@dataclass(kw_only=True)
class Inputs:
    """What the config names, found and checked before anything is trained or written."""

    folder: Path
    train: Prompts
    held_out: Prompts
    env: SingleTurn
    estimator: advantages.Estimator
    stop_ids: list[int]


@dataclass(kw_only=True)
class Progress:
    """What the summary needs and a checkpoint carries, beside weights."""

    evaluations: dict[str, dict] = field(default_factory=dict)
    """before_sft, before_rl, after_rl -> {"scores": ..., "answers": ...}"""
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    def add(self, seconds: dict[str, float], **tokens: int) -> None:
        for total, new in ((self.seconds, seconds), (self.tokens, tokens)):
            for name, value in new.items():
                total[name] = total.get(name, 0) + value


class Trainer:
    """The parts of a run; `train` is the algorithm."""

    def __init__(self, cfg: RLConfig, mesh: Mesh):
        self.cfg, self.mesh, self.output, self.began = cfg, mesh, Path(cfg.output), time.perf_counter()
        self.inputs = find_inputs(cfg, mesh)
        self.timer, self.progress = Timer(mesh.device), Progress()
        with self.timer.phase("start"):
            self.policy = Policy(cfg.policy, self.inputs.folder, mesh, sequence_parallel=cfg.parallel.sequence, timer=self.timer)
            dtype = cfg.engine.dtype if cfg.engine.dtype != "auto" else cfg.policy.dtype.replace("float64", "float32")
            self.engine = RolloutEngine(cfg.engine, self.inputs.folder, mesh, dtype=dtype, timer=self.timer)
            self.refit = Refit(cfg.refit, self.policy.shards(), self.policy.parts(), self.engine, mesh, check=cfg.debug.check_refit)
            self.sampler = Sampler(self.engine, self.inputs.env, self.inputs.train.tokenizer, mesh, seed=cfg.seed,
                                   tickets=cfg.rollout.tickets, threads=cfg.reward.threads)
            self.sampling = Sampling(max_tokens=cfg.rollout.max_tokens, stop_token_ids=tuple(self.inputs.stop_ids),
                                     temperature=cfg.rollout.temperature)
            self.first_step = self.begin()
        self.evict = [self.policy.sleeper]
        self.ref: Policy | None = None

    def begin(self) -> int:
        """Open the run folder; go on from its newest checkpoint if asked. Returns the first step."""
        found = checkpoint.find(self.output) if self.cfg.resume else None
        step = 0
        if found:
            saved = checkpoint.load(found, self.policy, self.mesh)
            step, self.progress = saved["step"], Progress(**saved["progress"])
        if self.mesh.rank == 0:
            self.output.mkdir(parents=True, exist_ok=True)
            save(self.cfg, self.output / "config.yaml")
            truncate(self.output / "metrics.jsonl", keep_before=step, keep_sft=found is not None)
        self.log = Log(self.output, rank=self.mesh.rank, first_step=step)
        self.log.say(f"{self.mesh.world_size} ranks on {self.mesh.device.type}, {sum(p.numel() for p in self.policy.model.parameters()) / 1e6:.2f}M "
                     f"parameters, {len(self.inputs.train.rows)} training prompts, {len(self.inputs.held_out.rows)} held out; writing {self.output}")
        if self.cfg.resume:
            self.log.say(f"resuming at step {step} from {found}" if found else "no finished checkpoint to resume from; starting at step 0")
        return step

    def train(self) -> None:
        cfg, mesh, policy, timer = self.cfg, self.mesh, self.policy, self.timer
        if cfg.sft.num_steps and self.first_step == 0 and "before_rl" not in self.progress.evaluations:
            self.warm_start()
        self.load_reference()
        loss = losses.policy(cfg.algo, cfg.rollout.max_tokens)
        num_updates = cfg.num_steps * cfg.algo.updates_per_step
        self.log.progress("rl", cfg.num_steps, self.first_step)
        self.progress.add(timer.take())
        for step in range(self.first_step, cfg.num_steps):
            with self.engine.awake(self.refit, self.evict):
                if step == 0 or (cfg.eval.every and step % cfg.eval.every == 0):
                    self.evaluate(step, "before_rl" if step == 0 else None)
                with timer.phase("rollout"):
                    trajectories = self.collect(step)
                with timer.phase("idle"):
                    mesh.barrier()
            with timer.phase("prepare"):
                advantages.assign(trajectories, self.inputs.estimator, mesh.sums)
                minibatches = [[pack(micro, mesh.device, cfg.rollout.temperature, multiple=policy.row_multiple) for micro in minibatch]
                               for minibatch in exchange(trajectories, mesh, cfg.tokens_per_rank, cfg.algo.updates_per_step)]
            with timer.phase("annotate"):
                if cfg.algo.updates_per_step > 1:
                    policy.annotate(minibatches, "old_logprobs")
                if self.ref:
                    self.ref.annotate(minibatches, "ref_logprobs")
            updates = [policy.step(minibatch, loss, learning_rate(cfg.policy, policy.num_updates, num_updates)) for minibatch in minibatches]
            self.report(step, trajectories, minibatches, updates)
            if cfg.checkpoint.every and (step + 1) % cfg.checkpoint.every == 0:
                self.save(step + 1)
        self.log.end_progress()
        self.finish()

    def collect(self, step: int) -> list[Trajectory]:
        r = self.cfg.rollout
        tickets = range(step * r.prompts_per_step, (step + 1) * r.prompts_per_step)
        return self.sampler.collect(self.inputs.train, tickets, r.samples_per_prompt, self.sampling, version=self.policy.num_updates)

    def evaluate(self, step: int, name: str | None = None) -> None:
        """Score held-out prompts; the engine must be awake. `name`: keep the result for the summary."""
        sampling = dataclasses.replace(self.sampling, temperature=self.cfg.eval.temperature)
        with self.timer.phase("evaluate"):
            result = evaluate(self.sampler, self.inputs.held_out, self.cfg.eval, sampling, self.mesh)
        self.log.scalars("eval", step, result.scores)
        self.log.say(f"step {step}: held-out accuracy {result.scores['accuracy']:.3f}, reward {result.scores['reward']:.3f}")
        if name:
            self.progress.evaluations[name] = dataclasses.asdict(result)

    def warm_start(self) -> None:
        with self.engine.awake(self.refit, self.evict):
            self.evaluate(-1, "before_sft")
        self.progress.add(self.timer.take())
        with self.timer.phase("sft"):
            num_tokens = warm_start(self.cfg, self.policy, self.inputs.train, self.inputs.stop_ids, self.mesh, self.log)
            checkpoint.export(self.policy, self.output / "sft", self.mesh)
        self.progress.add({"sft": sum(self.timer.take().values())}, sft=num_tokens)  # its forward and backward are not RL's

    def load_reference(self) -> None:
        """The frozen copy for the KL term: the policy as RL found it."""
        if self.cfg.algo.kl_coef:
            folder = self.output / "sft" if self.cfg.sft.num_steps else self.inputs.folder
            self.ref = Policy(self.cfg.policy, folder, self.mesh, trainable=False, sequence_parallel=self.cfg.parallel.sequence, timer=self.timer)
            self.evict.append(self.ref.sleeper)

    def report(self, step: int, trajectories: list[Trajectory], minibatches: list[list[Packed]], updates: list[dict]) -> None:
        """Means over all ranks to the log."""
        mesh, seconds = self.mesh, self.timer.take()
        own = {"reward": sum(t.reward for t in trajectories), "answer_tokens": sum(int(t.sampled.sum()) for t in trajectories),
               "stopped": sum(t.info["stopped"] for t in trajectories), "equal_groups": _num_equal_groups(trajectories)}
        ranks = mesh.gather((len(trajectories), own, sum(sum(b.lengths) for m in minibatches for b in m), seconds))
        num = sum(n for n, *_ in ranks)
        metrics = {name: sum(values[name] for _, values, *_ in ranks) / num for name in own}
        metrics["equal_groups"] *= self.cfg.rollout.samples_per_prompt  # a share of groups, not of trajectories
        metrics |= {name: max(u[name] for u in updates) if name.endswith("_max") else float(np.mean([u[name] for u in updates])) for name in updates[0]}
        generated, trained = sum(v["answer_tokens"] for _, v, *_ in ranks), sum(t for *_, t, _ in ranks) // mesh.tensor.size()
        times = {f"time/{name}": max(s.get(name, 0.0) for *_, s in ranks) for name in {n for *_, s in ranks for n in s}}
        times |= {f"time/idle_rank{rank}": s["idle"] for rank, (*_, s) in enumerate(ranks)}
        times["tokens_per_second/generated"] = generated / times["time/rollout"]
        times["tokens_per_second/trained"] = trained / (times["time/forward"] + times["time/backward"])
        self.log.scalars("rl", step, {**metrics, "refit_bytes": self.refit.bytes_received, **dict(sorted(times.items()))})
        self.log.advance(reward=metrics["reward"], tokens=metrics["answer_tokens"], mismatch=metrics["mismatch"])
        self.progress.add(seconds, generated=generated, trained=trained)
        if self.cfg.debug.save_trajectories:
            _dump(trajectories, self.output / "trajectories" / f"step-{step}-rank-{mesh.rank}.jsonl")

    def save(self, step: int) -> None:
        with self.timer.phase("checkpoint"):
            path = checkpoint.save(self.output, step, self.policy, dataclasses.asdict(self.progress), self.mesh, keep=self.cfg.checkpoint.keep)
        self.log.say(f"step {step}: saved {path}")

    def finish(self) -> None:
        """Last evaluation, export, summary."""
        with self.engine.awake(self.refit, self.evict):
            self.evaluate(self.cfg.num_steps, "after_rl")
        with self.timer.phase("export"):
            checkpoint.export(self.policy, self.output / "model", self.mesh)
        self.progress.add(self.timer.take())
        summary = report.summarise(self.progress.evaluations, self.progress.seconds, self.progress.tokens, report.peak_rss_mb(self.mesh))
        summary |= {"wall_seconds": time.perf_counter() - self.began, "model": str(self.output / "model")}
        self.log.close()
        if self.mesh.rank == 0:
            report.write(self.output, summary, self.progress.evaluations)
        self.engine.close()


def find_inputs(cfg: RLConfig, mesh: Mesh) -> Inputs:
    """Raises UserError at the first thing that is missing or cannot work."""
    check_rl(cfg, mesh.world_size)
    output = Path(cfg.output)
    in_the_way = [p.name for p in output.iterdir() if p.name != "scratch"] if output.is_dir() else [output.name] * output.exists()
    if in_the_way and not (cfg.resume and output.is_dir()):
        raise UserError(f"output = {output} holds {in_the_way[0]} of another run; choose another folder with --output, or go on with it by --resume")
    rows = load_rows(cfg.data.train, "data.train", cfg.data)
    if cfg.data.eval:
        held_out = load_rows(cfg.data.eval, "data.eval", cfg.data)
    else:
        rows, held_out = split(rows, cfg.data.held_out, cfg.seed)
    env = make_env(cfg.reward.function)
    estimator = advantages.find(cfg.algo.advantage)
    check_rows(cfg.reward.function, [*rows, *held_out])
    if cfg.sft.num_steps and any(row.get("answer") is None for row in rows):
        raise UserError(f"sft.num_steps = {cfg.sft.num_steps} needs an answer in every row (data.answer_key = {cfg.data.answer_key})")
    if cfg.policy.model == "scratch":
        folder, tokenizer = output / "scratch", scratch.make_tokenizer(cfg.policy.scratch.phrases)
        config = scratch.make_config(cfg.policy.scratch, tokenizer, cfg.engine.max_model_len)
    else:
        folder = build.resolve(cfg.policy.model, "policy.model")
        config, tokenizer = build.read_config(folder), None
    families.check(config, f"policy.model = {cfg.policy.model}", cfg.engine.tensor_parallel_size, cfg.engine.max_model_len, mesh.device.type)
    tensor.check(families.divided(config), cfg.parallel.tensor)
    tokenizer = tokenizer or chat.load_tokenizer(folder)
    part = slice(mesh.rank, None, mesh.world_size)
    train = Prompts(rows, tokenizer, cfg.data, seed=cfg.seed)
    train.check_lengths("data.train", part)
    held_out = Prompts(held_out, tokenizer, cfg.data, seed=cfg.seed, shuffle=False)
    held_out.check_lengths("data.eval" if cfg.data.eval else "data.train", part)
    mesh.barrier()  # nobody looks at the output folder any more, and nobody found a mistake
    if cfg.policy.model == "scratch":
        if mesh.rank == 0 and not (cfg.resume and folder.exists()):  # other weights would be another run
            scratch.make_model(cfg.policy.scratch, folder, max_len=cfg.engine.max_model_len, seed=cfg.seed)
        mesh.barrier()
    return Inputs(folder=folder, train=train, held_out=held_out, env=env, estimator=estimator, stop_ids=chat.stop_token_ids(tokenizer, folder))


def _num_equal_groups(trajectories: list[Trajectory]) -> int:
    rewards: dict[int, set[float]] = {}
    for t in trajectories:
        rewards.setdefault(t.group, set()).add(t.reward)
    return sum(len(values) == 1 for values in rewards.values())


def _dump(trajectories: list[Trajectory], path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        for t in trajectories:
            file.write(json.dumps({"group": t.group, "episode": t.episode, "version": t.version, "reward": t.reward, "tokens": t.tokens.tolist(),
                                   "sampled": t.sampled.astype(int).tolist(), "logprobs": t.logprobs.tolist(), **t.info}) + "\n")


if __name__ == "__main__":
    cli.run(RLConfig, lambda cfg, mesh: Trainer(cfg, mesh).train())
