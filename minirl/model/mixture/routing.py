"""The routers of a mixture of experts: told which experts to take, counted, and kept in balance.

A router scores the experts of each token and takes the k best. `Routing` wraps the routers of a
model, which stay the library's:

* Replay (R3, arXiv 2510.11370): where `Packed.routes` names the experts that the engine took, the
  router takes them, too. Its scores are its own, with their gradient, and are normalised over those
  experts as its family does it. Rounding makes a trainer and an engine choose differently now and
  then, which changes a token's log-prob more than all other rounding.
* Counts of a step, and what they are for, are in model/mixture/balance.py.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from minirl.base.errors import require
from minirl.config.policy import PolicyConfig
from minirl.config.rl import section_of
from minirl.model import families
from minirl.model.mixture.balance import BIAS, Balance, WithGradient
from minirl.model.mixture.mixtures import experts_of_token
from minirl.parallel.mesh import Mesh
from minirl.types.packed import Packed


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

    Attributes:
        replays: take the experts that `Packed.routes` names.
        balance: what counts them and keeps them in balance.
    """

    def __init__(self, model: nn.Module, cfg: PolicyConfig, *, sigmoid: bool, num_copies: int):
        """Wrap the routers of a model that has some. Call it before anything else wraps them.

        Args:
            model: of the library.
            cfg: of the model.
            sigmoid: routers score by a sigmoid, and add a bias to choose.
            num_copies: tensor-parallel ranks, each of which runs the routers on all tokens, and
                whose gradients of them are added.

        Raises:
            UserError: layers differ in how many experts a token gets.
        """
        config: Any = model.config
        routers: list[Any] = []
        biased: list[Any] = []  # The module that has the bias of each router.
        for block in model.modules():
            for router in block.children():
                if hasattr(router, "top_k") and not hasattr(router, "experts"):
                    routers.append(router)
                    biased.append(router if hasattr(router, BIAS) else block)
        assert routers, "a mixture has routers"
        self.replays = False
        self.top_k = experts_of_token(config.get_text_config())
        self.num_experts: int = routers[0].num_experts
        self.balance = Balance(
            cfg.router,
            biased,
            num_experts=self.num_experts,
            top_k=self.top_k,
            sigmoid=sigmoid,
            num_copies=num_copies,
        )
        self._batch: Packed | None = None
        self._is_counting = False
        self._num_to_count = 0  # Micro-batches of the step.
        for number, router in enumerate(routers):
            self._wrap(number, router)

    def _wrap(self, number: int, router: Any) -> None:
        plain = router.forward

        def forward(*args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self._route(number, plain, *args)

        router.forward = forward

    def begin(self, batch: Packed) -> None:
        """Note the rows that the next forward is of, and its recomputation in the backward."""
        self._batch = batch

    def begin_step(
        self, num_tokens: float, micro_batches: list[Packed], forward: Callable[[Packed], Any]
    ) -> None:
        """Begin an optimizer step.

        If its backwards need the counts of the whole step, all micro-batches but the first are
        counted now. That one is counted when it is computed, before the first backward.

        Args:
            num_tokens: in the loss, on all ranks.
            micro_batches: of this rank.
            forward: of the model, without gradient.
        """
        self.balance.begin_step(num_tokens, replays=self.replays)
        self._num_to_count = len(micro_batches)
        if self.balance.needs_loads:
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
        if self._num_to_count == 0 and self.balance.needs_loads:
            self.balance.share(mesh)

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
            self.balance.count(number, logits, experts, batch.loss_rows, choice, own)
        if self.balance.has_loss and torch.is_grad_enabled() and logits.requires_grad:
            weights = WithGradient.apply(weights, logits, self.balance, number, batch.loss_rows)
        return (experts, weights, logits) if is_reversed else (logits, weights, experts)


def is_mixture(config: PretrainedConfig) -> bool:
    """Return whether a model has mixtures of experts."""
    return families.has_experts(config)


def check(config: PretrainedConfig, cfg: PolicyConfig) -> None:
    """Refuse settings of routers that a model has not.

    Args:
        config: of the model.
        cfg: its settings.

    Raises:
        UserError: the model is no mixture, or has no bias to move.
    """
    router = cfg.router
    section = section_of(cfg)
    values = {
        f"{section}.router.aux_loss_coef": router.aux_loss_coef,
        f"{section}.router.z_loss_coef": router.z_loss_coef,
        f"{section}.router.bias_update_rate": router.bias_update_rate,
    }
    for name, value in values.items():
        require(
            not value or is_mixture(config),
            f"{name} = {value} is about the routers of a mixture of experts, and the model is of "
            f"family {config.model_type}, which has none; set it to 0",
        )
    with_bias = [name for name, family in families.FAMILIES.items() if family.sigmoid_router]
    require(
        not router.bias_update_rate or families.FAMILIES[config.model_type].sigmoid_router,
        f"{section}.router.bias_update_rate = {router.bias_update_rate} moves the bias of routers, "
        f"and family {config.model_type} has none (there is one in {', '.join(with_bias)}); use "
        f"{section}.router.aux_loss_coef",
    )


def install(model: nn.Module, cfg: PolicyConfig, num_copies: int) -> Routing | None:
    """Wrap the routers of a model; None: it has none. Arguments are those of `Routing`."""
    config: Any = model.config
    check(config, cfg)
    if not is_mixture(config):
        return None
    sigmoid = families.FAMILIES[config.model_type].sigmoid_router
    return Routing(model, cfg, sigmoid=sigmoid, num_copies=num_copies)
