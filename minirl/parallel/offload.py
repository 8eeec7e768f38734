"""What a model keeps in host memory while it does not work."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from minirl.parallel.fsdp import local, reshard
from minirl.parallel.storage import SleepingTensors


class Sleeper:
    """Offloads storages to host memory and reloads them.

    No tensor object changes, so FSDP, optimizer and views stay valid.
    """

    def __init__(
        self,
        model: nn.Module,
        shared: set[str],
        optimizer_state: Callable[[], list[Tensor]],
        base: frozenset[str] = frozenset(),
        *,
        active: bool = True,
    ):
        """Remember what to offload.

        Args:
            model: the sharded model.
            shared: names of its parameters that another model holds, and offloads.
            optimizer_state: returns the local tensors of the optimizer's state.
            base: names of the parameters that may sleep while a refit reads the model, because it
                reads their `values`.
            active: False: everything stays on the device.
        """
        self.model = model
        self.shared = shared
        self.optimizer_state = optimizer_state
        # Without CUDA there is no other memory to move to, and nothing is offloaded.
        self.active = active and torch.cuda.is_available()
        self._state = SleepingTensors()
        self._parameters = SleepingTensors()
        self._base = SleepingTensors()
        self.base = base

    def sleep_optimizer(self) -> None:
        """Offload the optimizer's state."""
        if self.active:
            self._state.sleep(self.optimizer_state())

    def sleep_base(self) -> None:
        """Offload the parameters of the base; `values` has copies of them."""
        if self.active:
            reshard(self.model)
            self._base.sleep([local(p) for name, p in self._own() if name in self.base])

    def sleep_parameters(self) -> None:
        """Offload the parameters."""
        if not self.active:
            return
        self.sleep_base()
        self._parameters.sleep([local(p) for name, p in self._own() if name not in self.base])

    def _own(self) -> list[tuple[str, nn.Parameter]]:
        return [item for item in self.model.named_parameters() if item[0] not in self.shared]

    def values(self, t: Tensor) -> Tensor:
        """Return this rank's part of a parameter, or if `sleep_base` has offloaded it, a copy."""
        return self._base.values(t)

    def sleep(self) -> None:
        """Offload the optimizer's state and the parameters."""
        self.sleep_optimizer()
        self.sleep_parameters()

    def wake_optimizer(self) -> None:
        """Reload the optimizer's state, if it is offloaded."""
        if self._state.asleep:
            self._state.wake()

    def wake_parameters(self) -> None:
        """Reload the parameters, if they are offloaded."""
        for part in (self._parameters, self._base):
            if part.asleep:
                part.wake()
