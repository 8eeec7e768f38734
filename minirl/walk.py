"""One GRPO step of the real program with real numbers, station by station.

    python -m minirl.walk
    python -m minirl.walk --break loss-scale logprob-temperature stale-engine

Two ranks on the CPU train a model of 0.2M parameters to spell words backward. Each of ten stations
prints what goes in, what comes out, and the file and line of the code that does it.
The ninth compares it with the same step in plain PyTorch: one process, one sequence at a time, an
ordinary Hugging Face model. The exit code is 0 only if loss and gradient norm agree.

`--break` breaks rules on purpose and prints the wrong number next to the right one. The program
starts its two ranks itself; under torchrun it just runs. It leaves nothing on the disk.
"""

if __name__ == "__main__":  # First the flags: the imports below take seconds. It does not return.
    import argparse
    import os
    import subprocess
    import sys
    import tempfile
    from pkgutil import resolve_name

    parser = argparse.ArgumentParser(description="One GRPO step with real numbers.")
    names = ("loss-scale", "logprob-temperature", "stale-engine")
    parser.add_argument("--break", dest="broken", nargs="+", choices=names, default=[])
    broken = parser.parse_args().broken
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        # Else torchrun waits for ever where nothing knows the machine by its name.
        command += ["--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", "2", "-m", "minirl.walk", *sys.argv[1:]]
        with tempfile.TemporaryDirectory() as folder:  # for all that torchrun would leave
            quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TMPDIR": folder}
            sys.exit(subprocess.run(command, env=os.environ | quiet).returncode)
    sys.exit(resolve_name("minirl.walk:main")(broken))

import inspect
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from minirl.algo import advantages, losses, normalize
from minirl.batch.exchange import exchange
from minirl.batch.packing import pack
from minirl.checkpoint import exporting
from minirl.config.parse import load_config
from minirl.config.rl import RLConfig
from minirl.engine.engine import RolloutEngine
from minirl.model.logprob import logprob_entropy
from minirl.parallel import fsdp, sharding
from minirl.parallel.machines import join_world
from minirl.parallel.mesh import Mesh
from minirl.parallel.regions import local_region
from minirl.refit.plan import Planner
from minirl.refit.refit import Refit
from minirl.rewards.functions import score_reasoning_gym
from minirl.rl import Generation, Trainer
from minirl.rollout.sampler import Sampler
from minirl.run.supervised import warm_start
from minirl.train.policy import Metrics, Policy
from minirl.types.packed import UNSET, Packed, Trajectory

# Between plain PyTorch and minirl, relative. Everything is float64 but for the inside of Hugging
# Face's norms: a difference of 1e-16 before such a rounding can become one of 1e-8 after it.
TOLERANCE = 1e-7
WEIGHT = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
BREAKS = {
    "loss-scale": """
    Each rank divided by the number of its tokens, and the mean over ranks was taken. Tokens
    of a rank with few of them count more: the result depends on which rank got which answer.""",
    "logprob-temperature": """
    The tokens were sampled at temperature 0.8, and the log-probs taken at 1: trainer and engine
    speak of two distributions, and the gradient is that of the wrong one.""",
    "stale-engine": """
    Without a refit the engine samples with the weights from before the step: its log-probs are
    not the policy's, and each further step widens the gap.""",
}


def main(broken: list[str]) -> int:
    """Make the step on this rank; return 1 if plain PyTorch does not agree.

    Args:
        broken: rules to break on purpose, of BREAKS.
    """
    mesh = join_world()
    with tempfile.TemporaryDirectory() as folder:
        equal = Walk(Path(folder), mesh).step(broken)
    if dist.is_initialized():  # some versions of vLLM destroy the default group with the engine
        dist.destroy_process_group()
    return int(not equal)


def show(template: str, *values: object) -> None:
    """Print on rank 0."""
    if os.environ["RANK"] == "0":
        print(template.format(*values))


def station(title: str, *code: Callable) -> None:
    """Print the head of a station, with file and line of each function that it shows."""
    show("\n{}", title)
    for function in code:
        # Looked up now, so that they are never stale.
        file = function.__module__.replace(".", "/")
        line = inspect.getsourcelines(function)[1]
        show("   code  {}.py:{} {}", file, line, function.__qualname__)


def show_broken(name: str, wrong: Metrics, right: Metrics) -> None:
    """Print the numbers of a broken rule next to the right ones."""
    show("   --break {}{}", name, BREAKS[name])
    for metric in ("loss", "grad_norm", "mismatch"):
        if wrong.get(metric) != right.get(metric):
            show("   {:9} broken {:.7f} | right {:.7f}", metric, wrong[metric], right[metric])


class Walk(Trainer):
    """The trainer of `minirl.rl`, taken through one step in ten stations.

    Args:
        folder: a temporary one of this rank.
        mesh: the ranks.
    """

    generation: Generation  # never None: a walk does not replay rollouts

    def __init__(self, folder: Path, mesh: Mesh):
        cfg = load_config(RLConfig, str(Path(__file__).with_suffix(".yaml")))
        cfg.output = mesh.gather(str(folder / "run"))[0]
        super().__init__(cfg, mesh)
        self.to_text: Callable = self.inputs.prompts.tokenizer.convert_ids_to_tokens
        self.loss = losses.policy(cfg.algo, cfg.env.max_tokens)
        warm_start(cfg, self.inputs, self.policy, self.run.log, self.tokens_per_rank)
        self.run.log.close()

    def step(self, broken: list[str]) -> bool:
        """Make the step; return whether plain PyTorch agrees."""
        self.show_weights()
        trajectories = self.roll_out()
        batch = self.prepare(trajectories)
        self.show_loss(batch)
        equal = self.update_beside_plain(batch, trajectories, broken)
        self.show_change(batch, broken)
        self.generation.close()
        return equal

    def show_weights(self) -> None:
        """Show the shards of a weight, and bring all weights into the engine."""
        station("1. Shards: every rank owns a part of every weight", sharding.shard, local_region)
        shards = self.policy.shards()
        show("   in    {} {}", WEIGHT, shards[WEIGHT].shape)
        owned = self.mesh.gather(local_region(shards[WEIGHT]))
        show("   out   rank 0 owns {}\n         rank 1 owns {}", *owned)

        station(
            "2. Refit: the policy's weights go into the engine, in place",
            Planner.plan,
            Refit._start,
        )
        trained = fsdp.local(shards[EMBEDDING])[0, 0]
        in_engine = self.generation.engine.parameters()[EMBEDDING][0, 0]
        show("   in    embedding: policy {:+.6f}, engine {:+.6f} (random)", trained, in_engine)
        self.generation.refit()
        show("   out   embedding: policy {:+.6f}, engine {:+.6f}", trained, in_engine)

    def roll_out(self) -> list[Trajectory]:
        """Sample a group of answers to each prompt; they are scored as soon as they end."""
        station(
            "3. Rollout: answers to prompts",
            Trainer.collect,
            Sampler.collect_step,
            RolloutEngine.step,
        )
        show("   note  with parallel.generators other ranks do this, while these train: split.py")
        with self.generation.awake():
            trajectories = self.sample(0)
        first_group = trajectories[:4]
        row = self.inputs.prompts.row(trajectories[0].group)
        show("   in    {0[prompt]}   (answer: {0[answer]})", row)
        show("         {}", self.to_text(self.inputs.prompts.encode(row)))
        for t in first_group:
            show("   out   {}", self.to_text(t.tokens[t.sampled]))

        station(
            "4. Rewards: a function scores each answer",
            score_reasoning_gym,
            Trainer.shape,
        )
        self.shape(trajectories)
        for t in first_group:
            show("   {!r:10} -> {:.3f}", t.info["completion"], t.reward)
        return trajectories

    def sample(self, first_ticket: int) -> list[Trajectory]:
        """Sample a step's answers with the weights that the engine has."""
        rollout = self.generation.sampler.collect_step(
            first_ticket, self.generation.sampling, version=self.policy.num_updates
        )
        assert rollout  # None only with rollout.ahead
        return rollout.trajectories

    def prepare(self, trajectories: list[Trajectory]) -> Packed:
        """Make the batch of this rank, with the trainer's log-probs and the advantages."""
        station(
            "5. Exchange and packing: even work, no padding", Trainer.make_batches, exchange, pack
        )
        show("   in    answers of so many rows: {}", [len(t.tokens) - 1 for t in trajectories])
        batch = self.make_batches(trajectories)[0][0]
        show("   out   prompts, and answers that share them: {}", batch.sequences.lengths)
        show("         rows of each rank: {}", self.mesh.gather(len(batch.inputs)))

        station(
            "6. Log-probs: the trainer's, of the tokens that the engine sampled",
            Policy.annotate,
            logprob_entropy,
        )
        self.policy.annotate([[batch]], "old_logprobs")
        for row in batch.loss_rows[:6]:
            texts = self.to_text([batch.inputs[row], batch.targets[row]])
            logprobs = batch.engine_logprobs[row], batch.old_logprobs[row]
            show("   {!r:>15} -> {!r:9} engine {:+.6f}   trainer {:+.6f}", *texts, *logprobs)

        station(
            "7. Advantages: (reward - mean of its group) / deviation of its group",
            Trainer.assign_advantages,
            advantages.grpo,
        )
        self.assign_advantages([[batch]])
        rewards = normalize.to_rows(batch.sequences.rewards, batch)
        for row in batch.is_last_row.nonzero().flatten()[:8]:  # an answer has one advantage
            show("   reward {:.3f} -> advantage {:+.3f}", rewards[row], batch.advantages[row])
        return batch

    def show_loss(self, batch: Packed) -> None:
        """Print the loss: a sum of all ranks over a count of all ranks."""
        station(
            "8. Loss: a sum over tokens, divided by the number of tokens on all ranks",
            losses.policy,
            normalize.count,
        )
        token_loss, _ = self.loss.token_loss(batch, batch.old_logprobs, batch.old_entropy)
        sums = torch.stack([token_loss[batch.loss_mask].sum(), normalize.count(batch, "token")])
        for rank, parts in enumerate(self.mesh.gather(sums.tolist())):
            show("   in    rank {}: {:+.6f} over {:.0f} tokens", rank, *parts)
        total, count = self.mesh.sums(sums)
        show("   out   {:+.6f} / {:.0f} = {:+.7f}", total, count, total / count)

    def update_beside_plain(
        self, batch: Packed, trajectories: list[Trajectory], broken: list[str]
    ) -> bool:
        """Make the optimizer step, and one in plain PyTorch; return whether they agree."""
        station(
            "9. Backward: the gradients of all ranks are summed into the shards",
            Trainer.update,
            Policy.update,
            plain_step,
        )
        folder = self.run.output / "model"
        exporting.export(self.policy, folder)
        plain = plain_step(folder, sum(self.mesh.gather(trajectories), []), self.cfg)
        wrong = {name: self.try_broken(batch, name) for name in broken if name != "stale-engine"}
        right = self.update(0, [[batch]])
        equal = True
        for name, value in plain.items():
            difference = abs(right[name] / value - 1)
            line = "   {:9} plain PyTorch {:.7f} | minirl {:.7f} | relative difference {:.0e}"
            show(line, name, value, right[name], difference)
            equal &= difference < TOLERANCE
        for name, metrics in wrong.items():
            show_broken(name, metrics, right)
        return equal

    def try_broken(self, batch: Packed, name: str) -> Metrics:
        """Return what an update with a broken rule reports. It changes nothing, for its lr is 0."""
        if name == "logprob-temperature":
            batch = replace(batch, temperature=1.0, old_logprobs=UNSET)
        else:
            # A factor of the advantages is one of the loss: here, for the mean of the ranks' means.
            count = len(batch.loss_rows)
            scale = sum(self.mesh.gather(count)) / (count * self.mesh.world_size)
            batch = replace(batch, advantages=batch.advantages * scale)
        metrics = self.policy.update([batch], self.loss, lr=0.0)
        self.policy.forget_optimizer_state()
        return metrics

    def show_change(self, batch: Packed, broken: list[str]) -> None:
        """Print what the step changed: the log-probs of the answers, and the next rollout."""
        station(
            "10. Optimizer step: better answers became likelier, and the engine samples on",
            Generation.awake,
        )
        before = batch.old_logprobs
        self.policy.annotate([[batch]], "old_logprobs")
        change = batch.old_logprobs - before
        better = change[batch.advantages > 0].mean()
        worse = change[batch.advantages < 0].mean()
        show("   out   log-probs of better answers {:+.4f}, of worse ones {:+.4f}", better, worse)

        mismatches = []
        for refit in (lambda: None, self.generation.refit):
            with self.generation.engine.awake(refit, self.policy.sleeper):
                first = self.cfg.rollout.prompts_per_step
                trajectories = self.sample(first)
            following = self.make_batches(trajectories)[0][0]
            self.assign_advantages([[following]])
            mismatches.append(self.policy.measure([following], self.loss)["mismatch"])
        stale, fresh = mismatches
        show("         next rollout, mean |engine - trainer|: {:.1e}", fresh)
        if "stale-engine" in broken:
            show_broken("stale-engine", {"mismatch": stale}, {"mismatch": fresh})


def plain_step(folder: Path, trajectories: list[Trajectory], cfg: RLConfig) -> Metrics:
    """Return loss and gradient norm of a GRPO step: one process, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    num_tokens = sum(t.sampled.sum() for t in trajectories)
    total = 0.0
    for t in trajectories:
        # The advantage: how much better than its siblings, in deviations of their rewards.
        siblings = [other.reward for other in trajectories if other.group == t.group]
        rewards = torch.tensor(siblings, dtype=torch.float64)
        advantage = (t.reward - rewards.mean()) / (rewards.std() + 1e-6)

        # The log-probs of the sampled tokens. Logits at a token speak about the next one.
        tokens = torch.tensor(t.tokens).long()
        logits = model(tokens[None, :-1]).logits[0] / cfg.rollout.temperature
        logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[t.sampled[1:], 0]

        # PPO's clipped loss. Before the first update the ratio is 1, but it carries the gradient.
        old = logprobs.detach()
        ratio = (logprobs - old).exp()
        clipped = ratio.clamp(1 - cfg.algo.clip_low, 1 + cfg.algo.clip_high)
        token_loss = -torch.minimum(ratio * advantage, clipped * advantage)

        # The engine sampled with slightly other probabilities: each token counts as much as the
        # trainer finds it likelier, at most twice (truncated importance sampling).
        weight = (old - torch.tensor(t.logprobs[t.sampled])).exp().clamp(max=2)
        loss = (token_loss * weight).sum() / num_tokens
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.policy.max_grad_norm)
    return {"loss": total, "grad_norm": norm.item()}
