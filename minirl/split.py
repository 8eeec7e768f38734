"""RL with generators and trainers on ranks of their own, at the same time (parallel.generators).

`Trainers` are the trainer of rl.py, whose batches come from the other side. `Generators` have the
engines, the environments and the reward functions. Both make the same meetings, in this order; W(k)
are the weights that step k begins with:

    trainers                                generators
    weights(k): send W(k)                   receive W(k)
    batch(k): receive batch k               send batch k
    train on batch k                        evaluate W(k) if that is due, and go on by
                                              lockstep: draw batch k + 1 with W(k)
                                              inflight: draw what comes next, until they are called

With `stream` batch k is drawn with W(k), and goes to the trainers in parts as its groups finish.
"""

import json
import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minirl.algo import losses
from minirl.base.files import write_whole
from minirl.base.log import say
from minirl.base.reading import parse_json, read_text
from minirl.checkpoint import finding
from minirl.config.rl import RLConfig
from minirl.data.order import Curriculum
from minirl.parallel.mesh import Mesh
from minirl.parallel.sides import Meetings
from minirl.refit.refit import Refit
from minirl.rl import Generation, Minibatches, Trainer
from minirl.rollout import index, records
from minirl.rollout.generating import GeneratingSampler
from minirl.rollout.sampler import StepRollout
from minirl.run.evaluation import NUM_SHOWN, eval_sampling, score
from minirl.run.inputs import Inputs
from minirl.run.trainer import BaseTrainer
from minirl.train.policy import Metrics
from minirl.train.updates import learning_rate
from minirl.types.packed import Trajectory

DRAWN = "drawn"  # The folder of batches that belong to checkpoints.
TRAINING = ("prepare", "annotate", "forward", "backward", "optimizer")  # Phases of a step.
LEAST_GAIN = 0.95  # Of the seconds of a step, for another number of generators to be worth it.


@dataclass(frozen=True, kw_only=True)
class News:
    """What the trainers say when they send weights."""

    step: int  # The step that begins with these weights.
    version: int  # Optimizer steps that they have seen.
    evaluates: bool = False  # The generators evaluate them.
    name: str | None = None  # Of that evaluation, for the summary.
    draws: bool = True  # The generators draw the batch of this step.
    is_last: bool = False  # The generators leave after this.
    # The first ticket to draw, and those to draw before; None: the generators know.
    tickets: tuple[int, list[int]] | None = None
    outcomes: str = ""  # A curriculum's, as its `save` returns them, in a resumed run.
    # int64 [N, 2]: a curriculum's results since the last news.
    results: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))


class Evaluation(NamedTuple):
    """Answers to held-out prompts, to be scored by the trainers."""

    step: int  # That the weights are of.
    name: str | None
    trajectories: list[Trajectory]
    reasons: list[str]  # Why episodes failed.


class Delivery(NamedTuple):
    """What a rank that generates sends to one that trains."""

    rollout: StepRollout | None
    rows: dict[int, int]  # What a curriculum has drawn for each ticket.
    evaluations: list[Evaluation]
    numbers: Metrics  # Of the generators, for the log,
    seconds: dict[str, float]  # and their seconds by phase.


def main(cfg: RLConfig, mesh: Mesh) -> None:
    """Run the program of this rank's side."""
    if mesh.side == "generators":
        generators = Generators(cfg, mesh)
        mesh.watch.can_save = True
        generators.train()
    else:
        sides = {"lockstep": LockstepTrainers, "stream": StreamTrainers, "inflight": Trainers}
        trainers = sides[cfg.rollout.overlap].run_to_end(cfg, mesh)
        trainers.dismiss()


# --------------------------------------------------------------------------------------------------
# those who train


class Trainers(Trainer):
    """The trainer of `minirl.rl`, without an engine."""

    def __init__(self, cfg: RLConfig, mesh: Mesh):
        super().__init__(cfg, mesh)
        self.meetings = Meetings(mesh)
        self.refit = Refit(
            cfg.refit,
            self.policy.shards(),
            self.policy.parts(),
            None,
            mesh=mesh,
            read=self.policy.merged,
            check=cfg.debug.check_refit,
        )
        self.is_first_news = True
        self.have_left = False  # The generators.
        self.rows: dict[int, int] = {}  # As in `Delivery`, of this step.
        self.results: list[np.ndarray] = []  # As in `News`.
        self.numbers: Metrics = {}  # As in `Delivery`, of this step.

    # ----------------------------------------------------------------------------------------------
    # the meetings

    def send_weights(self, news: News) -> None:
        """Give the generators the policy's weights. Collective over both sides."""
        if self.is_first_news:
            drawn = self.run.first_step * self.cfg.rollout.prompts_per_step
            first = drawn + self.progress.extra_tickets
            news = replace(
                news,
                tickets=news.tickets or (first, self.progress.unfinished_tickets),
                outcomes=self.progress.outcomes,
            )
            self.progress.add({}, discarded=self.progress.unfinished_tokens)
            self.progress.unfinished_tokens = 0
            self.is_first_news = False
        if self.results:
            news = replace(news, results=np.concatenate(self.results))
            self.results.clear()
        self.have_left = news.is_last
        with self.timer.phase("idle_trainers"):
            self.meetings.enter()
        self.mesh.everyone.broadcast(news, 0)
        with self.timer.phase("refit"):
            self.refit()

    def receive(self) -> StepRollout | None:
        """Return what the generators have drawn, and record their evaluations. Collective.

        Each group comes to one rank as a whole, which its ticket decides.
        """
        with self.timer.phase("idle_trainers"):
            self.meetings.enter()
        world = self.mesh.everyone
        messages = world.all_to_all([b""] * world.world_size)[self.mesh.world_size :]
        deliveries: list[Delivery] = [pickle.loads(message) for message in messages]
        first = deliveries[0]
        for i, evaluation in enumerate(first.evaluations):
            parts = [delivery.evaluations[i] for delivery in deliveries]
            trajectories = in_order([t for part in parts for t in part.trajectories])
            reasons = [reason for part in parts for reason in part.reasons]
            with self.timer.phase("evaluate"):
                result = score(
                    trajectories,
                    reasons[:1],
                    len(self.inputs.held_out.rows),
                    self.cfg.eval,
                    self.reward_model,
                    self.mesh,
                    max(NUM_SHOWN, self.cfg.log.samples),
                )
            self.record_evaluation(evaluation.step, evaluation.name, result)
        self.numbers |= first.numbers
        self.run.meter.elsewhere |= first.seconds
        if first.rollout is None:
            return None
        for delivery in deliveries:
            self.rows |= delivery.rows
        found = [t for d in deliveries if d.rollout for t in d.rollout.trajectories]
        return replace(first.rollout, trajectories=in_order(found))

    def news_of(self, step: int) -> News:
        """Return the news of a step that begins."""
        every = self.cfg.eval.every
        return News(
            step=step,
            version=self.policy.num_updates,
            evaluates=step == 0 or bool(every and step % every == 0),
            name="before_rl" if step == 0 else None,
        )

    def dismiss(self) -> None:
        """Let the generators leave, if they have not."""
        if not self.have_left:
            self.send_weights(News(step=self.num_steps, version=-1, is_last=True))
        self.refit.wait()
        self.say_who_waited()

    # ----------------------------------------------------------------------------------------------
    # what differs from the trainer of all ranks

    def collect(self, step: int) -> list[Trajectory] | None:
        """Send the weights of a step, and return this rank's part of its episodes. Collective."""
        self.rows.clear()
        self.send_weights(self.news_of(step))
        return self.begin(step, self.receive())

    def begin(self, step: int, rollout: StepRollout | None) -> list[Trajectory]:
        """Return this rank's part of a step's episodes, or of their first part."""
        assert rollout
        trajectories = self.take(step, rollout)
        if self.dump:
            self.dump.begin(step, trajectories)
        return trajectories

    def row_of(self, ticket: int) -> int:
        """Return the row that the generators' curriculum has drawn for a ticket of this step."""
        return self.rows[ticket]

    def record_outcomes(self, results: np.ndarray) -> None:
        """Let the curricula of both sides learn from a step."""
        super().record_outcomes(results)
        self.results.append(results)

    def warm_start(self) -> bool:
        """Imitate answers first, while the generators evaluate the weights from before."""
        before = replace(self.news_of(-1), evaluates=True, name="before_sft", draws=False)
        self.send_weights(before)
        return super().warm_start()

    def evaluate_result(self) -> bool:
        """Have the final weights evaluated; return False if a signal interrupts it."""
        final = replace(self.news_of(self.num_steps), evaluates=True, name="after_rl", is_last=True)
        self.send_weights(final)
        self.progress.evaluations.pop("after_rl", None)
        self.receive()
        return "after_rl" in self.progress.evaluations

    def describe_generation(self) -> Metrics:
        """Return what the generators have said of themselves since the last call."""
        numbers = self.numbers
        self.numbers = {}
        return numbers

    def say_who_waited(self) -> None:
        """Say which side has waited for the other, and which number of generators would not."""
        seconds = self.progress.seconds
        idle = {side: seconds.get(f"idle_{side}", 0.0) for side in ("trainers", "generators")}
        busy_training = sum(seconds.get(phase, 0.0) for phase in TRAINING)
        busy_generating = seconds.get("rollout", 0.0)
        if self.mesh.rank or not (busy_training and busy_generating):
            return
        # A side's seconds, if they go down with the number of its ranks.
        num_ranks = self.mesh.everyone.world_size
        generators = num_ranks - self.mesh.world_size
        size = self.cfg.engine.tensor_parallel_size
        longest = {
            g: max(
                busy_training * self.mesh.world_size / (num_ranks - g),
                busy_generating * generators / g,
            )
            for g in range(size, num_ranks, size)
        }
        best = min(longest, key=longest.__getitem__)
        waited = max(idle, key=idle.__getitem__)
        advice = "as many as there are are best"
        if longest[best] < LEAST_GAIN * longest[generators]:
            advice = f"parallel.generators {best} would be faster"
        say(
            f"the {waited} waited longer: {idle['trainers']:.1f} s the trainers, "
            f"{idle['generators']:.1f} s the generators, of {busy_training:.1f} s of training and "
            f"{busy_generating:.1f} s of rollouts; {advice}"
        )


class LockstepTrainers(Trainers):
    """Each batch is drawn with the weights of the step before.

    So it belongs to a checkpoint, too: a resumed run could not draw it again.
    """

    def __init__(self, cfg: RLConfig, mesh: Mesh):
        super().__init__(cfg, mesh)
        self.folder = self.run.output / DRAWN
        self.drawn: StepRollout | None = None  # The batch of the next step, if it is here.
        if self.run.resumed_from:
            self.drawn = self.load_drawn(self.run.first_step)

    def collect(self, step: int) -> list[Trajectory] | None:
        """Return this rank's part of a step's episodes, which may be here already. Collective."""
        if self.is_first_news and self.drawn:
            # The generators go on with the step after this one.
            news = replace(self.news_of(step), draws=False, tickets=(self.drawn.next_ticket, []))
            self.send_weights(news)
        if self.drawn is None:
            return super().collect(step)
        drawn, self.drawn = self.drawn, None
        return self.begin(step, drawn)

    def save(self, num_steps: int) -> None:
        """Write a checkpoint, with the batch of the next step. Collective."""
        self.fetch(num_steps)
        super().save(num_steps)

    def stop(self, num_steps: int) -> None:
        """End the run with a checkpoint, with the batch of the next step. Collective."""
        if self.run.saver.step != num_steps:
            self.fetch(num_steps)
        super().stop(num_steps)

    def fetch(self, step: int) -> None:
        """Receive the batch of the next step, and write it for a checkpoint. Collective."""
        if step >= self.num_steps or self.drawn:
            return
        self.rows.clear()
        self.send_weights(self.news_of(step))
        self.drawn = self.receive()
        assert self.drawn
        with self.timer.phase("checkpoint"):
            records.write_step(self.drawn.trajectories, self.folder, step, self.mesh)
            if self.mesh.rank == 0:
                needed = [*finding.finished(self.run.output), step]
                for part in index.parts(self.folder):
                    if part.step < min(needed):
                        index.remove(part)
                numbers = asdict(replace(self.drawn, trajectories=[])) | {"rows": self.rows}
                write_whole(self._numbers_of(step), json.dumps(numbers))
            self.mesh.barrier()

    def load_drawn(self, step: int) -> StepRollout | None:
        """Return the batch that was drawn for a step when it was saved; None: there is none."""
        path = self._numbers_of(step)
        if not path.exists():
            return None
        numbers = parse_json(read_text(path, f"{path}:"))
        self.rows = {int(ticket): row for ticket, row in numbers.pop("rows").items()}
        numbers["trajectories"] = records.load_step(self.folder, step, self.mesh)
        return StepRollout(**numbers)

    def _numbers_of(self, step: int) -> Path:
        return self.folder / f"step-{step}.json"


class StreamTrainers(Trainers):
    """A step's groups come in parts; their gradients are summed, and one update follows."""

    def collect(self, step: int) -> list[Trajectory] | None:
        """Return this rank's part of the first groups of a step. Collective."""
        self.trajectories = super().collect(step) or []
        return self.trajectories

    def begin(self, step: int, rollout: StepRollout | None) -> list[Trajectory]:
        """Return this rank's part of the first groups of a step."""
        assert rollout
        self.is_last_part = rollout.is_last
        return super().begin(step, rollout)

    def update(self, step: int, minibatches: Minibatches) -> Metrics:
        """Train the policy on the parts of a step.

        Args:
            step: the step.
            minibatches: those of its first part; the others are appended.
        """
        cfg = self.cfg
        loss = losses.policy(self.algo, cfg.env.max_tokens)
        if self.dump:
            loss = self.dump.noting(loss)
        sums = [self.policy.sum_gradients(minibatches[0], loss, is_last=self.is_last_part)]
        while not self.is_last_part:
            rollout = self.receive()
            assert rollout
            more = self.take(step, rollout)
            self.is_last_part = rollout.is_last
            self.trajectories += more
            (minibatch,) = self.to_minibatches(more)
            minibatches[0] += minibatch
            sums.append(self.policy.sum_gradients(minibatch, loss, is_last=self.is_last_part))
        lr = learning_rate(self.policy.cfg, self.policy.num_updates, self.num_steps)
        return self.policy.update_by_sums(sums, lr)


# --------------------------------------------------------------------------------------------------
# those who generate


class Generators(BaseTrainer):
    """The side with the engines."""

    cfg: RLConfig

    def __init__(self, cfg: RLConfig, mesh: Mesh):
        super().__init__(cfg, mesh)
        self.inputs = Inputs(cfg, mesh.everyone)
        self.num_steps = self.inputs.num_steps
        self.announce(self.inputs.model_configs())
        assert self.engine_config
        self.meetings = Meetings(mesh)
        self.generation = Generation(
            cfg,
            self.inputs,
            self.engine_config,
            mesh,
            self.timer,
            make_sampler=GeneratingSampler,
        )
        sampler = self.generation.sampler
        assert isinstance(sampler, GeneratingSampler)
        self.sampler = sampler
        self.sampling = self.generation.sampling
        self.curriculum: Curriculum | None = None
        self.next_ticket = 0
        self.evaluations: list[Evaluation] = []  # Not delivered yet.

    def train(self) -> None:
        """Generate until the trainers let this side leave."""
        news = self.receive_weights()
        if news.name == "before_sft":
            self.evaluate(news)
            news = self.receive_weights()
        overlap: dict[str, Callable[[News], News]] = {
            "lockstep": self.keep_in_step,
            "stream": self.stream,
            "inflight": self.keep_going,
        }
        news = overlap[self.cfg.rollout.overlap](news)
        if news.evaluates:
            self.evaluate(news)
            self.deliver(None)
        self.generation.close()

    def keep_in_step(self, news: News) -> News:
        """Draw each batch with the weights of the step before. Return the last news."""
        batch = self.draw(news) if news.draws and not news.is_last else None
        while not news.is_last:
            if batch:
                self.deliver(batch)
            self.evaluate(news)
            batch = self.draw(news) if news.step + 1 < self.num_steps else None
            news = self.receive_weights()
        return news

    def keep_going(self, news: News) -> News:
        """Draw what the next steps need, and take weights when they come. Return the last news."""
        step_size = self.cfg.rollout.prompts_per_step
        while not news.is_last:
            num_later = self.num_steps - 1 - news.step
            self.sampler.ahead = step_size * min(self.cfg.rollout.max_staleness, num_later)
            self.deliver(self.draw(news))
            self.evaluate(news)
            with self.timer.phase("rollout"):
                self.next_ticket = self.sampler.run_on(
                    self.next_ticket, self.sampling, self.meetings.is_called
                )
            news = self.receive_weights()
        return news

    def stream(self, news: News) -> News:
        """Send the groups of each step as they finish. Return the last news."""
        while not news.is_last:
            if self.curriculum:
                self.curriculum.start(self.next_ticket)
            parts = self.sampler.collect_parts(
                self.next_ticket,
                self.sampling,
                version=news.version,
                is_called=self.meetings.is_called,
            )
            is_last = False
            while not is_last:
                with self.timer.phase("rollout"):
                    part = next(parts)
                is_last = part.is_last
                self.next_ticket = part.next_ticket
                self.deliver(part)
            self.evaluate(news)
            news = self.receive_weights()
        return news

    # ----------------------------------------------------------------------------------------------
    # the meetings

    def receive_weights(self) -> News:
        """Take the weights that the trainers send, and return their news. Collective."""
        with self.timer.phase("idle_generators"):
            self.meetings.enter()
        news: News = self.mesh.everyone.broadcast(None, 0)
        self.sampler.engine_loop.change_weights(
            self.generation.refit,
            news.version,
            keeps_cache=self.cfg.rollout.kv == "keep",
        )
        self.generation.note_updates(news.version)
        if news.tickets:
            self.next_ticket, self.sampler.waiting = news.tickets
            if self.cfg.rollout.curriculum_floor:
                self.curriculum = Curriculum(
                    self.inputs.prompts.order, self.cfg.rollout.curriculum_floor, news.outcomes
                )
                self.inputs.prompts.order = self.curriculum
        if self.curriculum:
            self.curriculum.record(news.results)
        return news

    def draw(self, news: News) -> StepRollout:
        """Return the next batch, drawn with the weights of the news."""
        if self.curriculum:
            self.curriculum.start(self.next_ticket)
        with self.timer.phase("rollout"):
            batch = self.sampler.collect_step(self.next_ticket, self.sampling, version=news.version)
        assert batch  # No signal interrupts it.
        self.next_ticket = batch.next_ticket
        return batch

    def evaluate(self, news: News) -> None:
        """Draw answers to the held-out prompts, if the trainers ask for it."""
        if not news.evaluates:
            return
        prompts = self.inputs.held_out
        with self.timer.phase("evaluate"):
            trajectories = self.sampler.collect(
                prompts,
                range(len(prompts.rows)),
                self.cfg.eval.samples,
                eval_sampling(self.cfg, self.sampling.stop_token_ids),
                version=news.version,
                can_stop=news.is_last,
            )
        if trajectories is not None:
            reasons = self.sampler.runner.troubles[:1]
            self.evaluations.append(Evaluation(news.step, news.name, trajectories, reasons))
        self.sampler.runner.troubles.clear()

    def deliver(self, rollout: StepRollout | None) -> None:
        """Send what has been drawn to the trainers. Collective over both sides."""
        with self.timer.phase("idle_generators"):
            self.meetings.enter()
        world = self.mesh.everyone
        num_trainers = world.world_size - self.mesh.world_size
        numbers: Metrics = {}
        seconds: dict[str, float] = {}
        if rollout is None or rollout.is_last:
            numbers, seconds = self.measures()
        messages = []
        for trainer in range(num_trainers):

            def part_of(trajectories: list[Trajectory], trainer: int = trainer) -> list[Trajectory]:
                return [t for t in trajectories if t.group % num_trainers == trainer]

            part = None
            rows = {}
            if rollout:
                part = replace(rollout, trajectories=part_of(rollout.trajectories))
                if self.curriculum:
                    rows = {t.group: self.curriculum[t.group] for t in part.trajectories}
            evaluations = [
                evaluation._replace(trajectories=part_of(evaluation.trajectories))
                for evaluation in self.evaluations
            ]
            delivery = Delivery(part, rows, evaluations, numbers, seconds)
            messages.append(pickle.dumps(delivery, pickle.HIGHEST_PROTOCOL))
        world.all_to_all(messages + [b""] * self.mesh.world_size)
        self.evaluations.clear()

    def measures(self) -> tuple[Metrics, dict[str, float]]:
        """Return numbers and seconds of this side since the last call: the most of any rank."""
        engine = self.generation.engine
        num_steps, waiting = engine.take_counts()
        here = {
            "rollout/steps": num_steps,
            "rollout/waiting": waiting,
            "refit_bytes": float(self.generation.refit.bytes_received),
            "kv_cache_tokens": float(engine.kv_cache_tokens),
        }
        taken = self.timer.take()
        times = {phase: taken.get(phase, 0.0) for phase in ("rollout", "idle_generators")}
        by_rank = self.mesh.gather((here, times))
        numbers = {name: max(on_rank[name] for on_rank, _ in by_rank) for name in here}
        seconds = {phase: max(on_rank[phase] for _, on_rank in by_rank) for phase in times}
        return numbers, seconds


def in_order(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Return trajectories in the order of their groups, which no rank decides."""
    return sorted(trajectories, key=lambda t: (t.group, t.episode, t.segment))
