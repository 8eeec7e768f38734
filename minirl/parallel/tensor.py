"""Tensor parallelism from the model's own plan strings ("colwise", "rowwise", ...), with or without sequence parallelism.

Parameters become DTensors on the tensor axis, which is what FSDP, optimizer, refit and checkpoints see; the forward runs on local
tensors with explicit collectives, Shoeybi et al. 2019 (arXiv 1909.08053). Sequence parallelism, Korthikanti et al. 2022
(arXiv 2205.05198): between the parallel blocks each rank keeps its part of the tokens, and an all-reduce becomes a reduce-scatter
behind a block and an all-gather in front of the next.

The library's own tensor parallelism is not used: under gradient accumulation it reduces the gradients of query and key norms twice.
"""

import re
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from minirl.parallel.mesh import all_gather_single, reduce_scatter_single
from minirl.types import UserError

TOKENS, FEATURES = 1, -1  # dimensions of [1, T, H]


@dataclass(frozen=True)
class TensorParallel:
    mesh: DeviceMesh
    sequence: bool
    """Sequence parallelism."""

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()


# ---------------------------------------------------------------------------------------------------- collectives


def _all_reduce(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def _gather(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    x = x.movedim(dim, 0).contiguous()
    out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    all_gather_single(out, x, group=group)
    return out.movedim(0, dim)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    x = x.movedim(dim, 0).contiguous()
    out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    reduce_scatter_single(out, x, group=group)
    return out.movedim(0, dim)


def _own(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def _same(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return x.view_as(x)


def _function(forward: Callable, backward: Callable, dim: int = TOKENS) -> Callable[[Tensor, dist.ProcessGroup], Tensor]:
    class Collective(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
            ctx.group = group
            return forward(x, group, dim)

        @staticmethod
        def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
            return backward(grad, ctx.group, dim), None

    return Collective.apply


enter = _function(_same, _all_reduce)  # Megatron's f: whole tokens go into a column-parallel block
leave = _function(_all_reduce, _same)  # Megatron's g: partial sums come out of a row-parallel one
gather_in = _function(_gather, _reduce_scatter)  # f and g under sequence parallelism
scatter_out = _function(_reduce_scatter, _gather)
gather_tokens = _function(_gather, _own)  # in front of what computes the same on every rank and whose gradient is whole
gather_features = _function(_gather, _own, FEATURES)  # the same behind a column-parallel matrix
own_features = _function(_own, _gather, FEATURES)  # and back, in front of a row-parallel one


# ---------------------------------------------------------------------------------------------------- parameters


def _shard(module: nn.Module, name: str, tp: TensorParallel, placement: Shard | Replicate) -> None:
    parameter = module._parameters.get(name)
    if parameter is not None and not isinstance(parameter, DTensor):
        if isinstance(placement, Shard) and parameter.shape[placement.dim] % tp.size:
            raise UserError(f"parallel.tensor = {tp.size} does not divide dimension {placement.dim} of {type(module).__name__}.{name}, {tuple(parameter.shape)}")
        sharded = distribute_tensor(parameter.data, tp.mesh, [placement], src_data_rank=None)  # no broadcast: all have the same, or meta
        module._parameters[name] = nn.Parameter(sharded, parameter.requires_grad)


def _local(parameter: Tensor | None, *, partial: bool = False) -> Tensor | None:
    """The local tensor. `partial`: this rank sees only part of the contributions to its gradient, which FSDP then sums once, after
    the last micro-batch (a hook on `.grad` would sum again at each)."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()]) if partial else parameter.to_local()


# ---------------------------------------------------------------------------------------------------- styles


def _column(module: nn.Linear, tp: TensorParallel, *, gather: bool = False) -> None:
    """Own rows of the weight; whole tokens in, own features out. The block around it enters once for all its columns.

    `gather`: all features out, for what cannot be split by heads: fused projections, norms over all heads jointly.
    """
    _shard(module, "weight", tp, Shard(0))
    _shard(module, "bias", tp, Shard(0))

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        y = F.linear(x, _local(self.weight), _local(self.bias))
        return gather_features(y, tp.group) if gather else y

    module.forward = types.MethodType(forward, module)


def _column_of_one_head(module: nn.Linear, tp: TensorParallel, num_heads: int, head_dim: int) -> None:
    """Keys or values with fewer heads than ranks: weight on every rank, which uses the head of its queries."""
    _shard(module, "weight", tp, Replicate())
    _shard(module, "bias", tp, Replicate())
    head = tp.rank * num_heads // tp.size
    rows = slice(head * head_dim, (head + 1) * head_dim)

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        bias = _local(self.bias, partial=True)
        return F.linear(x, _local(self.weight, partial=True)[rows], None if bias is None else bias[rows])

    module.forward = types.MethodType(forward, module)


def _row(module: nn.Linear, tp: TensorParallel, *, split: bool = False, inner: bool = False) -> None:
    """Own columns of the weight; own features in, sums over ranks out. The bias is added once, behind the sum.

    `split`: all features come in. `inner`: the block around it sums its whole output over ranks.
    """
    _shard(module, "weight", tp, Shard(1))
    _shard(module, "bias", tp, Replicate())

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        y = F.linear(own_features(x, tp.group) if split else x, _local(self.weight))
        if inner:
            return y
        y = (scatter_out if tp.sequence else leave)(y, tp.group)
        return y if self.bias is None else y + _local(self.bias, partial=tp.sequence)

    module.forward = types.MethodType(forward, module)


def _vocabulary(module: nn.Embedding, tp: TensorParallel) -> None:
    """Own rows of the embedding; other tokens give 0, and the sum over ranks is whole. What a family does besides (scaling) is kept."""
    num = module.weight.shape[0] // tp.size
    _shard(module, "weight", tp, Shard(0))
    if module.padding_idx is not None:  # its row gets no gradient, whichever rank has it
        row = module.padding_idx - tp.rank * num
        module.padding_idx = row if 0 <= row < num else None
    plain = _with_local_parameters(module, partial=False)

    def forward(self: nn.Embedding, ids: Tensor) -> Tensor:
        own = ids - tp.rank * num
        elsewhere = (own < 0) | (own >= num)
        y = plain(own.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)
        return (scatter_out if tp.sequence else leave)(y, tp.group)

    module.forward = types.MethodType(forward, module)


def _with_local_parameters(module: nn.Module, *, partial: bool) -> Callable:
    """The module's own forward, which finds local tensors where its DTensors are."""
    plain = module.forward

    def forward(*args: object, **kwargs: object) -> object:
        kept = dict(module._parameters)
        module._parameters.update({n: _local(p, partial=partial) for n, p in kept.items()})
        try:
            return plain(*args, **kwargs)
        finally:
            module._parameters.update(kept)

    return forward


def _replicated(module: nn.Module, tp: TensorParallel, *, partial: bool) -> None:
    """Small parameters, whole on every rank: norms, routers. Partial gradients where this rank sees only its own heads, tokens or experts."""
    for name in module._parameters:
        _shard(module, name, tp, Replicate())
    module.forward = _with_local_parameters(module, partial=partial)


def _per_head(module: nn.Module, tp: TensorParallel) -> None:
    """A norm with weights of its own for each head, [heads, head_dim]: own heads."""
    for name in module._parameters:
        _shard(module, name, tp, Shard(0))
    module.forward = _with_local_parameters(module, partial=False)


def _experts(module: nn.Module, tp: TensorParallel) -> None:
    """Own experts out of fused tensors [experts, ...]: tokens of others' experts give 0 here, and the block sums over ranks.

    To the experts function an index of `num_experts` means none of them.
    """
    num = module.num_experts // tp.size
    for name in module._parameters:
        _shard(module, name, tp, Shard(0))
    module.num_experts = num
    plain = _with_local_parameters(module, partial=False)

    def forward(self: nn.Module, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        own = indices - tp.rank * num
        return plain(hidden, own.masked_fill((own < 0) | (own >= num), num), weights)

    module.forward = types.MethodType(forward, module)


def _enter_once(module: nn.Module, tp: TensorParallel) -> None:
    """One collective at the input of an attention, MLP or mixture block, instead of one for each of its column-parallel matrices."""
    function = gather_in if tp.sequence else enter

    def hook(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (function(args[0], tp.group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": function(kwargs["hidden_states"], tp.group)}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _leave_once(module: nn.Module, tp: TensorParallel) -> None:
    """And one at the output of a mixture block, in which everything is a partial sum: own experts, own features of the shared one."""
    function = scatter_out if tp.sequence else leave
    module.register_forward_hook(lambda _, args, y: function(y, tp.group))


# ---------------------------------------------------------------------------------------------------- plan


def check(divided: dict[str, int], size: int) -> None:
    """`divided`: names and values of what the family splits over ranks. Raises UserError where `size` does not divide one, with the arithmetic."""
    for name, value in divided.items():
        if name == "num_key_value_heads" and value % size and size % value:  # fewer heads than ranks are replicated
            raise UserError(f"parallel.tensor = {size} neither divides num_key_value_heads = {value} nor is a multiple of it")
        if name != "num_key_value_heads" and value % size:
            raise UserError(f"parallel.tensor = {size} does not divide {name} = {value}")


def apply(model: nn.Module, tp: TensorParallel, plan: dict[str, str]) -> None:
    """Make every parameter of a Hugging Face causal language model a DTensor over the tensor axis. On meta tensors or real ones.

    `plan`: names with * for layer numbers -> the library's style strings.
    """
    config, modules = model.config, dict(model.named_modules())
    styles = {name: plan.get(_wild(name)) for name in modules if modules[name] is not model.get_output_embeddings()}
    mixtures = {_parent(name) for name, style in styles.items() if style == "moe_tp_experts"}
    def block_of(name: str) -> str:
        return next((m for m in mixtures if name.startswith(f"{m}.")), _parent(name))
    columns = {name: style for name, style in styles.items() if style in ("colwise", "colwise_gather_output")}
    blocks = mixtures | {block_of(name) for name in columns}
    partial_blocks = mixtures | {block_of(name) for name, style in columns.items() if style == "colwise"}
    for name, module in modules.items():
        style = styles.get(name)
        if module is model.get_input_embeddings():
            _vocabulary(module, tp)
        elif module is model.get_output_embeddings():
            _column(module, tp)  # its logits are never gathered
        elif style == "colwise" and name.endswith(("k_proj", "v_proj")) and config.num_key_value_heads < tp.size:
            _column_of_one_head(module, tp, config.num_key_value_heads, modules[_parent(name)].head_dim)
        elif style in ("colwise", "colwise_gather_output"):
            _column(module, tp, gather=style == "colwise_gather_output")
        elif style in ("rowwise", "rowwise_split_input"):
            _row(module, tp, split=style == "rowwise_split_input", inner=block_of(name) in mixtures)
        elif style == "moe_tp_experts":
            _experts(module, tp)
        elif style not in (None, "replicated_with_grad_allreduce"):
            raise NotImplementedError(f"{type(model).__name__}: tensor-parallel style {style!r} of {name}")
        elif block_of(name) in blocks - mixtures and any(p.ndim == 2 for p in module._parameters.values()):
            _per_head(module, tp)
        elif any(p is not None for p in module._parameters.values()):
            # Inside a block tokens are whole, but a query norm sees own heads, a router own experts. Outside, norms see own tokens or all.
            block = block_of(name)
            _replicated(module, tp, partial=block in partial_blocks if block in blocks else tp.sequence)
        if name in blocks:
            _enter_once(module, tp)
        if name in mixtures:
            _leave_once(module, tp)
    if config.tie_word_embeddings and model.get_output_embeddings() is not None:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _wild(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
