"""minirl's scheduler against vLLM's own: the same steps, tokens and log-probs, whatever happens.

Both drive a model that is a formula, in the order of vLLM's engine core: each step after the one
before has been computed, or ahead of it; for the old model runner or the new one, which get
other descriptions of a step. Then the real engine, and two ranks of one.
"""

from collections import Counter, deque
from types import SimpleNamespace

import numpy as np
import pytest

import tiny
from harness import ranks
from minirl.config.shared import EngineConfig
from minirl.engine.engine import RolloutEngine, Sampling

BLOCK = 4
EOS = 3


class Model:
    """Samples by a formula of the request and the position, and checks what it is told."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.known = {}  # Tokens of a request that are known, sampled ones included.
        self.computed = {}
        self.blocks = {}
        self.numbers = {}  # For the formula.

    def run(self, step):
        """The output of a step, for vLLM's scheduler."""
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        for request_id in [*step.finished_req_ids, *(step.preempted_req_ids or ())]:
            self.blocks.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self.known[new.req_id] = len(tokens)
            self.computed[new.req_id] = new.num_computed_tokens
            self.blocks[new.req_id] = [list(group) for group in new.block_ids]
            self.numbers[new.req_id] = new.sampling_params.seed
        cached = step.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            new_blocks = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                self.known[request_id] = len(cached.all_token_ids[request_id])
                self.blocks[request_id] = [list(group) for group in new_blocks]
                self.computed[request_id] = cached.num_computed_tokens[i]
            elif new_blocks:
                for group, more in zip(self.blocks[request_id], new_blocks, strict=True):
                    group += more
            assert self.computed[request_id] == cached.num_computed_tokens[i]
        self.check_blocks(step)
        ids = list(step.num_scheduled_tokens)
        assert step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens.values())
        sampled = []
        for request_id in ids:
            self.computed[request_id] += step.num_scheduled_tokens[request_id]
            tokens = []
            if self.computed[request_id] >= self.known[request_id]:
                tokens = [self.sample(request_id)]
                self.known[request_id] += 1
            sampled.append(tokens)
        columns = np.array([[*tokens, -1][:1] for tokens in sampled]).reshape(len(ids), 1)
        others = np.arange(3)[None] + columns
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=LogprobsLists(
                others, np.float32(others) / -7, np.ones(len(ids), dtype=np.int64)
            ),
        )

    def check_blocks(self, step):
        """The tokens of a step have slots, which no other request writes."""
        written = []
        for request_id, num in step.num_scheduled_tokens.items():
            first = self.computed[request_id]
            for group in self.blocks[request_id]:
                assert len(group) * self.block_size >= first + num
                written += group[
                    first // self.block_size : (first + num - 1) // self.block_size + 1
                ]
        assert len(written) == len(set(written))

    def sample(self, request_id):
        return (self.numbers[request_id] * 37 + self.known[request_id] * 11) % 53


def make_options(folder, ahead, num_blocks, window):
    """The arguments of vLLM's scheduler; with `window`, half the layers see so many tokens."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )

    model = ModelConfig(model=str(folder), dtype="float32", skip_tokenizer_init=True)
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=24,
            max_model_len=40,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
    )
    config.model_config.max_model_len = 40
    config.scheduler_config.async_scheduling = ahead
    layer = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["whole"], FullAttentionSpec(**layer))]
    if window:
        spec = SlidingWindowSpec(**layer, sliding_window=window)
        groups.append(KVCacheGroupSpec(["window"], spec))
    return {
        "vllm_config": config,
        "kv_cache_config": KVCacheConfig(num_blocks, [], groups),
        "structured_output_manager": SimpleNamespace(
            should_advance=lambda request: False, accept_tokens=lambda request, tokens: True
        ),
        "block_size": BLOCK,
        "log_stats": False,
    }


def make_requests(num):
    """Requests of all kinds, with prompts that begin alike, as the engine's client makes them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreRequest

    requests = []
    for i in range(num):
        params = SamplingParams(
            seed=i,
            max_tokens=2 + i * 7 % 33,
            logprobs=2 if i % 8 == 5 else 0,
            flat_logprobs=True,
            stop_token_ids=[i % 5, 17] if i % 3 == 0 else [],
            min_tokens=2 if i % 9 == 0 else 0,
            ignore_eos=i % 4 != 1,
            # With strings to stop at, the text of each step is looked at.
            detokenize=i % 13 == 12,
            stop=["a string"] if i % 13 == 12 else None,
            output_kind=RequestOutputKind.DELTA if i % 11 == 7 else RequestOutputKind.FINAL_ONLY,
        )
        params.update_from_generation_config({}, EOS)
        requests.append(
            EngineCoreRequest(
                request_id=f"{i}-internal",
                external_req_id=str(i),
                prompt_token_ids=[(i % 3) * 20 + place for place in range(1 + i * 5 % 14)],
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
        )
    return requests


class Run:
    """A scheduler, the model, the output processor, and what came of it."""

    def __init__(self, scheduler, ahead):
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.engine.output_processor import OutputProcessor

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = scheduler
        self.ahead = ahead
        self.model = Model(BLOCK)
        self.processor = OutputProcessor(None, log_stats=False)
        scheduler.states = self.processor.request_states  # as RolloutEngine does it
        self.queue = deque()
        self.steps = []
        self.results = []

    def add(self, request):
        from vllm.v1.request import Request

        self.processor.add_request(request, None)
        self.scheduler.add_request(Request.from_engine_core_request(request, self.hasher))

    def abort(self, request_ids):
        from vllm.v1.request import RequestStatus

        self.processor.abort_requests(request_ids, internal=True)
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def step(self):
        """As vLLM's engine core does it, with two steps in its queue if it is ahead."""
        scheduler = self.scheduler
        if scheduler.has_requests():
            step = scheduler.schedule()
            step.num_common_prefix_blocks = []  # For cascade attention, which is off.
            self.steps.append(step)
            self.queue.append((step, self.model.run(step)))
            if self.ahead and len(self.queue) < 2:
                return
        if self.queue:
            step, output = self.queue.popleft()
            for client in scheduler.update_from_output(step, output).values():
                for done in self.processor.process_outputs(client.outputs).request_outputs:
                    (one,) = done.outputs
                    ids, values = one.logprobs.token_ids, one.logprobs.logprobs
                    ends = one.finish_reason, one.stop_reason
                    self.results.append((done.request_id, one.token_ids, ids, values, *ends))

    def unfinished(self):
        """What has been sampled, by request."""
        found = {}
        for key, state in self.processor.request_states.items():
            columns = state.logprobs_processor.logprobs
            lists = state.detokenizer.output_token_ids, columns.token_ids, columns.logprobs
            found[key] = [list(column) for column in lists]
            assert len(columns.start_indices) == len(columns.end_indices) == len(lists[0])
            assert len(columns.token_ids) == len(columns.ranks) == len(columns.decoded_tokens)
        return found


def drive(scheduler, ahead, reset):
    """Requests come, are aborted and go; in the middle all lose their keys, if `reset`."""
    run = Run(scheduler, ahead)
    requests = make_requests(48)
    unfinished = []
    number = 0
    while requests or scheduler.has_unfinished_requests() or run.queue:
        if number % 4 == 0:
            for request in requests[:2]:
                run.add(request)
            requests = requests[2:]
        if number in (25, 57, 58, 90):
            unfinished.append(run.unfinished())
            run.abort([request.request_id for request in scheduler.running[1::3]])
        if reset and number == 70:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        run.step()
        number += 1
        assert number < 2000
    assert not scheduler.requests
    cache = scheduler.kv_cache_manager
    assert cache.block_pool.get_num_free_blocks() == cache.block_pool.num_gpu_blocks - 1
    return run.steps, run.results, unfinished


def compare(mesh, folder, ahead, v2, num_blocks, reset, window):
    """{what: how many} of short steps, all steps, and preemptions."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from minirl.engine.scheduler import make_scheduler

    options = make_options(folder, ahead, num_blocks, window)
    plain = (AsyncScheduler if ahead else Scheduler)(**options)
    short = make_scheduler(**options)
    counts = Counter()
    for name in ("_extend", "_preempt_request"):
        original = getattr(short, name)

        def counted(*args, name=name, original=original, **options):
            counts[name] += 1
            return original(*args, **options)

        setattr(short, name, counted)
    runs = []
    for scheduler in (plain, short):
        scheduler.use_v2_model_runner = v2
        runs.append(drive(scheduler, ahead, reset))
    (steps, *found), (own_steps, *own_found) = runs
    for step, own_step in zip(steps, own_steps, strict=True):
        assert own_step == step
    assert own_found == found
    return Counter(counts, steps=len(steps))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("scheduler") / "model", seed=0)


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_steps_and_tokens_are_those_of_vllms_scheduler(folder, ahead, v2):
    for num_blocks, reset, window in ((200, False, 0), (25, True, 0), (400, False, 8)):
        counts = ranks(1, compare, folder, ahead, v2, num_blocks, reset, window)[0]
        assert counts["_extend"] > counts["steps"] // 8
        assert bool(counts["_preempt_request"]) == reset


def answer(engine, num):
    """What an engine samples: requests with stops, others that are streamed, some aborted."""
    outputs = {}
    unfinished = []
    for i in range(num):
        stops = (7, 11, 13, 17) if i % 3 == 0 else ()
        sampling = Sampling(max_tokens=6 + i * 37 % 50, stop_token_ids=stops, temperature=0.9)
        engine.add(str(i), [5 + i % 4, 60, 100] * (1 + i % 9), sampling, seed=i, stream=i % 10 == 9)
    for number in range(300):
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        if number == 9:
            unfinished = sorted(engine.unfinished())
            engine.abort([str(i) for i in range(2, num, 7)])
    assert not engine.llm.llm_engine.has_unfinished_requests()
    assert engine.llm.reset_prefix_cache()
    return outputs, unfinished


def both_ways(mesh, folder, gib):
    cfg = EngineConfig(
        max_model_len=128,
        max_num_seqs=12,
        kv_cache_gb=gib,
        tensor_parallel_size=mesh.world_size,
    )
    engine = RolloutEngine(cfg, folder, mesh, dtype="float32", load_weights=True)
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    short = answer(engine, 40)
    scheduler.states = {}  # Unknown requests go vLLM's way.
    return short, answer(engine, 40)


@pytest.mark.parametrize(("world", "gib"), [(1, 0.02), (1, 0.0006), (2, 0.01)])
def test_the_engine_answers_alike_both_ways(folder, world, gib):
    for short, plain in ranks(world, both_ways, folder, gib):
        assert short == plain
        assert len(short[0]) > 30 and len(short[1]) > 5
