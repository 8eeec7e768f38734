"""Tensor parallelism from the model's own plan strings ("colwise", "rowwise", ...), with or without
sequence parallelism.

Parameters become DTensors on the tensor axis, which is what FSDP, optimizer, refit and checkpoints
see; the forward runs on local tensors with explicit collectives, Shoeybi et al. 2019 (arXiv
1909.08053). Sequence parallelism, Korthikanti et al. 2022 (arXiv 2205.05198): between the parallel
blocks each rank keeps its part of the tokens, and an all-reduce becomes a reduce-scatter behind a
block and an all-gather in front of the next.

The library's own tensor parallelism is not used: under gradient accumulation it reduces the
gradients of query and key norms twice.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from minirl.errors import UserError
from minirl.parallel.fsdp import local
from minirl.parallel.mesh import all_gather_single, reduce_scatter_single

TOKENS, FEATURES = 1, 2  # dimensions of [1, T, H]


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        group: dist.ProcessGroup,
        source: Placement,
        target: Placement,
        grad: Placement,
    ) -> Tensor:
        ctx.group, ctx.grad, ctx.source = (
            group,
            grad,
            Replicate() if source.is_partial() else source,
        )
        return _redistribute(x, group, source, target)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _redistribute(grad, ctx.group, ctx.grad, ctx.source), None, None, None, None


def _redistribute(
    x: Tensor, group: dist.ProcessGroup, source: Placement, target: Placement
) -> Tensor:
    if source == target:
        return x.view_as(x)
    if source.is_replicate():
        return x.chunk(group.size(), target.dim)[group.rank()].contiguous()
    if target.is_replicate() and source.is_partial():
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x
    gather, dim = target.is_replicate(), source.dim if target.is_replicate() else target.dim
    x = x.movedim(dim, 0).contiguous()
    out = x.new_empty(len(x) * group.size() if gather else len(x) // group.size(), *x.shape[1:])
    (all_gather_single if gather else reduce_scatter_single)(out, x, group=group)
    return out.movedim(0, dim)


def move(
    x: Tensor,
    group: dist.ProcessGroup,
    source: Placement,
    target: Placement,
    *,
    grad: Placement | None = None,
) -> Tensor:
    """This rank's tensor at placement `source` over a group -> that at `target`. `grad`: what the
    gradient that comes back is; as `target` if not said. It leaves as `source`, but whole where
    that is a partial sum. (DTensors could do the same, at thrice the time of the host.)
    """
    return _Move.apply(x, group, source, target, grad or target)


@dataclass(frozen=True)
class TensorParallel:
    mesh: DeviceMesh
    sequence: bool  # Sequence parallelism.

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @property
    def tokens(self) -> Placement:
        """Between the parallel blocks."""
        return Shard(TOKENS) if self.sequence else Replicate()

    def copy_to_region(self, x: Tensor) -> Tensor:
        """Tokens go into a column-parallel block whole; Megatron's f."""
        return move(x, self.group, self.tokens, Replicate(), grad=Partial())

    def reduce_from_region(self, x: Tensor) -> Tensor:
        """Partial sums come out of a row-parallel block; Megatron's g."""
        return move(x, self.group, Partial(), self.tokens)

    def gather_tokens(self, x: Tensor) -> Tensor:
        """In front of what computes the same on every rank and whose gradient is whole."""
        return move(x, self.group, self.tokens, Replicate())


# ----------------------------------------------------------------------------------------------------
# parameters


def _shard(module: nn.Module, name: str, tp: TensorParallel, placement: Shard | Replicate) -> None:
    parameter = module._parameters.get(name)
    if parameter is not None and not isinstance(parameter, DTensor):
        if isinstance(placement, Shard) and parameter.shape[placement.dim] % tp.group.size():
            raise UserError(
                f"parallel.tensor = {tp.group.size()} does not divide dimension {placement.dim} of {type(module).__name__}.{name}, {tuple(parameter.shape)}"
            )
        sharded = distribute_tensor(
            parameter.data, tp.mesh, [placement], src_data_rank=None
        )  # no broadcast: all have the same, or meta
        module._parameters[name] = nn.Parameter(sharded, parameter.requires_grad)


# ----------------------------------------------------------------------------------------------------
# styles


def _parallel(
    module: nn.Module, tp: TensorParallel, placement: Shard | Replicate, *, partial: bool = False
) -> Callable:
    """Shard the module's parameters alike. Returns its own forward, which finds local tensors where
    its DTensors are.
    """
    for name in module._parameters:
        _shard(module, name, tp, placement)
    plain = module.forward

    def forward(*args: object, **kwargs: object) -> object:
        kept = dict(module._parameters)
        module._parameters.update({n: local(p, partial=partial) for n, p in kept.items()})
        try:
            return plain(*args, **kwargs)
        finally:
            module._parameters.update(kept)

    return forward


def _column(module: nn.Linear, tp: TensorParallel) -> Callable:
    """Own rows of the weight, but all features out: for what cannot be split by heads, fused
    projections and norms over all heads jointly.
    """
    plain = _parallel(module, tp, Shard(0))
    return lambda x: move(plain(x), tp.group, Shard(FEATURES), Replicate())


def _column_of_one_head(
    module: nn.Linear, tp: TensorParallel, num_heads: int, head_dim: int
) -> Callable:
    """Keys or values with fewer heads than ranks: weight on every rank, which uses the head of its
    queries.
    """
    _parallel(module, tp, Replicate())
    head = tp.group.rank() * num_heads // tp.group.size()
    rows = slice(head * head_dim, (head + 1) * head_dim)
    return lambda x: F.linear(
        x, *(p if p is None else local(p, partial=True)[rows] for p in (module.weight, module.bias))
    )


def _row(
    module: nn.Linear, tp: TensorParallel, *, split: bool = False, inner: bool = False
) -> Callable:
    """Own columns of the weight; own features in, sums over ranks out. The bias is added once,
    behind the sum.

    `split`: all features come in. `inner`: the block around it sums its whole output over ranks.
    """
    _shard(module, "weight", tp, Shard(1))
    _shard(module, "bias", tp, Replicate())

    def forward(x: Tensor) -> Tensor:
        y = F.linear(
            move(x, tp.group, Replicate(), Shard(FEATURES)) if split else x, local(module.weight)
        )
        y = y if inner else tp.reduce_from_region(y)
        return y if inner or module.bias is None else y + local(module.bias, partial=tp.sequence)

    return forward


def _vocabulary(module: nn.Embedding, tp: TensorParallel) -> Callable:
    """Own rows of the embedding; other tokens give 0, and the sum over ranks is whole. What a
    family does besides (scaling) is kept.
    """
    num = module.weight.shape[0] // tp.group.size()
    plain, first = _parallel(module, tp, Shard(0)), tp.group.rank() * num
    if module.padding_idx is not None:  # its row gets no gradient, whichever rank has it
        row = module.padding_idx - first
        module.padding_idx = row if 0 <= row < num else None

    def forward(ids: Tensor) -> Tensor:
        own = ids - first
        elsewhere = (own < 0) | (own >= num)
        return tp.reduce_from_region(
            plain(own.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)
        )

    return forward


def _experts(module: nn.Module, tp: TensorParallel) -> Callable:
    """Own experts out of fused tensors [experts, ...]: tokens of others' experts give 0 here, and
    the block sums over ranks.

    To the experts function an index of `num_experts` means none of them.
    """
    num = module.num_experts = module.num_experts // tp.group.size()
    plain, first = _parallel(module, tp, Shard(0)), tp.group.rank() * num

    def forward(hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        own = indices - first
        return plain(hidden, own.masked_fill((own < 0) | (own >= num), num), weights)

    return forward


def _enter_once(module: nn.Module, tp: TensorParallel) -> None:
    """One collective at the input of an attention, MLP or mixture block, instead of one for each of
    its column-parallel matrices.
    """

    def hook(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (tp.copy_to_region(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": tp.copy_to_region(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


# ----------------------------------------------------------------------------------------------------
# plan


def check_divides(divided: dict[str, int], size: int) -> None:
    """`divided`: names and values of what the family splits over ranks. Raises UserError where
    `size` does not divide one, with the arithmetic.
    """
    for name, value in divided.items():
        replicated = name == "num_key_value_heads"  # where they are fewer than ranks
        if value % size and not (replicated and size % value == 0):
            raise UserError(
                f"parallel.tensor = {size} does not divide {name} = {value}"
                + ", nor is it a multiple of it" * replicated
            )


def apply(model: nn.Module, tp: TensorParallel, plan: dict[str, str]) -> None:
    """Make every parameter of a Hugging Face causal language model a DTensor over the tensor axis.
    On meta tensors or real ones.

    `plan`: names with * for layer numbers -> the library's style strings.
    """
    modules, num_kv_heads = (
        dict(model.named_modules()),
        model.config.get_text_config().num_key_value_heads,
    )
    styles = {
        name: plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        for name in modules
        if modules[name] is not model.get_output_embeddings()
    }
    mixtures = {_parent(name) for name, style in styles.items() if style == "moe_tp_experts"}

    def block_of(name: str) -> str:
        return next((m for m in mixtures if name.startswith(f"{m}.")), _parent(name))

    columns = {
        name: style
        for name, style in styles.items()
        if style in ("colwise", "colwise_gather_output")
    }
    blocks = mixtures | {block_of(name) for name in columns}
    partial_blocks = mixtures | {
        block_of(name) for name, style in columns.items() if style == "colwise"
    }
    for name, module in modules.items():
        style = styles.get(name)
        if module is model.get_input_embeddings():
            module.forward = _vocabulary(module, tp)
        elif (
            style == "colwise"
            and name.endswith(("k_proj", "v_proj"))
            and num_kv_heads < tp.group.size()
        ):
            module.forward = _column_of_one_head(
                module, tp, num_kv_heads, modules[_parent(name)].head_dim
            )
        elif (
            style == "colwise" or module is model.get_output_embeddings()
        ):  # whose logits are never gathered
            module.forward = _parallel(
                module, tp, Shard(0)
            )  # whole tokens in, own features out; the block around it enters once for all
        elif style == "colwise_gather_output":
            module.forward = _column(module, tp)
        elif style in ("rowwise", "rowwise_split_input"):
            module.forward = _row(
                module, tp, split=style == "rowwise_split_input", inner=block_of(name) in mixtures
            )
        elif style == "moe_tp_experts":
            module.forward = _experts(module, tp)
        elif style not in (None, "replicated_with_grad_allreduce"):
            raise NotImplementedError(
                f"{type(model).__name__}: tensor-parallel style {style!r} of {name}"
            )
        elif block_of(name) in blocks - mixtures and any(
            p.ndim == 2 for p in module._parameters.values()
        ):
            module.forward = _parallel(
                module, tp, Shard(0)
            )  # a norm with weights of its own for each head, [heads, head_dim]: own heads
        elif any(p is not None for p in module._parameters.values()):
            # Small ones, whole on every rank, with partial gradients where this rank sees only its
            # own heads, tokens or experts. Inside a block
            # tokens are whole, but a query norm sees own heads, a router own experts. Outside,
            # norms see own tokens or all.
            partial = block_of(name) in partial_blocks if block_of(name) in blocks else tp.sequence
            module.forward = _parallel(module, tp, Replicate(), partial=partial)
        if name in blocks:
            _enter_once(module, tp)
        if (
            name in mixtures
        ):  # in which everything is a partial sum: own experts, own features of the shared one
            module.register_forward_hook(lambda _, args, y: tp.reduce_from_region(y))
    if model.config.tie_word_embeddings and model.get_output_embeddings() is not None:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
