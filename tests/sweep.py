"""Which causal language models of the installed transformers could be trained, and why not others.

    .venv/bin/python tests/sweep.py              # all that have no row, and a table
    .venv/bin/python tests/sweep.py phi olmo     # these

Each becomes a tiny instance, made from its config class, and goes through what
`tests/test_families.py` asks of a row: packed log-probs and gradients are those of Hugging Face's
plain forward (float64), on one rank and on two with tensor and sequence parallelism; load and
export give the same files. A family that passes has to get a row with its peculiar settings; the
reasons of the others are in minirl/model/README.md.
"""

import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

import test_families
import tiny
from harness import RankFailed, ranks
from minirl.checkpoint import exporting
from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.model.families import DENSE_PLAN, FAMILIES, REFUSED, ExpertNames, Family, Fused
from minirl.train.policy import Policy

# Sizes by the names that configs have for them; of each family those that its config knows.
SIZES: dict[str, Any] = tiny.COMMON | {
    "head_dim": 32,
    "d_kv": 32,
    "n_positions": 512,
    "ffn_dim": 96,
    "n_inner": 96,
    "word_embed_proj_dim": 128,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"],
}
PAGE = Path(__file__).parent.parent / "minirl" / "model" / "README.md"


def every_family() -> list[str]:
    """Return the model types of all causal language models of the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def make_tiny(folder: Path, family: str) -> Path:
    """Write a tiny instance with the sizes that the family's config knows."""
    if family in tiny.OWN or family in FAMILIES:
        return tiny.make(folder, family)
    default = AutoConfig.for_model(family)
    known = {name: value for name, value in SIZES.items() if hasattr(default, name)}
    if "sliding_attention" not in str(vars(default).get("layer_types")):
        known.pop("layer_types", None)
    if "qk_rope_head_dim" in known:
        known["head_dim"] = known["qk_rope_head_dim"]
    return tiny.make(folder, family, **known)


def say_what_it_is(family: str) -> str | None:
    """Return why a family is none that minirl trains, from its config alone."""
    config = AutoConfig.for_model(family)
    if config.is_encoder_decoder:
        return "an encoder and a decoder"
    if family in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "an encoder, which is a decoder only by a setting"
    if set(config.sub_configs) - {"text_config"}:
        return "more than a language model: its config has parts for images, sound or the like"
    return None


# What a row of a family that has none may need, tried in this order.
FUSED = (Fused(), Fused(rotary=False), Fused(norm_wide=True), Fused(norm_wide=True, rotary=False))


def guess_row(family: str, folder: Path, fused: Fused) -> Family:
    """Return a row for a family that has none: experts as its files have them, a plan if it lacks
    one."""
    row = Family(divided=(), fused=fused)
    if not AutoConfig.for_model(family).get_text_config().base_model_tp_plan:
        row = row._replace(plan=DENSE_PLAN)
    names = list(load_file(folder / "model.safetensors"))
    found = [re.search(r"layers\.\d+\.(\w+)\.experts\.0\.(\w+)\.weight", name) for name in names]
    matrices = {match[2] for match in found if match}
    for gate, up, down in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
        if matrices == {gate, up, down}:
            block = next(match[1] for match in found if match)
            plan = {"model.layers.*.mlp.experts": "moe_tp_experts"} | row.plan
            row = row._replace(experts=ExpertNames(block, gate, up, down), plan=plan)
    return row


def try_family(mesh: Any, family: str, folder: Path, sequence: bool, fused: Fused) -> str | None:
    """Return why a family does not pass on a mesh, None if it does."""
    set_verbosity_error()
    disable_progress_bar()
    test_families.stay_float64()
    if family not in FAMILIES:
        FAMILIES[family] = guess_row(family, folder, fused)
    result = test_families.differences(mesh, folder, sequence)
    if not result["values"] < 1e-12:
        return "its packed log-probs are not its plain ones"
    if not result["gradient"] < 1e-11:
        return "its packed gradients are not its plain ones"
    if sequence:
        policy = Policy(PolicyConfig(dtype="float32"), folder, mesh, sequence_parallel=True)
        out = folder.with_name(f"{family} exported")
        exporting.export(policy, out)
        if mesh.rank == 0:
            test_families.assert_same_files(folder, out)
    return None


ON_TWO = "on two ranks: "
NO_TINY_ONE = "no tiny instance by the common names of sizes"
# Parts of errors -> what they mean.
MEANINGS = {
    "'NoneType' object has no attribute": "a parameter has no gradient, such as its head's bias",
    "has no attribute 'model'": "its layers are not in a part named `model`",
    "get_seq_length": "some of its layers are no attention",
    "= None in its config.json": "its config has other names for sizes",
    "argument: 'pack'": "it does not pass arguments on to attention",
    "must match the size of tensor": "sizes of tensors differ in a tiny instance",
    "shapes cannot be multiplied": "sizes of tensors differ in a tiny instance",
    "have the same dtype": "it keeps a router in float32",
    "Could not import": "it needs a package that is not installed",
    "the weights do not fit": "its files have a layout of their own",
    "TimeoutError": "a tiny instance takes more than a minute",
    "packed attention for": "its attention has arguments that packed attention does not take",
    "inplace operation": "it has no gradient: a value is changed in place",
    "does not support gradient checkpointing": "the library cannot recompute its activations",
    "has no attribute 'act_fn'": "its MLP has other names",
    "is not supported; supported are": "its config is another family's",
    "without overflow": "a value overflows in a tiny instance",
    "_stacklevel": "its softmax is called in a way of its own",
}


def shorten(error: Exception) -> str:
    """Return what an error means, or its first line."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, RankFailed):
        text = f"{error.kind}: {error.text}"
    for part, meaning in MEANINGS.items():
        if part in text:
            return meaning
    return text.strip().splitlines()[0][:120]


def sweep(family: str, folder: Path) -> tuple[str, str]:
    """Return how far a family comes (`none`, `one rank`, `all`), and why not further."""
    if family in REFUSED:
        return "none", REFUSED[family]
    try:
        why = say_what_it_is(family)
        if why:
            return "none", why
        make_tiny(folder / family, family)
    except Exception:  # whatever a config class raises
        return "none", NO_TINY_ONE
    try:
        why = ranks(1, try_family, family, folder / family, False, Fused(), timeout=60)[0]
        if why:
            return "none", why
    except Exception as error:
        return "none", shorten(error)
    whys = []
    parallel = ParallelConfig(tensor=2, sequence=True)
    for fused in FUSED:
        arguments = (family, folder / family, True, fused)
        try:
            why = ranks(2, try_family, *arguments, parallel=parallel, timeout=60)[0]
        except Exception as error:
            return "one rank", f"{ON_TWO}{shorten(error)}"
        if not why:
            return "all", str(fused) if fused != Fused() else ""
        whys.append(why)
    return "one rank", f"{ON_TWO}{whys[0]}"


def write_table(whys: dict[str, str]) -> str:
    """Return the table of minirl/model/README.md: each reason, and the families that have it."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for family, why in whys.items():
        by_reason[why].append(family)
    rows = [f"| {why} | {', '.join(by_reason[why])} |" for why in sorted(by_reason)]
    return "\n".join(["| why not | families |", "|---|---|", *rows])


def read_table() -> dict[str, str]:
    """Return the reasons that the page gives, by family."""
    whys = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| ") and line.count("|") == 3 and "why not" not in line:
            why, names = line.strip("| ").split(" | ")
            whys |= dict.fromkeys(names.split(", "), why)
    return whys


if __name__ == "__main__":
    torch.set_num_threads(1)
    set_verbosity_error()
    chosen = sys.argv[1:] or [name for name in every_family() if name not in FAMILIES]
    reasons = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in chosen:
            level, reason = sweep(name, Path(temporary))
            print(" | ".join((name, level, reason)), flush=True)
            if level != "all":
                reasons[name] = reason
    print(f"\n{write_table(reasons)}")
