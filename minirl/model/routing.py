"""The routers of a mixture of experts: they take given experts, are counted, and are balanced.

A router scores the experts of each token and takes the k best. `Routing` wraps the routers of a
model, which stay the library's.

Replay (R3, arXiv 2510.11370): where `Packed.routes` names the experts that the engine took, the
router takes them, too. Its scores are its own, with their gradient, and are normalised over those
experts as its family does it. Rounding makes a trainer and an engine choose differently now and
then, which changes a token's log-prob more than all other rounding.

Balance: counts and losses over the tokens in the loss of one optimizer step, on all ranks and in
all micro-batches together, each counted once: by the normalisation rule of algo/normalize.py, so
that neither packing nor the mesh changes anything. Prompts are left out, because how often a shared
one is computed depends on the packing.

For each mixture with E experts, N tokens of k choices each, c_i of them for expert i, and router
logits x:

* auxiliary loss: E * sum_i f_i P_i, where f_i = c_i / N, and P_i is the mean of the router's
  probability of expert i (Switch Transformer, arXiv 2101.03961, eq. 4 to 6; GShard, arXiv
  2006.16668; for k > 1 as the library's `load_balancing_loss_func` has it of one layer). It is k if
  all experts get the same. f_i has no gradient. It is that of the whole step, so it is counted
  before the first backward: by a forward of all micro-batches but the first, which costs their time
  once more.
* z-loss: the mean of logsumexp(x)^2 (ST-MoE, arXiv 2202.08906, eq. 5).
* bias: b_i += rate * sign(mean_j c_j - c_i) after the step (arXiv 2408.15664, algorithm 1). It
  takes part in the choice only, and has no gradient.

The losses are means over the mixtures, and come on top of the loss of the step.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minirl.config.policy import PolicyConfig
from minirl.model import families
from minirl.parallel.mesh import Mesh
from minirl.types.packed import Packed

BIAS = "e_score_correction_bias"  # Of the library's routers, or of the blocks around them.


class _Columns(NamedTuple):
    """Sums over the tokens in the loss, float64, a row for each mixture."""

    loads: Tensor  # [M, E]: choices of each expert.
    probabilities: Tensor  # [M, E]: of each expert, by the router.
    entropy: Tensor  # [M, 1]: of these, nats.
    squared: Tensor  # [M, 1]: logsumexp of the logits, squared.
    replayed: Tensor  # [M, 1]: tokens with a route from the engine,
    changed: Tensor  # [M, 1]: and those of them that the router would have sent elsewhere.


class WithGradient(torch.autograd.Function):
    """Pass a router's weights on, and give its logits the gradient of the losses above.

    So the losses are in the backward of the layer, and with activation checkpointing in that of its
    recomputation, once.
    """

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, logits: Tensor, routing: "Routing", number: int, rows: Tensor
    ) -> Tensor:
        """Return the weights."""
        ctx.save_for_backward(logits, rows)
        ctx.routing = routing
        ctx.number = number
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of weights and logits."""
        logits, rows = ctx.saved_tensors
        return grads[0], ctx.routing.gradient(ctx.number, logits, rows), None, None, None


def _wide(logits: Tensor) -> Tensor:
    """Return logits in float32 at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class _Replay(TorchFunctionMode):
    """Answers the `topk` by which a router chooses experts.

    A call of another size is left alone: some routers choose groups of experts before.
    """

    def __init__(self, choice: Tensor, num_experts: int):
        """Take the choice int64 [T, k]: negative where the router's own counts."""
        super().__init__()
        self.choice = choice
        self.num_experts = num_experts
        self.own: Tensor | None = None  # What the router would have chosen.

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call a function of torch."""
        result = function(*args, **(kwargs or {}))
        if function not in (torch.topk, torch.Tensor.topk):
            return result
        scores = args[0]
        if scores.shape != (len(self.choice), self.num_experts):
            return result
        assert self.own is None and result.indices.shape == self.choice.shape
        self.own = result.indices
        choice = torch.where(self.choice < 0, self.own, self.choice)
        return torch.return_types.topk((scores.gather(1, choice), choice))


class Routing:
    """The routers of a model.

    A step is `begin_step`; forwards and backwards, each forward inside `counting`; `finish`; and
    `move_bias` if the step was made.

    Attributes:
        replays: take the experts that `Packed.routes` names.
    """

    def __init__(self, model: nn.Module, cfg: PolicyConfig, *, sigmoid: bool, num_copies: int):
        """Wrap the routers of a model that has some. Call it before anything else wraps them.

        Args:
            model: of the library.
            cfg: of the model.
            sigmoid: routers score by a sigmoid, and add a bias to choose.
            num_copies: tensor-parallel ranks, each of which runs the routers on all tokens, and
                the gradients of the ranks are added.

        Raises:
            UserError: layers differ in how many experts a token gets.
        """
        config: Any = model.config
        routers: list[Any] = []
        self._biased: list[Any] = []  # The module that has the bias of each router.
        for block in model.modules():
            for router in block.children():
                if hasattr(router, "top_k") and not hasattr(router, "experts"):
                    routers.append(router)
                    self._biased.append(router if hasattr(router, BIAS) else block)
        assert routers, "a mixture has routers"
        self._routers = routers
        self.cfg = cfg.router
        self.replays = False
        self.top_k = families.experts_of_token(config.get_text_config())
        self.num_experts: int = routers[0].num_experts
        self._sigmoid = sigmoid
        self._num_copies = num_copies
        self._batch: Packed | None = None
        # Of the step.
        self._is_counting = False
        self._num_to_count = 0  # Micro-batches.
        self._num_tokens = 0.0  # In the loss, on all ranks.
        self._sums: Tensor | None = None  # Of this rank; a row holds all `_Columns` of a mixture.
        self._fractions: Tensor | None = None  # float64 [M, E]: f of all ranks.
        self._loads: Tensor | None = None  # float64 [M, E]: of all ranks, on the host.
        for number, router in enumerate(routers):
            router.forward = partial(self._route, number, router.forward)

    def begin(self, batch: Packed) -> None:
        """Note the rows that the next forward is of, and its recomputation in the backward."""
        self._batch = batch

    def begin_step(
        self, num_tokens: float, micro_batches: list[Packed], forward: Callable[[Packed], Any]
    ) -> None:
        """Begin an optimizer step, or the next part of one (Policy.sum_gradients).

        The auxiliary loss needs the counts of the whole step in each backward, so all micro-batches
        but the first are counted now. That one is counted when it is computed, before the first
        backward.

        Args:
            num_tokens: in the loss, on all ranks.
            micro_batches: of this rank.
            forward: of the model, without gradient.
        """
        self._num_tokens += num_tokens
        self._fractions = None
        self._loads = None
        self._num_to_count = len(micro_batches)
        if self.cfg.aux_loss_coef:
            self._num_to_count = 1
            self._is_counting = True
            for batch in micro_batches[1:]:
                forward(batch)
            self._is_counting = False

    @contextlib.contextmanager
    def counting(self, mesh: Mesh) -> Iterator[None]:
        """Count the choices of the forward of the step's next micro-batch, inside the block.

        Its recomputation is outside. Collective, if it is the last one that is to be counted.
        """
        self._is_counting = self._num_to_count > 0
        yield
        self._is_counting = False
        self._num_to_count -= 1
        if self._num_to_count == 0 and self.cfg.aux_loss_coef:
            self.share(mesh)

    def _route(self, number: int, plain: Callable, *args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what a router returns: logits [T, E], weights [T, k] and experts int64 [T, k].

        Granite's return them in the reverse order, and so does this then.

        Args:
            number: of the router.
            plain: its forward.
            args: of it.
        """
        batch = self._batch
        assert batch is not None, "begin was not called"
        choice = None
        own = None
        if self.replays and batch.routes is not None:
            choice = batch.routes[:, number].long()
            with _Replay(choice, self.num_experts) as replay:
                logits, weights, experts = outputs = plain(*args)
            own = replay.own
            assert own is not None, "the router does not choose by topk"
        else:
            logits, weights, experts = outputs = plain(*args)
        is_reversed = not logits.dtype.is_floating_point
        if is_reversed:
            experts, weights, logits = outputs
        if self._is_counting:
            self.count(number, logits, experts, batch.loss_rows, choice, own)
        has_loss = self.cfg.aux_loss_coef or self.cfg.z_loss_coef
        if has_loss and torch.is_grad_enabled() and logits.requires_grad:
            weights = WithGradient.apply(weights, logits, self, number, batch.loss_rows)
        return (experts, weights, logits) if is_reversed else (logits, weights, experts)

    def _columns(self, sums: Tensor) -> _Columns:
        return _Columns(*sums.split([self.num_experts, self.num_experts, 1, 1, 1, 1], dim=1))

    def _probabilities(self, logits: Tensor) -> Tensor:
        if self._sigmoid:
            scores = logits.sigmoid()
            return scores / scores.sum(-1, keepdim=True)
        return logits.softmax(-1)

    @torch.no_grad()
    def count(
        self,
        number: int,
        logits: Tensor,
        experts: Tensor,
        rows: Tensor,
        choice: Tensor | None,
        own: Tensor | None,
    ) -> None:
        """Add what a router has done.

        Args:
            number: of the router.
            logits: [T, E].
            experts: int64 [T, k], as they were taken.
            rows: int64 [N], those in the loss.
            choice: int64 [T, k], negative where no route was known; None: nowhere.
            own: int64 [T, k], what the router would have taken; None: `experts`.
        """
        if self._sums is None:
            num_columns = 2 * self.num_experts + 4
            self._sums = logits.new_zeros(len(self._biased), num_columns, dtype=torch.float64)
        columns = self._columns(self._sums[number : number + 1])
        x = _wide(logits.index_select(0, rows))
        taken = experts.index_select(0, rows)
        ones = x.new_ones(taken.numel(), dtype=torch.float64)
        columns.loads[0].index_add_(0, taken.flatten(), ones)
        p = self._probabilities(x)
        columns.probabilities[0].add_(p.sum(0, dtype=torch.float64))
        columns.entropy.sub_(torch.xlogy(p, p).sum(dtype=torch.float64))
        columns.squared.add_(x.logsumexp(-1).square().sum(dtype=torch.float64))
        if choice is not None and own is not None:
            is_replayed = (choice.index_select(0, rows) >= 0).all(1)
            own = own.index_select(0, rows)
            differs = (own.sort(1).values != taken.sort(1).values).any(1)
            columns.replayed.add_(is_replayed.sum())
            columns.changed.add_(differs.sum())

    def share(self, mesh: Mesh) -> None:
        """Learn the choices of all ranks, before the first backward. Collective."""
        assert self._sums is not None
        loads = mesh.data_sums(self._columns(self._sums).loads.cpu().contiguous())
        self._fractions = (loads / max(1.0, self._num_tokens)).to(self._sums.device)

    def gradient(self, number: int, logits: Tensor, rows: Tensor) -> Tensor:
        """Return the gradient of the losses by the logits [T, E] of a router."""
        with torch.enable_grad():
            x = _wide(logits.detach().index_select(0, rows)).requires_grad_()
            value = self.cfg.z_loss_coef * x.logsumexp(-1).square().sum()
            if self.cfg.aux_loss_coef:
                assert self._fractions is not None, "share was not called"
                sums = self._probabilities(x).sum(0)
                balanced = (self._fractions[number].to(x.dtype) * sums).sum() * self.num_experts
                value = value + self.cfg.aux_loss_coef * balanced
            # Every tensor-parallel rank has all tokens, and their gradients are added.
            share = len(self._biased) * max(1.0, self._num_tokens) * self._num_copies
            (grad,) = torch.autograd.grad(value / share, x)
        return torch.zeros_like(logits).index_copy(0, rows, grad.to(logits.dtype))

    def finish(self, mesh: Mesh) -> dict[str, float]:
        """Return the metrics of the step, of all ranks. Collective."""
        assert self._sums is not None
        columns = self._columns(mesh.data_sums(self._sums.cpu()))
        self._loads = columns.loads
        num = max(1.0, self._num_tokens)
        self._sums = None
        self._num_tokens = 0.0
        fractions = columns.loads / num
        metrics = {
            "expert_load_max": float(fractions.max()) * self.num_experts / self.top_k,
            "router_entropy": float(columns.entropy.mean()) / num,
        }
        if self.cfg.aux_loss_coef:
            products = fractions * columns.probabilities / num
            metrics["router_aux_loss"] = float(products.sum(1).mean()) * self.num_experts
        if self.cfg.z_loss_coef:
            metrics["router_z_loss"] = float(columns.squared.mean()) / num
        if self.replays:
            num_replayed = float(columns.replayed.mean())
            metrics["router_replayed"] = num_replayed / num
            metrics["router_changed"] = float(columns.changed.mean()) / max(1.0, num_replayed)
        return metrics

    @torch.no_grad()
    def move_bias(self) -> None:
        """Move the biases of routers towards balance, by the counts of the step that ended.

        Those of frozen routers stay.
        """
        rate = self.cfg.bias_update_rate
        if not rate:
            return
        assert self._loads is not None, "finish was not called"
        rows = zip(self._routers, self._biased, self._loads, strict=True)
        for router, module, loads in rows:
            if any(p.requires_grad for p in router.parameters()):
                bias = module.e_score_correction_bias
                bias.add_(torch.sign(loads.mean() - loads).to(bias), alpha=rate)


def gemma4_route(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts as Gemma 4's router does, which returns probabilities instead of logits.

    Args:
        router: the library's Gemma4TextRouter.
        hidden: [T, H].

    Returns:
        Logits [T, E], weights [T, k] and experts int64 [T, k].
    """
    normed = router.norm(hidden) * router.scale * router.scalar_root_size
    logits = router.proj(normed)
    probabilities = F.softmax(logits, dim=-1, dtype=torch.float32)
    weights, experts = torch.topk(probabilities, router.top_k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights * router.per_expert_scale[experts], experts


def install(model: nn.Module, cfg: PolicyConfig, num_copies: int) -> Routing | None:
    """Wrap the routers of a model; None: it has none. Arguments are those of `Routing`."""
    config: Any = model.config
    if not families.has_experts(config):
        return None
    router: Any
    for router in model.modules():
        if type(router).__name__ == "Gemma4TextRouter":
            router.top_k = router.config.top_k_experts
            router.num_experts = router.config.num_experts
            router.forward = partial(gemma4_route, router)
    sigmoid = families.FAMILIES[config.model_type].sigmoid_router
    return Routing(model, cfg, sigmoid=sigmoid, num_copies=num_copies)
