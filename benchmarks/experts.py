"""What expert parallelism costs and saves, by arithmetic.

    python -m benchmarks.experts         # the table of minirl/parallel/README.md

Of a micro-batch with activation checkpointing, on nodes of 8 GPUs. Nothing is measured.
"""

from benchmarks.fits import MODELS
from minirl.plan.sizes import read_sizes

TOKENS = 16384  # Of a rank.
TFLOPS = 400.0  # Reached.
LINK_GB = 450.0  # GB/s in one direction inside a node.
NETWORK_GB = 50.0  # The same between nodes, for each GPU.
PER_NODE = 8
NODES = (1, 8)
GB = 1e9


def seconds_of(num_bytes: float, num_ranks: int, stride: int = 1) -> float:
    """Return how long bytes take over the slowest link among ranks that are `stride` apart."""
    inside = num_ranks * stride <= PER_NODE
    return num_bytes / ((LINK_GB if inside else NETWORK_GB) * GB)


def row(name: str, nodes: int, experts: int) -> str:
    """Return a row of the table."""
    config = MODELS[name]
    shape = read_sizes(config.to_dict())
    of_layer = config.num_experts * 3 * config.hidden_size * config.moe_intermediate_size
    num_ranks = nodes * PER_NODE
    rest = num_ranks // experts
    in_experts = shape.num_layers * of_layer
    others = shape.parameters - in_experts

    active = shape.active_in_layers + shape.hidden * shape.vocabulary
    compute = 8 * active * TOKENS / (TFLOPS * 1e12)
    of_others = (2 + 2 + 4) * others * (1 - 1 / num_ranks)
    # bfloat16 in forward and backward, and float32 gradients.
    of_experts = (2 + 2 + 4) * in_experts / experts * (1 - 1 / rest)
    moved = of_others + of_experts
    gathers = seconds_of(of_others, num_ranks) + seconds_of(of_experts, rest, experts)
    # bfloat16, there and back: forward, recomputed and backward. 1 / experts of a token's are here.
    of_token = 6 * config.num_experts_per_tok * config.hidden_size * 2 * (1 - 1 / experts)
    travel = shape.num_layers * TOKENS * of_token
    waited = seconds_of(travel, experts)
    total = max(compute + waited, gathers)
    whole = 4 * (others + in_experts / experts)
    return (
        f"| {name} | {nodes} | {experts} | {moved / GB:.0f} | {gathers:.1f} | {travel / GB:.0f} | "
        f"{waited:.1f} | {compute:.1f} | {total:.1f} | {whole / GB:.0f} |"
    )


def table() -> str:
    """Return the table of minirl/parallel/README.md."""
    rows = [
        "| model | nodes | `--parallel.experts` | FSDP, GB | s | tokens, GB | s | computation, s | "
        "all, s | a whole gradient, GB |",
        "|---" * 10 + "|",
    ]
    for name in ("Qwen3-30B-A3B", "Qwen3-235B-A22B"):
        for nodes in NODES:
            rows += [row(name, nodes, experts) for experts in (1, PER_NODE)]
        rows.append(row(name, NODES[-1], PER_NODE * NODES[-1]))
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table())
