"""Parameters that are not trained, by patterns of their names."""

import difflib
import itertools
from fnmatch import fnmatchcase

from transformers import PreTrainedModel

from minirl.base.errors import UserError, require
from minirl.model import families


def freeze(model: PreTrainedModel, patterns: list[str], setting: str) -> None:
    """Make parameters need no gradient, before the model is split or sharded.

    Args:
        model: whole, perhaps on the meta device.
        patterns: as `frozen_names` takes them.
        setting: what holds the patterns, for messages.

    Raises:
        UserError: as `frozen_names` does.
    """
    frozen = frozen_names(model, patterns, setting)
    for name, p in model.named_parameters():
        if name in frozen:
            p.requires_grad_(False)


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
