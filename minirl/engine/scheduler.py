"""Engine steps that only decode, at little cost for the host.

In each step vLLM's scheduler looks at everything that a request may need, and its output processor
gets an object for every token: with 128 sequences that takes the host longer than the GPU needs for
a small model. In most steps of a rollout every running request samples one token, and nothing else
happens. Then the scheduler here takes a short way, and writes the token itself where the output
processor would. Whatever else there is to do goes vLLM's own way: steps in `schedule`, requests in
`update_from_output`.

It reads and writes the state that vLLM keeps, as versions 0.26 and 0.32 do
(`compat.check_version`). This file is imported when an engine starts, by its name.
"""

import copy
from dataclasses import dataclass
from math import gcd
from typing import Any

from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


@dataclass(slots=True)
class Decode:
    """A running request whose prompt is computed, and which only samples from now on."""

    request: Request
    stops: frozenset[int]  # Tokens that may end it.
    limit: int  # Tokens of prompt and completion with which it ends at the latest.
    # The output processor's lists of what it has sampled.
    tokens: list[int]
    logprobs: FlatLogprobs

    def append(self, token: int, logprob: float) -> None:
        """Note a token that does not end the request."""
        self.request.append_output_token_ids(token)
        self.tokens.append(token)
        columns = self.logprobs
        columns.start_indices.append(len(columns.logprobs))
        columns.token_ids.append(token)
        columns.logprobs.append(logprob)
        columns.ranks.append(None)
        columns.decoded_tokens.append(None)
        columns.end_indices.append(len(columns.logprobs))


class DecodeScheduler(Scheduler):
    """Schedules each step after the one before has been computed, as vLLM does on CPU.

    Attributes:
        num_ahead: tokens that a step adds to those of a request that are on their way
            (`num_output_placeholders`). vLLM counts them only if it schedules steps ahead.
        states: the output processor's requests by vLLM's request id. Before it is set, everything
            goes vLLM's own way.
    """

    num_ahead = 0

    def __init__(self, **options: Any):
        """Make vLLM's scheduler, with its arguments."""
        super().__init__(**options)
        groups = self.kv_cache_config.kv_cache_groups
        self._num_groups = len(groups)
        # A request may get a block, or fill one, only at multiples of it.
        self._block_size = gcd(*(group.kv_cache_spec.block_size for group in groups))
        self._decodes: dict[str, Decode] = {}  # By vLLM's request id.
        self.states: dict[str, Any] = {}

    # ----------------------------------------------------------------------------------------------
    # before a step

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Return what the next step computes."""
        requests = self._find_decodes()
        if not requests:
            return super().schedule(throttle_prefills)
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = cached = self._extend(requests)
        output.num_scheduled_tokens = dict.fromkeys(cached.req_ids, 1)
        output.total_num_scheduled_tokens = len(requests)
        output.free_encoder_mm_hashes = self.encoder_cache_manager.get_freed_mm_hashes()
        output.new_block_ids_to_zero = self._get_new_block_ids_to_zero()
        output.finished_req_ids = self.finished_req_ids
        output.preempted_req_ids = self.reset_preempted_req_ids
        self.finished_req_ids: set[str] = set()
        self.reset_preempted_req_ids: set[str] = set()
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids = set(cached.req_ids)
        return output

    def _find_decodes(self) -> list[Request]:
        """Return the requests that sample a token if the next step only decodes, else none.

        Nothing is changed here. Without a free block for each request that may need one, vLLM
        preempts others.
        """
        running = self.running
        may_admit = len(running) < self.max_num_running_reqs and self.get_request_counts()[1]
        if may_admit or self.pause_state != PauseState.UNPAUSED:
            return []
        requests = []
        num_blocks = 0
        for request in running:
            decode = self._decodes.get(request.request_id)
            if decode is None:
                return []
            computed = request.num_computed_tokens
            ahead = request.num_output_placeholders
            if ahead and computed + 2 - ahead >= decode.limit:
                continue  # Its last token is on its way.
            if computed % self._block_size == 0:
                num_blocks += self._num_groups
            requests.append(request)
        if num_blocks > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return []
        if not self.use_v2_model_runner:  # It needs all tokens of those that come back.
            ids = {request.request_id for request in requests}
            if not ids <= self.prev_step_scheduled_req_ids:
                return []
        return requests

    def _extend(self, requests: list[Request]) -> CachedRequestData:
        """Make room for the next token of each request, and describe the requests for the model."""
        cache = self.kv_cache_manager
        cached = CachedRequestData.make_empty()
        for request in requests:
            computed = request.num_computed_tokens
            ahead = request.num_output_placeholders
            blocks = None
            if computed % self._block_size == 0:
                blocks = cache.allocate_slots(request, 1).get_block_ids(allow_none=True)
            elif not ahead and (computed + 1) % self._block_size == 0:
                cache.cache_blocks(request, computed + 1)
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append(blocks)
            cached.num_computed_tokens.append(computed)
            cached.num_output_tokens.append(request.num_output_tokens + ahead)
            request.num_computed_tokens = computed + 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders = ahead + self.num_ahead
        return cached

    def _preempt_request(self, request: Request, *args: Any, **options: Any) -> None:
        """Let a request that loses its blocks go vLLM's way until it samples again."""
        self._decodes.pop(request.request_id, None)
        super()._preempt_request(request, *args, **options)

    # ----------------------------------------------------------------------------------------------
    # after a step

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take over what a step has sampled, and return what is new for the output processor."""
        rest = copy.copy(scheduler_output)
        rest.num_scheduled_tokens = self._record(scheduler_output, model_runner_output)
        outputs = super().update_from_output(rest, model_runner_output)
        for output in outputs[0].outputs if outputs else ():
            request = self.requests.get(output.request_id)
            if request and self._decodes_only(request):
                params = request.sampling_params
                state = self.states[request.request_id]
                self._decodes[output.request_id] = Decode(
                    request,
                    stops=frozenset([*(params.stop_token_ids or ()), params.eos_token_id]),
                    limit=min(request.num_prompt_tokens + request.max_tokens, self.max_model_len),
                    tokens=state.detokenizer.token_ids,
                    logprobs=state.logprobs_processor.logprobs,
                )
        return outputs

    def _record(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[str, int]:
        """Append the sampled tokens of requests that go on to decode.

        Returns:
            The others of the step, which vLLM handles, with their numbers of tokens. Among them are
            those that may end with their token.
        """
        rest = {}
        rows = model_runner_output.req_id_to_index
        sampled = model_runner_output.sampled_token_ids
        logprobs: list[float] = []
        if model_runner_output.logprobs:
            # The first is that of the sampled token; a request that asks for more makes it wider.
            logprobs = model_runner_output.logprobs.logprobs[:, 0].tolist()
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            decode = self._decodes.get(request_id)
            if decode is None:
                rest[request_id] = num_tokens
                continue
            row = rows[request_id]
            (token,) = sampled[row]
            request = decode.request
            if token in decode.stops or request.num_tokens + 1 >= decode.limit:
                rest[request_id] = num_tokens
                continue
            decode.append(token, logprobs[row])
            request.num_in_flight_tokens -= num_tokens
            if self.num_ahead:
                request.num_output_placeholders -= 1
                computed = request.num_computed_tokens - request.num_output_placeholders
                if computed % self._block_size == 0:
                    self.kv_cache_manager.cache_blocks(request, computed)
        return rest

    def _decodes_only(self, request: Request) -> bool:
        """Return whether a request that has just sampled only has to decode from now on."""
        params = request.sampling_params
        return (
            request.status == RequestStatus.RUNNING
            and params.output_kind == RequestOutputKind.FINAL_ONLY
            and params.num_logprobs == 0
            and params.flat_logprobs
            and not params.detokenize  # There are no strings that stop it either.
            and not request.use_structured_output
            and not self.encoder_cache_manager.get_cached_input_ids(request)
            and request.request_id in self.states
            and not self.has_mamba_layers  # Their states move between blocks in any step.
        )

    def _free_blocks(self, request: Request) -> None:
        """Forget a request that has ended, or was aborted."""
        super()._free_blocks(request)
        self._decodes.pop(request.request_id, None)


class AheadDecodeScheduler(DecodeScheduler, AsyncScheduler):
    """Schedules a step while the one before is computed, as vLLM does on CUDA."""

    num_ahead = 1


def make_scheduler(*, vllm_config: Any, **options: Any) -> DecodeScheduler:
    """Return the scheduler for an engine of vLLM, with the arguments of vLLM's own."""
    ahead = vllm_config.scheduler_config.async_scheduling
    kind = AheadDecodeScheduler if ahead else DecodeScheduler
    return kind(vllm_config=vllm_config, **options)
