"""The simulation of steps: small cases by hand, and laws that hold whatever the lengths are."""

import dataclasses
from functools import partial

import numpy as np
import pytest

from benchmarks.outages import ChangingJob, Outages
from minirl.base.errors import UserError
from minirl.plan import simulation
from minirl.plan.simulation import Engines, Job, LogNormal, Measured, SimulatedRun
from minirl.rollout import index

TAIL = LogNormal(300.0, 1.0, 3200.0)


class Fixed:
    """The same lengths for each group."""

    def __init__(self, *lengths):
        self.lengths = np.array(lengths, float)
        self.mean = self.lengths.mean()

    def draw(self, rng, num_groups, samples):
        return np.tile(self.lengths[:samples], (num_groups, 1))


def shared(running, contexts):
    """An engine that draws 100 tokens a second, for all its answers together."""
    return np.maximum(running, 1e-9) / 100


def flat(running, contexts):
    """An engine whose answers get 50 tokens a second each, however many there are."""
    return np.full_like(running, 0.02)


def usual(running, contexts):
    """Between both."""
    return (1 + np.maximum(1, running) / 50) / 50


def job(**settings):
    known = {
        "prompts": 16,
        "samples": 4,
        "lengths": TAIL,
        "num_engines": 3,
        "slots": 64,
        "step_seconds": usual,
        "train_seconds": 10.0,
        "refit_seconds": 1.0,
    }
    return ChangingJob(**known | settings) if "outages" in settings else Job(**known | settings)


WAYS = {
    "colocated": simulation.colocated,
    "ahead": partial(simulation.colocated, ahead=16),
    "lockstep": simulation.lockstep,
    "stream": simulation.stream,
    "inflight 1": partial(simulation.inflight, max_staleness=1),
    "inflight 4": partial(simulation.inflight, max_staleness=4),
}


# --------------------------------------------------------------------------------------------------
# small cases by hand


def test_answers_share_their_engine():
    """Of 10, 20 and 30 tokens: 10 for all three, then 10 for two, then 10 for one."""
    engines = Engines(job(samples=3, lengths=Fixed(10, 20, 30), num_engines=1, step_seconds=shared))
    engines.begin(1)
    while not engines.finished_at[0] < np.inf:
        engines.advance()
    assert engines.now == pytest.approx((30 + 20 + 10) / 100)
    assert engines.finished_at[0] == pytest.approx(engines.now)
    assert engines.drawn_tokens().tolist() == [60.0]


def test_an_environment_takes_its_time_beside_the_engine():
    one = job(prompts=1, samples=1, lengths=Fixed(50), num_engines=1, step_seconds=flat)
    run = SimulatedRun(dataclasses.replace(one, environment_seconds=4.0))
    assert run.wait(run.issue(0)) == pytest.approx(50 * 0.02 + 4.0)


def test_prompts_are_read_once_for_a_group_and_answers_again_after_a_refit():
    one = job(prompts=1, samples=2, lengths=Fixed(50, 50), num_engines=1, step_seconds=flat)
    engines = Engines(dataclasses.replace(one, prompt_tokens=100.0, token_seconds=0.01))
    engines.begin(1)
    engines.advance(1.0)  # It reads the prompt.
    assert engines.drawn_tokens()[0] == 0
    engines.advance(1.5)
    assert engines.drawn_tokens()[0] == pytest.approx(2 * 25)
    engines.stall(0.25, recompute=True)  # 2 x 25 tokens of answers and the prompt.
    engines.advance(1.5 + 0.25 + 1.5)
    assert engines.drawn_tokens()[0] == pytest.approx(2 * 25)


def test_a_group_waits_until_an_engine_has_room_for_all_its_answers():
    """Room for two groups of two: the third one begins when two answers have ended."""
    load = job(samples=2, lengths=Fixed(40, 50), num_engines=1, slots=4, step_seconds=flat)
    engines = Engines(load)
    engines.begin(3)
    while engines.finished_at.max() == np.inf:
        engines.advance()
    assert engines.finished_at.tolist() == pytest.approx([1.0, 1.0, 0.8 + 1.0])


# --------------------------------------------------------------------------------------------------
# laws


@pytest.mark.parametrize("num_engines", [1, 3, 6])
@pytest.mark.parametrize("name", WAYS)
def test_rounds_are_as_good_as_one_answer_at_a_time(name, num_engines, monkeypatch):
    load = job(num_engines=num_engines, prompt_tokens=50.0, token_seconds=1e-4)
    found = WAYS[name](load)
    monkeypatch.setattr(simulation, "ROUND", 10**9)
    monkeypatch.setattr(simulation, "ROUND_WITH_QUEUE", 10**9)
    exact = WAYS[name](load)
    assert found.seconds == pytest.approx(exact.seconds, rel=0.02)
    assert found.idle_engines == pytest.approx(exact.idle_engines, abs=0.02)
    assert found.most_stale == exact.most_stale


def test_a_seed_gives_the_same_run():
    outages = Outages(up_seconds=60.0, down_seconds=5.0)
    for way in WAYS.values():
        assert way(job(outages=outages, steps=6)) == way(job(outages=outages, steps=6))
        assert way(job(steps=6)) != way(job(steps=6, seed=1))


@pytest.mark.parametrize("train", [5.0, 500.0])
def test_lockstep_takes_what_the_slower_side_takes(train):
    lengths = Fixed(1000, 1000, 1000, 1000)
    draw = 16 * 4 * 1000 / 100 / 4  # Four engines.
    given = {"lengths": lengths, "num_engines": 4, "step_seconds": shared}
    found = simulation.lockstep(job(**given, train_seconds=train, update_seconds=1.0))
    drawing, training = 1.0 + draw, train + 1.0  # A refit, and an update, take a second.
    seconds = max(drawing, training)
    assert found.seconds == pytest.approx(seconds)
    assert found.idle_trainers == pytest.approx(max(0.0, drawing - training) / seconds)
    assert found.idle_engines == pytest.approx(max(0.0, training - drawing) / seconds)
    assert found.staleness == found.most_stale == 1


def test_without_a_tail_ranks_apart_save_the_sleep_and_the_refit_only():
    """8 ranks whose speed does not depend on how many answers they draw."""
    given = {"lengths": Fixed(1000, 1000, 1000, 1000), "step_seconds": shared}
    work = 800.0  # Of a rank that trains alone.
    together = simulation.colocated(
        job(**given, num_engines=8, train_seconds=work / 8, sleep_seconds=2.0)
    )
    least = together.seconds - 2.0 - 1.0
    for num in range(1, 8):
        split = job(**given, num_engines=num, train_seconds=work / (8 - num), refit_seconds=0.0)
        for name in ("lockstep", "stream", "inflight 1", "inflight 4"):
            assert WAYS[name](split).seconds >= 0.99 * least, (name, num)
    # 640 s of drawing and 800 s of training on 8 ranks.
    best = simulation.inflight(
        job(**given, num_engines=4, train_seconds=work / 4, refit_seconds=0.0), max_staleness=1
    )
    assert best.seconds == pytest.approx(work / 4)


def test_with_a_tail_the_more_staleness_the_faster():
    times = [simulation.colocated(job()).seconds]
    for max_staleness in (1, 2, 4):
        times.append(simulation.inflight(job(), max_staleness=max_staleness).seconds)
    assert times == sorted(times, reverse=True) and times[0] > 2 * times[-1]


def test_half_of_what_the_bound_allows_is_as_fast_with_half_the_staleness():
    """Groups that wait for the bound, finished or in a queue, only become old."""
    every = simulation.inflight(job(steps=30), max_staleness=4)
    half = simulation.inflight(job(steps=30), max_staleness=4, ahead=32)
    assert half.seconds < 1.1 * every.seconds and half.staleness < 0.65 * every.staleness


def test_the_side_with_too_few_ranks_makes_the_other_one_wait():
    few = simulation.inflight(job(num_engines=1, train_seconds=1.0), max_staleness=2)
    assert few.idle_trainers > 0.9 and few.idle_engines < 0.01
    many = simulation.inflight(job(num_engines=32, train_seconds=200.0), max_staleness=2)
    assert many.idle_trainers < 0.01 and many.idle_engines > 0.5


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
@pytest.mark.parametrize("train", [1.0, 60.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_group_is_too_old_and_nothing_is_thrown_away(max_staleness, train, seed):
    load = job(train_seconds=train, seed=seed)
    found = simulation.inflight(load, max_staleness=max_staleness)
    assert 0 < found.staleness <= found.most_stale == max_staleness and found.lost == 0
    partial_rollouts = simulation.colocated(load, ahead=16, max_staleness=max_staleness)
    assert partial_rollouts.most_stale <= max_staleness and partial_rollouts.lost == 0
    assert simulation.stream(load).most_stale == 0


def test_engines_that_fail_lose_tokens_and_others_draw_them_again():
    fine = simulation.inflight(job(steps=60), max_staleness=2)
    failing = Outages(up_seconds=60.0, down_seconds=10.0)
    lossy = simulation.inflight(job(steps=60, outages=failing), max_staleness=2)
    moving = dataclasses.replace(failing, keeps_tokens=True)
    kept = simulation.inflight(job(steps=60, outages=moving), max_staleness=2)
    assert lossy.lost > 0.05 and kept.lost == 0
    assert fine.seconds < kept.seconds < lossy.seconds
    assert lossy.most_stale == kept.most_stale == 2


def test_a_slow_engine_is_felt():
    slow = simulation.lockstep(job(step_seconds=lambda *given: usual(*given) * [3.0, 1.0, 1.0]))
    assert slow.seconds > 1.3 * simulation.lockstep(job()).seconds
    assert slow.seconds <= 3.01 * simulation.lockstep(job()).seconds


# --------------------------------------------------------------------------------------------------
# lengths


@pytest.mark.parametrize("mean", [100.0, 1000.0, 3000.0])
@pytest.mark.parametrize("sigma", [0.0, 0.8, 1.5])
def test_lengths_have_the_mean_that_is_asked_for(mean, sigma):
    lengths = LogNormal.of_mean(mean, sigma, 4000.0)
    assert lengths.mean == pytest.approx(mean, rel=1e-3)
    drawn = lengths.draw(np.random.default_rng(0), 20_000, 4)
    assert drawn.mean() == pytest.approx(mean, rel=0.03) and drawn.max() <= 4000.0


def test_lengths_of_a_dump_are_those_of_its_groups(tmp_path):
    answers = [(7, 0, 10), (7, 1, 20), (3, 1, 2), (3, 0, 1)]
    rows = np.zeros(5, index.SAMPLED)
    for row, (group, episode, tokens) in zip(rows, answers, strict=False):
        row["group"], row["episode"], row["num_sampled"] = group, episode, tokens
    rows[4] = (7, 1, 1, *[0] * (len(index.SAMPLED.names) - 3))
    rows[4]["num_sampled"] = 5  # Another segment of an answer.
    none = np.zeros(0, index.TRAINED), np.zeros((0, 3), np.float32)
    for rank, part in enumerate((rows[:3], rows[3:])):
        files = index.part_of(tmp_path, 0, rank)
        files.lines.write_text("")
        index.write_tables(files, part, *none)
    lengths = Measured.of_dump(tmp_path)
    assert lengths.mean == (10 + 25 + 2 + 1) / 4
    drawn = lengths.draw(np.random.default_rng(0), 50, 2)
    assert {tuple(group) for group in drawn.tolist()} == {(10.0, 25.0), (1.0, 2.0)}
    with pytest.raises(UserError, match="has no dumped rollouts"):
        Measured.of_dump(tmp_path / "none")
