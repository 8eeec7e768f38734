"""Which parameters are trained, by their names: frozen weights, and linears with adapters."""

import difflib
import itertools
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel

from minirl.base.errors import UserError, require
from minirl.model import families
from minirl.model.families import FUSED

# Groups of targets, by the block that a linear is in.
ATTENTION = ("*attn*", "*attention*")
MLP = ("*mlp*", "*feed_forward*", "*experts*")
GROUPS = {"all-linear": (*ATTENTION, *MLP), "attention": ATTENTION, "mlp": MLP}
LAYERS = "*layers.*"  # Of the language model.
TOWERS = ("*visual*", "*vision_tower*", "*audio_tower*")  # Get adapters by patterns only.
# Linears that are in no group: a router, the gate of a shared expert, which has one output, and the
# gates of a delta net's heads, of which there are about as many as a rank.
GATES = ("wg", "shared_expert_gate", "in_proj_ba", "in_proj_a", "in_proj_b")
# Linears that get no adapter: rows are multiplied by their weights (`causal.packed_forward`).
HEADS = ("lm_head", "score")


def frozen_names(model: PreTrainedModel, patterns: list[str], setting: str) -> set[str]:
    """Return the names, in the model, of the parameters that patterns match.

    Args:
        model: whole, perhaps on the meta device.
        patterns: as of `fnmatch`, where * stands for any text, also with dots. They match the
            names of weights in the model's Hugging Face folder, such as model.visual.*.
        setting: what holds the patterns, for messages.

    Raises:
        UserError: a pattern matches nothing, all of them match everything, or they match some of
            the weights that are one parameter here (the experts of a layer).
    """
    in_files = names_in_files(model)
    all_weights = list(itertools.chain.from_iterable(in_files.values()))
    matched: set[str] = set()
    for pattern in patterns:
        found = [weight for weight in all_weights if fnmatchcase(weight, pattern)]
        if not found:
            # Names and the modules that they are of, because a pattern usually names a module.
            parts = [weight.split(".") for weight in all_weights]
            known = {".".join(part[: i + 1]) for part in parts for i in range(len(part))}
            close = difflib.get_close_matches(pattern.strip("*."), sorted(known), cutoff=0.5)
            raise UserError(
                f"{setting}: {pattern!r} matches no weight of the model; close names are "
                f"{', '.join(close or all_weights[:1])} (for a module write it with .* at its end)"
            )
        matched.update(found)

    frozen = set()
    for name, weights in in_files.items():
        num_matched = sum(weight in matched for weight in weights)
        require(
            num_matched in (0, len(weights)),
            f"{setting} = {patterns} matches {num_matched} of the {len(weights)} matrices of "
            f"experts that are trained as one ({weights[0]}, ..., {weights[-1]}); match all or "
            "none of them",
        )
        if num_matched:
            frozen.add(name)
    require(
        len(frozen) < len(in_files),
        f"{setting} = {patterns} matches all {len(all_weights)} weights of the model, and nothing "
        "would be trained; take a narrower pattern",
    )
    return frozen


def names_in_files(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return, by parameter of the model, the weights in files that it is made of.

    The matrices of experts are weights of their own there.
    """
    in_files = {}
    for name, p in model.named_parameters():
        slices = families.checkpoint_slices(model.config, name, p.shape)
        in_files[name] = [part.name for part in slices]
    return in_files


def target_names(model: PreTrainedModel, targets: list[str], setting: str) -> list[str]:
    """Return the names of the modules that get adapters, in the model's order.

    Args:
        model: whole.
        targets: as `LoraConfig.targets` has them.
        setting: what holds them, for messages.

    Raises:
        UserError: one of them matches nothing.
    """
    can_be = {}
    for name, module in model.named_modules():
        is_experts = set(FUSED) <= set(module._parameters)
        if (isinstance(module, nn.Linear) and name not in HEADS) or is_experts:
            can_be[name] = module
    matched: set[str] = set()
    for target in targets:
        found = [name for name in can_be if _matches(name, target)]
        if not found:
            last = sorted({name.rpartition(".")[2] for name in can_be})
            require(
                target not in HEADS,
                f"{setting}: the head {target} gets no adapter; train it whole by modules_to_save "
                f"['{target}.*'], or if it is tied, ['model.embed_tokens.*']",
            )
            raise UserError(
                f"{setting}: {target!r} matches no linear layer of the model; give all-linear, "
                f"attention, mlp, a name ({', '.join(last)}) or a pattern of whole names such as "
                f"{next(iter(can_be))}"
            )
        matched.update(found)
    return [name for name in can_be if name in matched]


def _matches(name: str, target: str) -> bool:
    """Return whether a target of the config means a module."""
    last = name.rpartition(".")[2]
    in_tower = any(fnmatchcase(name, pattern) for pattern in TOWERS)
    if target in GROUPS:
        in_layers = fnmatchcase(name, LAYERS) and not in_tower
        in_group = any(fnmatchcase(name, pattern) for pattern in GROUPS[target])
        return in_layers and in_group and last not in GATES
    if "." in target or "*" in target:
        return fnmatchcase(name, target)
    return last == target and not in_tower
