"""Training on given answers.

`SupervisedTrainer` is SFT itself; reward models, DPO and KTO override some of its methods.
`warm_start` is the short form before RL.
"""

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from minirl.algo import losses, normalize
from minirl.base.errors import require
from minirl.base.log import say
from minirl.batch.exchange import exchange
from minirl.batch.packing import pack
from minirl.config.rl import RLConfig
from minirl.config.supervised import DPOConfig, KTOConfig, SupervisedConfig
from minirl.config.validate import check_settings
from minirl.data.chat import images_of
from minirl.data.examples import Chats, to_examples
from minirl.data.formats import open_examples
from minirl.data.tokenizer import stop_token_ids
from minirl.model import build, checks
from minirl.parallel.machines import errors_of_all, ranks_of_node
from minirl.parallel.mesh import Mesh
from minirl.run.inputs import (
    Inputs,
    check_output,
    check_same_models,
    check_same_rows,
    check_steps_left,
    find_model,
    find_other_model,
    load_splits,
    make_scratch,
    marks_for_template,
    require_shown,
)
from minirl.run.log import Log
from minirl.run.metrics import count_work
from minirl.run.trainer import BaseTrainer, TrainingRun
from minirl.train.frozen import Reference
from minirl.train.policy import Metrics, Minibatch, Policy
from minirl.train.updates import learning_rate
from minirl.types.packed import Trajectory, prompt_length

# Held-out rows that are on the device at once.
ROWS_OF_PART = 2048


def make_minibatch(
    examples: list[Trajectory],
    policy: Policy,
    tokens_per_rank: int,
    *,
    ref: Reference | None = None,
    pairs: bool = False,
    single: bool = False,
) -> Minibatch:
    """Return this rank's micro-batches of one optimizer step. Collective.

    Args:
        examples: any number of examples of this rank; they are spread over all ranks.
        policy: the model that will read them.
        tokens_per_rank: token budget of a micro-batch.
        ref: another model that will read them.
        pairs: whether groups are pairs; the two sides of a pair stay in one micro-batch.
        single: whether every answer counts alone, as in `pack`.
    """
    (minibatch,) = exchange(examples, policy.mesh, tokens_per_rank, whole_groups=pairs)
    layout = policy.layout.joined([ref.layout] if ref else [])
    return [
        pack(micro, policy.mesh.device, layout=layout, pairs=pairs, single=single)
        for micro in minibatch
    ]


@dataclass(frozen=True)
class Task:
    """What a supervised program learns from, and with what kind of model."""

    name: str  # On the progress bar.
    encoder: type[Chats]  # Makes token ids of rows.
    pairs: bool = False  # A row is a pair; its two sides stay in one micro-batch.
    single: bool = False  # Every answer counts alone.
    score_head: bool = False  # The model has a score head instead of the language model's.
    scores: tuple[str, ...] = ("loss", "perplexity")  # The metrics of held-out rows.


class SupervisedTrainer(BaseTrainer):
    """A supervised run: `train` is the algorithm; with these methods it is SFT."""

    cfg: SupervisedConfig
    task = Task("sft", Chats)

    def __init__(self, cfg: SupervisedConfig, mesh: Mesh):
        super().__init__(cfg, mesh)
        self.has_said_lost = False  # Of rows to train on,
        self.has_said_lost_held_out = False  # and of held-out ones.
        with self.timer.phase("start"):
            # 1. Find and check what the config names.
            check_settings(cfg, mesh.world_size)
            check_output(cfg, mesh)
            train, held_out = load_splits(open_examples, cfg.data, cfg.seed, mesh, mark_row)
            marks = np.concatenate([train.marks, held_out.marks])
            has_chats = bool(np.any(marks & IS_CHAT))
            with errors_of_all(mesh, same_everywhere=True):
                files = find_model(cfg, mesh, chats=has_chats)
                models = {"policy": files.config}
                checks.check_experts(models, cfg.parallel, ranks_of_node())
            build.check_trained(files.config, cfg.policy, score=self.task.score_head)
            checks.check_routers(files.config, cfg.policy)
            check_same_models({"policy": files.folder}, mesh)
            require_shown(train, files.tokenizer)
            require_shown(held_out, files.tokenizer)
            require(
                files.vision or not np.any(marks & HAS_IMAGES),
                f"a chat has images, and policy.model = {cfg.policy.model} reads none; take a "
                "model of a family that does",
            )

            # 2. Rows as token ids, when a step needs them.
            as_tokens = partial(
                self.task.encoder,
                tokenizer=files.tokenizer,
                stop_ids=stop_token_ids(files.tokenizer, files.folder) if has_chats else [],
                cfg=cfg.data,
                mesh=mesh,
                thread=ThreadPoolExecutor(1, "encode"),
                seed=cfg.seed,
                vision=files.vision,
                score=self.task.score_head,
            )
            self.files = files
            self.rows = as_tokens(train)
            self.held_out = as_tokens(held_out, shuffle=False)
            exact = cfg.num_epochs * len(self.rows) / cfg.batch_size
            num_steps = math.ceil(exact - 1e-9)  # 1.1 * 100 is more than 110
            self.num_steps = cfg.num_steps or max(1, num_steps)
            check_steps_left(cfg, self.num_steps)
            description = f"{len(self.rows)} rows, {len(self.held_out)} held out"
            row_hashes = check_same_rows(cfg, mesh, description, train, held_out)

            # 3. Models.
            self.check_model()
            make_scratch(cfg, mesh)
            self.announce({"policy": files.config.to_dict()})
            self.policy = self.load_model(cfg.policy, files.folder, score=self.task.score_head)
            # Of DPO and KTO, found before anything of the run is written.
            self.ref: Reference | None = None
            if isinstance(cfg, DPOConfig | KTOConfig):
                found = find_other_model(cfg.reference, files.config, cfg.parallel, "reference")
                with self.timer.phase("reference"):
                    self.ref = self.make_reference(found or files.folder)
            self.run = TrainingRun(cfg, self.policy, description, row_hashes)
            if cfg.batch_size > len(self.rows):
                size = f"batch_size = {cfg.batch_size} is more than the {len(self.rows)} rows"
                self.run.log.say(f"{size}, so that a step has some of them more than once")
            if cfg.num_steps and cfg.num_epochs != SupervisedConfig.num_epochs:
                ends = f"num_steps = {cfg.num_steps} ends the run"
                self.run.log.say(f"{ends}, and not num_epochs = {cfg.num_epochs:g}")

    def train(self) -> None:
        """Train from the first step of the run to the last. All ranks take each step together."""
        cfg = self.cfg
        run = self.run
        loss = self.make_loss()
        run.begin(self.task.name, self.num_steps)
        for step in range(run.first_step, self.num_steps):
            if step == 0 or (cfg.eval.every and step % cfg.eval.every == 0):
                self.evaluate(step, "before" if step == 0 else None)
                if run.has_reached_goal:
                    break
            with self.timer.phase("prepare"):
                first = step * cfg.batch_size
                examples = self.rows.examples(range(first, first + cfg.batch_size))
                lost = dict(zip(self.rows.lost_names, examples.num_lost, strict=True))
                if any(examples.num_lost) and not self.has_said_lost:  # the log counts all of them
                    self.has_said_lost = True
                    self.say_lost(step, f"{cfg.batch_size} rows", lost)
            metrics: Metrics = {}
            work = None
            if examples.num_rows:
                with self.timer.phase("prepare"):
                    batches = self.make_batches(examples.here)
                lr = learning_rate(cfg.policy, step, self.num_steps)
                metrics = self.name_metrics(self.policy.update(batches, loss, lr))
                work = count_work([batches], self.mesh)

            metrics |= lost
            metrics["epoch"] = (first + cfg.batch_size) / len(self.rows)
            metrics["tokens"] = examples.num_tokens
            metrics |= run.meter.end_step(work, trained=examples.num_tokens)
            run.log.scalars("train", step, metrics, ("loss", "tokens"))
            if cfg.checkpoint.every and (step + 1) % cfg.checkpoint.every == 0:
                run.save(step + 1)
            if self.mesh.agree_to_stop():  # a signal has asked to save and leave
                run.stop(step + 1)
                return
        run.export_result()  # written while the model is evaluated
        if not run.has_reached_goal:
            self.evaluate(self.num_steps, "after")

        # Write the summary with the scores before and after.
        titled = {}
        for when, scores in run.progress.evaluations.items():
            for name, value in scores.items():
                titled[f"{name} {when}"] = value
        run.finish(titled, sizes={})

    def say_lost(self, step: int, rows: str, lost: dict[str, int]) -> None:
        """Say how many of some rows nothing is learnt or measured of, by reason."""
        named = ", ".join(f"{name} {num}" for name, num in lost.items())
        limit = f"up to data.max_tokens = {self.cfg.data.max_tokens}"
        self.run.log.say(f"step {step}: of {rows}, {limit}: {named}")

    def evaluate(self, step: int, name: str | None) -> None:
        """Score held-out rows. Collective. `name`: keep the scores for the summary."""
        loss = self.make_loss()
        num_rows = len(self.held_out)
        means: Metrics = {}
        num_counted = 0.0  # Tokens or pairs in the loss.
        lost = dict.fromkeys(self.held_out.lost_names, 0)
        with self.timer.phase("evaluate"):
            for first in range(0, num_rows, ROWS_OF_PART):
                numbers = range(first, min(first + ROWS_OF_PART, num_rows))
                examples = self.held_out.examples(numbers)
                for reason, num in zip(lost, examples.num_lost, strict=True):
                    lost[reason] += num
                batches = self.make_batches(examples.here)
                counts = [normalize.count(batch, loss.aggregation) for batch in batches]
                num_in_part = float(self.mesh.data_sums(torch.stack(counts).sum().cpu()).round())
                num_counted += num_in_part
                share = num_in_part / max(1.0, num_counted)
                for metric, value in self.policy.measure(batches, loss).items():
                    mean = means.get(metric, 0.0)
                    means[metric] = mean + (value - mean) * share
                if num_rows > ROWS_OF_PART and self.mesh.rank == 0:
                    say(f"evaluation: {numbers.stop:,} of {num_rows:,} held-out rows")
            measured = self.name_metrics(means)
            measured["perplexity"] = math.exp(min(measured["loss"], 700.0))
            scores = {name: measured[name] for name in self.task.scores if name in measured}
        if any(lost.values()) and not self.has_said_lost_held_out:
            self.has_said_lost_held_out = True
            self.say_lost(step, f"{num_rows} held-out rows", lost)
        self.run.record_evaluation(step, scores, scores, name, scores)
        if self.run.has_reached_goal:
            self.run.progress.evaluations["after"] = scores

    def annotate_reference(self, batches: Minibatch) -> None:
        """Add the reference's log-probs; it is awake only here. Collective."""
        assert self.ref
        with self.timer.phase("annotate"):
            self.ref.annotate([batches])

    # Other programs override these.

    def check_model(self) -> None:
        """Refuse a model that the program cannot use. Raises UserError."""

    def make_loss(self) -> losses.Loss:
        """Return what is minimised."""
        return losses.sft()

    def make_batches(self, examples: list[Trajectory]) -> Minibatch:
        """Return this rank's micro-batches of one optimizer step. Collective."""
        kinds = {"pairs": self.task.pairs, "single": self.task.single}
        return make_minibatch(examples, self.policy, self.tokens_per_rank, ref=self.ref, **kinds)

    def name_metrics(self, measured: Metrics) -> Metrics:
        """Return the metrics of a step as they are logged."""
        return measured


# What is noted of a row while it is read.
IS_CHAT = 1
HAS_IMAGES = 2


def mark_row(row: dict) -> int:
    """Return the marks of a chat, or of a pair."""
    messages = row.get("messages") or row.get("prompt")
    if not messages:
        return 0
    has_images = HAS_IMAGES if images_of(messages) else 0
    return IS_CHAT | has_images | marks_for_template(row)


def warm_start(
    cfg: RLConfig, inputs: Inputs, policy: Policy, log: Log, tokens_per_rank: int
) -> int | None:
    """Take `cfg.sft.num_steps` steps of negative log-likelihood on the rows' answers. Collective.

    Example n of the run is a function of (seed, n) alone, so any number of ranks sees the same
    examples in the same steps.

    Returns:
        How many tokens all ranks trained on; None: a signal has asked to stop, and the warm start
        is lost.
    """
    sft = cfg.sft
    policy.start_phase(
        dataclasses.replace(
            cfg.policy,
            lr=sft.lr,
            lr_schedule=sft.lr_schedule,
            lr_warmup_steps=sft.lr_warmup_steps,
            lr_warmup_ratio=0.0,
        )
    )
    log.progress("sft", sft.num_steps)
    num_tokens = 0
    for step in range(sft.num_steps):
        numbers = range(step * sft.batch_size, (step + 1) * sft.batch_size)
        numbers_here = numbers[policy.mesh.rank :: policy.mesh.world_size]
        examples = [_example(cfg, inputs, n) for n in numbers_here]
        batches = make_minibatch(examples, policy, tokens_per_rank)
        lr = learning_rate(policy.cfg, step, sft.num_steps)
        metrics = policy.update(batches, losses.sft(), lr)
        num_tokens += sum(len(example.tokens) for example in examples)
        log.scalars("sft", step, metrics, ("loss",))
        if policy.mesh.agree_to_stop():
            return None
    policy.start_phase(cfg.policy)
    return int(policy.mesh.sums(torch.tensor(num_tokens)))


def _example(cfg: RLConfig, inputs: Inputs, number: int) -> Trajectory:
    """Return example `number`: a prompt with its answer, sometimes with one wrong character."""
    prompts = inputs.prompts
    row = prompts.row(number)
    rng = np.random.default_rng([cfg.seed, number, 1])
    answer = str(row["answer"])
    if answer and rng.random() < cfg.sft.wrong_character:
        place = rng.integers(len(answer))
        other_row = prompts.row(int(rng.integers(len(prompts.rows))))
        alphabet = sorted(set(answer + str(other_row["answer"])))
        answer = answer[:place] + str(rng.choice(alphabet)) + answer[place + 1 :]
    messages = [*prompts.messages(row), {"role": "assistant", "content": answer}]
    chat_row = {**row, "messages": messages, "trained": [len(messages) - 1]}
    chat_row.pop("text", None)  # another column of the user's, which is not trained on here
    (example,) = to_examples(prompts.tokenizer, prompts.vision, chat_row, inputs.stop_ids)
    begin = 0
    if prompts.cut_to and not example.images:
        begin = max(0, prompt_length(example) - prompts.cut_to)
    return dataclasses.replace(
        example,
        group=number,
        tokens=example.tokens[begin:],
        sampled=example.sampled[begin:],
        logprobs=example.logprobs[begin:],
    )
