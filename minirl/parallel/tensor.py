"""Tensor parallelism from the model's plan strings ("colwise", "rowwise", ...).

Parameters become DTensors on the tensor axis, which is what FSDP, optimizer, refit and checkpoints
see; the forward runs on local tensors with explicit collectives, Shoeybi et al. 2019 (arXiv
1909.08053). Sequence parallelism, Korthikanti et al. 2022 (arXiv 2205.05198): between the parallel
blocks each rank keeps its part of the tokens, and an all-reduce becomes a reduce-scatter after a
block and an all-gather before the next.

The library's own tensor parallelism is not used: under gradient accumulation it reduces the
gradients of query and key norms twice.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
)

from minirl.base.errors import UserError
from minirl.parallel.fsdp import local
from minirl.parallel.placements import WHOLE, Forward, Layout, local_parts, move, shard_all

# Names of a linear's adapter (model/adapters/lora.py), [rank, in] and [out, rank].
LORA_A = "lora_A"
LORA_B = "lora_B"
# Where they are fewer than ranks, each is on several.
REPLICABLE = ("num_key_value_heads", "num_global_key_value_heads")
# Dimensions of hidden states [1, T, H].
TOKENS = 1
FEATURES = 2


@dataclass(frozen=True)
class TensorParallel:
    """The tensor axis, and how hidden states go in and out of the parallel blocks."""

    mesh: DeviceMesh
    sequence: bool  # Sequence parallelism.

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the ranks that hold parts of each matrix."""
        return self.mesh.get_group()

    @property
    def tokens(self) -> Placement:
        """Return the placement of hidden states between the parallel blocks."""
        return Shard(TOKENS) if self.sequence else Replicate()

    def copy_to_region(self, x: Tensor) -> Tensor:
        """Give a column-parallel block all tokens; Megatron's f."""
        return move(x, self.group, self.tokens, Replicate(), grad=Partial())

    def reduce_from_region(self, x: Tensor) -> Tensor:
        """Add the partial sums that a row-parallel block returns; Megatron's g."""
        return move(x, self.group, Partial(), self.tokens)

    def copy_inputs_to_region(self, _: nn.Module, args: tuple, kwargs: dict) -> tuple:
        """Call `copy_to_region` at the input of a block, instead of at each of its matrices.

        A forward pre-hook of the block.
        """
        if args:
            return (self.copy_to_region(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.copy_to_region(kwargs["hidden_states"])}

    def reduce_outputs_from_region(self, _: nn.Module, args: tuple, output: Any) -> Any:
        """Add the partial sums that a mixture returns, alone or before its router's scores.

        A forward hook of the mixture.
        """
        if isinstance(output, tuple):
            return self.reduce_from_region(output[0]), *output[1:]
        return self.reduce_from_region(output)

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Gather all tokens for a computation that every rank repeats, with the whole gradient."""
        return move(x, self.group, self.tokens, Replicate())


# A style shards the parameters of a module, and returns the module's forward.
Style = Callable[[Any, TensorParallel], Forward]

# --------------------------------------------------------------------------------------------------
# styles


def _column(module: nn.Module, tp: TensorParallel) -> Forward:
    """Keep a part of the weight's rows: whole tokens in, this rank's features out.

    The block around the module calls `copy_to_region` once for all of its column-parallel modules.
    """
    return shard_all(module, tp.mesh, Layout(Shard(0)), others={LORA_A: WHOLE})


def _gathered_column(module: nn.Linear, tp: TensorParallel) -> Forward:
    """Keep a part of the weight's rows, but return all features.

    For what cannot be split by heads: fused projections, and norms over all heads jointly.
    """
    column = _column(module, tp)
    return lambda x: move(column(x), tp.group, Shard(FEATURES), Replicate())


def _whole(module: nn.Module, tp: TensorParallel) -> Forward:
    """Keep all of the weight: its outputs are for all heads."""
    return shard_all(module, tp.mesh, WHOLE)


def _parts(module: Any, tp: TensorParallel) -> Forward:
    """Compute this rank's part of each of `module.parts`: features that are each on their own.

    The weights, which are few, are whole on every rank.
    """
    group = tp.group

    def of_rank(p: Tensor) -> Tensor:
        return local_parts(local(p, partial=True), module.parts, group.rank(), group.size(), dim=0)

    return shard_all(module, tp.mesh, Layout(Replicate(), of_rank))


def _column_parts(module: Any, tp: TensorParallel) -> Forward:
    """Keep a part of the weight's rows, but return this rank's heads of all `module.parts`.

    Parts lie end to end, so that a rank's rows are not its heads'.
    """
    column = _column(module, tp)
    group = tp.group

    def forward(x: Tensor) -> Tensor:
        y = move(column(x), group, Shard(FEATURES), Replicate(), grad=Partial())
        return local_parts(y, module.parts, group.rank(), group.size(), FEATURES)

    return forward


def _delta_net(module: Any, tp: TensorParallel) -> Forward:
    """Keep this rank's heads of a gated delta net (model/delta_net.py)."""
    size = tp.group.size()
    module.num_k_heads //= size
    module.num_v_heads //= size
    module.key_dim //= size
    module.value_dim //= size
    return shard_all(module, tp.mesh, Layout(Shard(0)))


def _row_sums(module: nn.Linear, tp: TensorParallel) -> Forward:
    """Keep a part of the weight's columns: this rank's features in, partial sums out.

    The bias is left to the caller, because it must be added once only.
    """
    without_bias = Layout(Replicate(), lambda bias: None)
    others = {"bias": without_bias, LORA_B: WHOLE}
    return shard_all(module, tp.mesh, Layout(Shard(1)), others=others)


def _row(module: nn.Linear, tp: TensorParallel) -> Forward:
    """Keep a part of the weight's columns, and add the partial sums over ranks.

    The bias is added once, after the sum.
    """
    row_sums = _row_sums(module, tp)

    def forward(x: Tensor) -> Tensor:
        y = tp.reduce_from_region(row_sums(x))
        return y if module.bias is None else y + local(module.bias, partial=tp.sequence)

    return forward


def _split_row(module: nn.Linear, tp: TensorParallel) -> Forward:
    """Do as `_row`, but take all features, and use this rank's."""
    row = _row(module, tp)
    return lambda x: row(move(x, tp.group, Replicate(), Shard(FEATURES)))


def _embedding(module: nn.Embedding, tp: TensorParallel) -> Forward:
    """Keep a part of the embedding's rows; other tokens give 0, and the sum over ranks is whole.

    What a family does besides (scaling) is kept.
    """
    num_rows = module.weight.shape[0] // tp.group.size()
    first = tp.group.rank() * num_rows
    embed = shard_all(module, tp.mesh, Layout(Shard(0)))
    if module.padding_idx is not None:  # its row gets no gradient, whichever rank has it
        row = module.padding_idx - first
        module.padding_idx = row if 0 <= row < num_rows else None

    def forward(ids: Tensor) -> Tensor:
        rows = ids - first
        elsewhere = (rows < 0) | (rows >= num_rows)
        hidden = embed(rows.masked_fill(elsewhere, 0))
        return tp.reduce_from_region(hidden.masked_fill(elsewhere[..., None], 0))

    return forward


def _experts(module: Any, tp: TensorParallel) -> Forward:
    """Keep some of the experts of fused tensors [experts, ...].

    Tokens of other ranks' experts give 0 here, and the block sums over ranks. To the experts
    function (model/experts.py) an index of `num_experts` means no expert.
    """
    num_experts = module.num_experts // tp.group.size()
    first = tp.group.rank() * num_experts
    module.num_experts = num_experts
    mixture = shard_all(module, tp.mesh, Layout(Shard(0)))

    def forward(hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        here = indices - first
        elsewhere = (here < 0) | (here >= num_experts)
        return mixture(hidden, here.masked_fill(elsewhere, num_experts), weights)

    return forward


def _router_alone(module: Any, tp: TensorParallel) -> Forward:
    """Let a router see all tokens, [T, H], where no block around it and its experts does."""
    router = _whole(module, tp)
    return lambda hidden: router(tp.copy_to_region(hidden[None]).squeeze(0))


def _experts_alone(module: Any, tp: TensorParallel) -> Forward:
    """Do as `_experts`, after `_router_alone`: some tokens in, and summed over ranks out."""
    is_divided = all(isinstance(p, DTensor) for p in module._parameters.values())  # over EP ranks
    mixture = module.forward if is_divided else _experts(module, tp)

    def forward(hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        x = tp.copy_to_region(hidden[None]).squeeze(0)
        return tp.reduce_from_region(mixture(x, indices, weights)[None]).squeeze(0)

    return forward


EXPERTS = "moe_tp_experts"
STYLES: dict[str, Style] = {
    "embedding": _embedding,
    "head": _column,  # Its logits are never gathered.
    # The strings of the library's plans.
    "colwise": _column,
    "colwise_gather_output": _gathered_column,
    "rowwise": _row,
    "rowwise_split_input": _split_row,
    EXPERTS: _experts,
    # Of an attention module with parameters that have a number for each head: this rank's heads.
    "heads": _column,
    # The strings of model/families.py.
    "whole": _whole,
    "router_alone": _router_alone,
    "experts_alone": _experts_alone,
    "delta_net": _delta_net,
    "parts": _parts,
    "colwise_parts": _column_parts,
}
UNSHARDED = ("", "replicated_with_grad_allreduce")


# --------------------------------------------------------------------------------------------------
# plan


def check_divides(divided: dict[str, int], size: int) -> None:
    """Refuse a tensor-parallel size that does not divide a value of the config.

    Args:
        divided: names and values of what the family splits over ranks.
        size: parallel.tensor.

    Raises:
        UserError: with the arithmetic, and the smaller sizes that work.
    """
    name = _find_undivided(divided, size)
    if name:
        also = ", nor is it a multiple of it" if name in REPLICABLE else ""
        usable = [str(n) for n in range(1, size) if not _find_undivided(divided, n)]
        raise UserError(
            f"parallel.tensor = {size} does not divide {name} = {divided[name]}{also}; "
            f"smaller sizes that work: {', '.join(usable)}"
        )


def _find_undivided(divided: dict[str, int], size: int) -> str | None:
    """Return the first name with a value that `size` does not divide, None if it divides all."""
    for name, value in divided.items():
        if value % size and (name not in REPLICABLE or size % value):
            return name
    return None


class _Blocks:
    """The blocks (attention, MLP, mixture) into which tokens go whole, by name."""

    def __init__(self, styles: dict[str, str]):
        """Find them from the styles of the modules inside."""
        # Blocks in which everything is a partial sum: a rank has some experts, and some features of
        # the shared expert.
        self.mixtures = {
            name.rpartition(".")[0] for name, style in styles.items() if style == "moe_tp_experts"
        }
        # Blocks inside which a rank sees some heads, tokens or experts only.
        self.partial = self.mixtures | {
            self.around(name) for name, style in styles.items() if style == "colwise"
        }
        self.all = self.partial | {
            self.around(name) for name, style in styles.items() if style == "colwise_gather_output"
        }

    def around(self, name: str) -> str:
        """Return the block that a module is in: its parent, or the mixture around both."""
        for mixture in self.mixtures:
            if name.startswith(f"{mixture}."):
                return mixture
        return name.rpartition(".")[0]


def apply(model: Any, tp: TensorParallel, plan: dict[str, str]) -> None:
    """Make every parameter of a causal language model a DTensor over the tensor axis.

    Args:
        model: of Hugging Face; on meta tensors or real ones.
        tp: the tensor axis.
        plan: names of modules, with * for layer numbers -> the library's style strings.

    Raises:
        NotImplementedError: the plan has a style that is not in STYLES.
        UserError: the axis does not divide a parameter.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    outer = {embedding: "embedding", head: "head"}
    styles = {}
    for name, module in model.named_modules():
        in_plan = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")
        styles[name] = outer.get(module, in_plan)
    blocks = _Blocks(styles)

    for name, module in model.named_modules():
        style = _find_style(name, module, styles[name], blocks, model, tp)
        if style:
            module.forward = style(module, tp)
        if name in blocks.all:
            module.register_forward_pre_hook(tp.copy_inputs_to_region, with_kwargs=True)
        if name in blocks.mixtures:
            module.register_forward_hook(tp.reduce_outputs_from_region)
    if model.config.tie_word_embeddings and head is not None:
        head.weight = embedding.weight


def _find_style(
    name: str,
    module: nn.Module,
    style: str,
    blocks: _Blocks,
    model: Any,
    tp: TensorParallel,
) -> Style | None:
    """Return how to shard a module, None if it has no parameters of its own.

    style: its string in the plan, or "".
    """
    if style == EXPERTS and all(isinstance(p, DTensor) for p in module._parameters.values()):
        return None  # expert parallelism has divided them (model/experts.py)
    block = blocks.around(name)
    if style == "colwise" and name.endswith(("k_proj", "v_proj")):
        num_heads = module.out_features // model.get_submodule(block).head_dim
        if num_heads < tp.group.size():
            # Each rank has the whole weight, and uses the rows of the head that its queries share.
            head = tp.group.rank() * num_heads // tp.group.size()
            rows = Layout(Replicate(), lambda p: local(p, partial=True).chunk(num_heads)[head])
            return lambda module, tp: shard_all(module, tp.mesh, rows, others={LORA_A: WHOLE})
    if style == "rowwise" and block in blocks.mixtures:
        return _row_sums  # the mixture around it sums its whole output over ranks
    if style in STYLES:
        return STYLES[style]
    if style not in UNSHARDED:
        raise NotImplementedError(f"tensor-parallel style {style!r} of {name} is not known")
    parameters = list(module.parameters(recurse=False))
    if not parameters:
        return None
    if block in blocks.all - blocks.mixtures and any(p.ndim == 2 for p in parameters):
        return _column  # a norm with a weight for each head, [heads, head_dim]: this rank's heads
    # The others are small, and whole on every rank. Inside a block tokens are whole, but a query
    # norm sees this rank's heads, a router this rank's experts. Outside, a norm sees this rank's
    # tokens or all.
    partial_grad = block in blocks.partial if block in blocks.all else tp.sequence
    view = partial(local, partial=partial_grad)
    return lambda module, tp: shard_all(module, tp.mesh, Layout(Replicate(), view))
