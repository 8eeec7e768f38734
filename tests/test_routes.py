"""Router replay: the engine's choices of experts travel with the tokens, and the trainer's routers
take them."""

import asyncio
import contextlib
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeTopKRouter

import tiny
from harness import ranks
from minirl.algo import losses
from minirl.base.errors import UserError
from minirl.base.oversight import Oversight
from minirl.batch import attention_plan
from minirl.batch.exchange import exchange
from minirl.batch.packing import LIVE, pack
from minirl.config.policy import ParallelConfig, PolicyConfig, RouterConfig
from minirl.config.rl import AlgoConfig, RLConfig
from minirl.config.shared import EngineConfig
from minirl.engine.engine import EngineOutput, RolloutEngine, Sampling
from minirl.engine.loop import Completion, EngineLoop, Request, extended
from minirl.engine.routed_experts import narrow
from minirl.model import build, families
from minirl.rollout import records
from minirl.rollout.conversation import Prompt, Segment
from minirl.run.inputs import check_routers
from minirl.train.policy import Policy
from minirl.types.packed import Trajectory
from test_gradients import batches_of, exact_norm, trajectories, worst

LAYERS, EXPERTS, TOP_K = 2, 4, 2
MIXTURES = [name for name, family in families.FAMILIES.items() if family.experts]
MESHES = {
    "dp 2": (2, ParallelConfig()),
    "tp 2": (2, ParallelConfig(tensor=2)),
    "cp 2": (2, ParallelConfig(context=2)),
    "cp 2, ring": (2, ParallelConfig(context=2, context_engine="ring")),
}


def routed(given: list[Trajectory], seed: int = 0, layers: int = LAYERS) -> list[Trajectory]:
    """With random routes. Siblings have the same of a shared prompt; some tokens have none."""
    rng = np.random.default_rng(seed)
    of_prompt: dict[tuple, np.ndarray] = {}
    for t in given:
        length = len(t.tokens)
        num = length - 1 if t.episode else length // 2
        choice = np.argsort(rng.random((length, layers, EXPERTS)), axis=-1)[..., :TOP_K]
        prompt = t.tokens[: int(t.sampled.argmax())]
        shared = of_prompt.setdefault((t.group, prompt.tobytes()), choice)
        choice[: len(prompt)] = shared[: len(prompt)]
        t.routes = narrow(choice[: max(num, len(prompt))], EXPERTS)
    return given


# --------------------------------------------------------------------------------------------------
# with the tokens


def test_a_token_keeps_its_first_route():
    first = np.full((3, 1, 1), 1, np.uint8)
    later = np.full((5, 1, 1), 2, np.uint8)
    assert extended(None, later) is later
    assert extended(first, later).ravel().tolist() == [1, 1, 1, 2, 2]
    assert extended(later, first).ravel().tolist() == [2] * 5


def test_numbers_of_experts_are_as_small_as_they_can_be():
    assert narrow(np.array([255]), 256).dtype == np.uint8
    assert narrow(np.array([256]), 257).tolist() == [256]


def test_rows_have_the_routes_of_their_input_tokens():
    """Of a shared prompt, whose last token each sibling has itself; and none behind the last."""
    one, two = routed([t for t in trajectories() if t.group == 5])
    plain = dataclasses.replace(two, group=6, tokens=two.tokens + 1, routes=None)
    batch = pack([one, two, plain], torch.device("cpu"))
    assert batch.routes.dtype == torch.int16 and batch.routes.shape[1:] == (LAYERS, TOP_K)
    num_prompt = int(one.sampled.argmax())
    parts = batch.routes.split(batch.sequences.lengths)
    assert len(parts) == 4 and len(parts[0]) == num_prompt - 1
    assert np.array_equal(parts[0], one.routes[: num_prompt - 1])
    of_sibling = dict(zip(batch.sequences.ids[1:], parts[1:], strict=True))
    for t in (one, two):
        part = of_sibling[t.group, t.episode, t.segment].numpy()
        known = t.routes[num_prompt - 1 : len(t.tokens) - 1]
        assert np.array_equal(part[: len(known)], known)
        assert (part[len(known) :] == LIVE).all()
    assert (of_sibling[6, 1, 0] == LIVE).all()
    assert pack([plain], torch.device("cpu")).routes is None


def send(mesh, dtype):
    own = routed(trajectories())[mesh.rank :: 2]
    for t in own:
        t.routes = t.routes.astype(dtype)
        t.turn_rewards = None if t.group % 3 else t.turn_rewards
    own[0].routes = None
    (micros,) = exchange(own, mesh, 100)
    received = sum(micros, [])
    return [(t.group, t.episode, t.sampled, t.logprobs, t.routes) for t in received]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_routes_travel_to_the_ranks_that_train(dtype):
    expected = {(t.group, t.episode): t for t in routed(trajectories())}
    received = sum(ranks(2, send, dtype), [])
    assert len(received) == len(expected)
    num_without = 0
    for group, episode, sampled, logprobs, found in received:
        t = expected[group, episode]
        assert np.array_equal(sampled, t.sampled) and np.array_equal(logprobs, t.logprobs)
        if found is None:
            num_without += 1
            continue
        assert found.dtype == dtype and np.array_equal(found, t.routes)
    assert num_without == 2


def test_a_file_of_trajectories_has_their_routes(tmp_path):
    t = routed(trajectories())[1]
    t.versions = np.zeros(len(t.tokens), np.int32)
    line = json.dumps(records.to_record(t), default=np.ndarray.tolist)
    again = records.from_record(json.loads(line))
    assert again.routes.dtype == np.uint8 and np.array_equal(again.routes, t.routes)
    for bad in ({"dtype": "object"}, {"shape": [1, 2]}, {"data": "AAA="}):
        record = json.loads(line)
        record["routes"] |= bad
        with pytest.raises(ValueError):
            records.from_record(record)
    t.routes = None
    line = json.dumps(records.to_record(t), default=np.ndarray.tolist)
    assert records.from_record(json.loads(line)).routes is None


class Tokenizer:
    """Decodes a token as its number."""

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(f"{token} " for token in tokens)


def numbered(first: int, last: int) -> np.ndarray:
    """Routes that are the positions from 0 on; those before `first` are 99."""
    values = np.arange(last, dtype=np.uint8)
    values[:first] = 99
    return values[:, None, None]


def test_the_turns_of_a_conversation_append_their_routes():
    """Each request computes everything before it again; a part behind a stop string is dropped."""
    segment = Segment()
    segment.append_prompt(Prompt([5] * 4, "", []))
    answer = Completion([6] * 3, [-1.0] * 3, False, [0] * 3, routes=numbered(0, 9))
    segment.append_completion(answer, Tokenizer())
    assert len(segment.routes) == 7  # of 10 tokens, 3 are kept behind the prompt
    segment.routes = segment.routes[:6]  # as if nothing had been dropped
    segment.append_prompt(Prompt([7] * 2, "", []))
    answer = Completion([8] * 2, [-1.0] * 2, True, [1] * 2, routes=numbered(6, 10))
    segment.append_completion(answer, Tokenizer())
    assert segment.routes.ravel().tolist() == list(range(10))


# --------------------------------------------------------------------------------------------------
# in the trainer


def chosen_by(policy: Policy, batch) -> torch.Tensor:
    """The experts that the routers take in a forward, int64 [M, T, k], and its log-probs."""
    taken = {}

    def count(number, logits, experts, *_):
        taken[number] = experts.clone()

    routing = policy.model.routing
    routing.count = count
    routing._is_counting = True
    policy.annotate([[batch]], "old_logprobs")
    routing._is_counting = False
    del routing.count
    return torch.stack([taken[number] for number in sorted(taken)])


def gradients_of(policy, batch):
    policy.model(batch)[0].sum().backward()
    grads = {
        name: p.grad.full_tensor().clone()
        for name, p in policy.parameters().items()
        if p.grad is not None
    }
    policy.model.zero_grad()
    return grads


def replay_own(mesh, folder, dtype, checkpointing):
    cfg = PolicyConfig(dtype=dtype, activation_checkpointing=checkpointing)
    policy = Policy(cfg, folder, mesh)
    (batch,) = batches_of([trajectories()], policy)
    own = chosen_by(policy, batch)
    plain = batch.old_logprobs
    grads = gradients_of(policy, batch)

    policy.replays_routes = True
    batch.routes = own.transpose(0, 1).to(torch.int16)
    policy.annotate([[batch]], "old_logprobs")
    assert torch.equal(batch.old_logprobs, plain)
    again = gradients_of(policy, batch)
    assert all(torch.equal(grads[name], again[name]) for name in grads)

    # Half of the rows elsewhere, the others by themselves.
    other = (own + 1) % policy.model.routing.num_experts
    batch.routes = other.transpose(0, 1).to(torch.int16)
    batch.routes[::2] = LIVE
    taken = chosen_by(policy, batch)
    assert torch.equal(taken[:, 1::2], other[:, 1::2])
    assert torch.equal(taken[0, ::2], own[0, ::2])
    assert not torch.equal(batch.old_logprobs, plain)
    policy.replays_routes = False
    policy.annotate([[batch]], "old_logprobs")
    assert torch.equal(batch.old_logprobs, plain)


@pytest.mark.parametrize("family", MIXTURES)
def test_replaying_its_own_choices_changes_no_bit(tmp_path, family):
    folder = tiny.make(tmp_path / "model", family)
    checkpointing = "selective" if family == "qwen3_moe" else "full"
    ranks(1, replay_own, folder, "bfloat16", checkpointing)


def exact_router(self, hidden):
    """The library's rounds to float32 inside, in the backward, too, where siblings' gradients of a
    shared prompt are added before or behind it."""
    logits = torch.nn.functional.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
    weights, experts = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
    return logits, weights / weights.sum(-1, keepdim=True), experts


def step(mesh, folder, settings, budget):
    """The gradient, metrics and weights of an optimizer step of all `trajectories`."""
    attention_plan.SHORT_PROMPT = 2
    Qwen3MoeRMSNorm.forward = exact_norm
    Qwen3MoeTopKRouter.forward = exact_router
    cfg = PolicyConfig(dtype="float64", max_grad_norm=0.0, **settings)
    sequence = mesh.tensor.size() > 1
    policy = Policy(cfg, folder, mesh, sequence_parallel=sequence)
    policy.replays_routes = True
    given = trajectories()
    own = routed(given)[mesh.rank :: mesh.world_size]
    # The oracle: each sequence alone, nothing shared.
    (micros,) = exchange(own, mesh, budget) if budget else [[[t] for t in own]]
    batches = batches_of(micros, policy, 0.7)
    grads = {}
    take = policy.optimizer.step

    def keep_gradients():
        grads.update(
            {n: p.grad.full_tensor() for n, p in policy.shards().items() if p.grad is not None}
        )
        take()

    policy.optimizer.step = keep_gradients
    metrics = policy.update(batches, losses.policy(AlgoConfig(), 20), lr=1e-3)
    buffers = {n: b.clone() for n, b in policy.shards().items() if n.endswith("_bias")}
    return {"grads": grads, "metrics": metrics, "buffers": buffers, "num_micro": len(batches)}


BALANCED = {
    "activation_checkpointing": "full",
    "router": RouterConfig(aux_loss_coef=0.3, z_loss_coef=0.2),
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tiny.make(
        tmp_path_factory.mktemp("routes") / "model", "qwen3_moe", dtype=torch.float64
    )
    (expected,) = ranks(1, step, folder, BALANCED, 0)
    return folder, expected


@pytest.mark.parametrize("mesh", MESHES)
def test_replay_and_balance_on_every_axis_are_those_of_one_process(one_process, mesh):
    folder, expected = one_process
    world, parallel = MESHES[mesh]
    for found in ranks(world, step, folder, BALANCED, 60 // parallel.context, parallel=parallel):
        assert found["num_micro"] >= 2
        assert worst(found["grads"], expected["grads"]) < 1e-12
        assert expected["metrics"].keys() == found["metrics"].keys()
        for name, value in expected["metrics"].items():
            assert found["metrics"][name] == pytest.approx(value, rel=1e-11), name
    assert 0.3 < expected["metrics"]["router_replayed"] < 1
    assert 0 < expected["metrics"]["router_changed"] <= 1


def test_replay_is_refused_for_a_model_without_routers(tmp_path):
    dense = build.read_config(tiny.make(tmp_path / "dense", "qwen3"))
    mixture = build.read_config(tiny.make(tmp_path / "mixture", "olmoe"))
    cfg = RLConfig(algo=AlgoConfig(router_replay=True))
    with pytest.raises(UserError, match="policy.model = .* is of family qwen3, which has none"):
        check_routers(cfg, dense, dense)
    check_routers(cfg, mixture, dense)


# --------------------------------------------------------------------------------------------------
# from the engine


def outputs_of(engine: RolloutEngine, num_steps: int = 10**6) -> dict[str, EngineOutput]:
    found = {}
    for _ in range(num_steps):
        if not engine.llm.llm_engine.has_unfinished_requests():
            break
        found |= {output.request_id: output for output in engine.step()}
    return found


def as_trajectory(prompt: list[int], output: EngineOutput) -> Trajectory:
    tokens = np.array(prompt + output.tokens, np.int32)
    known = np.zeros(len(tokens), np.float32)
    known[len(prompt) :] = output.logprobs
    return Trajectory(
        tokens=tokens,
        sampled=np.arange(len(tokens)) >= len(prompt),
        logprobs=known,
        routes=output.routes,
        group=int(output.request_id),
    )


def record(mesh, folder):
    """In float32, where engine and trainer choose alike: routes that are mixed up would show."""
    # Room for about 640 tokens, and 16 requests of 100: some are preempted.
    cfg = EngineConfig(max_model_len=128, kv_cache_gb=640 * 1024 / 2**30)
    engine = RolloutEngine(cfg, folder, mesh, dtype="float32", load_weights=True, routes=True)
    policy = Policy(PolicyConfig(dtype="float32"), folder, mesh)
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request
    num_preempted = 0

    def counting(request, *others, **options):
        nonlocal num_preempted
        num_preempted += 1
        preempt(request, *others, **options)

    scheduler._preempt_request = counting
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 250, 40).tolist() for _ in range(4)]
    sampling = Sampling(max_tokens=60, stop_token_ids=(2,))
    for i in range(16):
        engine.add(str(i), prompts[i % 4], sampling, 100 + i, stream=i == 3)
    streamed: list[EngineOutput] = []
    found = {}
    for number in range(10**6):
        if not engine.llm.llm_engine.has_unfinished_requests():
            break
        for output in engine.step():
            if output.request_id == "3":
                streamed.append(output)
            else:
                found[output.request_id] = output
        if number == 20:
            early = {output.request_id: output for output in engine.unfinished()}
            engine.abort(["5"])
    assert num_preempted
    tokens = []
    logprobs = []
    for output in streamed:
        tokens += output.tokens
        logprobs += output.logprobs
    found["3"] = streamed[-1]._replace(tokens=tokens, logprobs=logprobs)

    # What is said of a request before its end is the beginning of what is said then.
    assert "5" in early and "5" not in found and len(found) == 15
    num_compared = 0
    for name, output in early.items():
        if output.routes is not None and name in found:
            assert len(output.routes) == 40 + len(output.tokens) - 1
            assert np.array_equal(output.routes, found[name].routes[: len(output.routes)])
            num_compared += 1
    assert num_compared

    # The same choices as the trainer's own, of all tokens but the last.
    num_routes = 0
    for name, output in found.items():
        t = as_trajectory(prompts[int(name) % 4], output)
        assert t.routes.dtype == np.uint8
        assert t.routes.shape == (len(t.tokens) - 1, LAYERS, TOP_K)
        batch = pack([t], mesh.device, layout=policy.layout)
        own = chosen_by(policy, batch).transpose(0, 1).numpy()
        assert np.array_equal(np.sort(own, -1), np.sort(t.routes, -1)), name
        num_routes += len(t.routes)
    assert not engine.routes._internal_ids
    engine.close()
    return num_routes


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_the_engine_says_which_experts_it_took(tmp_path, family):
    """With prompts that share the cache, preemptions, streams, and requests that are aborted."""
    folder = tiny.make(tmp_path / "model", family)
    (num_routes,) = ranks(1, record, folder)
    assert num_routes > 1000


class InterruptedEngine:
    """Answers a request in two parts, of which the second begins behind the first."""

    is_leader = True
    vision = None

    def __init__(self):
        self.added = []
        self.parts = [
            EngineOutput("0", [6, 6], [-1.0, -1.0], None, [], numbered(0, 5)),
            EngineOutput("1", [7, 7, 7], [-1.0] * 3, "stop", [], numbered(5, 8)),
        ]

    def add(self, *arguments):
        self.added.append(arguments)

    def abort(self, request_ids):
        pass

    def step(self):
        return [self.parts.pop()] if len(self.added) > 1 else []

    def unfinished(self):
        return [self.parts.pop(0)] if len(self.parts) > 1 else []

    def tensor_parallel_broadcast(self, orders):
        return orders


def test_runs_of_the_loop_leave_no_timers():
    """Each would start again in the next run, for ever, and they would become more."""
    loop = EngineLoop(InterruptedEngine(), repeatable=False, turn_seconds=0.02)
    for _ in range(3):
        loop.run(asyncio.sleep(0.02))
        assert all(timer.cancelled() for timer in loop.loop._scheduled)
    loop.close()


@pytest.mark.parametrize("seconds", [30.0, 0.3])
def test_what_an_agent_is_given_does_not_run_out_while_it_gets_no_completions(seconds):
    """Neither in training, when the loop stands still, nor in an evaluation, which runs it."""
    watch = Oversight()
    loop = EngineLoop(InterruptedEngine(), repeatable=False, watch=watch)
    answered = asyncio.Event()
    timeouts = []

    async def call():
        timeout = asyncio.timeout(seconds)
        timeouts.append(timeout)
        with contextlib.suppress(TimeoutError):
            async with watch.limit_call(timeout, 2 * seconds, lambda: "too slow"):
                await answered.wait()

    async def train_again():
        loop.resume()
        if seconds > 1:
            assert seconds - 5 < timeouts[0].when() - loop.loop.time() < seconds
            answered.set()
        await task

    task = loop.loop.create_task(call())
    loop.run(asyncio.sleep(0.01))
    loop.run(asyncio.sleep(0.4))
    (timeout,) = timeouts
    assert not task.done() and timeout.when() is None
    assert [limit.deadline for limit in watch.limits] == [math.inf]
    loop.run(train_again())
    assert timeout.expired() == (seconds < 1)
    assert watch.limits == []
    loop.close()


def test_a_request_that_goes_on_in_the_next_rollout_keeps_its_routes():
    loop = EngineLoop(InterruptedEngine(), repeatable=False)
    request = Request(
        tokens=[5] * 4,
        sampling=Sampling(max_tokens=9, stop_token_ids=(2,)),
        seed=0,
        images=(),
        name=(0,),
    )
    task = loop.loop.create_task(loop.generate(request))

    async def leave():
        for _ in range(40):
            await asyncio.sleep(0)

    loop.run(leave())
    assert request.done.routes.ravel().tolist() == list(range(5))
    loop.resume()

    async def wait():
        return await task

    completion = loop.run(wait())
    assert completion.tokens == [6, 6, 7, 7, 7]
    assert completion.routes.ravel().tolist() == list(range(8))
    loop.close()


def pause_streams(mesh, folder):
    """Pause equal requests that are streamed or not, change weights, and let them end; one that is
    streamed ends at a stop string."""
    cfg = EngineConfig(max_model_len=128, kv_cache_gb=0.05)
    engine = RolloutEngine(cfg, folder, mesh, dtype="float32", load_weights=True, routes=True)
    loop = EngineLoop(engine, repeatable=False)
    requests = {}
    for name in ("whole", "streamed", "stopped"):
        sampling = Sampling(max_tokens=40, stop_token_ids=())
        requests[name] = Request(
            tokens=list(range(10, 30)), sampling=sampling, seed=1, images=(), name=(0,)
        )
    tasks = {name: loop.loop.create_task(loop.generate(r)) for name, r in requests.items()}

    def stop():
        if len(requests["stopped"].done.tokens) == 9:
            tasks["stopped"].cancel()

    requests["streamed"].on_tokens = lambda: None
    requests["stopped"].on_tokens = stop

    async def sample(num_tokens):
        while len(requests["streamed"].done.tokens) < num_tokens:
            await asyncio.sleep(0)

    loop.run(sample(15), pauses=False)
    with torch.no_grad():
        loop.change_weights(lambda: engine.model.lm_head.weight.neg_(), 1)
    drawn = {name: r.done.routes for name, r in requests.items()}
    loop.run(sample(25))
    paused = {name: r.done.routes for name, r in requests.items()}
    loop.resume()
    loop.run(sample(40))
    ended = {name: r.done.routes for name, r in requests.items()}
    loop.close()
    engine.close()
    return drawn, paused, ended, tasks["stopped"].cancelled()


def test_streamed_requests_have_the_routes_of_others(tmp_path):
    """However they are interrupted; and what a stop string ends has those of its tokens."""
    folder = tiny.make(tmp_path / "model", "qwen3_moe", tied=False)
    ((*stages, is_cancelled),) = ranks(1, pause_streams, folder)
    for stage in stages:
        assert np.array_equal(stage["streamed"], stage["whole"])
        assert len(stage["stopped"]) == 20 + 9 - 1
        assert np.array_equal(stage["stopped"], stage["whole"][:28])
    lengths = [len(stage["whole"]) for stage in stages]
    assert is_cancelled and lengths[0] < lengths[1] < lengths[2] == 20 + 40 - 1
