"""Training on what others wrote.

`SupervisedTrainer` is SFT itself; reward models and DPO put methods of their own in place of some
of its. `warm_start` is the short form before RL.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from minirl.algo import losses
from minirl.config.rl import RLConfig
from minirl.config.supervised import ChatsConfig, DPOConfig, RMConfig, SupervisedConfig
from minirl.config.validate import validate_pairs, validate_supervised
from minirl.data import chat
from minirl.data.examples import Chats, load_chats, to_example
from minirl.data.pairs import Pairs, load_pairs
from minirl.data.prompts import Prompts
from minirl.errors import UserError
from minirl.inputs import (
    ModelFiles,
    check_output,
    find_model,
    load_splits,
    make_scratch,
)
from minirl.log import Log
from minirl.parallel.mesh import Mesh
from minirl.policy import Policy, learning_rate, make_minibatch
from minirl.trainer import Metrics, Program, TrainingRun
from minirl.types import Packed, Trajectory


class SupervisedTrainer(Program):
    """A supervised run: `train` is the algorithm, and SFT is what the methods say here."""

    cfg: SupervisedConfig
    name = "sft"  # On the progress bar.
    score_head = False  # The model has a score head in place of the language model's.
    pairs = False  # Rows are pairs, whose two sides stay in one micro-batch.

    def __init__(self, cfg: SupervisedConfig, mesh: Mesh):
        super().__init__(cfg, mesh)
        with self.timer.phase("start"):
            self.files, self.rows, self.held_out = self.find_inputs()
            self.check_model(self.files.folder)
            num_steps = math.ceil(cfg.num_epochs * len(self.rows) / cfg.batch_size)
            self.num_steps = cfg.num_steps or max(1, num_steps)
            self.policy = self.load_model(cfg.policy, self.files.folder, score=self.score_head)
            self.ref = self.load_reference()
            lost = [a + b for a, b in zip(self.rows.num_lost, self.held_out.num_lost, strict=True)]
            sizes = f"{len(self.rows)} rows, {len(self.held_out)} held out"
            description = f"{sizes} ({self.describe_lost(*lost)})"
            self.run = TrainingRun(cfg, self.policy, mesh, self.timer, description)
        self.log = self.run.log
        self.progress = self.run.progress

    def train(self) -> None:
        """Train from the first step of the run to the last. All ranks take each step together."""
        cfg = self.cfg
        loss = self.make_loss()
        self.log.progress(self.name, self.num_steps, self.run.first_step)
        self.progress.add(self.timer.take())
        for step in range(self.run.first_step, self.num_steps):
            if step == 0 or (cfg.eval.every and step % cfg.eval.every == 0):
                self.evaluate(step, "before" if step == 0 else None)
            with self.timer.phase("prepare"):
                first = step * cfg.batch_size
                examples = self.rows.examples(range(first, first + cfg.batch_size))
                batches = self.make_batches(examples)
            lr = learning_rate(cfg.policy, step, self.num_steps)
            metrics = self.policy.update(batches, loss, lr)
            self.report(step, examples, metrics)
            self.run.save_if_due(step + 1)
        self.evaluate(self.num_steps, "after")
        self.finish()

    def report(self, step: int, examples: list[Trajectory], metrics: Metrics) -> None:
        """Log the metrics of an update. Tokens are those of the rows, in the loss or not."""
        num_tokens = sum(self.mesh.gather(sum(len(t.tokens) for t in examples)))
        metrics["epoch"] = (step + 1) * self.cfg.batch_size / len(self.rows)
        metrics["tokens"] = num_tokens
        self.run.report("train", step, metrics, ("loss", "tokens"), trained=num_tokens)

    def evaluate(self, step: int, name: str | None = None) -> None:
        """Score held-out rows. Collective. `name`: keep the scores for the summary."""
        with self.timer.phase("evaluate"):
            examples = self.held_out.examples(range(len(self.held_out)))
            measured = self.policy.measure(self.make_batches(examples), self.make_loss())
            scores = self.make_scores(measured)
        self.run.record_evaluation(step, scores, scores, name, scores)

    def finish(self) -> None:
        """Export, and write the summary with the scores before and after. Collective."""
        titled = {}
        for when, scores in self.progress.evaluations.items():
            for name, value in scores.items():
                titled[f"{name} {when}"] = value
        self.run.finish(titled)

    def find_inputs(self) -> tuple[ModelFiles, Chats | Pairs, Chats | Pairs]:
        """Find and check what the config names.

        Returns:
            The files of the model, the rows to train on, the held-out rows.

        Raises:
            UserError: at the first thing that is missing or cannot work.
        """
        cfg = self.cfg
        self.check_settings()
        check_output(Path(cfg.output), cfg.resume)
        train, held_out = load_splits(self.load_rows, cfg.data, cfg.seed)
        rows = itertools.chain(train, held_out)
        has_chats = any("messages" in row or "prompt" in row for row in rows)
        max_tokens = cfg.data.max_tokens
        files = find_model(cfg, max_tokens, chats=has_chats)
        num_positions = files.config.get_text_config().max_position_embeddings
        if num_positions < max_tokens:
            raise UserError(
                f"data.max_tokens = {max_tokens} is more than the {num_positions} positions of "
                f"policy.model = {cfg.policy.model}; lower it"
            )
        stop_ids = chat.stop_token_ids(files.tokenizer, files.folder) if has_chats else []
        as_tokens = partial(
            self.encoder(),
            tokenizer=files.tokenizer,
            stop_ids=stop_ids,
            cfg=cfg.data,
            mesh=self.mesh,
            seed=cfg.seed,
            vision=files.vision,
        )
        held_out_setting = "data.eval" if cfg.data.eval else "data.train"
        encoded = as_tokens(train, "data.train")
        encoded_held_out = as_tokens(held_out, held_out_setting, shuffle=False)
        make_scratch(cfg, max_tokens, self.mesh)
        return files, encoded, encoded_held_out

    # What other programs put in its place.

    def check_settings(self) -> None:
        """Refuse settings that cannot work together. Raises UserError."""
        validate_supervised(self.cfg, self.mesh.world_size)

    def load_rows(self, source: str | list[str], setting: str) -> Sequence[dict]:
        """Return the rows of a source. Raises UserError, naming the setting."""
        assert isinstance(self.cfg.data, ChatsConfig)  # PairTrainer loads pairs instead
        return load_chats(source, setting, self.cfg.data)

    def encoder(self) -> Callable[..., Chats | Pairs]:
        """Return what makes token ids of rows."""
        return Chats

    def describe_lost(self, num_cut: int, num_dropped: int) -> str:
        """Return what became of rows that do not fit, for the log."""
        return (
            f"{num_cut} cut to {self.cfg.data.max_tokens} tokens, {num_dropped} dropped with no "
            "token in the loss"
        )

    def check_model(self, folder: Path) -> None:
        """Refuse a model that the program has no use for. Raises UserError."""

    def load_reference(self) -> Policy | None:
        """Load a frozen model beside the policy, before anything of the run is written."""
        return None

    def make_loss(self) -> losses.Loss:
        """Return what is minimised."""
        return losses.sft()

    def make_batches(self, examples: list[Trajectory]) -> list[Packed]:
        """Return this rank's micro-batches of one optimizer step. Collective."""
        return make_minibatch(
            examples, self.policy, self.mesh, self.cfg.tokens_per_rank, pairs=self.pairs
        )

    def make_scores(self, measured: Metrics) -> Metrics:
        """Return the held-out scores: mean negative log-likelihood of the tokens in the loss."""
        loss = measured["loss"]
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


class PairTrainer(SupervisedTrainer):
    """What reward models and DPO share: rows are pairs."""

    cfg: RMConfig | DPOConfig
    rows: Pairs
    held_out: Pairs
    pairs = True

    def check_settings(self) -> None:
        """Refuse settings that cannot work together. Raises UserError."""
        validate_pairs(self.cfg, self.mesh.world_size)

    def load_rows(self, source: str | list[str], setting: str) -> Sequence[dict]:
        """Return the pairs of a source. Raises UserError, naming the setting."""
        return load_pairs(source, setting, self.cfg.data)

    def encoder(self) -> Callable[..., Pairs]:
        """Return what makes token ids of pairs."""
        return partial(Pairs, score=self.score_head)

    def describe_lost(self, num_long: int, num_equal: int) -> str:
        """Return which pairs were dropped, for the log."""
        return (
            f"{num_long} with more than {self.cfg.data.max_tokens} tokens and {num_equal} with two "
            "equal sides dropped"
        )

    def make_scores(self, measured: Metrics) -> Metrics:
        """Return the held-out scores of pairs.

        The loss; the share in which the chosen answer is put higher, and by how much on average.
        """
        return {name: measured[name] for name in ("loss", "accuracy", "margin")}


def warm_start(
    cfg: RLConfig, policy: Policy, prompts: Prompts, stop_ids: list[int], mesh: Mesh, log: Log
) -> int:
    """Take `cfg.sft.num_steps` steps of negative log-likelihood on the rows' answers. Collective.

    Example n of the run is a function of (seed, n) alone, so any number of ranks sees the same
    examples in the same steps.

    Returns:
        How many tokens this rank trained on.
    """
    sft = cfg.sft
    policy.start_phase(
        dataclasses.replace(
            cfg.policy, lr=sft.lr, lr_schedule="cosine", lr_warmup_steps=sft.lr_warmup_steps
        )
    )
    log.progress("sft", sft.num_steps)
    num_tokens = 0
    for step in range(sft.num_steps):
        numbers = range(step * sft.batch_size, (step + 1) * sft.batch_size)
        examples = []
        for n in numbers[mesh.rank :: mesh.world_size]:
            examples.append(_example(prompts, n, sft.wrong_character, cfg.seed, stop_ids))
        batches = make_minibatch(examples, policy, mesh, cfg.tokens_per_rank)
        lr = learning_rate(policy.cfg, step, sft.num_steps)
        metrics = policy.update(batches, losses.sft(), lr)
        num_tokens += sum(sum(batch.lengths) for batch in batches)
        log.scalars("sft", step, metrics, ("loss",))
    policy.start_phase(cfg.policy)
    return num_tokens


def _example(
    prompts: Prompts, number: int, wrong_character: float, seed: int, stop_ids: list[int]
) -> Trajectory:
    """Return example `number`: a prompt with its answer, at times with one wrong character."""
    row = prompts.row(number)
    rng = np.random.default_rng([seed, number, 1])
    answer = str(row["answer"])
    if answer and rng.random() < wrong_character:
        place = int(rng.integers(len(answer)))
        other_row = prompts.row(int(rng.integers(len(prompts.rows))))
        alphabet = sorted(set(answer + str(other_row["answer"])))
        answer = answer[:place] + str(rng.choice(alphabet)) + answer[place + 1 :]
    messages = [*prompts.messages(row), {"role": "assistant", "content": answer}]
    chat_row = {"messages": messages, "trained": [len(messages) - 1]}
    example = to_example(prompts.tokenizer, prompts.vision, chat_row, stop_ids)
    return dataclasses.replace(example, group=number)
