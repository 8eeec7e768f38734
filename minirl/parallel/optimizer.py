"""Several torch optimizers as one, and where their state is kept between steps."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from minirl.config.policy import PolicyConfig
from minirl.parallel.fsdp import local
from minirl.parallel.storage import HostMemory, dequantize, quantize

# Parameters below this many elements (norms, biases) keep a full state: nothing to save there.
SMALL = 4096
# What of an optimizer's state may be kept in 8 bits, and whether it has a sign. The one without is
# kept as its square root, which is what the step divides by: half the decades to cover, so that few
# small second moments become 0 under a first moment that does not.
SIGNED = {"exp_avg": True, "momentum_buffer": True, "exp_avg_sq": False}


class ShardAdamW(torch.optim.AdamW):
    """AdamW on this rank's shards of parameters, gradients and state.

    It is a rule for each element, so nothing is to be said about meshes. torch's own has DTensor
    work out how the results of all tensors are sharded: 2 to 3 ms a tensor in the first step.
    """

    def _init_group(self, group: dict, *lists: list[Tensor]) -> bool:
        """Fill the lists of what is stepped, as torch's does, with this rank's tensors."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return has_complex


class Optimizer:
    """Optimizers of disjoint parameters, stepped one after the other.

    Their state may be stored elsewhere between two steps. For a step it comes back in full
    precision, a limited number of parameters at a time, and for a checkpoint all at once. So a
    checkpoint does not depend on where state was; one of 8-bit state resumes bitwise on the same
    mesh, and to within a level on another mesh, which has other blocks of elements.
    """

    def __init__(self, parts: list[torch.optim.Optimizer], cfg: PolicyConfig):
        """Take over the optimizers.

        Args:
            parts: the optimizers.
            cfg: `optimizer_state` is where their state is between steps. device: stays as it is.
                offload: in host memory. 8bit: on the device in one byte an element (see
                `quantize`). With `ema_decay` an exponential moving average of the parameters is one
                more entry of the state, `ema`, in their dtype and shards. It begins as the weights
                after the first update; set the attribute `ema_decay` before each further one.
        """
        self.parts = parts
        self.rest = cfg.optimizer_state
        # So many elements of parameters get their stored state back for a step at the same time.
        self.elements_at_once = 2**28
        self.ema_decay = 0.0
        # (parameter, key of its state) -> codes and scales of 8 bits.
        self._codes: dict[tuple[Tensor, str], tuple[Tensor, Tensor]] = {}
        self._host_memory = HostMemory()
        if cfg.ema_decay:
            for part in parts:
                part.register_step_post_hook(self._average)

    @property
    def stepped(self) -> bool:
        """Return whether there is any state."""
        return any(part.state for part in self.parts)

    def step(self) -> None:
        """Step all parts. Collective, if one of them is."""
        for part in self.parts:
            groups = part.param_groups
            for group in groups:
                for params in self._at_once(group["params"]):
                    # A torch optimizer steps what is in its groups.
                    part.param_groups = [{**group, "params": params}]
                    self._restore(part, params)
                    part.step()
                    self._store(part, params)
            part.param_groups = groups

    def _at_once(self, params: list[Tensor]) -> list[list[Tensor]]:
        """Return the parameters as lists of those that are stepped at the same time."""
        if self.rest == "device":
            return [params]
        lists: list[list[Tensor]] = [[]]
        num_elements = 0
        for p in params:
            if lists[-1] and num_elements + p.numel() > self.elements_at_once:
                lists.append([])
                num_elements = 0
            lists[-1].append(p)
            num_elements += p.numel()
        return lists

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Keep all state on the device in full precision inside, for a checkpoint."""
        for part in self.parts:
            self._restore(part, part.state)
        yield
        for part in self.parts:
            self._store(part, part.state)

    def tensors(self) -> list[Tensor]:
        """Return the local tensors of all state, also those of stored state."""
        out = []
        for part in self.parts:
            out += [t for _, _, t in _entries(part, part.state) if t.ndim]
        for stored in self._codes.values():
            out += stored
        return out

    def averages(self) -> dict[Tensor, Tensor]:
        """Return the moving average of every parameter; only inside `awake`.

        One that was never updated is its own average.

        Raises:
            KeyError: averages are not kept.
        """
        averages: dict[Tensor, Tensor] = {}
        for part in self.parts:
            for group in part.param_groups:
                for p in group["params"]:
                    averages[p] = part.state[p]["ema"] if p in part.state else p
        return averages

    @torch.no_grad()
    def _store(self, part: torch.optim.Optimizer, params: Iterable[Tensor]) -> None:
        """Store the state of parameters, and free its storages.

        Nothing else is freed: every tensor object stays the one that others know.
        """
        for p, key, t in _entries(part, params):
            if self.rest == "offload" and t.ndim:
                self._host_memory.keep((p, key), t)
            elif self.rest == "8bit" and key in SIGNED and p.numel() >= SMALL:
                self._codes[p, key] = quantize(t, signed=SIGNED[key])
            else:
                continue
            t.untyped_storage().resize_(0)

    @torch.no_grad()
    def _restore(self, part: torch.optim.Optimizer, params: Iterable[Tensor]) -> None:
        """Bring the stored state of parameters back into its tensors."""
        for p, key, t in _entries(part, params):
            if self.rest == "offload" and not t.untyped_storage().nbytes():
                self._host_memory.bring_back((p, key), t)
            elif (p, key) in self._codes:
                codes, scales = self._codes.pop((p, key))
                t.untyped_storage().resize_(t.nbytes)
                t.copy_(dequantize(codes, scales, t, signed=SIGNED[key]))

    @torch.no_grad()
    def _average(self, part: torch.optim.Optimizer, *_: object) -> None:
        for group in part.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = part.state[p]
                if "ema" in state:
                    local(state["ema"]).lerp_(local(p), 1 - self.ema_decay)
                else:
                    state["ema"] = p.detach().clone()


def _entries(
    part: torch.optim.Optimizer, params: Iterable[Tensor]
) -> Iterator[tuple[Tensor, str, Tensor]]:
    """Yield (parameter, key, this rank's tensor) of the state of those parameters that have any."""
    for p in params:
        for key, value in part.state.get(p, {}).items():
            yield p, key, local(value)
