"""RL with generators and trainers on ranks of their own, at the same time (parallel.generators).

`Trainers` are the trainer of rl.py, whose batches come from the other side. `Generators` have the
engines, the environments and the reward functions. Both make the same meetings, in one order; W(k)
are the weights that step k begins with. In flight it is this:

    trainers                                generators
    weights(k): send W(k)                   receive W(k)
    batch(k): receive batch k               send batch k
    train on batch k                        evaluate W(k) if that is due,
                                            draw what comes next, until they are called

With `stream` batch k is drawn with W(k), and goes to the trainers in parts as its groups finish.

In lockstep the next batch waits for nobody, and comes first. W(k) travel while the trainers prepare
it and compute its log-probs:

    trainers                                generators
    batch(k): receive batch k               send batch k
    weights(k): send W(k)                   receive W(k)
    train on batch k                        evaluate W(k) if that is due,
                                            draw batch k + 1 with W(k)

Step 0 begins as in flight.
"""

import functools
import json
import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from minirl.algo import losses
from minirl.base.log import say
from minirl.base.reading import parse_json, read_text
from minirl.checkpoint.run_folder import ANSWERS, fingerprint
from minirl.config.rl import RLConfig
from minirl.data.order import Curriculum
from minirl.data.prompts import Prompts
from minirl.engine.engine import Sampling
from minirl.parallel.mesh import Mesh
from minirl.parallel.sides import Meetings, seconds_between_looks
from minirl.refit.refit import Refit
from minirl.rl import Generation, Minibatches, Trainer
from minirl.rollout import records
from minirl.rollout.pacing import Goal, GroupState
from minirl.rollout.sampler import Group, Sampler, StepRollout
from minirl.run import results
from minirl.run.evaluation import NUM_SHOWN, eval_sampling, score, telling_progress
from minirl.run.inputs import Inputs, choose_dtype
from minirl.run.trainer import BaseTrainer
from minirl.train.policy import Metrics
from minirl.train.updates import learning_rate
from minirl.types.packed import Trajectory

DRAWN = "drawn"  # Names of a checkpoint's files with the batch of its next step begin so.
TRAINING = ("prepare", "annotate", "forward", "backward", "optimizer")  # Phases of a step.
LEAST_GAIN = 0.95  # Of the seconds of a step, for another number of generators to be worth it.
NUM_PARTS = 8  # Of a step whose groups are handed on as they finish.


@dataclass(frozen=True, kw_only=True)
class News:
    """What the trainers say when they send weights."""

    step: int  # The step that begins with these weights.
    version: int  # Optimizer steps that they have seen.
    evaluates: bool = False  # The generators evaluate them.
    name: str | None = None  # Of that evaluation, for the summary.
    draws: bool = True  # The generators draw the batch of this step,
    delivers: bool = True  # and deliver what they have.
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
    cfg.policy.dtype = choose_dtype(cfg.policy.dtype, "policy.dtype", mesh.everyone)
    if mesh.side == "generators":
        generators = Generators(cfg, mesh)
        mesh.watch.can_save = True
        generators.train()
    else:
        sides = {"lockstep": LockstepTrainers, "stream": StreamTrainers, "inflight": Trainers}
        trainers = sides[cfg.rollout.overlap].main(cfg, mesh)
        trainers.dismiss()


# --------------------------------------------------------------------------------------------------
# those who train


class Trainers(Trainer):
    """The trainer of `minirl.rl`, without an engine."""

    def __init__(self, cfg: RLConfig, mesh: Mesh):
        super().__init__(cfg, mesh)
        with self.timer.phase("start"):  # Until the generators' engines are there.
            self.meetings = Meetings(mesh, 60 * cfg.timeout_minutes)
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
        self.num_finished = self.run.first_step  # Steps.
        self.seconds: dict[str, float] = {}  # Of these, by phase.
        self.awaited: set[int] = set()  # Steps whose evaluations are still to come.
        self.rows: dict[int, int] = {}  # As in `Delivery`, of this step.
        self.results: list[np.ndarray] = []  # As in `News`.
        self.numbers: Metrics = {}  # As in `Delivery`, of this step.
        self.num_updates = 0  # Optimizer steps that the weights had seen before this step's.

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
        if news.evaluates:
            self.awaited.add(news.step)
        with self.timer.phase("idle_trainers"):
            self.meetings.enter()
        self.mesh.everyone.broadcast(news, 0)
        with self.timer.phase("refit"):
            self.refit()

    def receive(self) -> StepRollout | None:
        """Return what the generators have drawn, and record their evaluations. Collective.

        Each group comes to one rank as a whole, which its ticket decides.
        """
        deliveries = self.take_deliveries()
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
            self.awaited.discard(evaluation.step)
            self.record_evaluation(evaluation.step, evaluation.name, result)
        self.numbers |= first.numbers
        self.run.meter.elsewhere |= first.seconds
        if first.rollout is None:
            return None
        for delivery in deliveries:
            self.rows |= delivery.rows
        found = [t for d in deliveries if d.rollout for t in d.rollout.trajectories]
        return replace(first.rollout, trajectories=in_order(found))

    def take_deliveries(self) -> list[Delivery]:
        """Return what each rank of the generators sends to this one. Collective."""
        with self.timer.phase("idle_trainers"):
            self.meetings.enter()
        world = self.mesh.everyone
        messages = world.all_to_all([b""] * world.world_size)[self.mesh.world_size :]
        self.refit.wait()  # The generators have their weights, or would not be here.
        return [pickle.loads(message) for message in messages]

    def news_of(self, step: int) -> News:
        """Return the news of a step that begins."""
        every = self.cfg.eval.every
        return News(
            step=step,
            version=self.policy.num_updates,
            evaluates=step == 0 or bool(every and step % every == 0),
            name="before_rl" if step == 0 else None,
        )

    def last_news(self, step: int) -> News:
        """Return news after which the generators deliver what they have, and leave."""
        return News(step=step, version=self.policy.num_updates, draws=False, is_last=True)

    def fetch(self, step: int, *, is_last: bool = False) -> None:
        """Receive what belongs to a checkpoint and is on the other side. Collective.

        That is evaluations of earlier weights, which a resumed run has not.

        Args:
            step: number of finished steps.
            is_last: the generators leave.
        """
        if (self.awaited or is_last) and not self.have_left:
            self.send_weights(replace(self.last_news(step), is_last=is_last))
            self.receive()

    def save(self, num_steps: int) -> None:
        """Write a checkpoint. Collective."""
        if self.mesh.agree_to_stop():
            return  # `stop` follows, and lets the generators leave with the same meeting.
        self.fetch(num_steps)
        if not self.run.has_reached_goal:  # A run that resumed here would not know.
            super().save(num_steps)

    def stop(self, num_steps: int) -> None:
        """End the run with a checkpoint, because a signal has asked for it. Collective."""
        if self.run.has_reached_goal:
            num_steps = self.num_finished  # It comes in the last evaluation.
        if self.run.saver.step != num_steps:
            self.fetch(num_steps, is_last=True)
        super().stop(num_steps)

    def dismiss(self) -> None:
        """Let the generators leave, if they have not."""
        if not self.have_left:
            self.send_weights(replace(self.last_news(self.num_steps), delivers=False))
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
        self.num_updates = self.policy.num_updates
        if self.run.has_reached_goal:  # Nothing trains on them.
            self.discard(rollout)
            return []
        trajectories = self.take(step, rollout)
        if self.dump:
            self.dump.begin(step, trajectories)
        return trajectories

    def discard(self, rollout: StepRollout) -> None:
        """Count the tokens of a step, or of a part of it, that nothing trains on. Collective."""
        sampled = sum(int(t.sampled.sum()) for t in rollout.trajectories)
        num_tokens = int(self.mesh.sums(torch.tensor(sampled)))
        self.progress.add({}, discarded=num_tokens + rollout.discarded_tokens)

    def row_of(self, ticket: int) -> int:
        """Return the row that the generators' curriculum has drawn for a ticket of this step."""
        return self.rows[ticket]

    def record_outcomes(self, results: np.ndarray) -> None:
        """Let the curricula of both sides learn from a step."""
        super().record_outcomes(results)
        self.results.append(results)

    def warm_start(self) -> bool:
        """Imitate answers first, while the generators evaluate the weights from before."""
        before = replace(self.news_of(-1), evaluates=True, name="before_sft")
        self.send_weights(replace(before, draws=False, delivers=False))
        return super().warm_start()

    def evaluate_result(self) -> bool:
        """Have the final weights evaluated; return False if a signal interrupts it."""
        news = self.last_news(self.num_finished)
        self.send_weights(replace(news, evaluates=True, name="after_rl"))
        self.receive()
        return "after_rl" in self.progress.evaluations

    def report(
        self, step: int, trajectories: list[Trajectory], minibatches: Minibatches, metrics: Metrics
    ) -> None:
        """Log a step that is finished. Collective."""
        self.numbers |= self.describe_ages(trajectories)
        super().report(step, trajectories, minibatches, metrics)
        self.num_finished = step + 1
        self.seconds = dict(self.progress.seconds)

    def describe_ages(self, trajectories: list[Trajectory]) -> Metrics:
        """Return how old the tokens of a step are, and of how many versions an answer is."""
        num_versions = 0
        ages = [np.zeros(0, np.int64)]
        for t in trajectories:
            if t.versions is not None:
                versions = t.versions[t.sampled]
                num_versions += len(np.unique(versions))
                ages.append(self.num_updates - versions)
        in_step = np.concatenate(ages)
        here = [num_versions, len(trajectories), in_step.sum(), len(in_step)]
        versions, answers, total, tokens = self.mesh.sums(torch.tensor(here)).tolist()
        oldest = self.mesh.maxima(torch.tensor(in_step.max(initial=0)))
        return {
            "rollout/versions": versions / max(1, answers),
            "rollout/token_staleness": total / max(1, tokens),
            "rollout/token_staleness_max": float(oldest),
        }

    def describe_generation(self) -> Metrics:
        """Return what the generators have said of themselves since the last call."""
        numbers = self.numbers
        self.numbers = {}
        return numbers

    def say_who_waited(self) -> None:
        """Say which side has waited for the other, and which number of generators would not."""
        seconds = self.seconds  # Without the last evaluation, for which the trainers wait.
        idle = {side: seconds.get(f"idle_{side}", 0.0) for side in ("trainers", "generators")}
        busy_training = sum(seconds.get(phase, 0.0) for phase in TRAINING)
        busy_generating = seconds.get("rollout", 0.0)
        if self.mesh.rank or not (busy_training and busy_generating):
            return
        # A side's seconds, if they go down with the number of its ranks.
        num_ranks = self.mesh.everyone.world_size
        generators = num_ranks - self.mesh.world_size
        size = self.cfg.engine.tensor_parallel_size
        parallel = self.cfg.parallel
        product = parallel.replicate * parallel.context * parallel.tensor
        longest = {}
        for g in range(size, num_ranks, size):
            trainers = num_ranks - g
            if trainers % product or trainers // parallel.replicate % parallel.experts:
                continue  # They make no mesh.
            longest[g] = max(
                busy_training * self.mesh.world_size / trainers, busy_generating * generators / g
            )
        best = min(longest, key=longest.__getitem__)
        waited = max(idle, key=idle.__getitem__)
        advice = f"parallel.generators {generators} suits both"
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
        self.drawn: StepRollout | None = None  # The batch of the next step, if it is here.
        self.is_drawing = False  # The generators draw the next batch, or stand there with it.
        if self.run.resumed_from:
            self.drawn = self.load_drawn(self.run.resumed_from)

    def send_weights(self, news: News) -> None:
        """Give the generators the policy's weights, with which they draw the next batch."""
        if self.is_drawing:
            self.take_deliveries()  # For nobody: this run ends.
        super().send_weights(news)
        self.is_drawing = not news.is_last and 0 <= news.step < self.num_steps - 1

    def collect(self, step: int) -> list[Trajectory] | None:
        """Return this rank's part of a step's episodes, which may be here already. Collective."""
        news = self.news_of(step)
        if self.is_drawing and self.drawn is None:
            self.take_turn(news)
        elif self.drawn is None:
            return super().collect(step)
        elif self.is_first_news:  # The generators go on with the step after this one.
            news = replace(news, tickets=(self.drawn.next_ticket, self.drawn.unfinished))
            self.send_weights(replace(news, draws=False, delivers=False))
        drawn = self.drawn
        self.drawn = None
        return self.begin(step, drawn)

    def take_turn(self, news: News) -> None:
        """Receive the batch of the next step, and send the weights that it begins with."""
        self.rows.clear()
        self.is_drawing = False
        self.drawn = self.receive()
        if not self.run.has_reached_goal:
            self.send_weights(replace(news, draws=False, delivers=False))

    def update(self, step: int, minibatches: Minibatches) -> Metrics:
        """Train the policy on a step, when the memory of what is sent is free again."""
        self.refit.wait()
        return super().update(step, minibatches)

    def fetch(self, step: int, *, is_last: bool = False) -> None:
        """Receive the batch of the next step, too, for the checkpoint. Collective."""
        if self.is_drawing and self.drawn is None:
            # A resumed run evaluates these weights.
            self.take_turn(self.last_news(step) if is_last else self.news_of(step))
        else:
            super().fetch(step, is_last=is_last)
        with self.timer.phase("checkpoint"):
            files = {}
            if self.drawn:
                counts = asdict(replace(self.drawn, trajectories=[]))
                others = {"counts": counts, "rows": self.rows, "numbers": self.numbers}
                others["settings"] = fingerprint(self.cfg, ANSWERS)
                lines = b"".join(records.to_lines(self.drawn.trajectories))
                name = f"{DRAWN}-{self.mesh.rank}.json"
                files = {name: json.dumps(others).encode(), f"{name}l": lines}
            self.run.saver.more_files = files

    def load_drawn(self, checkpoint: Path) -> StepRollout | None:
        """Return the batch in a checkpoint.

        None: a run of another kind has written it, or one with other settings of answers.
        """
        trajectories: list[Trajectory] = []
        counts = None
        for path in sorted(checkpoint.glob(f"{DRAWN}-*.json")):
            others = parse_json(read_text(path, "resume:"))
            if others.get("settings") != fingerprint(self.cfg, ANSWERS):
                if self.mesh.rank == 0:
                    say("the batch in the checkpoint was drawn with other settings; it is left out")
                return None
            counts = others["counts"]
            self.numbers = others["numbers"]
            self.rows |= {int(ticket): row for ticket, row in others["rows"].items()}
            trajectories += records.read_file(path.with_suffix(".jsonl"))
        if counts is None:
            return None
        mesh = self.mesh
        here = [t for t in trajectories if t.group % mesh.world_size == mesh.rank]
        return StepRollout(**counts | {"trajectories": in_order(here)})


class StreamTrainers(Trainers):
    """A step's groups come in parts; their gradients are summed, and one update follows."""

    is_last_part = True  # No part of the current step follows.

    def collect(self, step: int) -> list[Trajectory] | None:
        """Return this rank's part of the first groups of a step. Collective."""
        self.trajectories = super().collect(step) or []
        if self.run.has_reached_goal:  # Nothing trains on the other parts.
            while not self.is_last_part:
                rollout = self.receive()
                assert rollout
                self.is_last_part = rollout.is_last
                self.discard(rollout)
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
            if self.dump:
                self.dump.append(more)
            self.is_last_part = rollout.is_last
            self.trajectories += more
            (minibatch,) = self.to_minibatches(more)
            minibatches[0] += minibatch
            sums.append(self.policy.sum_gradients(minibatch, loss, is_last=self.is_last_part))
        lr = learning_rate(self.policy.cfg, step, self.num_steps)
        return self.policy.update_by_sums(sums, lr)


# --------------------------------------------------------------------------------------------------
# those who generate


class GeneratingSampler(Sampler):
    """The sampler of this side, whose engines go on while the trainers train.

    Between two runs, and from one step to the next, unfinished requests stay in the engine, unless
    the sides are in lockstep. Weights may change in between (`EngineLoop.change_weights`).
    """

    ahead = 0  # What is drawn of later steps; the loop of the generators sets it.
    can_stop = False  # The trainers say when.

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.pauses = self.cfg.rollout.overlap == "lockstep"
        # An engine that has enough waits for the others to see it.
        self.seconds_between_looks = seconds_between_looks(self.engine.num_replicas)

    def collect(self, prompts: Prompts, *args: Any, **options: Any) -> list[Trajectory] | None:
        """Run episodes as `Sampler.collect` does; the groups of training pause meanwhile."""
        if self.begun and not self.pauses:
            # The requests of training leave the engine until its next run.
            if self.engine.is_leader:
                none: Iterator[Group] = iter(())
                finished = self.engine_loop.run(self.training.run(none, 0, lambda versions: True))
                self.training.groups |= {group.ticket: group for group in finished}
            else:
                self.engine_loop.run(None)
        return super().collect(prompts, *args, **options)

    def run_on(self, first: int, sampling: Sampling, is_called: Callable[[], bool]) -> int:
        """Go on with groups of the next steps until this rank is called. Collective.

        Args:
            first: the first new ticket.
            sampling: how to sample.
            is_called: returns whether trainers wait for this side, sooner or later on all ranks.

        Returns:
            The first ticket that is new afterwards.
        """
        tickets, first = self.issue(self.pace().num_new(0, len(self.begun)), first)
        make_group = self.group_maker(sampling, self.engine_loop.version)
        num_samples = self.training_config.samples_per_prompt
        groups = self._run_groups(
            self.training, make_group, tickets, num_samples, [], is_called=is_called
        )
        self.training.groups |= {group.ticket: group for group in groups}
        self._exchange_states([])
        self.take_back(tickets, ())
        return first

    def collect_parts(
        self,
        first: int,
        sampling: Sampling,
        *,
        version: int,
        is_called: Callable[[], bool],
    ) -> Iterator[StepRollout]:
        """Yield the groups of a training step in parts, as they finish. Collective.

        All parts together are what `collect_step` returns.

        Args:
            first: the first new ticket.
            sampling: how to sample.
            version: optimizer steps that the weights have seen.
            is_called: returns whether trainers wait for a part; until then it grows.
        """
        cfg = self.training_config
        self.engine_loop.version = version
        make_group = self.group_maker(sampling, version)
        part = math.ceil(cfg.prompts_per_step / NUM_PARTS)
        num_missing = num_to_issue = cfg.prompts_per_step
        num_extra = cfg.extra_prompts
        replaced: dict[int, Group] = {}  # This rank's groups that others replace, by ticket.
        replaced_states: dict[int, GroupState] = {}  # Those of all ranks.
        has_trained = False
        while num_missing:
            tickets, first = self.issue(num_to_issue, first)
            num_groups = min(part, num_missing, len(self.begun) + len(tickets))
            groups = self._run_groups(
                self.training,
                make_group,
                tickets,
                cfg.samples_per_prompt,
                [Goal(version, num_groups)],
                is_called=is_called,
            )
            states = self._exchange_states(groups)
            num_begun = self.take_back(tickets, states)
            chosen = {t for t, state in states.items() if state.is_varied}
            num_missing -= len(chosen)
            num_replaced = min(len(states) - len(chosen), num_extra)
            num_extra -= num_replaced
            num_to_issue = len(tickets) - num_begun + num_replaced
            replaced |= {g.ticket: g for g in groups if g.ticket not in chosen}
            replaced_states |= {t: s for t, s in states.items() if t not in chosen}
            if not self.begun and not num_to_issue:  # Some that were replaced fill the step up.
                filling = sorted(replaced_states)[:num_missing]
                chosen |= set(filling)
                groups = [*(g for g in groups if g.ticket not in replaced), *replaced.values()]
                num_missing = 0
            rollout = self.rollout_of(
                groups,
                chosen,
                first,
                is_last=num_missing == 0,
                must_train=num_missing == 0 and not has_trained,
            )
            num_here = sum(len(t.tokens) for t in rollout.trajectories)
            has_trained |= bool(self.mesh.sums(torch.tensor(num_here)))
            yield rollout


class Generators(BaseTrainer):
    """The side with the engines."""

    cfg: RLConfig

    def __init__(self, cfg: RLConfig, mesh: Mesh):
        super().__init__(cfg, mesh)
        self.inputs = Inputs(cfg, mesh.everyone)
        self.num_steps = self.inputs.num_steps
        self.announce(self.inputs.model_configs())
        assert self.engine_config
        self.meetings = Meetings(mesh, 60 * cfg.timeout_minutes)
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
        # Of `RolloutEngine.take_counts`, since the last `measures`.
        self.engine_counts = np.zeros(2)

    def train(self) -> None:
        """Generate until the trainers let this side leave."""
        news = self.receive_weights()
        # By now the trainers have opened the folder.
        self.mesh.watch.record_end = functools.partial(results.record_end, Path(self.cfg.output))
        if news.name == "before_sft":
            self.evaluate(news)
            news = self.receive_weights()
            self.timer.take()  # To wait for the end of imitation is no step's.
        overlap: dict[str, Callable[[News], News]] = {
            "lockstep": self.keep_in_step,
            "stream": self.stream,
            "inflight": self.keep_going,
        }
        last = overlap[self.cfg.rollout.overlap](news)
        self.evaluate(last)
        if last.delivers:
            self.deliver(None)
        self.generation.close()

    def keep_in_step(self, news: News) -> News:
        """Draw each batch but the first with the weights of the step before.

        Returns:
            The news after which this side leaves, as the two methods below do.
        """
        while not news.is_last:
            if news.delivers:
                self.deliver(self.draw(news) if news.draws else None, ends_step=news.draws)
            self.evaluate(news)
            if news.step + 1 < self.num_steps:
                self.deliver(self.draw(news))
            news = self.receive_weights()
        return news

    def keep_going(self, news: News) -> News:
        """Draw what the next steps need, and take weights when they come."""
        step_size = self.cfg.rollout.prompts_per_step
        while not news.is_last:
            num_later = self.num_steps - 1 - news.step
            self.sampler.ahead = min(self.cfg.rollout.num_ahead, step_size * num_later)
            batch = self.draw(news) if news.draws else None
            self.deliver(batch, ends_step=news.draws)
            self.evaluate(news)
            with self.timer.phase("rollout"):
                self.next_ticket = self.sampler.run_on(
                    self.next_ticket, self.sampling, self.meetings.is_called
                )
            news = self.receive_weights()
        return news

    def stream(self, news: News) -> News:
        """Send the groups of each step as they finish."""
        while not news.is_last:
            if not news.draws:
                self.deliver(None, ends_step=False)
                news = self.receive_weights()
                continue
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
                self.deliver(part, ends_step=is_last)
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
        if self.evaluations and self.evaluations[-1].step == news.step:
            # `stop_at` ends the run, with weights that are evaluated already.
            self.evaluations[-1] = self.evaluations[-1]._replace(name=news.name)
            return
        prompts = self.inputs.held_out
        engine = self.generation.engine
        before = engine.take_counts()
        num_prompts = len(prompts.rows)
        with self.timer.phase("evaluate"), telling_progress(self.sampler, num_prompts):
            trajectories = self.sampler.collect(
                prompts,
                range(num_prompts),
                self.cfg.eval.samples,
                eval_sampling(self.cfg, self.sampling.stop_token_ids),
                version=news.version,
                can_stop=news.is_last,
            )
        engine.take_counts()  # Those of an evaluation are no rollout's.
        self.engine_counts += before
        if trajectories is not None:
            reasons = self.sampler.evaluation.runner.troubles[:1]
            self.evaluations.append(Evaluation(news.step, news.name, trajectories, reasons))

    def deliver(self, rollout: StepRollout | None, *, ends_step: bool = True) -> None:
        """Send what has been drawn to the trainers. Collective over both sides.

        Args:
            rollout: a batch, or a part of it; None: there are only evaluations.
            ends_step: with numbers of all that has been done since the last step's end.
        """
        with self.timer.phase("idle_generators"):
            self.meetings.enter()
        world = self.mesh.everyone
        num_trainers = world.world_size - self.mesh.world_size
        numbers: Metrics = {}
        seconds: dict[str, float] = {}
        if ends_step:
            numbers, seconds = self.measures()
        messages = []
        for trainer in range(num_trainers):
            part = None
            rows = {}
            if rollout:
                theirs = [t for t in rollout.trajectories if t.group % num_trainers == trainer]
                part = replace(rollout, trajectories=theirs)
                if self.curriculum:
                    rows = {t.group: self.curriculum[t.group] for t in theirs}
            evaluations = []
            for evaluation in self.evaluations:
                theirs = [t for t in evaluation.trajectories if t.group % num_trainers == trainer]
                evaluations.append(evaluation._replace(trajectories=theirs))
            delivery = Delivery(part, rows, evaluations, numbers, seconds)
            messages.append(pickle.dumps(delivery, pickle.HIGHEST_PROTOCOL))
        world.all_to_all(messages + [b""] * self.mesh.world_size)
        self.evaluations.clear()

    def measures(self) -> tuple[Metrics, dict[str, float]]:
        """Return numbers and seconds of this side since the last call: the most of any rank."""
        engine = self.generation.engine
        here = {
            "refit_bytes": float(self.generation.refit.bytes_received),
            "kv_cache_tokens": float(engine.kv_cache_tokens),
        }
        num_steps, waiting = self.engine_counts + engine.take_counts()
        self.engine_counts[:] = 0
        if engine.on_cuda:
            here |= {"rollout/steps": num_steps, "rollout/waiting": waiting}
        taken = self.timer.take()
        times = {phase: taken.get(phase, 0.0) for phase in ("rollout", "idle_generators")}
        by_rank = self.mesh.gather((here, times))
        numbers = {name: max(on_rank[name] for on_rank, _ in by_rank) for name in here}
        seconds = {phase: max(on_rank[phase] for _, on_rank in by_rank) for phase in times}
        return numbers, seconds


def in_order(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Return trajectories in the order of their groups, which no rank decides."""
    return sorted(trajectories, key=lambda t: (t.group, t.episode, t.segment))
