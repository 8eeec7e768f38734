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

TOKENS = 1  # dimension of [1, T, H]


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


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.movedim(TOKENS, 0).contiguous()
    out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    all_gather_single(out, x, group=group)
    return out.movedim(0, TOKENS)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.movedim(TOKENS, 0).contiguous()
    out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    reduce_scatter_single(out, x, group=group)
    return out.movedim(0, TOKENS)


def _own(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(dist.get_world_size(group), TOKENS)[dist.get_rank(group)].contiguous()


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _function(forward: Callable, backward: Callable) -> Callable[[Tensor, dist.ProcessGroup], Tensor]:
    class Collective(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
            ctx.group = group
            return forward(x, group)

        @staticmethod
        def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
            return backward(grad, ctx.group), None

    return Collective.apply


enter = _function(_same, _all_reduce)  # Megatron's f: whole tokens go into a column-parallel block
leave = _function(_all_reduce, _same)  # Megatron's g: partial sums come out of a row-parallel one
gather_in = _function(_gather, _reduce_scatter)  # f and g under sequence parallelism
scatter_out = _function(_reduce_scatter, _gather)
gather_tokens = _function(_gather, _own)  # in front of what computes the same on every rank and whose gradient is whole


# ---------------------------------------------------------------------------------------------------- parameters


def _shard(module: nn.Module, name: str, tp: TensorParallel, placement: Shard | Replicate) -> None:
    parameter = module._parameters.get(name)
    if parameter is not None and not isinstance(parameter, DTensor):
        sharded = distribute_tensor(parameter.data, tp.mesh, [placement], src_data_rank=None)  # no broadcast: all have the same, or meta
        module._parameters[name] = nn.Parameter(sharded, parameter.requires_grad)


def _local(parameter: Tensor | None, *, partial: bool = False) -> Tensor | None:
    """The local tensor. `partial`: this rank sees only part of the contributions to its gradient, which FSDP then sums once, after
    the last micro-batch (a hook on `.grad` would sum again at each)."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()]) if partial else parameter.to_local()


# ---------------------------------------------------------------------------------------------------- styles


def _column(module: nn.Linear, tp: TensorParallel) -> None:
    """Own rows of the weight; whole tokens in, own features out. The block around it enters once for all its columns."""
    _shard(module, "weight", tp, Shard(0))
    _shard(module, "bias", tp, Shard(0))
    module.forward = types.MethodType(lambda self, x: F.linear(x, _local(self.weight), _local(self.bias)), module)


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


def _row(module: nn.Linear, tp: TensorParallel) -> None:
    """Own columns of the weight; own features in, sums over ranks out. The bias is added once, behind the sum."""
    _shard(module, "weight", tp, Shard(1))
    _shard(module, "bias", tp, Replicate())

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        y = (scatter_out if tp.sequence else leave)(F.linear(x, _local(self.weight)), tp.group)
        return y if self.bias is None else y + _local(self.bias, partial=tp.sequence)

    module.forward = types.MethodType(forward, module)


def _vocabulary(module: nn.Embedding, tp: TensorParallel) -> None:
    """Own rows of the embedding; other tokens give 0, and the sum over ranks is whole."""
    num = module.weight.shape[0] // tp.size
    _shard(module, "weight", tp, Shard(0))

    def forward(self: nn.Embedding, ids: Tensor) -> Tensor:
        own = ids - tp.rank * num
        elsewhere = (own < 0) | (own >= num)
        y = F.embedding(own.masked_fill(elsewhere, 0), _local(self.weight)).masked_fill(elsewhere[..., None], 0)
        return (scatter_out if tp.sequence else leave)(y, tp.group)

    module.forward = types.MethodType(forward, module)


def _replicated(module: nn.Module, tp: TensorParallel, *, partial: bool) -> None:
    """Small parameters, whole on every rank: norms. Partial gradients where this rank sees its own heads or tokens only."""
    names = [n for n, p in module._parameters.items() if p is not None]
    for name in names:
        _shard(module, name, tp, Replicate())
    plain = module.forward

    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        kept = {n: self._parameters[n] for n in names}
        self._parameters.update({n: _local(p, partial=partial) for n, p in kept.items()})
        try:
            return plain(*args, **kwargs)
        finally:
            self._parameters.update(kept)

    module.forward = types.MethodType(forward, module)


def _enter_once(module: nn.Module, tp: TensorParallel) -> None:
    """One collective at the input of an attention or MLP block, instead of one for each of its column-parallel matrices."""
    function = gather_in if tp.sequence else enter

    def hook(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (function(args[0], tp.group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": function(kwargs["hidden_states"], tp.group)}

    module.register_forward_pre_hook(hook, with_kwargs=True)


# ---------------------------------------------------------------------------------------------------- plan


def check(config: object, size: int) -> None:
    """Raises UserError where `size` does not divide what it must, with the arithmetic."""
    kv = config.num_key_value_heads
    for name, value in (("num_attention_heads", config.num_attention_heads), ("vocab_size", config.vocab_size), ("intermediate_size", config.intermediate_size)):
        if value % size:
            raise UserError(f"parallel.tensor = {size} does not divide {name} = {value}")
    if kv % size and size % kv:
        raise UserError(f"parallel.tensor = {size} neither divides num_key_value_heads = {kv} nor is a multiple of it")


def apply(model: nn.Module, tp: TensorParallel) -> None:
    """Make every parameter of a Hugging Face causal language model a DTensor over the tensor axis. On meta tensors or real ones."""
    config, plan = model.config, dict(model._tp_plan)
    check(config, tp.size)
    head_dim = model.model.layers[0].self_attn.head_dim
    modules = dict(model.named_modules())
    blocks = {name.rpartition(".")[0] for name in modules if plan.get(_wild(name)) == "colwise"}
    for name, module in modules.items():
        style = plan.get(_wild(name))
        if module is model.get_input_embeddings():
            _vocabulary(module, tp)
        elif module is model.get_output_embeddings():
            _column(module, tp)  # its logits are never gathered
        elif style == "colwise" and name.endswith(("k_proj", "v_proj")) and config.num_key_value_heads < tp.size:
            _column_of_one_head(module, tp, config.num_key_value_heads, head_dim)
        elif style == "colwise":
            _column(module, tp)
        elif style == "rowwise":
            _row(module, tp)
        elif style not in (None, "replicated_with_grad_allreduce"):
            raise NotImplementedError(f"{type(model).__name__}: tensor-parallel style {style!r} of {name}")
        elif any(p is not None for p in module._parameters.values()):
            inside = name.rpartition(".")[0] in blocks  # query and key norms see whole tokens, but own heads
            _replicated(module, tp, partial=inside or tp.sequence)
        if name in blocks:
            _enter_once(module, tp)
    if config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def _wild(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
