"""What was written for others runs here as it is: files for OpenRLHF, rewards of TRL, environments
of verifiers and servers of OpenEnv."""

import asyncio
import inspect
import json
import math
import signal
import socket
import sys
import threading
import time

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
from minirl.data.sources import open_source
from minirl.data.tokenizer import load_tokenizer, stop_token_ids
from minirl.endpoint import open_endpoint
from minirl.engine.engine import RolloutEngine, Sampling
from minirl.envs import Raw, Session, State
from minirl.envs.registry import make_env
from minirl.refit.refit import Refit
from minirl.rewards.loading import make_rewards
from minirl.rollout.sampler import Sampler
from test_rollout import ENGINE, make_policy

ROW = {"prompt": "q", "rendered_prompt": "<|user|>q<|end|>", "answer": "42", "label": "42"}
CHAT = {**ROW, "prompt": [{"role": "user", "content": "q"}]}


@pytest.fixture
def file(tmp_path):
    """Writes a Python file and returns its path."""

    def write(text, name="theirs.py"):
        path = tmp_path / name
        path.write_text(inspect.cleandoc(text))
        return path

    return write


def state(answer, row=ROW, **other):
    return State(
        **{"row": row, "answer": answer, "stopped": True, "turn": 0, "messages": [], **other}
    )


# --------------------------------------------------------------------------------------------------
# OpenRLHF: rewards


@pytest.mark.parametrize(
    "returned",
    [
        "r",
        "r.tolist()",
        "{'rewards': r, 'scores': r, 'extra_logs': {'length': r}}",
        "{'rewards': r[0]}",
        "{'rewards': r, 'extra_logs': None}",
    ],
)
def test_openrlhf_reward_file(file, returned):
    path = file(f"""
        import torch

        def reward_func(queries, prompts, labels, **kwargs):
            assert len(queries) == len(prompts) == len(labels) == 1 and not kwargs
            triples = zip(queries, prompts, labels)
            r = torch.tensor([float(q[len(p):] == str(y)) for q, p, y in triples])
            return {returned}
    """)
    rewards = make_rewards(RewardConfig(function=f"openrlhf:{path}"))
    assert (rewards(ROW, "42"), rewards(ROW, "43")) == (1.0, 0.0)
    # As the other prefixes name a function, too.
    named = make_rewards(RewardConfig(function=f"openrlhf:{path}:reward_func"))
    assert named(ROW, "42") == 1.0


def test_openrlhf_reward_file_that_fails_is_told(file):
    with pytest.raises(UserError, match="has no function reward_func"):
        make_rewards(RewardConfig(function=f"openrlhf:{file('x = 1')}"))
    with pytest.raises(UserError, match="no file none.py"):
        make_rewards(RewardConfig(function="openrlhf:none.py"))
    with pytest.raises(UserError, match="raised KeyError: 'rewards'"):
        path = file("def reward_func(queries, prompts, labels): return {}", "other.py")
        make_rewards(RewardConfig(function=f"openrlhf:{path}"))(ROW, "")


# --------------------------------------------------------------------------------------------------
# OpenRLHF: agents

AGENT = """
    import torch
    from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

    class AgentInstance(AgentInstanceBase):
        {init}
            self.steps = 0

        async def reset(self, states, **kwargs):
            return {{"observation": states["observation"] + "Think."}}

        async def step(self, states, **kwargs):
            self.steps += 1
            done = self.steps == 2
            right = torch.tensor(float(states["action_text"] == states["label"]))
            feedback = "" if done else "\\n[again]\\n"
            read = torch.tensor(len(states["observation_text"]))
            return {{"rewards": right, "scores": right, "environment_feedback": feedback,
                     "done": done, "sampling_params": {sampling}, "extra_logs": {{"read": read}}}}

    class AgentExecutor(MultiTurnAgentExecutor):
        def __init__(self):
            super().__init__(AgentInstance)
"""


@pytest.mark.parametrize(
    "init", ["def __init__(self, *args, **kwargs):", "async def __init__(self, *args, **kwargs):"]
)
def test_openrlhf_agent_file(file, init):
    path = file(AGENT.format(init=init, sampling='states.get("sampling_params", None)'))
    make = make_env(f"openrlhf:{path}")
    first, second = make(), make()

    async def play(env, answers):
        text = await env.reset(ROW)
        results = [await env.step(state(answer)) for answer in answers]
        return text, results

    text, (one, two) = asyncio.run(play(first, ["41", "42"]))
    assert isinstance(text, Raw) and text == "<|user|>q<|end|>Think."
    assert isinstance(one.observation, Raw) and one.observation == "\n[again]\n"
    assert (one.reward, one.done, one.info) == (0.0, False, {"scores": 0.0, "read": len(text)})
    assert (two.reward, two.done, two.info) == (
        1.0,
        True,
        {"scores": 1.0, "read": len(text + "41\n[again]\n")},
    )
    assert asyncio.run(play(second, ["42"]))[1][0].done is False  # an instance an episode
    assert first.agent_class is second.agent_class  # and the file is loaded once
    assert not [
        name for name in sys.modules if name.split(".")[0] == "openrlhf"
    ]  # the stand-in for the package is gone


def test_openrlhf_agent_that_sets_sampling_is_refused(file):
    env = make_env(
        f"openrlhf:{file(AGENT.format(init='def __init__(self):', sampling='object()'))}"
    )()
    asyncio.run(env.reset(ROW))
    with pytest.raises(UserError, match="sampling belongs to the run"):
        asyncio.run(env.step(state("42")))


def test_openrlhf_executor_that_leads_its_episodes_is_refused(file):
    executor = "class AgentExecutor: execute = print"
    with pytest.raises(UserError, match="an `execute` of its own, and minirl runs the episodes"):
        make_env(f"openrlhf:{file(executor)}")
    with pytest.raises(UserError, match="has no function AgentInstance"):
        make_env(f"openrlhf:{file('x = 1', 'empty.py')}")


def test_openrlhf_file_that_needs_the_package_is_told(file):
    with pytest.raises(
        UserError, match="does not import: ModuleNotFoundError: No module named 'openrlhf.models'"
    ):
        make_env(f"openrlhf:{file('import openrlhf.models')}")


# --------------------------------------------------------------------------------------------------
# TRL


def test_trl_rewards_get_columns_as_lists(file):
    path = file("""
        def texts(prompts, completions, answer, **kwargs):
            return [float(c == a) + len(p) for p, c, a in zip(prompts, completions, answer)]

        def chats(completions, label, **kwargs):
            assert "prompt" not in kwargs and "rendered_prompt" not in kwargs
            pairs = zip(completions, label)
            return [float(c[0]["content"] == y and c[0]["role"] == "assistant") for c, y in pairs]

        async def later(completions, **kwargs):
            return [0.5 for _ in completions]

        def none(completions, **kwargs):
            return [None]

        def two(completions, **kwargs):
            return [0.0, 1.0]
    """)
    assert make_rewards(RewardConfig(function=f"trl:{path}:texts"))(ROW, "42") == 2.0
    assert make_rewards(RewardConfig(function=f"trl:{path}:chats"))(CHAT, "42") == 1.0
    assert make_rewards(RewardConfig(function=f"trl:{path}:later"))(ROW, "42") == 0.5
    assert (
        make_rewards(RewardConfig(function=f"trl:{path}:none"))(ROW, "42") == 0.0
    )  # does not apply
    with pytest.raises(UserError, match="raised ValueError: it returned 2 values"):
        make_rewards(RewardConfig(function=f"trl:{path}:two"))(ROW, "42")
    with pytest.raises(UserError, match="has no function three"):
        make_rewards(RewardConfig(function=f"trl:{path}:three"))


def test_trl_rewards_of_the_package(file):
    pytest.importorskip("trl")
    path = file("from trl.rewards import accuracy_reward, think_format_reward")
    format, accuracy = (
        make_rewards(RewardConfig(function=f"trl:{path}:{name}"))
        for name in ("think_format_reward", "accuracy_reward")
    )
    assert [format(CHAT, text) for text in ("<think>\nhm\n</think>\n42", "42")] == [1.0, 0.0]
    row = {**CHAT, "solution": r"$\frac{1}{2}$"}
    assert [
        accuracy(row, text)
        for text in (r"It is \boxed{\frac{1}{2}}.", r"It is \boxed{\frac{1}{3}}.")
    ] == [1.0, 0.0]


# --------------------------------------------------------------------------------------------------
# reasoning-gym


GENERATORS = [
    "basic_arithmetic",
    "chain_sum",
    "spell_backward",
    "word_sorting",
    "countdown",
    "number_sorting",
    "letter_counting",
    "simple_equations",
    "gcd",
    "propositional_logic",
]


@pytest.mark.parametrize("name", GENERATORS)
def test_reasoning_gym_rows_and_their_own_grader(name):
    rows = open_source(f"reasoning_gym:{name}?size=3&seed=7", "data.train").rows
    rewards = make_rewards(RewardConfig(function="reasoning_gym"))
    assert len(rows) == 3 and len({row["prompt"] for row in rows}) == 3
    assert [r["prompt"] for r in rows] != [
        r["prompt"] for r in open_source(f"reasoning_gym:{name}?size=3&seed=8", "data.train").rows
    ]
    for row in rows:
        assert row["answer"] is None or rewards(row, f" {row['answer']}\n") == 1.0
        assert rewards(row, "nonsense") < 0.1


def test_reasoning_gym_has_all_options_of_a_generator():
    [row] = open_source(
        "reasoning_gym:chain_sum?size=1&min_terms=5&max_terms=5&min_digits=1&max_digits=1&allow_negation=false",
        "data.train",
    ).rows
    assert row["metadata"]["num_terms"] == 5 and row["metadata"]["num_digits"] == 1
    with pytest.raises(UserError, match="min_term"):
        open_source("reasoning_gym:chain_sum?min_term=5", "data.train")


# --------------------------------------------------------------------------------------------------
# servers in threads


def serve(app):
    """Its URL, and what stops it."""
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)

    def stop():
        server.should_exit = True
        thread.join()
        listening.close()

    return f"http://127.0.0.1:{listening.getsockname()[1]}", stop


@pytest.fixture
def local(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


# --------------------------------------------------------------------------------------------------
# OpenEnv


@pytest.fixture(scope="module")
def echo():
    """A real OpenEnv server: an environment that echoes, and is done when told so."""
    server = pytest.importorskip("openenv.core.env_server")
    from pydantic import Field

    class Say(server.Action):
        message: str = Field(min_length=1)
        times: int = 1

    class Heard(server.Observation):
        echoed: str
        seed: int | None = None

    class Echo(server.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.heard, self.seed = [], seed
            return Heard(echoed="ready", seed=seed)

        def step(self, action, timeout_s=None, **kwargs):
            if action.message == "fail":
                raise KeyError("broken")
            self.heard.append(action.message * action.times)
            return Heard(
                echoed=" ".join(self.heard),
                seed=self.seed,
                reward=0.5 * len(self.heard),
                done=action.message == "bye",
            )

        @property
        def state(self):
            return server.State(step_count=len(self.heard))

    url, stop = serve(server.create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=16))
    yield url
    stop()


def test_openenv_sessions(echo, local):
    make = make_env(f"openenv:{echo}?action=message&observation=echoed")
    one, two = make(), make()
    assert one.reset(ROW) == [{"role": "user", "content": "q\n\nready"}]
    assert two.reset(CHAT) == [{"role": "user", "content": "q\n\nready"}]
    given = one.step(state("hello"))
    assert (given.observation, given.reward, given.done) == ("hello", 0.5, False)
    assert two.step(state("other")).observation == "other"  # a session of its own
    given = one.step(state("bye"))
    assert (given.observation, given.reward, given.done) == ("hello bye", 1.0, True)
    assert one.step(state("")).observation.startswith(
        "That is not an action: message: String should have at least 1 character"
    )
    with pytest.raises(RuntimeError, match="EXECUTION_ERROR: 'broken'"):
        two.step(state("fail"))
    three = make()
    image = {"type": "image", "image": "data:image/png;base64,AAAA"}
    (message,) = three.reset({"prompt": [{"role": "user", "content": [image]}]})
    assert message["content"] == [image, {"type": "text", "text": "\n\nready"}]
    for env in (one, two, three, make()):
        env.close()


def test_openenv_actions_as_json(echo, local):
    env = make_env(f"openenv:{echo}")()
    [message] = env.reset({**ROW, "reset": {"seed": 3}})
    assert json.loads(message["content"].removeprefix("q\n\n")) == {"echoed": "ready", "seed": 3}
    given = env.step(state('I say\n```json\n{"message": "a", "times": 2}\n```'))
    assert json.loads(given.observation)["echoed"] == "aa"
    assert "times" in env.step(state('{"message": "a", "times": "often"}')).observation
    assert "valid dictionary" in env.step(state("[1]")).observation
    assert env.step(state("hello")).reward == 0.0  # nor is this an action, and nothing was heard
    assert "not an action" in env.step(state("[" * 3000)).observation
    assert "not an action" in env.step(state('{"message": "\\ud800"}')).observation
    assert json.loads(env.step(state('{"message": "b"}')).observation)["echoed"] == "aa b"
    env.close()


def test_openenv_server_that_is_full_or_absent_is_told(echo, local, monkeypatch):
    envs = [make_env(f"openenv:{echo}?action=message")() for _ in range(17)]
    for env in envs[:16]:
        env.reset(ROW)
    with pytest.raises(RuntimeError, match="CAPACITY_REACHED: .*; start .* max_concurrent_envs"):
        envs[16].reset(ROW)
    for env in envs:
        env.close()
    with monkeypatch.context() as patched:
        patched.setattr(envs[0], "url", "http://127.0.0.1:1")
        with pytest.raises(ConnectionRefusedError):  # `env.on_error` says what it means
            envs[0].reset(ROW)
    with pytest.raises(UserError, match="its observations have no 'text'; they have echoed, seed"):
        make_env(f"openenv:{echo}?observation=text")().reset(ROW)
    with pytest.raises(UserError, match="no session with an OpenEnv server there"):
        make_env("openenv:http://127.0.0.1:1")
    with pytest.raises(UserError, match="no session with an OpenEnv server there"):
        make_env("openenv:localhost")


# --------------------------------------------------------------------------------------------------
# in a rollout


def rollout_program(mesh, folder, names, reward):
    """Text with special tokens, reward, truncated of each episode, by environment; and the largest
    difference to the trainer's log-probs."""
    tokenizer, policy = load_tokenizer(folder), make_policy(folder, mesh)
    engine = RolloutEngine(EngineConfig(**ENGINE), folder, mesh, dtype="float32")
    sampling = Sampling(
        max_tokens=6, stop_token_ids=tuple(stop_token_ids(tokenizer, folder)), temperature=1.0
    )
    prompts = Prompts(
        [{"prompt": f"{i}", "answer": "y"} for i in range(4)], tokenizer, DataConfig(), seed=0
    )
    found, mismatch = {}, 0.0
    for name in names:
        cfg = EvaluateConfig(
            engine=engine.cfg,
            rollout=RolloutConfig(max_tokens=6),
            env=EnvConfig(name=name, max_turns=3, max_tokens=100, on_error="raise"),
        )
        sampler = Sampler(
            engine,
            make_env(name),
            make_rewards(RewardConfig(function=reward)),
            prompts,
            cfg,
            open_endpoint,
        )
        with engine.awake(
            Refit(RefitConfig(), policy.shards(), policy.parts(), engine, check=True),
            policy.sleeper,
        ):
            trajectories = sampler.collect(prompts, range(4), 2, sampling)
        batches = [pack(trajectories, mesh.device, 1.0, layout=policy.layout)]
        policy.annotate([batches], "old_logprobs")
        mismatch = max(
            mismatch,
            *(
                ((b.old_logprobs - b.engine_logprobs).abs() * b.loss_mask).max().item()
                for b in batches
            ),
        )
        found[name] = [(tokenizer.decode(t.tokens), t.reward, t.info) for t in trajectories]
        sampler.close()
    return found, mismatch


def test_episodes_of_adapters_in_a_rollout(file, tmp_path, request, local):
    agent = f"openrlhf:{file(AGENT.format(init='def __init__(self):', sampling='None'))}"
    single = "single_turn"
    lengths = "def f(completions, answer, **columns): return [float(len(c)) for c in completions]"
    trl = f"trl:{file(lengths, 'trl_reward.py')}:f"
    try:
        served = f"openenv:{request.getfixturevalue('echo')}?action=message&observation=echoed"
        names = [single, agent, served]
    except pytest.skip.Exception:  # its package is not there; the others are
        names = [single, agent]
    [(found, mismatch)] = ranks(1, rollout_program, tiny.make(tmp_path / "model"), names, trl)
    assert mismatch < 1e-4
    assert all(reward == len(info["completion"]) for _, reward, info in found[single])
    assert len(found[agent]) == 8 and all(
        info["env"]["turns"] == 2 and not info["error"] for _, _, info in found[agent]
    )
    assert all(
        text.count("Think.") == 1 and text.count("\n[again]\n") == 1 for text, _, _ in found[agent]
    )
    for text, reward, info in found[names[2]] if len(names) > 2 else ():
        assert (
            "\n\nready" in text and not info["error"] and info["env"]["truncated"] == 1.0
        )  # by max_turns or the context
        assert (
            reward in [0.25 * heard * (heard + 1) for heard in range(int(info["env"]["turns"]) + 1)]
            and info["env"]["turns"] > 1
        )


# --------------------------------------------------------------------------------------------------
# verifiers


@pytest.fixture
def spelling(file, tmp_path, monkeypatch):
    """The name of an environment of verifiers with two turns."""
    pytest.importorskip("verifiers")
    file(
        """
        import verifiers as vf
        from datasets import Dataset

        class Twice(vf.MultiTurnEnv):
            async def env_response(self, messages, state, **kwargs):
                return [{"role": "user", "content": "Sure?"}]

        def load_environment(word="cat", size=2, group=False, fails=False):
            def right(completion, answer, **kwargs):
                if fails:
                    raise vf.InfraError("no box")
                return 1.0 if completion[-1]["content"] == answer else 0.25

            async def together(completions, **kwargs):
                return [0.0 for _ in completions]

            rows = Dataset.from_list([
                {"question": f"Spell {word} {i}", "answer": word.upper(), "info": {"i": i}}
                for i in range(size)
            ])
            rubric = vf.Rubric(funcs=[together if group else right], weights=[1.0])
            return Twice(dataset=rows, eval_dataset=rows.select([0]), system_prompt="Spell.",
                         rubric=rubric, max_turns=2)
    """,
        "spelling_env.py",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "spelling-env"
    sys.modules.pop("spelling_env", None)


@pytest.fixture
def endpoint(local):
    """A stand-in for the endpoint: `answers` are what it says in turn, `asked` what it heard."""
    from fastapi import FastAPI, Request

    app, asked, answers = FastAPI(), [], []

    @app.post("/v1/chat/completions")
    async def completions(request: Request):
        asked.append((request.headers["authorization"], await request.json()))
        return {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": answers.pop(0)},
                }
            ],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }

    url, stop = serve(app)
    yield Session(base_url=f"{url}/v1", api_key="key-1", model="policy"), asked, answers
    stop()


def test_verifiers_environment_leads_an_episode(spelling, endpoint):
    session, asked, answers = endpoint
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    env = make_env(f"verifiers:{spelling}?word=dog&size=3")()
    rows = env.environment.get_dataset()
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    row = rows[1]
    assert (
        row["prompt"][-1] == {"role": "user", "content": "Spell dog 1"} and row["answer"] == "DOG"
    )

    answers[:] = ["DOC", "DOG", "DOG", "DOC"]
    results = [asyncio.run(env.run({**row, "data_source": "x"}, session)) for _ in range(2)]
    assert [(r.reward, r.truncated) for r in results] == [(1.0, False), (0.25, False)]
    assert results[0].info["right"] == 1.0 and math.isclose(results[1].info["num_turns"], 2)
    assert {key for key, _ in asked} == {"Bearer key-1"} and {
        body["model"] for _, body in asked
    } == {"policy"}
    said = [(m["role"], m["content"]) for m in asked[1][1]["messages"]]
    assert said == [
        ("system", "Spell."),
        ("user", "Spell dog 1"),
        ("assistant", "DOC"),
        ("user", "Sure?"),
    ]


def test_verifiers_failures_are_told(spelling, endpoint):
    with pytest.raises(UserError, match="its rubric compares the answers of a group"):
        make_env(f"verifiers:{spelling}?group=true")
    with pytest.raises(UserError, match="verifiers:none-there: .*none-there"):
        make_env("verifiers:none-there")
    with pytest.raises(UserError, match="verifiers:spelling-env: .*colour"):
        make_env(f"verifiers:{spelling}?colour=red")
    env = make_env(f"verifiers:{spelling}")()
    with pytest.raises(
        RuntimeError, match="verifiers: "
    ):  # the endpoint has no answer left and fails
        asyncio.run(env.run(env.environment.get_dataset()[0], endpoint[0]))
