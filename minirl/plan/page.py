"""A plan as text: the page of `python -m minirl.plan`, and the lines at the start of a program."""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from minirl.plan.advice import Advice
from minirl.plan.cards import of_device
from minirl.plan.costs import OPTIMIZER, REACHED
from minirl.plan.plan import GIB, Plan, check_lower_bound, make_plan
from minirl.plan.workload import Workload

if TYPE_CHECKING:
    from minirl.parallel.mesh import Mesh

MOST_ADVICE = 5


def announce(workload: Workload, mesh: "Mesh") -> tuple[Plan, list[str]]:
    """Return the plan of a run, and what a training program says of it before it loads anything.

    Nothing is said about time: a step took 1.6 times its roofline when that was measured. On CPU
    nothing sleeps, and the lines compare the tensors of a rank with its share of the memory.

    Args:
        workload: what the run does.
        mesh: of the run.

    Raises:
        UserError: weights, gradients and optimizer state do not fit the ranks' devices.
    """
    import torch  # here, because `python -m minirl.plan` answers without it

    from minirl.model import fused

    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world_size))
    sizes = {role.name: role.sizes() for role in workload.roles}
    is_cuda = mesh.device.type == "cuda"
    name = "CPU"
    memory = host_memory() // per_node
    if is_cuda:
        properties = torch.cuda.get_device_properties(mesh.device)
        name = properties.name
        memory = properties.total_memory
    # All ranks must come to the same plan: that of the one with the least memory.
    card = of_device(name, -int(mesh.maxima(torch.tensor([-memory]))))
    check_lower_bound(workload, sizes["policy"], card)
    if is_cuda:
        plan = make_plan(workload, sizes, card, per_node, liger=fused.has_liger())
        return plan, short(plan)
    plan = make_plan(workload, sizes, card, per_node, automatic=("off",), liger=False)
    return plan, _short_on_cpu(plan, per_node)


def host_memory() -> int:
    """Return the memory of this machine in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def short(plan: Plan) -> list[str]:
    """Return the lines of a run on GPUs."""
    largest = _largest(plan.memory.items(), 4)
    memory = ", ".join(f"{phase} {size / GIB:.1f}" for phase, size in largest)
    cache = ""
    if plan.kv_tokens is not None:
        cache = f"; KV cache {max(0, plan.kv_tokens):,} tokens an engine"
    return [
        f"plan: {_verdict(plan)}",
        f"plan: GiB a GPU of {plan.card.memory_gib:.1f} GiB: {memory}{cache}",
        "plan: by formulas; python -m minirl.plan has the roofline of a step's time, and advice",
        *_delta_net_note(plan, "plan: "),
    ]


def _short_on_cpu(plan: Plan, num_ranks: int) -> list[str]:
    """Return the lines of a run on CPU.

    Args:
        plan: with the host's memory, divided by the ranks on it, as that of a GPU.
        num_ranks: on this host.
    """
    parts = dict(plan.alive["backward"])
    parts[OPTIMIZER] = plan.alive["optimizer"][OPTIMIZER]
    for name in ("CUDA context", "NCCL", "engine's graphs"):
        parts.pop(name, None)
    engine = plan.workload.engine
    if engine:
        parts["engine's weights"] = plan.alive["refit"]["engine's weights"]
        parts["KV cache"] = (engine.kv_cache_gb or 1.0) * GIB
    needed = sum(parts.values()) / GIB
    memory = plan.card.memory_gib
    verdict = "may not fit" if needed > memory else "fits"
    largest = [(name, size) for name, size in _largest(parts.items(), 5) if size > 0.005 * GIB]
    named = ", ".join(f"{name} {size / GIB:.2f}" for name, size in largest)
    return [
        f"plan: {verdict}: {needed:.2f} GiB of tensors a rank of {memory:.1f} GiB, this machine's "
        f"memory over its {num_ranks} ranks",
        f"plan: GiB a rank: {named}",
        "plan: no estimate of time for a CPU (python -m minirl.plan has one for GPUs)",
        *_delta_net_note(plan, "plan: "),
    ]


def full(plan: Plan, advised: list[Advice]) -> str:
    """Return all that `python -m minirl.plan` prints."""
    parts = [_head(plan), _memory(plan), "" if plan.lacks else _time(plan), _advice(plan, advised)]
    card = plan.card
    reached = ", ".join(f"{name} {share:.0%}" for name, share in REACHED.items())
    parts.append(
        f"assumed: {card.memory_gib:.1f} GiB, {card.tflops:,.0f} TFLOP/s, "
        f"{card.bandwidth_gb:,.0f} GB/s, {card.link_gb:,.0f} GB/s to GPUs of a node, "
        f"{card.network_gb:,.0f} to other nodes, {card.host_gb:,.0f} to the host; of these "
        f"reached: {reached}. Time is a roofline, memory a sum of live tensors."
    )
    parts += _delta_net_note(plan)
    if any(role.model.get("vision_config") for role in plan.workload.roles):
        parts.append("images are left out: the text of prompts is counted")
    return "\n\n".join(part for part in parts if part)


def _verdict(plan: Plan) -> str:
    """Return whether it fits, and with which checkpointing."""
    if plan.lacks:
        return f"DOES NOT FIT: {plan.lacks}"
    return (
        f"fits with activation checkpointing {plan.checkpointing}: at most "
        f"{plan.memory[plan.largest] / GIB:.1f} of {plan.limit / GIB:.1f} GiB ({plan.largest})"
    )


def _head(plan: Plan) -> str:
    workload = plan.workload
    load = workload.load
    parallel = workload.cfg.parallel
    # Each rank of a context holds a shard, too.
    shards = workload.world_size // (parallel.replicate * parallel.tensor)
    return (
        f"{workload.cfg.policy.model} on {workload.world_size} x {plan.card.name}: "
        f"{_verdict(plan)}\n"
        f"mesh: replicate {parallel.replicate}, FSDP over {shards}, context {parallel.context}, "
        f"tensor {parallel.tensor}; a step: {workload.num_sequences:,} sequences of "
        f"{load.prompt:,} + {load.answer:,} tokens, {workload.num_updates} update(s) of "
        f"{load.num_micro} micro-batch(es) of {load.tokens:,} rows a rank"
    )


def _memory(plan: Plan) -> str:
    lines = [f"memory, GiB a GPU of {plan.limit / GIB:.1f}: the peak of each phase"]
    for phase, size in _largest(plan.memory.items()):
        largest = _largest(plan.alive[phase].items(), 4)
        named = [f"{name} {part / GIB:.1f}" for name, part in largest if part > 0.05 * GIB]
        over = "  <- too much" if size > plan.limit else ""
        lines.append(f"  {phase:22}{size / GIB:8.1f}  {', '.join(named)}{over}")
    if plan.kv_tokens is not None:
        states = ""
        if plan.state_tokens:
            states = f"; the states of each sequence take as much as {plan.state_tokens:,} of them"
        lines.append(f"KV cache of an engine: {max(0, plan.kv_tokens):,} tokens{states}")
    if plan.shared_base:
        saved = f"{plan.shared_base / GIB:.1f} GiB a GPU"
        if any(role.shares_base for role in plan.workload.roles):
            lines.append(f"critic.share_base: the base is held once, which saves {saved}")
        else:
            lines.append(f"--critic.share-base would hold the base once, and save {saved}")
    return "\n".join(lines)


def _time(plan: Plan) -> str:
    lines = [
        f"time of a step: {plan.step_seconds:.1f} s; forward and backward reach "
        f"{plan.share_of_peak:.0%} of the card's {plan.card.tflops:,.0f} TFLOP/s"
    ]
    for phase, seconds in plan.seconds.items():
        sent = ""
        if phase in plan.wire:
            sent = f"  {plan.wire[phase] / 1e9:10,.1f} GB on the wire"
        lines.append(f"  {phase:22}{seconds:8.2f} s{sent}")
    return "\n".join(lines)


def _advice(plan: Plan, advised: list[Advice]) -> str:
    """Return what to change: what makes it fit, or else what makes it faster."""
    if plan.lacks and not advised:
        sizes: dict[str, float] = {}
        for parts in plan.alive.values():
            for part, size in parts.items():
                sizes[part] = max(size, sizes.get(part, 0.0))
        ((part, size),) = _largest(sizes.items(), 1)
        reason = ""
        if size > plan.limit:
            reason = f" ({part} alone takes {size / GIB:.1f} GiB of {plan.limit / GIB:.1f})"
        return f"no settings that were tried make it fit{reason}: take more GPUs, or larger ones"
    title = "settings that make it fit, the fastest first"
    if not plan.lacks:
        title = "settings that may be faster"
        advised = [a for a in advised if a.changes]
    if not advised:
        return ""
    lines = [title]
    for advice in advised[:MOST_ADVICE]:
        memory = advice.plan.memory[advice.plan.largest] / GIB
        flags = advice.flags or "(as it is)"
        lines.append(f"  {advice.plan.step_seconds:7.1f} s {memory:7.1f} GiB  {flags}")
    return "\n".join(lines)


def _delta_net_note(plan: Plan, prefix: str = "") -> list[str]:
    """Return with which kernels gated delta nets are counted; empty: there are none."""
    if not plan.has_delta_nets:
        return []
    return [
        f"{prefix}gated delta nets are counted as the kernels of the extra hybrids compute them "
        "(flash-linear-attention, causal-conv1d); without these they take more memory and time"
    ]


def _largest(items: Iterable[tuple[str, float]], most: int = 99) -> list[tuple[str, float]]:
    return sorted(items, key=lambda item: -item[1])[:most]
