"""Episodes with the real engine: turns, budgets, failures, segments, partial rollouts. What is
sampled is what the trainer would have sampled from."""

import asyncio
import collections
import itertools
import random
import time

import anthropic
import numpy as np
import openai
import pytest

import tiny
from harness import ranks, two_at_once
from minirl.base.errors import UserError
from minirl.batch.packing import pack
from minirl.config.rl import RefitConfig, RLConfig
from minirl.config.shared import DataConfig, EngineConfig, EnvConfig, EvaluateConfig, RolloutConfig
from minirl.data import images
from minirl.data.prompts import Prompts
from minirl.data.tokenizer import load_tokenizer, stop_token_ids
from minirl.data.vision import read_vision, sampling_stops
from minirl.endpoint import open_endpoint
from minirl.engine.engine import RolloutEngine, Sampling
from minirl.envs import Agent, Env, EnvMaker, Raw, Result
from minirl.refit.refit import Refit
from minirl.rewards.scoring import Rewards
from minirl.rollout.pacing import spread
from minirl.rollout.sampler import Sampler
from minirl.types.packed import Trajectory
from test_rollout import make_policy, overwrite

ROWS = [{"prompt": f"{i}{'x' * (3 * i)}", "answer": str(i)} for i in range(9)]


class Talk(Env):
    """Replies to every answer, in threads and after a while; the turn earns its number."""

    turns = 3

    def reset(self, row):
        return row["prompt"]

    def step(self, state):
        time.sleep(random.random() * 0.01)
        (role, content) = state.messages[-1].values()
        assert (
            role == "assistant"
            and ("<|" in content or content == state.answer)
            and len(state.messages) == 2 * state.turn + 2
        )
        assert state.row["rendered_prompt"].endswith("<|assistant|>")
        return Result(
            observation=f"reply {state.turn}",
            reward=float(state.turn),
            done=state.turn + 1 == self.turns,
            sampling={"max_tokens": 2 + 7 * int(state.row["answer"]) % 29},
            info={"last": float(state.turn)},
        )


class Tail(Env):
    """Ends after two answers, but after twenty for one row."""

    def reset(self, row):
        return row["prompt"]

    def step(self, state):
        num_turns = 20 if state.row["answer"] == "3" else 2
        return Result(observation="go on", reward=1.0, done=state.turn + 1 == num_turns)


class AsyncTalk(Talk):
    async def reset(self, row):
        return [{"role": "system", "content": "s"}, {"role": "user", "content": row["prompt"]}]

    async def step(self, state):
        await asyncio.sleep(random.random() * 0.01)
        return Result(
            observation=[{"role": "user", "content": "a"}], reward=1.0, done=state.turn == 1
        )


class Forgetful(Env):
    """Rewrites the chat before the second answer."""

    def reset(self, row):
        return row["prompt"]

    def step(self, state):
        return (
            Result(
                messages=[{"role": "user", "content": "summary"}],
                observation="does not count",
                reward=0.5,
            )
            if state.turn == 0
            else Result(observation="more", done=state.turn == 2, reward=0.25)
        )


class InTokens(Env):
    """Speaks in tokens and raw texts."""

    def reset(self, row):
        return [5, 6, 7]

    def step(self, state):
        return Result(
            observation=Raw("<|user|>raw<|end|>") if state.turn == 0 else [9, 10],
            done=state.turn == 2,
            sampling={"max_tokens": 4 + 7 * int(state.row["answer"]) % 29},
        )


class Shows(Env):
    """Shows images in every turn but one, in all the ways there are: in the parts of messages,
    beside a text, beside a Raw one, in a chat written anew."""

    def reset(self, row):
        self.n = int(row["answer"])
        image = {"type": "image_url", "image_url": {"url": tiny.picture(30 + 9 * self.n, 56)}}
        return [{"role": "user", "content": [{"type": "text", "text": row["prompt"]}, image]}]

    def step(self, state):
        seen = images.rgb(tiny.picture(56 + 28 * self.n, 56))
        if state.turn == 2 and self.n % 3 == 0:
            return Result(
                messages=[
                    *state.messages,
                    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]},
                ],
                images=[seen],
            )
        if state.turn == 2 and self.n % 3 == 1:
            return Result(
                observation=Raw(f"<|user|>{tiny.IMAGE}{tiny.IMAGE}<|end|><|assistant|>"),
                images=[seen, seen],
            )
        return Result(
            observation="and this?",
            images=[] if state.turn == 1 else [seen],
            done=state.turn == 3,
            sampling={"max_tokens": 4 + self.n},
        )


class ShowsBadly(Env):
    """No such file, more images than places, more than the engine takes, and a good one."""

    def reset(self, row):
        self.way = int(row["answer"]) % 4
        return "x"

    def step(self, state):
        shown = [
            ["/none.png"],
            [tiny.picture(56, 56)] * 2,
            [tiny.picture(56, 56)] * 5,
            [tiny.picture(56, 56)],
        ][self.way]
        said = "x" if self.way != 1 else [{"role": "user", "content": [{"type": "image"}]}]
        return Result(observation=said, images=shown, done=state.turn == 1, reward=1.0)


class Greedy(Env):
    """Never done."""

    def reset(self, row):
        return row["prompt"]

    def step(self, state):
        return Result(observation="go on, " + "and on, " * int(state.row["answer"]))


class Broken(Env):
    """Fails in a way of its own in each of the rows; row 0 is well."""

    closed = []

    def reset(self, row):
        self.way = int(row["answer"])
        if self.way == 1:
            raise ValueError("no reset")
        return [] if self.way == 2 else "p"

    def step(self, state):
        if self.way == 3:
            return 1.0
        if self.way == 4:
            return Result(reward=float("nan"))
        if self.way == 5:
            return Result()
        if self.way == 6:
            time.sleep(60)
        if self.way == 7:
            return Result(observation="x", sampling={"temperature": 2.0})
        if self.way == 8 and state.turn == 1:
            raise KeyError("second step")
        return Result(done=self.way != 8, observation="x", reward=2.0)

    def close(self):
        self.closed.append(self)


CLIENT = openai.OpenAI(base_url="http://session", api_key="session", max_retries=0)


class Caller(Agent):
    """A program of its own, which asks twice over HTTP: the second time with what it heard the
    first."""

    graded = True

    def run(self, row, session):
        client = CLIENT.with_options(base_url=session.base_url, api_key=session.api_key)
        chat = [{"role": "user", "content": row["prompt"]}]
        for _ in range(2):
            said = (
                client.chat.completions.create(model=session.model, messages=chat, max_tokens=7)
                .choices[0]
                .message.content
            )
            chat += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": "and?"},
            ]
        if row["answer"] == "3":
            raise ValueError("three")
        return Result(reward=float(row["answer"]), info={"asked": 2.0, "last": len(said)})


class Viewer(Agent):
    """Shows an image through one API, and goes on through the other with a second one."""

    def run(self, row, session):
        first, second = (
            tiny.picture(56 + 28 * i, 56).replace("data:image;", "data:image/png;")
            for i in range(2)
        )
        with openai.OpenAI(
            base_url=session.base_url, api_key=session.api_key, max_retries=0
        ) as client:
            asked = [
                {"type": "text", "text": row["prompt"]},
                {"type": "image_url", "image_url": {"url": first}},
            ]
            said = (
                client.chat.completions.create(
                    model=session.model, messages=[{"role": "user", "content": asked}], max_tokens=7
                )
                .choices[0]
                .message.content
            )
            for url, why in (
                ("/etc/passwd", "data URL"),
                ("data:image/png;base64,AAAA", "cannot be read"),
            ):
                with pytest.raises(openai.BadRequestError, match=why):
                    client.chat.completions.create(
                        model=session.model,
                        messages=[
                            {
                                "role": "user",
                                "content": [{"type": "image_url", "image_url": {"url": url}}],
                            }
                        ],
                    )
            with pytest.raises(openai.BadRequestError, match="parts of type text and image_url"):
                client.chat.completions.create(
                    model=session.model,
                    messages=[
                        {
                            "role": "user",
                            "content": [asked[1], {"type": "image", "image": "/etc/passwd"}],
                        }
                    ],
                )
            with pytest.raises(
                openai.BadRequestError, match="5 images, more than engine.max_images = 4"
            ):
                client.chat.completions.create(
                    model=session.model, messages=[{"role": "user", "content": [asked[1]] * 5}]
                )
        with anthropic.Anthropic(
            base_url=session.base_url.removesuffix("/v1"), api_key=session.api_key, max_retries=0
        ) as client:
            blocks = [
                {
                    "type": "image",
                    "source": {
                        "type": "base64",
                        "media_type": "image/png",
                        "data": url.partition(",")[2],
                    },
                }
                for url in (first, second)
            ]
            chat = [
                {"role": "user", "content": [asked[0], blocks[0]]},
                {"role": "assistant", "content": said},
                {"role": "user", "content": [blocks[1]]},
            ]
            client.messages.create(model=session.model, messages=chat, max_tokens=7)
        return Result(reward=1.0)


def length_of_the_last(prompt, completion, row):
    """Of what a `Caller` heard last, after all of the chat."""
    read = row["rendered_prompt"]
    assert prompt in read and read.endswith("<|user|>and?<|end|><|assistant|>")
    return len(completion)


def set_up(mesh, folder, env, rollout=None, config=EvaluateConfig, seed=0, parts=None, **engine):
    """Return (policy, engine, refit, sampler, prompts, sampling).

    `parts`: the first three of an earlier call, to go on with."""
    tokenizer = load_tokenizer(folder)
    if not parts:
        policy = make_policy(folder, mesh)
        options = {"max_model_len": 160, "max_num_seqs": 16, "kv_cache_gb": 0.05, **engine}
        eng = RolloutEngine(
            EngineConfig(**options),
            folder,
            mesh,
            dtype="float32",
            vision=policy.vision,
        )
        parts = policy, eng, Refit(RefitConfig(), policy.shards(), policy.parts(), eng)
    eng, vision = parts[1], parts[0].vision and read_vision(folder, 4)
    cfg = config(
        engine=eng.cfg,
        seed=seed,
        rollout=RolloutConfig(**{"max_tokens": 12, **(rollout or {})}),
        env=EnvConfig(**{"name": "my", "max_turns": 6, "max_tokens": 96, **env}),
    )
    prompts = Prompts(ROWS, tokenizer, DataConfig(), seed=0, shuffle=False, vision=vision)
    make = {
        c.__name__: c
        for c in (
            Talk,
            Tail,
            AsyncTalk,
            Forgetful,
            InTokens,
            Greedy,
            Broken,
            Caller,
            Shows,
            ShowsBadly,
            Viewer,
        )
    }[cfg.env.name]
    sampler = Sampler(
        eng,
        EnvMaker(make, make()),
        Rewards((0.01, length_of_the_last, "length")),
        prompts,
        cfg,
        open_endpoint,
    )
    sampling = Sampling(
        max_tokens=cfg.rollout.max_tokens,
        stop_token_ids=sampling_stops(stop_token_ids(tokenizer, folder), vision),
        temperature=0.8,
    )
    return *parts, sampler, prompts, sampling


def mismatch(policy, trajectories):
    """Largest difference of the engine's log-probs to the trainer's."""
    batch = pack(trajectories, policy.mesh.device, 0.8, layout=policy.layout)
    policy.annotate([[batch]], "old_logprobs")
    return ((batch.old_logprobs - batch.engine_logprobs).abs() * batch.loss_mask).max().item()


def fields(trajectories):
    """Return what the tests compare of each trajectory."""
    return [
        (
            t.group,
            t.episode,
            t.segment,
            t.tokens.tolist(),
            t.sampled.tolist(),
            t.logprobs.tolist(),
            t.turn_rewards.tolist(),
            t.versions.tolist(),
            t.reward,
            t.version,
        )
        for t in trajectories
    ]


def episodes_program(mesh, folder, kinds):
    found, parts = {}, None
    for kind in kinds:
        *parts, sampler, prompts, sampling = set_up(mesh, folder, {"name": kind}, parts=parts)
        runs = []
        with parts[1].awake(parts[2], parts[0].sleeper):
            for _ in range(2):
                # As each refit leaves it. With AVX2 the last bits of a token depend on how many are
                # computed with it, and so on those that the cache has.
                assert parts[1].llm.reset_prefix_cache()
                runs.append(sampler.collect(prompts, range(9), 2, sampling, version=7))
        first, again = runs
        texts = [sampler.prompts.tokenizer.decode(t.tokens) for t in first]
        found[kind] = {
            "mismatch": mismatch(parts[0], first),
            "first": fields(first),
            "again": fields(again),
            "texts": texts,
            "info": [t.info for t in first],
            "images": [t.images for t in first],
        }
        sampler.close()
    return found


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory):
    """The results, in lists of one, of every program of one rank, by what the tests call it."""
    root = tmp_path_factory.mktemp("one_rank")
    folder = tiny.make(root / "a")
    other = tiny.make(root / "b", seed=1)
    sees = tiny.make(root / "c", "qwen2_5_vl")
    sees_too = tiny.make(root / "d", "qwen2_5_vl", seed=1)
    calls = {
        "images": (episodes_program, sees, ["Shows", "Talk", "ShowsBadly"]),
        "Shows": (partial_program, sees, sees_too, {"name": "Shows", "max_tokens": 120}, 3),
        "episodes": (
            episodes_program,
            folder,
            ["Talk", "AsyncTalk", "Forgetful", "InTokens", "Greedy"],
        ),
        "failed": (failing_program, folder),
        "Talk": (partial_program, folder, other, {"name": "Talk", "max_tokens": 120}, 3, 2),
        "InTokens": (partial_program, folder, other, {"name": "InTokens", "max_tokens": 120}, 3),
        "stale": (stale_program, folder, "round_robin"),
        "agent": (agent_program, folder, 1),
        "viewer": (agent_program, sees, 1, "Viewer"),
    }
    with two_at_once({name: (1, *call) for name, call in calls.items()}) as results:
        yield results


@pytest.fixture(scope="module")
def episodes(on_one_rank):
    (found,), (seen,) = on_one_rank["episodes"].result(), on_one_rank["images"].result()
    return found | {name: seen[name] for name in ("Shows", "ShowsBadly")}


@pytest.mark.parametrize("kind", ["Talk", "AsyncTalk", "Forgetful", "InTokens", "Greedy", "Shows"])
def test_turns_are_trained_as_they_were_sampled_and_runs_repeat(episodes, kind):
    """Also while environments take a random time: on CPU the engine waits for them."""
    assert 0 < episodes[kind]["mismatch"] < 1e-4
    assert episodes[kind]["first"] == episodes[kind]["again"]
    for _, _, _, tokens, sampled, logprobs, _, versions, _, version in episodes[kind]["first"]:
        assert version == 7 and len(tokens) == len(sampled) == len(logprobs)
        assert all(
            (v == 7 and p < 0) if s else (v == -1 and p == 0)
            for s, p, v in zip(sampled, logprobs, versions, strict=True)
        )


def test_images_of_environments(episodes):
    """Are there, as many tokens as they have; one that cannot be read or has no place is that
    episode's failure, one too many its end."""
    first, whole = episodes["Shows"]["first"], 0
    segments = collections.Counter((group, episode) for group, episode, *_ in first)
    for (group, episode, _, tokens, sampled, *_), placed, info in zip(
        first, episodes["Shows"]["images"], episodes["Shows"]["info"], strict=True
    ):
        assert not info["error"], info
        if segments[group, episode] == 1 and not info["env"]["truncated"]:
            whole += 1
            assert len(placed) == (4 if group % 3 == 1 else 3)
        places = {place for p in placed for place in range(p.start, p.start + p.num_tokens)}
        assert places == {
            i
            for i, (token, own) in enumerate(zip(tokens, sampled, strict=True))
            if token == tokens[placed[0].start] and not own
        }
        assert info["prompt"] == ROWS[group]["prompt"] and "data:" not in str(info)
    assert whole > 5
    ends = collections.defaultdict(set)
    for (group, *_), info in zip(
        episodes["ShowsBadly"]["first"], episodes["ShowsBadly"]["info"], strict=True
    ):
        assert bool(info["error"]) == bool(info["env"]["failed"])
        ends[group % 4].add(info["error"] or ("truncated" if info["env"]["truncated"] else "done"))
    # An answer with the token of an image ends any of them as truncated.
    assert [{end for end in ends[way] if end != "truncated"} for way in (1, 2, 3)] == [
        {
            "a chat with places for 1 images came with 2 of them: "
            "[{'role': 'user', 'content': [{'type': 'image'}]}]"
        },
        set(),
        {"done"},
    ]
    assert any("/none.png" in end for end in ends[0])


def test_turns_earn_at_their_last_tokens(episodes):
    talk = episodes["Talk"]
    for (*_, sampled, _, rewards, _, reward, _), text, info in zip(
        talk["first"], talk["texts"], talk["info"], strict=True
    ):
        assert not info["error"], info
        ends = [i for i, s in enumerate(sampled) if s and not (sampled + [False])[i + 1]]
        assert [rewards[i] for i in ends] == [0.0, 1.0, 2.0] and sum(rewards) == reward == 3.0
        assert text.count("<|user|>reply ") == 2 and text.index(
            "<|user|>reply 0<|end|><|assistant|>"
        ) < text.index("<|user|>reply 1<|end|><|assistant|>")
        assert (
            info["env"] == {"turns": 3, "truncated": 0.0, "failed": 0.0, "last": 2.0}
            and not info["error"]
        )


def test_history_rewritten_begins_a_segment(episodes):
    found = episodes["Forgetful"]
    places = [place[:3] for place in found["first"]]
    assert places == list(itertools.product(range(9), range(2), range(2)))
    for (_, _, segment, *_, reward, _), text in zip(found["first"], found["texts"], strict=True):
        assert reward == 1.0  # of the episode
        assert (
            text.startswith("<|user|>summary<|end|><|assistant|>") == (segment == 1)
            and text.count("<|user|>more<|end|><|assistant|>") == segment
        )


def test_tokens_and_raw_texts_are_taken_as_they_are(episodes):
    for (*_, sampled, _, _, _, _, _), text in zip(
        episodes["InTokens"]["first"], episodes["InTokens"]["texts"], strict=True
    ):
        assert (
            not any(sampled[:3])
            and text.count("<|user|>raw<|end|>") == 1
            and "<|assistant|>" not in text.split("<|user|>raw<|end|>")[1][:12]
        )


def test_budgets_truncate(episodes):
    """Of turns, of tokens and of the context; nothing raises."""
    found, by_turns, by_context = episodes["Greedy"], 0, 0
    for (_, _, _, tokens, sampled, *_), info in zip(found["first"], found["info"], strict=True):
        assert info["env"]["truncated"] == 1 and not info["stopped"]
        assert len(tokens) <= 160 and sum(sampled) <= 96
        by_turns += info["env"]["turns"] == 6
        by_context += info["env"]["turns"] < 6 and sum(sampled) < 80
    assert by_turns and by_context


def failing_program(mesh, folder):
    found, parts = {}, None
    for on_error in ("reward", "drop", "raise"):
        Broken.closed.clear()
        *parts, sampler, prompts, sampling = set_up(
            mesh,
            folder,
            {"name": "Broken", "on_error": on_error, "error_reward": -3.0, "timeout_seconds": 1.0},
            parts=parts,
        )
        began = time.monotonic()
        try:
            with parts[1].awake(parts[2], parts[0].sleeper):
                trajectories = sampler.collect(prompts, range(9), 2, sampling)
        except UserError as error:
            found[on_error] = str(error)
        else:
            found[on_error] = (
                [(t.group, t.episode, t.reward, t.info["error"]) for t in trajectories],
                sorted(sampler.evaluation.runner.troubles),
                len(Broken.closed),
                time.monotonic() - began,
            )
        sampler.close()
    return found


MESSAGES = {
    3: "returned 1.0, not a Result",
    4: "not a Result with a finite reward",
    5: "it is not done and said None",
    6: "took longer than env.timeout_seconds = 1.0",
    7: "sets sampling temperature",
    8: "Broken.step raised KeyError: 'second step'",
}


@pytest.fixture(scope="module")
def failed(on_one_rank):
    (found,) = on_one_rank["failed"].result()
    return found


def test_a_failed_episode_ends_alone(failed):
    """One of each kind; the others run to their end."""
    found, failures, closed, seconds = failed["reward"]
    assert seconds < 30  # nobody waits for a thread that sleeps
    by_group = {g: (r, error) for g, _, r, error in found}
    assert by_group[0] == (2.0, "")
    assert sorted(by_group) == list(range(9))  # also 1 and 2, which have no completion
    assert [by_group[group][0] for group in (1, 2)] == [-3.0, -3.0]
    for group, message in MESSAGES.items():
        reward, error = by_group[group]
        assert message in error
        assert reward == (2.0 - 3.0 if group == 8 else -3.0)
    assert len(failures) == 16 and closed == 18
    assert any("Broken.reset raised ValueError: no reset" in f for f in failures)
    assert any("said []" in f for f in failures)


@pytest.mark.parametrize("wrong", [{"info": None}, {"images": None}, {"sampling": [4]}])
def test_a_result_has_fields_of_their_kinds(wrong):
    """Raised in the environment, whose episode fails."""
    with pytest.raises(TypeError, match=f"a Result has {next(iter(wrong))} = "):
        Result(reward=1.0, done=True, **wrong)


def test_failed_episodes_can_be_dropped_or_end_the_run(failed):
    found, failures, _, _ = failed["drop"]
    assert [(g, e, r) for g, e, r, _ in found] == [(0, 0, 2.0), (0, 1, 2.0)] and len(failures) == 16
    assert (
        "env.name = Broken failed: " in failed["raise"]
        and "set env.on_error reward or drop" in failed["raise"]
    )


# --------------------------------------------------------------------------------------------------
# partial rollouts


def partial_program(mesh, folder, other, env, ahead, num_resumed=0):
    """Three steps, between which the weights change from those of one checkpoint to those of
    another and back, and what the trainer says to them. Then `num_resumed` times the last two steps
    of a run that is resumed after the first."""
    options = {
        "rollout": {
            "max_tokens": 40,
            "ahead": ahead,
            "prompts_per_step": 4,
            "samples_per_prompt": 2,
            "max_staleness": 9,
        },
        "config": RLConfig,
    }
    runs, parts = [], None
    for resumes in [False] + [True] * num_resumed:
        *parts, sampler, prompts, sampling = set_up(mesh, folder, env, parts=parts, **options)
        steps, first = [], 0
        if resumes:
            first, sampler.waiting = runs[0][0]["next"], runs[0][0]["unfinished"]
        for step in range(resumes, 3):
            overwrite(parts[0], other if step == 1 else folder)
            with parts[1].awake(parts[2], parts[0].sleeper):
                begun = len(sampler.training.groups)
                rollout = sampler.collect_step(first, sampling, version=step)
            trajectories, first = rollout.trajectories, rollout.next_ticket
            assert rollout.discarded_tokens == 0
            steps.append(
                {
                    "trajectories": fields(trajectories),
                    "begun": begun,
                    "next": first,
                    "left": len(sampler.training.groups),
                    "images": [t.images for t in trajectories],
                    "unfinished": rollout.unfinished,
                }
            )
        sampler.close()
        runs.append(steps)
    policy, worst, mixed = parts[0], 0.0, 0
    whole = [step for part in mesh.gather(runs[0]) for step in part]
    for version, weights in enumerate((folder, other, folder)):
        overwrite(policy, weights)
        for step in whole:
            pairs = zip(step["trajectories"], step["images"], strict=True)
            of_version = [(t, placed) for t, placed in pairs if version in t[7]]
            for (t, _), found in zip(of_version, annotated(policy, of_version), strict=True):
                _, _, _, _, sampled, engine, _, versions, _, oldest = t
                used = {v for v in versions if v >= 0}
                assert oldest == min(used)
                mixed += len(used) > 1
                # under the weights of its version and no others
                worst = max(
                    worst,
                    *(
                        abs(p - q)
                        for s, p, q, v in zip(sampled, engine, found, versions, strict=True)
                        if s and v == version
                    ),
                    0.0,
                )
    return {"runs": runs, "worst": worst, "mixed": mixed}


def annotated(policy, pairs):
    """Return the trainer's log-prob of each token of what `fields` made, which has its images."""
    out = []
    for (_, _, _, tokens, sampled, logprobs, *_), placed in pairs:
        t = Trajectory(
            tokens=np.array(tokens, np.int32),
            sampled=np.array(sampled),
            logprobs=np.array(logprobs, np.float32),
            images=placed,
        )
        batch = pack([t], policy.mesh.device, 0.8, layout=policy.layout)
        policy.annotate([[batch]], "old_logprobs")
        out.append([0.0, *batch.old_logprobs[: len(tokens) - 1].tolist()])
    return out


def groups_of(step):
    """The groups that a step of `partial_program` trains on."""
    return {t[0] for t in step["trajectories"]}


@pytest.mark.parametrize("env", ["Talk", "InTokens", "Shows"])
def test_unfinished_episodes_continue_under_new_weights(on_one_rank, env):
    """Every token's log-prob is that of the weights it was sampled with."""
    (r,) = on_one_rank[env].result()
    steps, *_ = r["runs"]
    assert r["worst"] < 1e-4 and r["mixed"] > 0
    trained = set()
    for step in steps:
        groups = groups_of(step)
        assert len(groups) == 4 and not groups & trained
        trained |= groups
    assert [s["left"] for s in steps] == [3, 3, 3]
    assert [s["next"] for s in steps] == [7, 11, 15]


def test_a_resumed_run_begins_unfinished_groups_again(on_one_rank):
    """From the same seeds, so that two runs resumed from one place are the same run."""
    (r,) = on_one_rank["Talk"].result()
    steps, resumed, again = r["runs"]
    assert resumed == again
    unfinished = steps[0]["unfinished"]
    assert len(unfinished) == 3 and resumed[0]["begun"] == 0
    trained = list(map(groups_of, (steps[0], *resumed)))
    assert trained[1] | trained[2] > set(unfinished)
    assert sum(map(len, trained)) == len(set.union(*trained)) == 12
    versions = set()
    for step in resumed:
        versions.update(*(t[7] for t in step["trajectories"]))
    assert versions == {-1, 1, 2}


def test_two_ranks_share_what_is_unfinished(tmp_path):
    folder, other = tiny.make(tmp_path / "a"), tiny.make(tmp_path / "b", seed=1)
    both = ranks(2, partial_program, folder, other, {"name": "Talk", "max_tokens": 120}, 4, 2)
    for r in both:
        _, resumed, again = r["runs"]
        assert again == resumed
        assert r["worst"] < 1e-4
    for here, there in zip(both[0]["runs"][0], both[1]["runs"][0], strict=True):
        assert len(groups_of(here) | groups_of(there)) == 4
        assert here["left"] == there["left"] == 2


def stale_program(mesh, folder, tickets):
    """Steps with one prompt in nine that has ten times as many answers as the others."""
    options = {
        "max_tokens": 4,
        "ahead": 3,
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "max_staleness": 2,
        "tickets": tickets,
    }
    env = {"name": "Tail", "max_turns": 24, "max_tokens": 120}
    policy, eng, refit, sampler, prompts, sampling = set_up(
        mesh, folder, env, options, RLConfig, max_model_len=512
    )
    steps, first = [], 0
    for step in range(9):
        with eng.awake(refit, policy.sleeper):
            rollout = sampler.collect_step(first, sampling, version=step)
            # leaves the paused requests alone
            evaluation = sampler.collect(prompts, range(3), 1, sampling)
        first = rollout.next_ticket
        steps.append(
            {
                "ages": [(t.group, t.episode, step - t.version) for t in rollout.trajectories],
                "discarded": rollout.discarded_tokens,
                "begun": sorted(sampler.begun),
                "waiting": list(sampler.waiting),
                "unfinished": rollout.unfinished_tokens,
            }
        )
        evaluated = sum(mesh.gather([t.group for t in evaluation if t.segment == 0]), [])
        assert sorted(evaluated) == [0, 1, 2]
    sampler.close()
    return steps


@pytest.mark.parametrize(("world", "tickets"), [(1, "round_robin"), (2, "pull")])
def test_no_token_is_older_than_allowed_and_none_is_thrown_away(
    on_one_rank, tmp_path, world, tickets
):
    """A group that would become too old is waited for: each ticket is trained on once, in time."""
    found = (
        on_one_rank["stale"].result()
        if world == 1
        else ranks(world, stale_program, tiny.make(tmp_path / "model"), tickets)
    )
    trained: dict[int, int] = {}  # ticket -> step
    oldest = collections.defaultdict(int)  # ticket -> age of its oldest token when trained on
    for n in range(9):
        for group, _, age in (t for r in found for t in r[n]["ages"]):
            assert trained.setdefault(group, n) == n and age <= 2
            oldest[group] = max(oldest[group], age)
        assert sum(step == n for step in trained.values()) == 2
        begun = found[0][n]["begun"]
        assert all(r[n]["begun"] == begun and r[n]["discarded"] == 0 for r in found)
        assert len(begun) <= 3  # of at most five, two are trained on
        known = sorted([*trained, *begun])
        assert known == list(range(len(known)))  # no ticket is left out
    if world == 1:  # With `pull` it depends on time how far the long ones have come.
        assert found[0][-1]["unfinished"]
        assert oldest[3] == oldest[12] == 2  # the long ones went on for as long as they may


def test_shares_go_to_who_has_least():
    assert (
        spread(5, [0, 0]) == [[0, 2, 4], [1, 3]]
        and spread(3, [4, 0]) == [[], [0, 1, 2]]
        and spread(4, [2, 1, 0]) == [[3], [1], [0, 2]]
        and spread(0, [1]) == [[]]
    )


def tp_program(mesh, folder, env):
    policy, eng, refit, sampler, prompts, sampling = set_up(
        mesh,
        folder,
        env,
        {"max_tokens": 12, "ahead": 2, "prompts_per_step": 3, "samples_per_prompt": 2},
        RLConfig,
        tensor_parallel_size=2,
    )
    with eng.awake(refit, policy.sleeper):
        found = sampler.collect_step(0, sampling, version=0)
        more = sampler.collect_step(found.next_ticket, sampling, version=1)
    sampler.close()
    return [fields(found.trajectories), fields(more.trajectories)]


def test_an_engine_on_two_ranks_runs_the_same_episodes(tmp_path):
    leader, follower = ranks(2, tp_program, tiny.make(tmp_path / "model"), {"name": "Talk"})
    assert follower == [[], []]
    for step in leader:
        assert len({t[0] for t in step}) == 3
        assert all(sum(t[6]) == 3.0 for t in step)


def agent_program(mesh, folder, tp, name="Caller"):
    policy, eng, refit, sampler, prompts, sampling = set_up(
        mesh, folder, {"name": name}, tensor_parallel_size=tp
    )
    # All threads for training are taken, as by agents that wait until an evaluation is over.
    sampler.runner.threads = asyncio.Semaphore(0)
    with eng.awake(refit, policy.sleeper):
        found = sampler.collect(prompts, range(9), 2, sampling, version=3)
    failures = sampler.evaluation.runner.troubles
    sampler.close()
    parts = [found] if tp == 1 else mesh.gather(found)
    worst = max((mismatch(policy, part) for part in parts if part), default=0.0)
    return (
        worst,
        fields(found),
        [t.info for t in found],
        failures,
        [sampler.prompts.tokenizer.decode(t.tokens) for t in found],
        [t.images for t in found],
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_a_program_that_talks_to_the_endpoint_is_trained(on_one_rank, tmp_path, tp):
    """Its two questions are one segment; it fails alone."""
    worst, found, info, failures, texts, _ = (
        on_one_rank["agent"].result()
        if tp == 1
        else ranks(tp, agent_program, tiny.make(tmp_path / "model"), tp)
    )[0]
    assert (
        0 < worst < 1e-4
        and len(failures) == 2
        and "Caller.run raised ValueError: three" in failures[0]
    )
    assert {place[:2] for place in found} == set(itertools.product(range(9), range(2)))
    for (group, _, segment, _, sampled, *_, reward, version), about, text in zip(
        found, info, texts, strict=True
    ):
        assert (
            reward == (0.0 if group == 3 else group + 0.01 * about["env"].pop("last"))
            and version == 3
            and sum(sampled) <= 14
        )
        assert about["row"] == {"answer": str(group)} and about["refusal"] == ""
        assert text.count("<|user|>and?<|end|><|assistant|>") == 1 and segment == 0
        assert about["stopped"] == text.endswith("<|end|>")
        said = {} if about["error"] else {"asked": 2.0}
        failed = float(bool(about["error"]))
        assert about["env"] == {"turns": 2, "truncated": 0.0, "failed": failed, **said}


def test_images_that_a_client_sends_are_trained_on(on_one_rank):
    """Through either API; a chat goes on, unless an answer held what cannot be said again."""
    ((worst, found, info, failures, _, placed),) = on_one_rank["viewer"].result()
    assert (
        0 < worst < 1e-4
        and not any(about["error"] for about in info)
        and all("refused a request" in trouble for trouble in failures)
    )
    assert all("more than engine.max_images = 4" in about["refusal"] for about in info)
    whole = [
        shown
        for (_, _, segment, *_), shown in zip(found, placed, strict=True)
        if segment == 0 and len(shown) == 2
    ]
    assert whole and all(
        p.url.startswith("data:image/png;") and q.num_tokens == p.num_tokens + 2 for p, q in whole
    )
    assert sum(len(shown) for shown in placed) >= 3 * 18 - len(whole)
