"""OpenRLHF's executors, written in the two shapes of its examples: one that asks the engine itself,
and one that puts an HTTP server around it, with sessions. What is trained on is what they saw."""

import asyncio
import inspect

import pytest

import tiny
from harness import ranks
from minirl.base.errors import UserError
from minirl.batch.packing import pack
from minirl.config.rl import RefitConfig
from minirl.config.shared import (
    DataConfig,
    EngineConfig,
    EnvConfig,
    EvaluateConfig,
    RewardConfig,
    RolloutConfig,
)
from minirl.data.prompts import Prompts
from minirl.data.tokenizer import load_tokenizer, stop_token_ids
from minirl.endpoint import open_endpoint
from minirl.engine.engine import RolloutEngine, Sampling
from minirl.envs import PolicyInfo, State
from minirl.envs.adapters.openrlhf import OpenRLHF, OpenRLHFExecutor
from minirl.envs.registry import make_env
from minirl.refit.refit import Refit
from minirl.rewards.loading import make_rewards
from minirl.rollout.sampler import Sampler
from test_rollout import ENGINE, make_policy

# Two turns, with a text between them; it earns the number of all tokens.
DIRECT = """
    from copy import deepcopy

    from openrlhf.utils.agent import AgentExecutorBase


    class AgentExecutor(AgentExecutorBase):
        async def execute(
            self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None
        ):
            encoded = hf_tokenizer(text=prompt, add_special_tokens=False, return_tensors="pt")
            tokens = encoded["input_ids"][0].tolist()
            ranges = []
            logprobs = [0.0] * len(tokens)
            for turn in range(2):
                params = deepcopy(sampling_params)
                params.max_tokens = 3 + turn
                output = (await llm_engine.generate(tokens, params)).outputs[0]
                assert len(output.token_ids) <= 6 and output.finish_reason in ("stop", "length")
                start = len(tokens)
                tokens = tokens + list(output.token_ids)
                ranges.append((start, len(tokens)))
                for token, found in zip(output.token_ids, output.logprobs):
                    logprobs.append(found[token].logprob)
                if turn == 0:
                    feedback = hf_tokenizer.encode(" again ", add_special_tokens=False)
                    tokens = tokens + feedback
                    logprobs += [0.0] * len(feedback)
            assert len(tokens) == len(logprobs) <= max_length
            return {"prompt": prompt, "label": label, "observation_tokens": tokens,
                    "action_ranges": ranges, "rollout_log_probs": logprobs, "truncated": False,
                    "reward": float(len(tokens)), "scores": 0.5,
                    "extra_logs": {"logprob": sum(logprobs), "turns": len(ranges)}}
"""
# A server in a thread, a client, sessions; no reward of its own.
SERVER = """
    import asyncio
    import socket
    import threading
    import time
    from urllib.request import urlopen
    from uuid import uuid4

    import uvicorn
    from fastapi import FastAPI, Request
    from openai import AsyncOpenAI
    from vllm import SamplingParams

    from openrlhf.utils.agent import AgentExecutorBase

    servers = []


    class AgentExecutor(AgentExecutorBase):
        def start(self, engine, tokenizer):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            self.engine, self.tokenizer, self.sessions = engine, tokenizer, {}
            app = FastAPI()

            @app.get("/health")
            async def health():
                return {}

            @app.post("/v1/chat/completions")
            async def complete(request: Request):
                return await self.complete(await request.json())

            threading.Thread(
                target=lambda: uvicorn.run(app, host="127.0.0.1", port=port, log_level="error"),
                daemon=True,
            ).start()
            for _ in range(300):
                try:
                    urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                    break
                except OSError:
                    time.sleep(0.05)
            self.client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="EMPTY")
            servers.append(port)

        async def complete(self, body):
            text = "".join(m["content"] for m in body["messages"])
            session = self.sessions.setdefault(body["session_id"], [])
            done = session[-1][0] + session[-1][1] if session else []
            new = text if not session else " more "
            tokens = done + self.tokenizer.encode(new, add_special_tokens=False)
            params = SamplingParams(max_tokens=body["max_tokens"], temperature=1.0, logprobs=1)
            output = await self.engine.generate(tokens, params)
            out = output.outputs[0]
            session.append((tokens, list(out.token_ids)))
            message = {"role": "assistant", "content": out.text}
            choice = {"index": 0, "message": message, "finish_reason": out.finish_reason}
            return {"id": uuid4().hex, "object": "chat.completion", "created": 0, "model": "m",
                    "choices": [choice]}

        async def execute(
            self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine
        ):
            if not hasattr(self, "client"):
                self.start(llm_engine, hf_tokenizer)
            session = uuid4().hex
            chat = [{"role": "user", "content": prompt}]
            for _ in range(2):
                reply = await self.client.chat.completions.create(
                    model="m", messages=chat, max_tokens=4, extra_body={"session_id": session}
                )
                chat.append({"role": "assistant", "content": reply.choices[0].message.content})
            tokens, completion = self.sessions.pop(session)[-1]
            return {"prompt": prompt, "label": label, "observation_tokens": tokens + completion,
                    "reward": None, "extra_logs": {"servers": len(servers)}}
"""


@pytest.fixture
def file(tmp_path):
    def write(text, name="theirs.py"):
        path = tmp_path / name
        path.write_text(inspect.cleandoc(text))
        return path

    return write


def roll_out(mesh, folder, name, reward):
    """The episodes of two samples to four prompts, twice; and the largest difference to the
    trainer's log-probs."""
    tokenizer, policy = load_tokenizer(folder), make_policy(folder, mesh)
    engine = RolloutEngine(EngineConfig(**ENGINE), folder, mesh, dtype="float32")
    sampling = Sampling(
        max_tokens=6, stop_token_ids=tuple(stop_token_ids(tokenizer, folder)), temperature=1.0
    )
    rows = [{"prompt": f"{i}", "answer": "y"} for i in range(4)]
    prompts = Prompts(rows, tokenizer, DataConfig(), seed=0)
    cfg = EvaluateConfig(
        engine=engine.cfg,
        rollout=RolloutConfig(max_tokens=6),
        env=EnvConfig(name=name, max_turns=4, max_tokens=100, on_error="raise"),
    )
    rewards = make_rewards(RewardConfig(function=reward))
    sampler = Sampler(engine, make_env(name), rewards, prompts, cfg, open_endpoint)
    refit = Refit(RefitConfig(), policy.shards(), policy.parts(), engine, check=True)
    found = []
    for _ in range(2):
        with engine.awake(refit, policy.sleeper):
            trajectories = sampler.collect(prompts, range(4), 2, sampling)
        batches = [pack(trajectories, mesh.device, 1.0, layout=policy.layout)]
        policy.annotate([batches], "old_logprobs")
        differences = [(b.old_logprobs - b.engine_logprobs).abs() * b.loss_mask for b in batches]
        episodes = [
            (
                t.tokens.tolist(),
                t.sampled.tolist(),
                float(t.logprobs.sum()),
                t.reward,
                t.info["env"],
                tokenizer.decode(t.tokens),
            )
            for t in trajectories
        ]
        found.append((episodes, max(d.max().item() for d in differences)))
    sampler.close()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("model") / "model")


def test_an_executor_that_asks_the_engine_itself(file, model):
    name = f"openrlhf:{file(DIRECT)}"
    ((first, mismatch), (second, _)) = ranks(1, roll_out, model, name, "exact")[0]
    assert len(first) == 8 and mismatch < 1e-4
    for tokens, sampled, logprob, reward, info, text in first:
        assert reward == len(tokens) and " again " in text
        assert info["turns"] == 2 and info["scores"] == 0.5 and info["failed"] == 0.0
        assert info["logprob"] == pytest.approx(logprob, rel=1e-5)
        assert 2 <= sum(sampled) <= 6 + 4 and not sampled[0]  # the first one as the run says
    assert first == second  # the same seeds


def test_an_executor_with_a_server_of_its_own(file, model):
    name = f"openrlhf:{file(SERVER)}"
    length = file("def f(prompt, completion, row): return float(len(completion))", "length.py")
    ((first, mismatch), (second, _)) = ranks(1, roll_out, model, name, f"{length}:f")[0]
    assert len(first) == 8 and mismatch < 1e-4
    assert all(" more " in text and info["failed"] == 0 for *_, info, text in first)
    assert len({reward for _, _, _, reward, _, _ in first}) > 1  # of the run's own function
    assert [episode[:4] for episode in first] == [episode[:4] for episode in second]
    # No more than episodes were under way at once, and none for the second round.
    assert max(info["servers"] for *_, info, _ in second) <= 8


# --------------------------------------------------------------------------------------------------
# one episode by hand

ROW = {"prompt": "q", "rendered_prompt": "ab", "answer": "42"}


class Characters:
    """A tokenizer, as far as these executors ask for one."""

    def encode(self, text, **_):
        return [ord(letter) for letter in text]


def answer(tokens):
    return State(
        row=ROW,
        answer="".join(map(chr, tokens)),
        stopped=True,
        turn=0,
        messages=[],
        tokens=tokens,
        logprobs=[-1.0] * len(tokens),
    )


def begin(path):
    env = make_env(f"openrlhf:{path}")()
    assert isinstance(env, OpenRLHFExecutor)
    env.policy = PolicyInfo(tokenizer=Characters(), max_tokens=5, max_length=50, temperature=1.0)
    return env


EXECUTOR = """
    from openrlhf.utils.agent import AgentExecutorBase

    made = []

    class AgentExecutor(AgentExecutorBase):
        def __init__(self):
            made.append(self)

        async def execute(
            self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine
        ):
            tokens = hf_tokenizer.encode(prompt)
            {body}
"""
ASK = "out = (await llm_engine.generate(tokens, sampling_params)).outputs[0]"


def play(env, *answers):
    async def go():
        try:
            first = await env.reset(ROW)
            return first, [await env.step(answer(tokens)) for tokens in answers]
        finally:
            await env.close()

    return asyncio.run(go())


def test_executors_are_used_again(file):
    path = file(EXECUTOR.format(body=ASK + "; return {'reward': len(made), 'truncated': True}"))
    for _ in range(3):
        first, [result] = play(begin(path), [99])
        assert first == [97, 98] and result.done and result.truncated and result.reward == 1.0


WRONG = {
    "no call": ("return {'reward': 1.0}", "without a call of llm_engine.generate"),
    "another history": (
        ASK + "; tokens = [1] + tokens; " + ASK,
        "does not continue the tokens of the one before",
    ),
    "nothing new": (
        ASK + "; tokens = tokens + out.token_ids; " + ASK,
        "does not continue the tokens of the one before",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_an_executor_must_not_do(file, name):
    body, message = WRONG[name]
    with pytest.raises(UserError, match=message):
        play(begin(file(EXECUTOR.format(body=body))), [99])


def test_what_an_executor_raises_is_raised(file):
    with pytest.raises(ZeroDivisionError):
        play(begin(file(EXECUTOR.format(body=ASK + "; return 1 / 0"))), [99])
    with pytest.raises(ZeroDivisionError):
        play(begin(file(EXECUTOR.format(body="return 1 / 0"), "other.py")))


def test_a_file_with_an_agent_instance_has_its_episodes_run_here(file):
    path = file("""
        from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

        class AgentInstance(AgentInstanceBase):
            pass

        class AgentExecutor(MultiTurnAgentExecutor):
            def __init__(self):
                super().__init__(AgentInstance)
    """)
    assert isinstance(make_env(f"openrlhf:{path}")(), OpenRLHF)
    with pytest.raises(UserError, match="has no function AgentInstance"):
        make_env(f"openrlhf:{file('x = 1', 'empty.py')}")
