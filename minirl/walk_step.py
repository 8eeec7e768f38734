"""The stations of `minirl.walk`: one GRPO step by the parts that `minirl.rl` is made of.

`Walk.step` plays it and prints what goes in and out of each station; `plain_step` is the same step
in plain PyTorch.
"""

import dataclasses
import inspect
import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from minirl import checkpoint
from minirl.algo import advantages, losses, normalize
from minirl.config.parse import load_config
from minirl.config.rl import RLConfig
from minirl.data.packing import exchange, pack
from minirl.generation import Generation
from minirl.inputs import Inputs
from minirl.log import Log
from minirl.model.logprob import logprob_entropy
from minirl.parallel import fsdp
from minirl.parallel.mesh import Mesh
from minirl.policy import Policy
from minirl.rewards.functions import Rewards
from minirl.rollout.engine import RolloutEngine
from minirl.rollout.refit import Refit
from minirl.rollout.sampler import Sampler
from minirl.supervised import warm_start
from minirl.types import Packed, Trajectory

# As in a file for `minirl.rl --config`. The trainer computes in float64, so that `equal` can mean
# seven digits; the engine in float32. A short warm start makes a policy that knows the letters.
SETTINGS = """
num_steps: 1
tokens_per_rank: 512
policy:
  dtype: float64
  lr: 5e-4
  scratch:
    hidden_size: 64
    num_layers: 2
    phrases: ["Spell this word backward (example: sun -> nus): "]
engine:
  kv_cache_gb: 0.05
data:
  train: reasoning_gym:spell_backward?min_word_len=3&max_word_len=3&size=400&seed=1
  max_prompt_tokens: 16
rollout:
  prompts_per_step: 8
  samples_per_prompt: 4
  max_tokens: 6
  temperature: 0.8
sft:
  num_steps: 40
  batch_size: 32
  lr: 1e-2
"""
# Between plain PyTorch and minirl, relative. Everything is float64 but for the inside of Hugging
# Face's norms: a difference of 1e-16 before such a rounding can become one of 1e-8 behind it.
TOLERANCE = 1e-7
WEIGHT = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
BREAKS = {
    "loss-scale": """
    Each rank divided by the number of its own tokens, and the mean over ranks was taken. Tokens
    of a rank with few of them count more: the result depends on which rank got which answer.""",
    "logprob-temperature": """
    The tokens were sampled at temperature 0.8, and the log-probs taken at 1: trainer and engine
    speak of two distributions, and the gradient is that of the wrong one.""",
    "stale-engine": """
    Without a refit the engine samples with the weights from before the step: its log-probs are
    not the policy's, and each further step widens the gap.""",
}


def letters(prompt: str, completion: str, row: dict) -> float:
    """Return the share of letters that stand where the answer has them: the reward."""
    answer = row["answer"]
    num_right = sum(a == b for a, b in zip(answer, completion, strict=False))
    return num_right / max(len(answer), len(completion))


def where(code: Callable) -> str:
    """Return file, line and name of a function, looked up now, so that they are never stale."""
    code = inspect.unwrap(code)
    lines, line = inspect.getsourcelines(code)
    line += next(i for i, text in enumerate(lines) if "def " in text)  # behind decorators
    file = Path(inspect.getfile(code)).relative_to(Path(__file__).parent.parent)
    return f"{file}:{line} {code.__qualname__}"


def show(template: str, *values: object) -> None:
    """Print on rank 0."""
    if os.environ["RANK"] == "0":
        print(template.format(*values))


def station(title: str, *code: Callable) -> None:
    """Print the head of a station."""
    show("\n{}", title)
    for function in code:
        show("   code  {}", where(function))


def show_broken(name: str, wrong: dict[str, float], right: dict[str, float]) -> None:
    """Print the numbers of a broken rule beside the right ones."""
    show("   --break {}{}", name, BREAKS[name])
    for metric in ("loss", "grad_norm", "mismatch"):
        if wrong.get(metric) != right.get(metric):
            show("   {:9} broken {:.7f} | right {:.7f}", metric, wrong[metric], right[metric])


class Walk:
    """The parts of `minirl.rl.Trainer`, and the ten stations of a step.

    Args:
        folder: a temporary one of this rank.
        mesh: the ranks.
    """

    def __init__(self, folder: Path, mesh: Mesh):
        (folder / "walk.yaml").write_text(SETTINGS)
        cfg = load_config(RLConfig, str(folder / "walk.yaml"))
        cfg.output = mesh.gather(str(folder / "run"))[0]
        cfg.reward.function = f"{__file__}:letters"
        inputs = Inputs(cfg, mesh)
        self.cfg = cfg
        self.mesh = mesh
        self.prompts = inputs.prompts
        self.policy = Policy(cfg.policy, inputs.folder, mesh)
        warm_start(cfg, inputs, self.policy, Log(folder, rank=1))
        self.generation = Generation(cfg, inputs, self.policy)
        self.loss = losses.policy(cfg.algo, cfg.env.max_tokens)

    def step(self, broken: list[str]) -> bool:
        """Make the step; return whether plain PyTorch agrees."""
        self.show_shards()
        self.refit_engine()
        trajectories = self.roll_out()
        self.show_rewards(trajectories)
        batch = self.pack_answers(trajectories)
        self.take_logprobs(batch)
        self.assign_advantages(batch)
        self.show_loss(batch)
        equal = self.update(batch, trajectories, broken)
        self.show_update(batch, broken)
        self.generation.close()
        return equal

    def show_shards(self) -> None:
        """Print who owns what of one weight."""
        station("1. Shards: every rank owns a part of every weight", fsdp.shard, fsdp.local_region)
        weight = self.policy.shards()[WEIGHT]
        show("   in    {} {}", WEIGHT, tuple(weight.shape))
        regions = self.mesh.gather(fsdp.local_region(weight))
        show("   out   rank 0 owns {}\n         rank 1 owns {}", *regions)

    def refit_engine(self) -> None:
        """Bring the policy's weights into the engine."""
        station("2. Refit: the policy's weights go into the engine, in place", Refit.__call__)
        trained = fsdp.local(self.policy.shards()[EMBEDDING])
        engine = self.generation.engine.parameters()[EMBEDDING]
        show("   in    {}", EMBEDDING)
        show(
            "         policy {:+.6f} ..., engine {:+.6f} ... (random)", trained[0, 0], engine[0, 0]
        )
        self.generation.refit()
        show("   out   policy {:+.6f} ..., engine {:+.6f} ...", trained[0, 0], engine[0, 0])
        show("         {:,} bytes came from the other rank", self.generation.refit.bytes_received)

    def roll_out(self) -> list[Trajectory]:
        """Sample a group of answers to each prompt."""
        station("3. Rollout: answers to prompts", Sampler.collect_step, RolloutEngine.step)
        trajectories = self.sample(0, self.generation.refit)
        row = self.prompts.row(trajectories[0].group)
        show("   in    {}   (answer: {})", row["prompt"], row["answer"])
        show("         {}", self.decode(self.prompts.encode(row)))
        for t in trajectories[: self.cfg.rollout.samples_per_prompt]:
            show("   out   {}", self.decode(t.tokens[t.sampled]))
            logprobs = t.logprobs[t.sampled].astype(float)
            show("         log-probs {}", logprobs.round(3).tolist())
        return trajectories

    def sample(self, first: int, refit: Callable[[], None]) -> list[Trajectory]:
        """Return this rank's answers to the prompts from ticket `first` on."""
        sampler, sampling = self.generation.sampler, self.generation.sampling
        with self.generation.engine.awake(refit, self.policy.sleeper):
            return sampler.collect_step(first, sampling, version=self.policy.num_updates)[0]

    def decode(self, tokens: Iterable) -> list[str]:
        """Return the text of each token."""
        return [str(self.prompts.tokenizer.decode([token])) for token in tokens]

    def show_rewards(self, trajectories: list[Trajectory]) -> None:
        """Print what the answers to a prompt earned; they were scored during the rollout."""
        station("4. Rewards: a function scores each answer", Rewards.__call__, letters)
        for t in trajectories[: self.cfg.rollout.samples_per_prompt]:
            show("   {!r:10} -> {:.3f}", t.info["completion"], t.reward)

    def pack_answers(self, trajectories: list[Trajectory]) -> Packed:
        """Spread the answers over the ranks and lay them end to end."""
        station("5. Exchange and packing: even work, no padding", exchange, pack)
        lengths = [len(t.tokens) - 1 for t in trajectories]
        show(
            "   in    {} answers of this rank, {} rows if padded",
            len(lengths),
            len(lengths) * max(lengths),
        )
        batch = self.pack(trajectories)
        show(
            "   out   {} rows: answers to a prompt share its rows",
            self.mesh.gather(len(batch.inputs)),
        )
        show("         rows of each sequence: {}", batch.lengths)
        return batch

    def pack(self, trajectories: list[Trajectory]) -> Packed:
        """Return the micro-batch that this rank trains on."""
        ((answers,),) = exchange(trajectories, self.mesh, self.cfg.tokens_per_rank)
        temperature = self.cfg.rollout.temperature
        return pack(answers, self.mesh.device, temperature, layout=self.policy.layout)

    def take_logprobs(self, batch: Packed) -> None:
        """Compute the trainer's log-probs of the sampled tokens."""
        title = "6. Log-probs: the trainer's, of the tokens that the engine sampled"
        station(title, Policy.annotate, logprob_entropy)
        mismatch = self.annotate(batch)
        for row in batch.loss_rows[:6]:
            show(
                "   {!r:>15} -> {!r:9} engine {:+.6f}   trainer {:+.6f}",
                *self.decode([batch.inputs[row], batch.targets[row]]),
                batch.engine_logprobs[row],
                batch.old_logprobs[row],
            )
        show("   out   mean |engine - trainer| of the sampled tokens: {:.1e}", mismatch)

    def annotate(self, batch: Packed) -> float:
        """Set the trainer's log-probs; return their mean distance from the engine's."""
        self.policy.annotate([[batch]], "old_logprobs")
        distance = (batch.old_logprobs - batch.engine_logprobs)[batch.loss_mask].abs()
        return statistics.mean(itertools.chain(*self.mesh.gather(distance.tolist())))

    def assign_advantages(self, batch: Packed) -> None:
        """Compare each answer with its group."""
        title = "7. Advantages: (reward - mean of its group) / deviation of its group"
        station(title, advantages.assign, advantages.grpo)
        mesh = self.mesh
        advantages.assign(
            [batch],
            advantages.grpo,
            self.cfg.algo,
            0.0,
            sum_over_ranks=mesh.data_sums,
            max_over_ranks=mesh.maxima,
            gather=mesh.gather,
        )
        show("   (group, sample, segment)")
        for row in self.answers(batch, batch.advantages):
            show("   {}  reward {:.3f} -> advantage {:+.3f}", *row)

    def answers(self, batch: Packed, *columns: Tensor) -> list[tuple]:
        """Return name and mean of each column over the tokens of this rank's first answers."""
        means = [normalize.sequence_sums(column, batch) / batch.loss_tokens for column in columns]
        rows = zip(batch.sequence_ids, batch.rewards, *means, strict=True)
        return [row for row in rows if row[-1].isfinite()][:8]

    def show_loss(self, batch: Packed) -> None:
        """Print the loss: a sum of all ranks over a count of all ranks."""
        title = "8. Loss: a sum over tokens, divided by the number of tokens on all ranks"
        station(title, losses.policy, normalize.weights, normalize.count)
        token_loss, _ = self.loss.token_loss(batch, batch.old_logprobs, batch.old_entropy)
        total = (token_loss * normalize.weights(batch, "token")).sum()
        count = normalize.count(batch, "token")
        for rank, part in enumerate(self.mesh.gather((total.item(), count.item()))):
            show("   in    rank {}: {:+.6f} over {:.0f} tokens", rank, *part)
        total, count = self.mesh.sums(torch.stack([total, count]))
        show("   out   {:+.6f} / {:.0f} = {:+.7f}", total, count, total / count)

    def update(self, batch: Packed, trajectories: list[Trajectory], broken: list[str]) -> bool:
        """Make the optimizer step, beside one in plain PyTorch; return whether they agree."""
        title = "9. Backward: the gradients of all ranks are summed into the shards"
        station(title, Policy.update, fsdp.clip_grad_norm, plain_step)
        folder = Path(self.cfg.output) / "model"
        checkpoint.export(self.policy, folder, self.mesh)
        everyone = list(itertools.chain(*self.mesh.gather(trajectories)))
        plain = plain_step(folder, everyone, self.cfg)
        wrong = {name: self.try_broken(batch, name) for name in broken if name != "stale-engine"}
        right = self.policy.update([batch], self.loss, self.cfg.policy.lr)
        equal = all(
            math.isclose(plain[name], right[name], rel_tol=TOLERANCE, abs_tol=1e-8)
            for name in plain
        )
        verdict = "equal" if equal else "NOT EQUAL"
        for name, value in plain.items():
            show(
                "   {:9} plain PyTorch {:.7f} | minirl {:.7f} | {}",
                name,
                value,
                right[name],
                verdict,
            )
        for name, values in wrong.items():
            show_broken(name, values, right)
        return equal

    def try_broken(self, batch: Packed, name: str) -> dict[str, float]:
        """Return what an update with a broken rule reports. It changes nothing, for its lr is 0."""
        count = normalize.count(batch, "token")
        # A factor of the advantages is one of the loss: here, for the mean of the ranks' means.
        scale = self.mesh.sums(count.clone()) / (count * self.mesh.world_size)
        changes: dict[str, dict] = {
            "loss-scale": {"advantages": batch.advantages * scale},
            "logprob-temperature": {"temperature": 1.0, "old_logprobs": None},
        }
        out = self.policy.update([dataclasses.replace(batch, **changes[name])], self.loss, lr=0.0)
        self.policy.forget_optimizer_state()
        return out

    def show_update(self, batch: Packed, broken: list[str]) -> None:
        """Print what the step changed: the log-probs of the answers, and the next rollout."""
        title = "10. Optimizer step: better answers became likelier, and the engine samples on"
        station(title, Policy.update, RolloutEngine.awake)
        before = batch.old_logprobs
        self.annotate(batch)
        for row in self.answers(batch, batch.advantages, before, batch.old_logprobs):
            show("   {}  reward {:.3f}  advantage {:+.3f}  log-probs {:+.3f} -> {:+.3f}", *row)
        following = self.cfg.rollout.prompts_per_step
        stale = self.annotate(self.pack(self.sample(following, lambda: None)))
        fresh = self.annotate(self.pack(self.sample(following, self.generation.refit)))
        show("   out   next rollout, mean |engine - trainer|: {:.1e}", fresh)
        if "stale-engine" in broken:
            show_broken("stale-engine", {"mismatch": stale}, {"mismatch": fresh})


def plain_step(folder: Path, trajectories: list[Trajectory], cfg: RLConfig) -> dict[str, float]:
    """Return loss and gradient norm of a GRPO step: one process, one sequence at a time."""
    algo = cfg.algo
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    num_tokens = sum(t.sampled.sum() for t in trajectories)
    total = 0.0
    for t in trajectories:
        # The advantage: how much better than its siblings, in deviations of their rewards.
        siblings = [other.reward for other in trajectories if other.group == t.group]
        if len(set(siblings)) == 1:
            continue  # None is better than another: nothing to learn.
        rewards = torch.tensor(siblings, dtype=torch.float64)
        advantage = (t.reward - rewards.mean()) / (rewards.std() + 1e-6)

        # The log-probs of the sampled tokens. Logits at a token speak about the next one.
        tokens = torch.tensor(t.tokens, dtype=torch.int64)
        sampled = torch.tensor(t.sampled[1:])
        logits = model(tokens[None, :-1]).logits[0] / cfg.rollout.temperature
        logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[sampled, 0]

        # PPO's clipped loss. Before the first update the ratio is 1, but it carries the gradient.
        old = logprobs.detach()
        ratio = (logprobs - old).exp()
        clipped = ratio.clamp(1 - algo.clip_low, 1 + algo.clip_high)
        token_loss = -torch.minimum(ratio * advantage, clipped * advantage)

        # The engine sampled with slightly other probabilities: each token counts as much as the
        # trainer finds it likelier, at most twice (truncated importance sampling).
        engine = torch.tensor(t.logprobs[1:])[sampled]
        weight = (old - engine).exp().clamp(max=2)
        loss = (token_loss * weight).sum() / num_tokens
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.policy.max_grad_norm)
    return {"loss": total, "grad_norm": norm.item()}
