"""From a Hugging Face folder to a sharded model.

Build on the meta device, shard by FSDP2, and let each rank read its own slices of the files.
"""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from minirl.base.errors import UserError, require
from minirl.base.reading import is_file, library_reads
from minirl.config.named import check_model
from minirl.config.policy import PolicyConfig
from minirl.config.rl import section_of
from minirl.model import attention, checks, families, fused, gemma4, loading
from minirl.model.adapters import lora, nf4
from minirl.model.adapters.files import is_adapter_folder, read_adapter
from minirl.model.freeze import freeze
from minirl.model.hybrid import delta_net
from minirl.model.logprob import logprob_entropy
from minirl.model.mixture import experts, routing
from minirl.parallel import fsdp, tensor
from minirl.parallel.experts import ExpertParallel
from minirl.parallel.machines import errors_of_all
from minirl.parallel.mesh import Mesh
from minirl.parallel.tensor import TensorParallel
from minirl.types.packed import Packed

# What a model's folder must hold -> the pattern of its files.
_NEEDED = {"config.json": "config.json", "weights": "*.safetensors", "tokenizer": "tokenizer*"}
# Selective checkpointing keeps the results of these operators: they take time.
aten = torch.ops.aten
KEPT = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._grouped_mm.default,
    aten._flash_attention_forward.default,
    torch.ops.minirl.flash_attention_forward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]
# Weights in other formats, which a download leaves out.
_UNUSED = ["*.bin", "*.pth", "*.gguf", "original/*", "consolidated*"]


def find_folder(model: str, setting: str) -> Path:
    """Return the local folder of a model; a hub id is downloaded.

    Args:
        model: a folder or a hub id.
        setting: the setting that holds `model`, for messages.

    Raises:
        UserError: there is neither, or the folder lacks config, weights or tokenizer.
    """
    check_model(model, setting)
    folder = Path(model)
    if not os.path.isdir(folder):
        try:
            folder = Path(snapshot_download(model, ignore_patterns=_UNUSED))
        except (HFValidationError, OSError) as error:  # the hub's other errors are OSErrors
            why = f"it cannot be downloaded: {error}"
            if isinstance(error, LocalEntryNotFoundError):
                why = "the hub cannot be reached from here; download it elsewhere (hf download)"
            raise UserError(f"{setting} = {model!r} is no folder, and as a hub id {why}") from error
    require(
        not is_adapter_folder(folder) or list(folder.glob("config.json")),
        f"{setting} = {folder} is an adapter; name the model that it adapts, and the adapter with "
        "policy.lora.adapter, or merge the two (python -m minirl.checkpoint merge)",
    )
    for needed, pattern in _NEEDED.items():
        require(list(folder.glob(pattern)), f"{setting} = {folder} has no {needed} ({pattern})")
    return folder


def read_config(folder: Path | str) -> PretrainedConfig:
    """Read a model's config.json, from a folder or, by its id, from the hub.

    It does not tell of weights in MXFP4, which are read as bfloat16.

    Raises:
        UserError: it cannot be read, or this version of transformers does not know its model type;
            or it counts more layers or heads than anybody would build.
    """
    file = Path(folder) / "config.json"
    with library_reads(f"{folder}/config.json"):
        if is_file(file):
            checks.check_counts(json.loads(file.read_bytes()), str(file))
        return loading.forget_mxfp4(AutoConfig.from_pretrained(folder))


class ScoreHead(nn.Linear):
    """The head of `AutoModelForSequenceClassification` with one label, in float32 at least."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return one number for each hidden state: [..., H] -> [...]."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return hidden.to(wide) @ self.weight[0].to(wide)


class CausalModel(PreTrainedModel):
    """What `build_model` makes of the library's models, for type checkers; never instantiated."""

    model: Any  # Its layers; for a model that reads images, a tower and `language_model`.
    lm_head: nn.Linear
    score: ScoreHead  # Instead of `lm_head`.
    adapters: lora.Adapters | None  # None: it has none.
    routing: routing.Routing | None  # None: it is no mixture of experts.
    shared: set[str]  # Names of parameters that are another model's, too, which holds them.
    set_requires_gradient_sync: Callable[[bool], None]  # Of FSDPModule, as the next.
    set_requires_all_reduce: Callable[[bool], None]


def layers(model: nn.Module) -> list[nn.Module]:
    """Return what is gathered and recomputed one at a time.

    These are the layers of the language model and of a tower for images.
    """
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def never_run(model: nn.Module) -> list[nn.Module]:
    """Return the modules that no forward uses, so that they are never gathered either."""
    return [module for name, module in model.named_modules() if name in gemma4.NEVER_RUN]


def last_hidden(model: CausalModel, batch: Packed, tp: TensorParallel | None) -> Tensor:
    """Return the last hidden states, [1, T, H] or this rank's part of the rows.

    The tower's outputs for images stand in place of the embeddings of their tokens. Qwen3-VL adds
    more of them after the first layers.
    """
    if model.routing:
        model.routing.begin(batch)
    images = batch.images
    if images is None:
        return model.model(
            input_ids=batch.inputs[None],
            position_ids=batch.positions[None],
            use_cache=False,
            pack=batch,
        ).last_hidden_state

    tower = _look(model, batch)
    language_model = model.model.language_model
    embedded = language_model.embed_tokens(batch.inputs[None]).squeeze(0)
    rows = images.rows
    features = images.features
    if tp and tp.sequence:  # this rank has a part of the rows only
        rows = rows - tp.group.rank() * len(embedded)
        is_here = (rows >= 0) & (rows < len(embedded))
        rows = rows[is_here]
        features = features[is_here]
    seen = tower.pooler_output.flatten(0, -2)
    values = seen.index_select(0, features).to(embedded.dtype)
    embedded = embedded.index_copy(0, rows, values)

    more: dict = {}
    if "deepstack_features" in tower:
        is_image = embedded.new_zeros(len(embedded), dtype=torch.bool).index_fill(0, rows, True)
        more["visual_pos_masks"] = is_image[None]
        more["deepstack_visual_embeds"] = [
            outputs.index_select(0, features) for outputs in tower.deepstack_features
        ]
    if "embed_tokens_per_layer" in language_model._modules:
        more["per_layer_inputs"] = gemma4.inputs_of_layers(
            language_model, batch.inputs, images.rows
        )
    return language_model(
        inputs_embeds=embedded[None],
        position_ids=batch.positions[None]
        if images.positions is None
        else images.positions[:, None],
        use_cache=False,
        pack=batch,
        **more,
    ).last_hidden_state


def _look(model: CausalModel, batch: Packed) -> Any:
    """Return what a tower makes of the images of a batch; `pooler_output` is [..., features, H]."""
    images = batch.images
    assert images is not None
    if images.places is not None:
        # Not by `get_image_features`, where the host waits for numbers of tokens to split them by.
        tower = model.model.vision_tower(images.pixels, images.places)
        tower.pooler_output = model.model.embed_vision(tower.last_hidden_state)
        return tower
    if images.grids is None:
        return model.model.get_image_features(images.pixels)
    return model.model.visual(images.pixels, grid_thw=images.grids)


def packed_forward(
    self: CausalModel,
    batch: Packed,
    entropy_gradient: bool = False,
    *,
    tp: TensorParallel | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target and the entropy of its distribution.

    Stands in for the model's own `forward`, so that the head's weight is used while FSDP has the
    root gathered.

    Args:
        self: the model.
        batch: T packed rows.
        entropy_gradient: the entropy has a gradient.
        tp: tensor parallelism of the model.
        scale: the family multiplies logits by it.
        softcap: bound of the logits; None: they have none.

    Returns:
        Both [T], 0 where the target is not in the loss.
    """
    hidden = last_hidden(self, batch, tp)
    if tp:
        hidden = tp.gather_tokens(hidden)
    logprobs, entropy = logprob_entropy(
        hidden.squeeze(0).index_select(0, batch.loss_rows),
        fsdp.local(self.lm_head.weight),
        batch.targets[batch.loss_rows],
        batch.temperature / scale,
        softcap=softcap,
        entropy_gradient=entropy_gradient,
        group=tp.group if tp else None,
    )
    zeros = logprobs.new_zeros(len(batch.inputs))
    return (
        zeros.index_copy(0, batch.loss_rows, logprobs),
        zeros.index_copy(0, batch.loss_rows, entropy),
    )


def score_forward(
    self: CausalModel,
    batch: Packed,
    entropy_gradient: bool = False,
    *,
    tp: TensorParallel | None,
) -> tuple[Tensor, None]:
    """Return the score of what has been read up to each row, in place of `packed_forward`.

    Returns:
        [T], 0 where the target is not in the loss; and no entropy.
    """
    scores = self.score(last_hidden(self, batch, tp))
    if tp:
        scores = tp.gather_tokens(scores)
    return scores.squeeze(0).masked_fill(~batch.loss_mask, 0), None


def build_model(
    cfg: PolicyConfig,
    folder: Path,
    mesh: Mesh,
    *,
    trainable: bool,
    score: bool,
    sequence_parallel: bool,
    base: CausalModel | None = None,
) -> CausalModel:
    """Return a sharded causal language model with `packed_forward` as its `forward`.

    Args:
        cfg: dtype and memory.
        folder: a Hugging Face folder.
        mesh: the ranks.
        trainable: parameters are float32 masters (float64 for dtype float64), also those that
            `cfg.freeze` leaves out of training; without it, all are frozen and kept in `cfg.dtype`.
        score: with a score head in place of the model's own, and `score_forward`.
        sequence_parallel: between tensor-parallel blocks each rank keeps its part of the tokens.
        base: a model of the same folder that holds the frozen parameters. None: it has its own.
    """
    compute_dtype = getattr(torch, cfg.dtype)
    master_dtype = compute_dtype
    adapter_dtype = torch.promote_types(compute_dtype, torch.float32)
    if trainable and not cfg.lora.rank:
        master_dtype = adapter_dtype

    # 1. On the meta device, without memory.
    config = families.without_dropout(read_config(folder))
    checks.check_supported(config, f"policy.model = {folder}")
    model = make_meta_model(config, master_dtype, score=score)
    model.requires_grad_(trainable)
    model.routing = routing.install(model, cfg, mesh.tensor.size())
    if trainable:
        _choose_trained(model, cfg, adapter_dtype, score=score)
    for module in never_run(model):
        module.requires_grad_(False)
    if cfg.activation_checkpointing in ("selective", "full"):
        arguments: dict[str, Any] = {"use_reentrant": False}
        if cfg.activation_checkpointing == "selective":
            selective = functools.partial(create_selective_checkpoint_contexts, KEPT)
            arguments["context_fn"] = selective
        model.gradient_checkpointing_enable(arguments)
        # Which that has enabled, for reentrant checkpointing. A frozen embedding would keep a
        # gradient of its outputs that nothing needs.
        model.disable_input_require_grads()
    model.train(trainable)
    kernels = fused.choose(cfg.kernels, mesh.device)
    if kernels:
        fused.install(model, kernels)

    # 2. Split over ranks.
    tp = TensorParallel(mesh.tensor, sequence_parallel) if mesh.tensor.size() > 1 else None
    _distribute(model, cfg, mesh, tp, reduce_dtype=adapter_dtype)

    # 3. Filled from files.
    if base is not None:
        loading.share_base(model, base)
    with errors_of_all(mesh):  # each rank reads its own part
        _fill(model, cfg, folder, mesh)
    if score:
        model.forward = functools.partial(score_forward, model, tp=tp)
    else:
        scale, softcap = families.FAMILIES[config.model_type].head(config)
        model.forward = functools.partial(
            packed_forward, model, tp=tp, scale=scale, softcap=softcap
        )
    return model


def _distribute(
    model: CausalModel,
    cfg: PolicyConfig,
    mesh: Mesh,
    tp: TensorParallel | None,
    *,
    reduce_dtype: torch.dtype,
) -> None:
    """Split a model on the meta device over the ranks.

    Args:
        model: whole.
        cfg: dtype and memory.
        mesh: the ranks.
        tp: tensor parallelism.
        reduce_dtype: dtype in which gradients are reduced.
    """
    # Experts over their axis, matrices over tensor-parallel ranks.
    config = model.config
    # `validate_lora` refuses it: a tensor rank's part of the bytes is no matrix of its own.
    assert tp is None or cfg.lora.quantization == "none", "matrices in four bits are cut"
    ep = ExpertParallel.of(mesh)
    if ep:
        checks.check_experts_divide(config, f"{section_of(cfg)}'s mixture", ep.mesh.size())
        experts.divide(model, ep)
    if tp:
        tensor.check_divides(families.divided(config), tp.group.size())
        plan = (model._tp_plan or {}) | families.FAMILIES[config.model_type].plan
        tensor.apply(model, tp, plan)
    # All that is left of them is sharded over the others.
    fsdp.shard(
        model,
        [*never_run(model), *layers(model)],
        mesh.fsdp,
        compute_dtype=getattr(torch, cfg.dtype),
        reduce_dtype=reduce_dtype,
        reshard_after_forward=cfg.reshard_after_forward,
        cpu_offload=cfg.cpu_offload,
        experts=experts.find_experts(model),
        experts_mesh=mesh.experts.fsdp if mesh.experts else None,
    )


def _choose_trained(
    model: CausalModel, cfg: PolicyConfig, adapter_dtype: torch.dtype, *, score: bool
) -> None:
    """Give a model on the meta device its adapters, and freeze what is not trained."""
    section = section_of(cfg)
    if cfg.lora.rank:
        new = frozenset({loading.SCORE} if score else ())
        model.adapters = lora.attach(model, cfg.lora, adapter_dtype, f"{section}.lora", new=new)
    if cfg.freeze:
        freeze(model, cfg.freeze, f"{section}.freeze")


def check_trained(config: PretrainedConfig, cfg: PolicyConfig, *, score: bool = False) -> None:
    """Refuse patterns of `freeze` and `lora` that do not fit a model, before it is loaded.

    Args:
        config: the model's.
        cfg: what is set for it.
        score: it has a score head instead of its own.

    Raises:
        UserError: they match nothing, or everything, or what cannot have an adapter.
    """
    if cfg.freeze or cfg.lora.rank:
        model = make_meta_model(config, torch.bfloat16, score=score)
        _choose_trained(model, cfg, torch.float32, score=score)


def _fill(model: CausalModel, cfg: PolicyConfig, folder: Path, mesh: Mesh) -> None:
    """Fill this rank's shards of what the model does not share, and of its adapters."""
    if loading.packed_weights(model):
        nf4.check(mesh.device)
    loading.load_weights(model, folder, mesh.device, cpu_offload=cfg.cpu_offload)
    lora.start(model)
    if model.adapters and cfg.lora.adapter:
        read_adapter(model, cfg.lora, f"{section_of(cfg)}.lora.adapter")


def make_meta_model(config: PretrainedConfig, dtype: torch.dtype, *, score: bool) -> CausalModel:
    """Return a model of the library without memory, with a score head instead of its own or not."""
    reads_images = families.reads_images(config)
    auto_class = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto_class.from_config(
            config,
            dtype=dtype,
            attn_implementation=attention.NAMES,
            experts_implementation=experts.NAME,
        )
        if score:
            del model.lm_head
            text = config.get_text_config()
            model.score = ScoreHead(text.hidden_size, 1, bias=False, dtype=dtype)
    for p in model.parameters():  # some families make a router's float32, whatever the dtype is
        p.data = p.data.to(dtype)
    delta_net.install(model)
    gemma4.install(model)
    model.adapters = None
    model.routing = None
    model.shared = set()
    for b in loading.buffers(model).values():  # rounded to bfloat16 they would choose other experts
        b.data = b.to(torch.promote_types(b.dtype, torch.float32))
    return model
