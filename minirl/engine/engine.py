"""The rollout engine: vLLM inside this process.

In minirl only this folder and endpoint/ import vLLM. Versions 0.26 (torch 2.11) and 0.32 (torch
2.13) run through the calls used here; where they differ, the difference is in compat.py.
"""

import contextlib
import gc
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from minirl.base.errors import UserError
from minirl.base.log import Timer
from minirl.config.shared import EngineConfig, Sleep
from minirl.data.images import rgb
from minirl.data.vision import Vision
from minirl.engine import compat, patches
from minirl.engine.cpu import packed, prompts
from minirl.engine.grammars import LEAST_MASS, Guide, MassRecorder, to_vllm
from minirl.engine.routed_experts import ReturnedRoutes, SlotRoutes
from minirl.engine.start import memory_remedy, resolve_num_seqs, start_vllm
from minirl.parallel.mesh import Mesh
from minirl.parallel.offload import Sleeper

NamedTensors = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample one completion, by the names of vLLM."""

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    # Limits of the episode, which vLLM does not know. 0: env.max_tokens, and the engine's
    # max_model_len, which is longer than that of training if evaluation has longer answers.
    episode_tokens: int = 0  # Sampled tokens.
    context_tokens: int = 0  # Tokens of a sequence.

    def context(self, max_model_len: int) -> int:
        """Return how many tokens a sequence may have in an engine with room for so many."""
        return self.context_tokens or max_model_len


class EngineOutput(NamedTuple):
    """Tokens of one request that the engine has not reported before."""

    request_id: str
    tokens: list[int]
    # One for each token, under the distribution it was drawn from (temperature applied).
    logprobs: list[float]
    # "stop": ended by a stop token, which is the last token; "length"; None: not finished.
    finish_reason: str | None
    # For each token: whether a guide's mask took probability from others. Empty: there is no guide.
    guided: list[bool]
    # Routes of the request's tokens, those of the prompt first (types/packed.py), if recorded.
    routes: np.ndarray | None
    # For each token: the likeliest ones in its place with their log-probs, as many as asked for.
    top: Sequence[list[tuple[int, float]]] = ()


class RolloutEngine:
    """One vLLM engine in this rank, or one shared by `tensor_parallel_size` consecutive ranks.

    Its weights are random until the first refit, so that it reads no checkpoint. With
    `load_weights` it reads them from the folder; with `vision`, too: vLLM keeps the scaling
    of pixels in a buffer of the image tower, which its `dummy` loader would fill with noise.
    """

    def __init__(
        self,
        cfg: EngineConfig,
        folder: Path,
        mesh: Mesh,
        *,
        dtype: str,
        load_weights: bool = False,
        vision: Vision | None = None,
        num_answers: int = 0,
        guides: bool = False,
        routes: bool = False,
        timer: Timer | None = None,
    ):
        """Start vLLM. Collective over all ranks, which agree on the size of the KV cache.

        Args:
            cfg: the engine's settings.
            folder: folder of the model.
            mesh: all ranks.
            dtype: dtype of the weights.
            load_weights: read the weights from the folder.
            vision: how the model reads images; None: it reads none, or gets none.
            num_answers: about how many answers all engines together are asked for at once.
            guides: answers may be held to a guide, for which vLLM needs the tokenizer.
            routes: report which experts the routers of a mixture have chosen.
            timer: gets the seconds of refits, and of waking and sleeping.

        Raises:
            UserError: vLLM refuses the model, or there is not enough memory.
        """
        self.cfg = cfg = resolve_num_seqs(cfg, mesh, num_answers)
        self.mesh = mesh
        self.timer = timer or Timer(mesh.device)
        self.vision = vision
        self.masses = MassRecorder() if guides else None
        self.on_cuda = mesh.device.type == "cuda"
        # What of the device sleeps in turn. Only a run's plan knows what is best.
        self.sleeps: Sleep = "all" if cfg.sleep == "auto" else cfg.sleep
        if not self.on_cuda:
            self.sleeps = "none"
        with self.uncompiled():
            self.llm = start_vllm(self, folder, dtype, load_weights=load_weights, routes=routes)
        import vllm  # in the environment that has been set

        self.vllm: Any = vllm
        self.model = self.llm.llm_engine.model_executor.driver_worker.worker.get_model()
        self.model_class = type(self.model).__name__
        self.latent = patches.latent_layers(self.model)
        if not (self.on_cuda or vision or routes):
            block_size = self.llm.llm_engine.vllm_config.cache_config.block_size
            prompts.SharedPrompts(self.model, block_size)
        self.routes: ReturnedRoutes | SlotRoutes | None = None
        if routes and self.on_cuda:
            self.routes = ReturnedRoutes(self.model)
        elif routes:
            self.routes = SlotRoutes(self.llm, self.model)
        core = self.llm.llm_engine.engine_core.engine_core
        core.scheduler.states = self.llm.llm_engine.output_processor.request_states
        self._num_steps = 0
        self._waits: list[float] = []  # For the device, in seconds, since `take_counts`.
        # How many tokens `take_unfinished` has reported of each request.
        self._num_reported: dict[str, int] = {}
        # Cached keys are found again only by requests with the same salt.
        self.cache_salt = ""
        if self.on_cuda:
            patches.time_waiting(core.model_executor, self._waits.append)
        self.tp_size = cfg.tensor_parallel_size
        self.num_replicas = mesh.world_size // self.tp_size
        self.replica = mesh.rank // self.tp_size
        self.is_leader = mesh.rank % self.tp_size == 0
        self._asleep: tuple[str, ...] = ()  # Tags of vLLM's that are.
        self.timer.unmapped_bytes = self.unmapped_bytes

    def uncompiled(self) -> contextlib.AbstractContextManager[Any]:
        """Interpret on CPU, inside the block, the functions that vLLM compiles.

        They are small, and to compile them takes longer than a short run.
        """
        if self.on_cuda:
            return contextlib.nullcontext()
        return torch.compiler.set_stance("force_eager")

    # ----------------------------------------------------------------------------------------------
    # weights

    def load_weights(self, named: NamedTensors) -> None:
        """Run vLLM's own loader for this model.

        Args:
            named: whole tensors by their names in a checkpoint. The loader fuses and splits them
                into this rank's parameters.
        """
        config = self.llm.llm_engine.vllm_config
        with torch.no_grad(), self.vllm.config.set_current_vllm_config(config):
            self.model.load_weights(named)
        self._forget_old_weights()

    def _forget_old_weights(self) -> None:
        """Compute again what vLLM keeps of the old weights, and drop what minirl does."""
        if self.latent:
            patches.renew_copies(self.latent)
        packed.forget()

    def parameters(self) -> dict[str, Tensor]:
        """Return this rank's weights by vLLM's names, without copies that it makes of others.

        The engine sees what is written there from the next `awake` on.
        """
        copies = {f"{layer}.{name}" for layer in self.latent for name in patches.COPIES}
        return {name: p.data for name, p in self.model.named_parameters() if name not in copies}

    def padding(self) -> dict[str, int]:
        """Return how many elements of each vocabulary parameter no checkpoint fills.

        They are rows that vLLM adds to make the vocabulary divisible.
        """
        num_padding = {}
        for name, module in self.model.named_modules():
            if hasattr(module, "shard_indices"):
                rows = module.shard_indices
                num_rows = rows.num_elements_padded - rows.num_org_elements
                num_padding[f"{name}.weight"] = num_rows * module.embedding_dim
        return num_padding

    @property
    def kv_cache_tokens(self) -> int:
        """Return how many tokens the KV cache holds."""
        cache = self.llm.llm_engine.vllm_config.cache_config
        return cache.num_gpu_blocks * cache.block_size

    @contextlib.contextmanager
    def awake(self, refit: Callable[[], None], sleeper: Sleeper) -> Iterator[None]:
        """Give the engine the policy's weights; inside the context it may generate.

        The order keeps the peak of memory low: the optimizer's state and the base of adapters are
        offloaded before the engine's weights return, and the shards, which the refit reads, before
        the KV cache returns. At the end the shards are back; the optimizer's state returns when it
        steps. What does not sleep (`engine.sleep`; nothing does on CPU) stays where it is.

        Args:
            refit: writes the policy's weights into the engine.
            sleeper: moves the policy between device and host.
        """
        with self.timer.phase("sleep_wake"):
            sleeper.sleep_optimizer()
            sleeper.sleep_base()
            self._wake("weights")
        with self.timer.phase("refit"):
            refit()
            self._forget_old_weights()
        with self.timer.phase("sleep_wake"):
            sleeper.sleep_parameters()
            if self._asleep:
                # A slower rank would run out of memory next to a neighbour's KV cache.
                self.mesh.barrier()
            self._wake("kv_cache")
        self._asleep = ()
        self.timer.note_device("engine_awake")
        # Cached keys and values, and what the tower made of images, are of the old weights.
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM kept cached keys of the old weights, because requests are still running"
            )
        if self.vision:
            self.llm.llm_engine.reset_encoder_cache()
        yield
        with self.timer.phase("sleep_wake"):
            self.sleep()
            sleeper.wake_parameters()

    def sleep(self) -> None:
        """Free the engine's memory, as engine.sleep says, until `awake`.

        Raises:
            UserError: another process took memory of the device meanwhile.
        """
        if self.sleeps == "none":
            return
        # A phase by itself: what is awake before is not there after it (`Timer`).
        with self.timer.phase("sleep_wake"):
            if self.sleeps == "cache":
                compat.discard_cache(self.llm.llm_engine.model_executor)
                self._asleep = ("kv_cache",)
            else:
                try:
                    self.llm.sleep(level=self.cfg.sleep_level)
                except AssertionError as error:
                    remedy = memory_remedy(error)
                    if not remedy:
                        raise
                    message = f"the vLLM engine did not fall asleep: {error}{remedy}"
                    raise UserError(message) from error
                self._asleep = ("weights", "kv_cache")
        self.timer.note_device("engine_asleep")

    def _wake(self, tag: str) -> None:
        """Let vLLM map again what it calls by this tag, if it is asleep."""
        if tag not in self._asleep:
            return
        with self.timer.phase("sleep_wake"):
            if torch.cuda.mem_get_info()[0] < self.unmapped_bytes():
                torch.cuda.empty_cache()  # What torch keeps of the trainer's.
            if self.sleeps == "cache":  # Of which vLLM's `LLM` does not know.
                self.llm.llm_engine.model_executor.collective_rpc("wake_up", args=([tag],))
            else:
                self.llm.wake_up([tag])

    def unmapped_bytes(self) -> int:
        """Return how much of the device a sleeping engine has given back.

        vLLM keeps the addresses, so torch's counters still count their memory.
        """
        if not self._asleep:
            return 0
        from vllm.device_allocator.cumem import CuMemAllocator

        blocks = CuMemAllocator.get_instance().pointer_to_data.values()
        return sum(block.handle[1] for block in blocks if block.is_asleep)

    # ----------------------------------------------------------------------------------------------
    # generation

    def add(
        self,
        request_id: str,
        prompt: list[int],
        sampling: Sampling,
        seed: int,
        images: Sequence[str] = (),
        stream: bool = False,
        guide: Guide | None = None,
        top_logprobs: int = 0,
    ) -> None:
        """Queue a request for one completion.

        With tensor parallelism every rank of the engine must add the same requests in the same
        order.

        Args:
            request_id: a name that no other request has.
            prompt: token ids, with one token for each image.
            sampling: how to sample.
            seed: a different one for each request. Unseeded requests draw from the process's
                generator, which the trainer uses, too, and which would differ between ranks of one
                engine.
            images: data URLs.
            stream: `step` reports each token at once, which costs vLLM an object for it.
            guide: what to hold the answer to; the engine was made for guides.
            top_logprobs: how many of the likeliest tokens to report in the place of each token.
        """
        if guide:
            assert self.masses, "the engine was not made for guides"
            self.masses.begin(request_id, sampling.temperature)
        kinds = self.vllm.sampling_params.RequestOutputKind
        params = self.vllm.SamplingParams(
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=seed,
            logprobs=top_logprobs,
            flat_logprobs=True,
            detokenize=False,
            output_kind=kinds.DELTA if stream else kinds.FINAL_ONLY,
            structured_outputs=to_vllm(guide) if guide else None,
        )
        inputs: dict[str, Any] = {"prompt_token_ids": prompt}
        if self.cache_salt:
            inputs["cache_salt"] = self.cache_salt
        if images:
            inputs["multi_modal_data"] = {"image": [rgb(url) for url in images]}
        internal_id = self.llm.llm_engine.add_request(request_id, inputs, params)
        if self.routes:
            self.routes.add(request_id, internal_id)

    def abort(self, request_ids: list[str]) -> None:
        """Drop these requests."""
        if self.masses:
            self.masses.end(request_ids)
        if self.routes:
            self.routes.end(request_ids)
        for request_id in request_ids:
            self._num_reported.pop(request_id, None)
        self.llm.llm_engine.abort_request(request_ids)

    def step(self) -> list[EngineOutput]:
        """Run one step of the engine, in which every running request samples a token.

        Returns:
            What is new of the requests that are streamed, and all of those that have finished.
        """
        if not self.llm.llm_engine.has_unfinished_requests():
            return []
        self._num_steps += 1
        with self.uncompiled():
            sampled = self.llm.llm_engine.step()
        outputs = []
        for output in sampled:
            sample = output.outputs[0]  # Each request is for one.
            reason = sample.finish_reason
            new = self._output(output.request_id, sample.token_ids, sample.logprobs, reason)
            if self.routes and reason:
                new = new._replace(routes=self.routes.of_finished(output))
            outputs.append(new)
        return outputs

    def change_weights(self, refit: Callable[[], None], *, keeps_cache: bool) -> None:
        """Give the engine other weights while requests are running, between two steps. Collective.

        Args:
            refit: writes the weights into the engine.
            keeps_cache: keys and values of running requests stay as the old weights made them.
                Otherwise they are computed again, in the next steps.
        """
        with self.timer.phase("refit"):
            refit()
            self._forget_old_weights()
        if not keeps_cache:
            self.llm.reset_prefix_cache(reset_running_requests=True)
        if self.vision:
            self.llm.llm_engine.reset_encoder_cache()

    def drain(self) -> list[EngineOutput]:
        """Finish the steps that vLLM has scheduled ahead, as it does on CUDA, and no others.

        Returns:
            As `step`.
        """
        core = self.llm.llm_engine.engine_core.engine_core
        outputs = []
        if core.batch_queue:
            core.pause_scheduler("keep", clear_cache=False)
            for _ in range(core.batch_queue_size):
                outputs += self.step()
            core.resume_scheduler()
        return outputs

    def take_counts(self) -> tuple[float, float]:
        """Return the steps since the last call, and on CUDA how many seconds they waited for it."""
        counts = float(self._num_steps), sum(self._waits, 0.0)
        self._num_steps = 0
        self._waits.clear()
        return counts

    def unfinished(self, request_ids: Collection[str] | None = None) -> Iterator[EngineOutput]:
        """Yield what is new of unfinished requests.

        Args:
            request_ids: of these; None: of all that are not streamed. New of a streamed one are
                its routes alone. What is known of masks is said only once.
        """
        delta = self.vllm.sampling_params.RequestOutputKind.DELTA
        for state in self.llm.llm_engine.output_processor.request_states.values():
            streams = state.output_kind == delta
            if streams if request_ids is None else state.external_req_id not in request_ids:
                continue
            tokens = [] if streams else state.detokenizer.output_token_ids
            logprobs = None if streams else state.logprobs_processor.logprobs
            new = self._output(state.external_req_id, tokens, logprobs, None)
            yield new._replace(routes=self.routes.of_unfinished(state)) if self.routes else new

    def take_unfinished(self) -> Iterator[EngineOutput]:
        """Yield what is new of all unfinished requests, which then counts as reported."""
        states = self.llm.llm_engine.output_processor.request_states.values()
        for new in self.unfinished({state.external_req_id for state in states}):
            before = self._num_reported.get(new.request_id, 0)
            self._num_reported[new.request_id] = before + len(new.tokens)
            yield new

    def _output(
        self, request_id: str, tokens: Sequence[int], logprobs: Any, reason: str | None
    ) -> EngineOutput:
        """Return an output of vLLM.

        Its log-probs are in one list, and each token's begin with its own, which the likeliest ones
        follow (`vllm.logprobs`, FlatLogprobs). Otherwise vLLM would make a dict and an object for
        each token. Those of guided tokens become the policy's own, without the mask.
        """
        values: list[float] = []
        top: list[list[tuple[int, float]]] = []
        num_reported = self._num_reported.get(request_id, 0)
        if reason:
            self._num_reported.pop(request_id, None)
        tokens = tokens[num_reported:]
        begins = logprobs.start_indices[num_reported:] if logprobs else ()
        ends = logprobs.end_indices[num_reported:] if logprobs else ()
        for begin, end, _ in zip(begins, ends, tokens, strict=True):
            values.append(logprobs.logprobs[begin])
            if end - begin > 1:
                ids = logprobs.token_ids[begin + 1 : end]
                pairs = zip(ids, logprobs.logprobs[begin + 1 : end], strict=True)
                top.append([pair for pair in pairs if math.isfinite(pair[1])])
        log_masses = self.masses.take(request_id, len(tokens)) if self.masses else None
        guided: list[bool] = []
        if log_masses is not None:
            known = [mass if math.isfinite(mass) else 0.0 for mass in log_masses]
            values = [value + mass for value, mass in zip(values, known, strict=True)]
            if top:
                pairs = zip(top, known, strict=True)
                top = [[(token, value + mass) for token, value in one] for one, mass in pairs]
            guided = [log_mass < math.log(LEAST_MASS) for log_mass in log_masses]
            if reason and self.masses:
                self.masses.end([request_id])
        return EngineOutput(request_id, list(tokens), values, reason, guided, None, top)

    def tensor_parallel_broadcast(self, value: Any) -> Any:
        """Return the leader's value, which can be pickled, on all ranks of this engine."""
        values = [value]
        if self.tp_size > 1:
            group = self.vllm.distributed.parallel_state.get_tp_group()
            dist.broadcast_object_list(values, src=group.ranks[0], group=group.cpu_group)
        return values[0]

    def close(self) -> None:
        """Release vLLM in the order that leaves torchrun an exit code of 0. Collective."""
        self.mesh.barrier()
        patches.remove_sockets()
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.model
        packed.forget()
        gc.collect()
        self.vllm.distributed.destroy_model_parallel()
