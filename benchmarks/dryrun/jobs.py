"""minirl's own steps on pretended GPUs: no device, no weights and no data are needed.

    python -m benchmarks.dryrun.jobs < jobs.json > results.json

Build, pack, annotate and update run as they do in training, as rank 0 of as many ranks as wanted,
on tensors without values. torch's fake process group answers collectives. It is a process of its
own because `pretend_cuda` and what `_join_alone` replaces are not put back.
"""

import dataclasses
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.dryrun import (
    delta_kernels,
    four_bits,
    head_kernels,
    image_tokens,
    kinds,
    liger_kernels,
)
from benchmarks.dryrun.engine import (
    BothSides,
    PretendedEngine,
    RefitMesh,
    regions_of_all_ranks,
)
from benchmarks.dryrun.kinds import END, MIDDLE, START
from benchmarks.dryrun.meter import Meter
from benchmarks.dryrun.pretend import pretend_cuda
from minirl.algo import losses, preference
from minirl.base.errors import BAD_INPUT, UserError, require
from minirl.base.log import Timer
from minirl.batch.packing import pack
from minirl.config.parse import fill_config
from minirl.config.policy import CHUNK_BYTES, ParallelConfig, PolicyConfig
from minirl.config.rl import AlgoConfig, RefitConfig
from minirl.config.supervised import DPOLossConfig, KTOLossConfig, RewardModelLossConfig
from minirl.data.images import to_url
from minirl.data.vision import Gemma4Vision, GemmaVision, QwenVision, Vision
from minirl.model import build, experts, loading
from minirl.parallel import fsdp
from minirl.parallel.machines import arrange, make_world
from minirl.parallel.mesh import Mesh
from minirl.parallel.storage import dynamic_code
from minirl.plan.cards import CARDS, Card
from minirl.plan.costs import Load, LossName
from minirl.refit.record import record_loader, wanted_by_name
from minirl.refit.refit import Refit
from minirl.train.policy import Minibatch, Policy
from minirl.types.packed import ImageBatch, ImageSpan, Trajectory

DEVICE = torch.device("cuda", 0)


@dataclass(kw_only=True)
class Job:
    """A model and what is done with it."""

    folder: str  # Holds config.json.
    load: Load
    world_size: int = 8
    gpus_per_node: int = 8
    card: Card = CARDS["h200"]
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    loss: LossName = "policy"
    share_base: bool = False  # It computes with the frozen base of another model with adapters.
    sleep: bool = False  # After the steps it sleeps and wakes.
    # Moves the weights into an engine, too, while it sleeps; or into those of the generators.
    refit: RefitConfig | None = None
    head_chunk_bytes: int = CHUNK_BYTES["cuda"]  # Of the logits that are alive at once.


# --------------------------------------------------------------------------------------------------
# a world of which only this rank is there


class LoneMesh(Mesh):
    """A mesh whose other ranks say what this one says."""

    def sums(self, values: Tensor) -> Tensor:
        """Return this rank's, as if the others had none."""
        return values

    def maxima(self, values: Tensor) -> Tensor:
        """Return this rank's."""
        return values

    def gather(self, value: object) -> list:
        """Return this rank's as that of all ranks."""
        return [value] * self.world_size

    def barrier(self) -> None:
        """Wait for nobody."""


def _join_alone(world_size: int, parallel: ParallelConfig) -> Mesh:
    """Be rank 0 of a world whose collectives do nothing."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    mesh = arrange(make_world(DEVICE), parallel)
    return LoneMesh(**vars(mesh))


def _replace_groups_and_weights() -> None:
    """Make every new group a fake one, and every model's weights memory without values."""
    new_group: Any = dist.new_group
    everywhere: Any = dist
    everywhere.new_group = lambda *args, **kwargs: new_group(*args, **{**kwargs, "backend": "fake"})

    def load_weights(
        model: Any,
        folder: Path,
        device: torch.device,
        *,
        cpu_offload: bool = False,
        setting: str = "policy.model",
    ) -> None:
        loading.allocate(model, device, cpu_offload=cpu_offload)
        four_bits.allocate(model, device)

    loading.load_weights = load_weights
    four_bits.pretend()
    delta_kernels.pretend()
    liger_kernels.pretend()
    head_kernels.pretend()
    experts._to_host = _even_rows
    vision: Any
    for vision in (QwenVision, GemmaVision, Gemma4Vision):
        vision.batch = _real_batch(vision.batch)
    # Rank 0 is the first along every axis of every mesh that it is in. torch looks it up in a
    # tensor, whose values it would not find.
    device_mesh: Any = DeviceMesh
    device_mesh._compute_coordinates_from_mesh = staticmethod(lambda ranks, _: (0,) * ranks.ndim)
    device_mesh._get_mesh_tensor_from_full_mesh = staticmethod(lambda meshes, _=None: meshes[0])


def _even_rows(by_rank: Tensor, num_rows: int) -> list[list[int]]:
    """Return numbers of rows as `experts._to_host` does, for tokens whose experts nobody knows."""
    _, received = by_rank.tolist()  # here the host waits
    num_ranks = len(received)
    ends = [num_rows * (rank + 1) // num_ranks for rank in range(num_ranks)]
    even = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return [even, even]


def _real_batch(batch: Callable[..., ImageBatch]) -> Any:
    """Return `Vision.batch` as it makes real pixels, and puts them on the pretended device then."""

    def make(vision: Vision, sequences: list, device: torch.device) -> ImageBatch:
        with _disable_current_modes():
            images = batch(vision, sequences, torch.device("cpu"))
        tensors = {name: t.to(device) for name, t in vars(images).items() if t is not None}
        return ImageBatch(**tensors)

    return make


class _PhaseTimer(Timer):
    """Tells the meter which phase it is."""

    def __init__(self, meter: Meter):
        super().__init__(DEVICE)
        self.meter = meter

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self.meter.phase, self.meter.part
        self.meter.phase = name
        self.meter.part = START
        yield
        self.meter.phase, self.meter.part = before


# --------------------------------------------------------------------------------------------------
# a run


def trajectories(load: Load, *, vision: Vision | None = None) -> list[Trajectory]:
    """Return sequences that fill a micro-batch of one rank.

    Args:
        load: how long they are, and how many there may be.
        vision: puts an image into every prompt.
    """
    rng = np.random.default_rng(0)
    out: list[Trajectory] = []
    for number in range(load.num_answers):
        group, episode = divmod(number, load.samples)
        tokens = rng.integers(5, 50, load.sequence).astype(np.int32)
        tokens[: load.prompt] = 5 + group % 40
        sampled = np.arange(load.sequence) >= load.prompt
        images = [_show(tokens, load, vision, group)] if vision else []
        out.append(
            Trajectory(
                tokens=tokens,
                sampled=sampled,
                logprobs=np.zeros(load.sequence, np.float32),
                group=group,
                episode=episode,
                group_tokens=load.samples * int(sampled.sum()),
                images=images,
            )
        )
    return out


def _show(tokens: np.ndarray, load: Load, vision: Vision, group: int) -> ImageSpan:
    """Put an image into a prompt, in place: one of half its length, if there is one so small."""
    side = vision.side(load.prompt // 2)
    url = to_url(Image.new("RGB", (side, side), (group % 256, 0, 0)))
    num_tokens = vision.num_tokens(url)
    require(
        num_tokens + 2 <= load.prompt,
        f"a prompt of {load.prompt} tokens has no room for an image, which has {num_tokens} tokens "
        "at least; plan for longer prompts",
    )
    tokens[1 : 1 + num_tokens] = vision.token
    return ImageSpan(1, num_tokens, url)


def _minibatch(job: Job, policy: Policy) -> Minibatch:
    """Return the micro-batches of a step, which are all alike."""
    with policy.timer.phase("pack"):
        examples = trajectories(job.load, vision=policy.vision)
        return [_micro_batch(examples, policy, job.loss) for _ in range(job.load.num_micro)]


def _micro_batch(examples: list[Trajectory], policy: Policy, loss: LossName) -> Any:
    pairs = loss in ("reward", "dpo")
    batch = pack(examples, DEVICE, layout=policy.layout, pairs=pairs, single=loss == "kto")
    zeros = torch.zeros(len(batch.inputs), device=DEVICE)
    batch.advantages = zeros
    batch.ref_logprobs = zeros
    batch.values = zeros
    batch.returns = zeros
    if batch.preference:
        batch.preference.baseline = torch.zeros((), device=DEVICE)
    return batch


def _sizes(minibatch: Minibatch) -> dict[str, int]:
    return {
        "num_micro": len(minibatch),
        "rows": len(minibatch[0].inputs),
        "loss_rows": len(minibatch[0].loss_rows),
    }


def _count_gradients(policy: Policy) -> list[int]:
    """Return a list that gets the bytes of gradients when the optimizer steps."""
    counted: list[int] = []
    step = policy.optimizer.step

    def count_and_step() -> None:
        gradients = [fsdp.local(p.grad) for p in policy.model.parameters() if p.grad is not None]
        counted.append(_device_bytes(gradients))
        step()

    policy.optimizer.step = count_and_step  # type: ignore[method-assign]
    return counted


def _make_loss(job: Job) -> losses.Loss:
    make: dict[str, Callable[[], losses.Loss]] = {
        "policy": lambda: losses.policy(AlgoConfig(), job.load.sequence),
        "value": lambda: losses.value(0.2),
        "sft": losses.sft,
        "reward": lambda: preference.reward_model(RewardModelLossConfig()),
        "dpo": lambda: preference.dpo(DPOLossConfig()),
        "kto": lambda: preference.kto(KTOLossConfig()),
    }
    return make[job.loss]()


def run(job: Job) -> dict[str, Any]:
    """Build a model and make two steps with it; the second one is what is measured.

    The first is of one micro-batch, after which there is all that lasts, as the optimizer's state.

    Returns:
        "phases": name -> peak bytes, what is alive at the peak ("kinds": by what it is for, which
        adds up to the peak; "at_peak": by operator and shape), the same of the phase's
        "parts", and work by kind of kernel;
        "waits": where the host waits for the device in a step;
        "parameter_bytes", "optimizer_bytes": of shards and the optimizer's state on the device,
        between two steps; "gradient_bytes": of gradients there when the optimizer steps;
        "after_first_step", "between_steps": bytes by device, without batches;
        "num_micro": micro-batches of a step; "rows", "loss_rows": of one of them; "parameters": of
        the whole model;
        "asleep": bytes by device, if the job sleeps; "refit": bytes of the engine's weights, of
        what came from other ranks, and of buffers.
    """
    mesh = _join_alone(job.world_size, job.parallel)
    CHUNK_BYTES["cuda"] = job.head_chunk_bytes
    dynamic_code.cache_clear()  # or it would hand out tensors of another job
    meter = Meter(job.card, job.gpus_per_node)
    with FakeTensorMode(allow_non_fake_inputs=True), meter:
        base = _make_base(job, mesh, meter) if job.share_base else None
        policy = _make_policy(job, mesh, _PhaseTimer(meter), base)
        image_tokens.tell(policy.model, meter.values)
        named = policy.model.named_parameters()
        shards = [fsdp.local(p) for name, p in named if name not in policy.model.shared]
        meter.name(shards, kinds.PARAMETERS)
        _step(job, policy, _minibatch(job, policy)[:1])
        meter.name(policy.optimizer.tensors(), kinds.OPTIMIZER)
        gradient_bytes = _count_gradients(policy)
        after_first = dict(meter.allocated)
        minibatch = _minibatch(job, policy)
        sizes = _sizes(minibatch)
        meter.phases.clear()
        meter.waits.clear()
        with _parts(policy, meter):
            _step(job, policy, minibatch)
        del minibatch
        between = dict(meter.allocated)
        waits = meter.waits.copy()
        behind = _sleep_and_refit(job, policy, meter) if job.sleep else {}
        return {
            "phases": {name: phase.as_dict() for name, phase in meter.phases.items()},
            "waits": [[why, where, num] for (why, where), num in waits.items()],
            "parameter_bytes": _device_bytes(shards),
            "optimizer_bytes": _device_bytes(policy.optimizer.tensors()),
            "gradient_bytes": sum(gradient_bytes),
            "after_first_step": after_first,
            "between_steps": between,
            "parameters": sum(p.numel() for p in policy.model.parameters()),
            **behind,
            **sizes,
        }


@contextmanager
def _parts(policy: Policy, meter: Meter) -> Iterator[None]:
    """Tell the meter which part of a phase it is.

    Forward is in its middle from the first layer on, and at its end from the last one on; backward
    is at its end when only the root's gradients are left.
    """

    def first_layer(*_: object) -> None:
        if meter.phase in ("forward", "annotate"):
            meter.part = MIDDLE

    def last_layer(*_: object) -> None:
        if meter.phase in ("forward", "annotate"):
            meter.part = END

    plain = FSDPState._root_post_backward_final_callback

    def only_root(state: FSDPState) -> None:
        meter.part = END
        plain(state)

    layers = build.layers(policy.model)
    hooks = [
        layers[0].register_forward_pre_hook(first_layer),
        layers[-1].register_forward_pre_hook(last_layer),
    ]
    root: Any = FSDPState
    root._root_post_backward_final_callback = only_root
    yield
    root._root_post_backward_final_callback = plain
    for hook in hooks:
        hook.remove()


def _make_base(job: Job, mesh: Mesh, meter: Meter) -> Policy:
    """Return the policy whose base the model shares; its memory is named as what it is."""
    base = Policy(job.policy, Path(job.folder), mesh)
    meter.name([fsdp.local(p) for p in base.model.parameters()], kinds.BASE)
    return base


def _make_policy(job: Job, mesh: Mesh, timer: Timer, base: Policy | None) -> Policy:
    return Policy(
        job.policy,
        Path(job.folder),
        mesh,
        trainable=job.loss != "frozen",
        score=job.loss in ("value", "reward"),
        sequence_parallel=job.parallel.sequence,
        base=base,
        timer=timer,
    )


def _sleep_and_refit(job: Job, policy: Policy, meter: Meter) -> dict[str, Any]:
    """Return what is alive while all sleeps, and what a refit moves; then wake all."""
    with policy.timer.phase("asleep"):
        policy.sleeper.sleep()
        asleep = dict(meter.allocated)
        policy.sleeper.wake_parameters()
    is_split = job.parallel.generators > 0
    refit = _refit(job, policy) if job.refit and not is_split else {}
    with policy.timer.phase("asleep"):
        policy.sleeper.wake_parameters()
        policy.sleeper.wake_optimizer()
    if job.refit and is_split:
        refit = _refit_generators(job, policy)
    return {"asleep": asleep, "refit": refit}


def _refit(job: Job, policy: Policy) -> dict[str, int]:
    """Refit an engine whose ranks all have whole weights, while the optimizer's state sleeps."""
    assert job.refit
    shards = policy.shards()
    mesh = _refit_mesh(job, policy)
    dtype = _engine_dtype(policy)
    with policy.timer.phase("refit"):
        policy.sleeper.sleep_base()
        engine: Any = PretendedEngine(mesh, shards, policy.parts(), dtype)
        refit = Refit(job.refit, shards, policy.parts(), engine, read=policy.merged)
        refit()
    return {
        "engine_bytes": _device_bytes(list(engine.parameters().values())),
        "received_bytes": refit.bytes_received,
        "buffer_bytes": refit.peak_bytes,
    }


def _refit_mesh(job: Job, policy: Policy) -> RefitMesh:
    """Return the mesh of the policy, whose ranks say which regions they have."""
    firsts: dict[Any, str] = {}  # The first weight of each layout: the regions of these travel.
    shards = policy.shards()
    for name, p in shards.items():
        layout = (p.shape, p.placements, p.device_mesh) if isinstance(p, DTensor) else p.shape
        firsts.setdefault(layout, name)
    of_layouts = {name: shards[name] for name in firsts.values()}
    regions = regions_of_all_ranks(of_layouts, policy.mesh.world_size, job.parallel)
    return RefitMesh(**vars(policy.mesh), regions=regions)


def _engine_dtype(policy: Policy) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, policy.cfg.dtype.replace("float64", "float32"))
    return dtype


def _refit_generators(job: Job, policy: Policy) -> dict[str, int]:
    """Refit as the first trainer, and then as the first generator."""
    assert job.refit
    shards = policy.shards()
    parts = policy.parts()
    mesh = _refit_mesh(job, policy)
    with policy.timer.phase("receive"):
        engine: Any = PretendedEngine(mesh, shards, parts, _engine_dtype(policy))
        shapes = {name: p.shape for name, p in shards.items()}
        wanted = wanted_by_name(record_loader(engine, shapes, parts)[0])
    del engine
    whole = BothSides(
        **vars(policy.mesh.everyone), num_trainers=policy.mesh.world_size, wanted=wanted
    )
    with policy.timer.phase("refit"):
        mesh = dataclasses.replace(mesh, whole=whole)
        sender = Refit(job.refit, shards, parts, None, mesh=mesh, read=policy.merged)
        sender()
    sent_bytes = sender.peak_bytes
    told = sender.weights
    del sender
    with policy.timer.phase("receive"):
        whole = dataclasses.replace(whole, rank=policy.mesh.world_size, told=told)
        mesh = dataclasses.replace(mesh, side="generators", whole=whole)
        engine = PretendedEngine(mesh, shards, parts, _engine_dtype(policy))
        receiver = Refit(job.refit, {}, {}, engine)
        receiver()
    return {
        "engine_bytes": _device_bytes(list(engine.parameters().values())),
        "sent_bytes": sent_bytes,
        "received_bytes": receiver.bytes_received,
        "buffer_bytes": receiver.peak_bytes,
    }


def _device_bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of tensors on the device; what is stored elsewhere has empty storages."""
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors if t.is_cuda)


def _step(job: Job, policy: Policy, minibatch: Minibatch) -> None:
    if job.loss in ("policy", "frozen", "value"):
        with policy.timer.phase("annotate"):
            policy.annotate([minibatch], "values" if job.loss == "value" else "old_logprobs")
    if job.loss != "frozen":
        policy.update(minibatch, _make_loss(job), 1e-6)


def _result(job: Job) -> dict[str, Any]:
    """Return what `run` does; if it fails, {"error": why, "traceback": where}."""
    try:
        return run(job)
    except UserError as error:
        return {"error": str(error), "traceback": ""}
    except Exception as error:  # a job that crashes is a result, too; the others go on
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def main() -> None:
    """Read jobs from stdin, and write a result for each of them to stdout, as JSON.

    Raises:
        UserError: the jobs are no jobs, or no device can be pretended here.
    """
    jobs = [fill_config(Job, values) for values in json.load(sys.stdin)]
    pretend_cuda()
    _replace_groups_and_weights()
    json.dump([_result(job) for job in jobs], sys.stdout)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"minirl: error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
