"""A plan as text."""

from collections.abc import Iterable

from minirl.model import families
from minirl.model.hybrid import delta_rule
from minirl.plan import kinds
from minirl.plan.advice import Advice
from minirl.plan.cards import REACHED
from minirl.plan.planner import GIB, Plan

MOST_ADVICE = 5


def full(plan: Plan, advised: list[Advice], source: str) -> str:
    """Return all that `python -m minirl.plan` prints; `source` is where the figures come from."""
    parts = [
        _head(plan, source),
        _memory(plan),
        "" if plan.lacks else _time(plan),
        _advice(plan, advised),
        _assumed(plan),
        _of_delta_nets(plan),
        _of_images(plan),
    ]
    return "\n\n".join(part for part in parts if part)


def short(plan: Plan) -> list[str]:
    """Return the three lines that a program prints when it starts, four of a hybrid."""
    of = f"of {plan.card.memory_gib:.1f} GiB"
    memory = ", ".join(
        f"{phase} {size / GIB:.1f}" for phase, size in _largest(plan.memory.items(), 4)
    )
    cache = ""
    if plan.kv_tokens is not None:
        cache = f"; KV cache {max(0, plan.kv_tokens):,} tokens an engine"
    # Nothing about time: a step took 1.6 times its roofline when that was measured.
    return [
        f"plan: {_verdict(plan)}",
        f"plan: GiB a GPU {of}: {memory}{cache}",
        "plan: by formulas; python -m minirl.plan rehearses it, with the roofline of a step's time",
        *_line_of_delta_nets(plan),
    ]


def short_on_cpu(plan: Plan, num_ranks: int) -> list[str]:
    """Return the same for a run on CPU, where nothing sleeps.

    Args:
        plan: with the host's memory, divided by the ranks on it, as that of a GPU.
        num_ranks: on this host.
    """
    parts = dict(plan.alive["backward"])
    parts[kinds.OPTIMIZER] = plan.alive["optimizer"][kinds.OPTIMIZER]
    for name in ("CUDA context", "NCCL", "engine's graphs"):
        parts.pop(name, None)
    engine = plan.workload.engine
    if engine:
        parts["engine's weights"] = plan.alive["refit"]["engine's weights"]
        parts["KV cache"] = (engine.kv_cache_gb or 1.0) * GIB
    parts = {name: size for name, size in parts.items() if size > 0.005 * GIB}
    needed = sum(parts.values()) / GIB
    memory = plan.card.memory_gib
    of = f"of {memory:.1f} GiB, this machine's memory over its {num_ranks} ranks"
    verdict = "may not fit" if needed > memory else "fits"
    named = ", ".join(f"{name} {size / GIB:.2f}" for name, size in _largest(parts.items(), 5))
    return [
        f"plan: {verdict}: {needed:.2f} GiB of tensors a rank {of}",
        f"plan: GiB a rank: {named}",
        "plan: no estimate of time for a CPU (python -m minirl.plan has one for GPUs)",
        *_line_of_delta_nets(plan),
    ]


def _line_of_delta_nets(plan: Plan) -> list[str]:
    said = _of_delta_nets(plan)
    return [f"plan: {said}"] if said else []


def _verdict(plan: Plan) -> str:
    """Return whether it fits, and with which checkpointing."""
    if plan.lacks:
        return f"DOES NOT FIT: {plan.lacks}"
    return (
        f"fits with activation checkpointing {plan.checkpointing}: at most "
        f"{plan.memory[plan.largest] / GIB:.1f} of {plan.limit / GIB:.1f} GiB ({plan.largest})"
    )


def _head(plan: Plan, source: str) -> str:
    workload = plan.workload
    load = workload.load
    parallel = workload.cfg.parallel
    # Context ranks have shards of their own.
    shards = workload.world_size // (parallel.replicate * parallel.tensor)
    axes = [f"replicate {parallel.replicate}", f"FSDP over {shards}"]
    axes += [f"context {parallel.context}", f"tensor {parallel.tensor}"]
    return "\n".join(
        [
            f"{workload.cfg.policy.model} on {workload.world_size} x {plan.card.name}: "
            f"{_verdict(plan)}",
            f"mesh: {', '.join(axes)}; a step: {workload.num_sequences:,} sequences of "
            f"{load.prompt:,} + {load.answer:,} tokens, "
            f"{workload.num_updates} update(s) of {load.num_micro} micro-batch(es) of "
            f"{load.tokens:,} rows a rank",
            f"from {source}",
        ]
    )


def _memory(plan: Plan) -> str:
    rows = []
    for phase, size in _largest(plan.memory.items()):
        parts = ", ".join(
            f"{name} {part / GIB:.1f}"
            for name, part in _largest(plan.alive[phase].items(), 4)
            if part > 0.05 * GIB
        )
        over = "  <- too much" if size > plan.limit else ""
        rows.append(f"  {phase:22}{size / GIB:8.1f}  {parts}{over}")
    lines = [f"memory, GiB a GPU of {plan.limit / GIB:.1f}: the peak of each phase", *rows]
    if plan.kv_tokens is not None:
        states = ""
        if plan.state_tokens:
            states = f"; the states of each sequence take as much as {plan.state_tokens:,} of them"
        lines.append(f"KV cache of an engine: {max(0, plan.kv_tokens):,} tokens{states}")
    if plan.of_shared_base:
        saved = f"{plan.of_shared_base / GIB:.1f} GiB a GPU"
        is_shared = any(role.shares_base for role in plan.workload.others)
        lines.append(
            f"critic.share_base: the base is held once, which saves {saved}"
            if is_shared
            else f"--critic.share-base would hold the base once, and save {saved}"
        )
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
        reason = f" ({plan.too_large})" if plan.too_large else ""
        return f"no settings that were tried make it fit{reason}: take more GPUs, or larger ones"
    title = "settings that make it fit, the fastest first (by formulas)"
    if not plan.lacks:
        title = "settings that may be faster (by formulas)"
        advised = [a for a in advised if a.changes]
    if not advised:
        return ""
    lines = [title]
    for advice in advised[:MOST_ADVICE]:
        memory = advice.plan.memory[advice.plan.largest] / GIB
        flags = advice.flags or "(as it is)"
        lines.append(f"  {advice.plan.step_seconds:7.1f} s {memory:7.1f} GiB  {flags}")
    return "\n".join(lines)


def _assumed(plan: Plan) -> str:
    card = plan.card
    reached = ", ".join(f"{name} {share:.0%}" for name, share in REACHED.items())
    return (
        f"assumed: {card.memory_gib:.1f} GiB, {card.tflops:,.0f} TFLOP/s, "
        f"{card.bandwidth_gb:,.0f} GB/s, {card.link_gb:,.0f} GB/s to GPUs of a node, "
        f"{card.network_gb:,.0f} to other nodes, {card.host_gb:,.0f} to the host; of these "
        f"reached: {reached}. Time is a roofline, memory a sum of live tensors."
    )


def _of_delta_nets(plan: Plan) -> str:
    """Return with which kernels gated delta nets are counted; empty: there are none."""
    if not any(delta_rule.convolution(role.model) for role in plan.workload.roles):
        return ""
    return (
        "gated delta nets are counted as the kernels of the extra hybrids compute them "
        "(flash-linear-attention, causal-conv1d); without these they take more memory and time"
    )


def _of_images(plan: Plan) -> str:
    """Return how images are counted; empty: no model reads any."""
    if not any(families.reads_images(role.model) for role in plan.workload.roles):
        return ""
    if plan.by_dry_run:
        return "images: one in every prompt, of half its length, if the model has any so small"
    return "images are left out: formulas count the text of prompts, a dry run counts images too"


def _largest(items: Iterable[tuple[str, float]], most: int = 99) -> list[tuple[str, float]]:
    return sorted(items, key=lambda item: -item[1])[:most]
