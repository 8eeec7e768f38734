"""Training on what others wrote: the trainer that SFT, reward models and DPO share, and the short
form before RL.
"""

import dataclasses
import functools
import math
from pathlib import Path

import numpy as np

from minirl.algo import losses
from minirl.config.rl import RLConfig
from minirl.config.supervised import SFTConfig
from minirl.config.validate import validate_pairs, validate_supervised
from minirl.data import chat
from minirl.data.examples import Chats, load_chats, to_example
from minirl.data.pairs import Pairs, load_pairs
from minirl.data.prompts import Prompts
from minirl.data.rows import split
from minirl.errors import UserError
from minirl.inputs import check_output, find_model, make_scratch
from minirl.log import Log, Timer
from minirl.parallel.mesh import Mesh
from minirl.policy import Policy, learning_rate, make_minibatch
from minirl.trainer import Program, TrainingRun
from minirl.types import Packed, Trajectory


class SupervisedTrainer(Program):
    """The parts of a run; `train` is the algorithm. What other programs put in its place comes
    first.
    """

    name, score, pairs = "sft", False, False
    check, load, make = staticmethod(validate_supervised), staticmethod(load_chats), Chats
    lost = "{} cut to {max_tokens} tokens, {} dropped with no token in the loss"

    def find_inputs(self) -> tuple[Path, Chats, Chats]:
        """(folder of the model, rows to train on, held-out rows). `check` looks at the settings,
        `load` finds the rows of a source, `make` makes token ids of them. Raises UserError at the
        first thing that is missing or cannot work.
        """
        cfg, mesh = self.cfg, self.mesh
        self.check(cfg, mesh.world_size)
        check_output(Path(cfg.output), cfg.resume)
        rows = self.load(cfg.data.train, "data.train", cfg.data)
        rows, held_out = (
            (rows, self.load(cfg.data.eval, "data.eval", cfg.data))
            if cfg.data.eval
            else split(rows, cfg.data.held_out, cfg.seed)
        )
        chats = any("messages" in row or "prompt" in row for row in [*rows, *held_out])
        folder, config, tokenizer, vision = find_model(cfg, cfg.data.max_tokens, chats=chats)
        if config.get_text_config().max_position_embeddings < cfg.data.max_tokens:
            raise UserError(
                f"data.max_tokens = {cfg.data.max_tokens} is more than the {config.get_text_config().max_position_embeddings} positions of policy.model = "
                f"{cfg.policy.model}; lower it"
            )
        stop_ids = chat.stop_token_ids(tokenizer, folder) if chats else []
        train = self.make(
            rows, "data.train", tokenizer, stop_ids, cfg.data, mesh, seed=cfg.seed, vision=vision
        )
        held_out = self.make(
            held_out,
            "data.eval" if cfg.data.eval else "data.train",
            tokenizer,
            stop_ids,
            cfg.data,
            mesh,
            seed=cfg.seed,
            shuffle=False,
            vision=vision,
        )
        make_scratch(cfg, cfg.data.max_tokens, mesh)
        return folder, train, held_out

    def make_loss(self) -> losses.Loss:
        return losses.sft()

    def load_others(self) -> None:
        """Models beside the policy, before anything of the run is written. Raises UserError."""

    def batches(self, examples: list[Trajectory]) -> list[Packed]:
        return make_minibatch(
            examples, self.policy, self.mesh, self.cfg.tokens_per_rank, pairs=self.pairs
        )

    def scores(self, measured: dict[str, float]) -> dict[str, float]:
        """Of held-out rows: mean negative log-likelihood of the tokens in the loss."""
        return {"loss": measured["loss"], "perplexity": math.exp(min(measured["loss"], 700.0))}

    def __init__(self, cfg: SFTConfig, mesh: Mesh):
        self.cfg, self.mesh, self.timer = cfg, mesh, Timer(mesh.device)
        with self.timer.phase("start"):
            self.folder, self.rows, self.held_out = self.find_inputs()
            self.num_steps = cfg.num_steps or max(
                1, math.ceil(cfg.num_epochs * len(self.rows) / cfg.batch_size)
            )
            self.policy = Policy(
                cfg.policy,
                self.folder,
                mesh,
                score=self.score,
                sequence_parallel=cfg.parallel.sequence,
                timer=self.timer,
            )
            self.load_others()
            lost = self.lost.format(
                *(a + b for a, b in zip(self.rows.num_lost, self.held_out.num_lost, strict=True)),
                max_tokens=cfg.data.max_tokens,
            )
            self.run = TrainingRun(
                cfg,
                self.policy,
                mesh,
                self.timer,
                f"{len(self.rows)} rows, {len(self.held_out)} held out ({lost})",
            )
        self.log, self.progress = self.run.log, self.run.progress

    def train(self) -> None:
        cfg, loss = self.cfg, self.make_loss()
        self.log.progress(self.name, self.num_steps, self.run.first_step)
        self.progress.add(self.timer.take())
        for step in range(self.run.first_step, self.num_steps):
            if step == 0 or (cfg.eval.every and step % cfg.eval.every == 0):
                self.evaluate(step, "before" if step == 0 else None)
            with self.timer.phase("prepare"):
                examples = self.rows.examples(
                    range(step * cfg.batch_size, (step + 1) * cfg.batch_size)
                )
                batches = self.batches(examples)
            metrics = self.policy.update(
                batches, loss, learning_rate(cfg.policy, step, self.num_steps)
            )
            num_tokens = sum(
                self.mesh.gather(sum(len(t.tokens) for t in examples))
            )  # of the rows, whether in the loss or not
            metrics |= {"epoch": (step + 1) * cfg.batch_size / len(self.rows), "tokens": num_tokens}
            self.run.report("train", step, metrics, ("loss", "tokens"), trained=num_tokens)
            self.run.save_if_due(step + 1)
        self.evaluate(self.num_steps, "after")
        self.run.finish(
            {
                f"{name} {when}": value
                for when, found in self.progress.evaluations.items()
                for name, value in found.items()
            }
        )

    def evaluate(self, step: int, name: str | None = None) -> None:
        """Score held-out rows. `name`: keep it for the summary."""
        with self.timer.phase("evaluate"):
            scores = self.scores(
                self.policy.measure(
                    self.batches(self.held_out.examples(range(len(self.held_out)))),
                    self.make_loss(),
                )
            )
        self.run.evaluated(step, scores, scores, name, scores)


class PairTrainer(SupervisedTrainer):
    """What reward models and DPO share: rows are pairs, whose two sides stay in one micro-batch."""

    lost = "{} with more than {max_tokens} tokens and {} with two equal sides dropped"
    pairs, check, load, make = (
        True,
        staticmethod(validate_pairs),
        staticmethod(load_pairs),
        functools.partial(Pairs, score=False),
    )

    def scores(self, measured: dict[str, float]) -> dict[str, float]:
        """Of held-out pairs: loss, share in which the chosen answer is put higher, and by how much
        on average.
        """
        return {name: measured[name] for name in ("loss", "accuracy", "margin")}


def warm_start(
    cfg: RLConfig, policy: Policy, prompts: Prompts, stop_ids: list[int], mesh: Mesh, log: Log
) -> int:
    """`cfg.sft.num_steps` steps of negative log-likelihood on answers. Returns the tokens trained
    on.

    Example n of the run is a function of (seed, n) alone, so any number of ranks sees the same
    examples in the same steps.
    """
    sft, num_tokens = cfg.sft, 0
    policy.start_phase(
        dataclasses.replace(
            cfg.policy, lr=sft.lr, lr_schedule="cosine", lr_warmup_steps=sft.lr_warmup_steps
        )
    )
    log.progress("sft", sft.num_steps)
    for step in range(sft.num_steps):
        examples = range(step * sft.batch_size, (step + 1) * sft.batch_size)
        own = [
            _example(prompts, n, sft.wrong_character, cfg.seed, stop_ids)
            for n in examples[mesh.rank :: mesh.world_size]
        ]
        batches = make_minibatch(own, policy, mesh, cfg.tokens_per_rank)
        metrics = policy.update(
            batches, losses.sft(), learning_rate(policy.cfg, step, sft.num_steps)
        )
        num_tokens += sum(sum(b.lengths) for b in batches)
        log.scalars("sft", step, metrics, ("loss",))
    policy.start_phase(cfg.policy)
    return num_tokens


def _example(
    prompts: Prompts, number: int, wrong_character: float, seed: int, stop_ids: list[int]
) -> Trajectory:
    row, rng = prompts.row(number), np.random.default_rng([seed, number, 1])
    answer = str(row["answer"])
    if answer and rng.random() < wrong_character:
        at = int(rng.integers(len(answer)))
        alphabet = sorted(
            set(answer + str(prompts.row(int(rng.integers(len(prompts.rows))))["answer"]))
        )
        answer = answer[:at] + str(rng.choice(alphabet)) + answer[at + 1 :]
    messages = [*prompts.messages(row), {"role": "assistant", "content": answer}]
    example = to_example(
        prompts.tokenizer,
        prompts.vision,
        {"messages": messages, "trained": [len(messages) - 1]},
        stop_ids,
    )
    return dataclasses.replace(example, group=number)
