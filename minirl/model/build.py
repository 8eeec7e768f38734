"""From a Hugging Face folder to a sharded model and its optimizer.

Build on the meta device, shard by FSDP2, and let each rank read its own slices of the files.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from minirl.base.errors import UserError, require
from minirl.base.reading import is_file, library_reads
from minirl.config.policy import PolicyConfig
from minirl.config.rl import section_of
from minirl.config.validate import check_model
from minirl.model import (
    attention,
    checks,
    delta_net,
    experts,
    families,
    fused,
    loading,
    routing,
    selective,
)
from minirl.model.adapters import lora
from minirl.model.adapters.files import is_adapter_folder, read_adapter
from minirl.model.causal import (
    SCORE,
    CausalModel,
    ScoreHead,
    buffers,
    packed_forward,
    score_forward,
)
from minirl.model.trained import frozen_names
from minirl.parallel import fsdp, sharding, tensor
from minirl.parallel.machines import errors_of_all
from minirl.parallel.mesh import Mesh
from minirl.parallel.muon import Muon
from minirl.parallel.optimizer import Optimizer, ShardAdamW
from minirl.parallel.tensor import TensorParallel

# What a model's folder must hold -> the pattern of its files.
_NEEDED = {
    "config.json": "config.json",
    "weights (*.safetensors)": "*.safetensors",
    "tokenizer (tokenizer*)": "tokenizer*",
}
# Modules that no run uses, and that are not trained: Gemma 4's tower for sound.
NEVER_RUN = ("model.audio_tower", "model.embed_audio")
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
        f"{setting} = {folder} is an adapter; merge it with its base (merge_and_unload of peft) or "
        "name the model/ of the run that made it; to train it, name the base by policy.model and "
        "the adapter by policy.lora.adapter",
    )
    for needed, pattern in _NEEDED.items():
        require(
            list(folder.glob(pattern)),
            f"{setting} = {folder} has no {needed}; name the folder of a model: of a run "
            "its model/, of a checkpoint what `python -m minirl.checkpoint export` makes of it",
        )
    return folder


def read_config(folder: Path | str) -> PretrainedConfig:
    """Read a model's config.json, from a folder or, by its id, from the hub.

    It does not tell of weights in MXFP4, which are read as bfloat16.

    Raises:
        UserError: it cannot be read, this version of transformers does not know its model type, or
            it counts more layers or heads than anybody would build.
    """
    file = Path(folder) / "config.json"
    require(
        not isinstance(folder, Path) or is_file(file),
        f"{file} is missing; put it back, or name another model",
    )
    with library_reads(str(file)):
        if is_file(file):
            checks.check_counts(json.loads(file.read_bytes()), str(file))
        config = AutoConfig.from_pretrained(folder)
    quantization = vars(config).get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
        del config.quantization_config
    return config


def layers(model: nn.Module) -> list[nn.Module]:
    """Return what is gathered and recomputed one at a time.

    These are the layers of the language model and of a tower for images.
    """
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


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
    # Frozen models have the policy's settings, but for its name.
    setting = f"{section_of(cfg)}.model" if trainable else "model"
    checks.check_supported(config, f"{setting} = {folder}")
    model = make_meta_model(config, master_dtype, score=score)
    model.requires_grad_(trainable)
    model.routing = routing.install(model, cfg, mesh.tensor.size())
    if trainable:
        _choose_trained(model, cfg, adapter_dtype, score=score)
    # Sharded by themselves, as no forward uses them, they are never gathered either.
    never_run = [module for name, module in model.named_modules() if name in NEVER_RUN]
    for module in never_run:
        module.requires_grad_(False)
    if cfg.activation_checkpointing in ("selective", "full"):
        # Nothing in a layer is random.
        arguments: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if cfg.activation_checkpointing == "selective":
            selective.install(layers(model))
            arguments["context_fn"] = selective.contexts
        model.gradient_checkpointing_enable(arguments)
        # Which that has enabled, for reentrant checkpointing. A frozen embedding would keep a
        # gradient of its outputs that nothing needs.
        model.disable_input_require_grads()
    model.train(trainable)
    kernels = fused.choose(cfg.kernels, mesh.device)
    if kernels:
        fused.install(model, kernels)

    # 2. Split over ranks: experts over their axis, matrices over tensor-parallel ranks, and what is
    # left of them over the others.
    family = families.FAMILIES[config.model_type]
    tp = TensorParallel(mesh.tensor, sequence_parallel) if mesh.tensor.size() > 1 else None
    # `validate_lora` refuses it: a tensor rank's part of the bytes is no matrix of its own.
    assert tp is None or cfg.lora.quantization == "none", "matrices in four bits are cut"
    if mesh.experts:
        experts.divide(model, mesh)
    if tp:
        tensor.check_divides(families.divided(config), tp.group.size())
        tensor.apply(model, tp, (model._tp_plan or {}) | family.plan)
    sharding.shard(
        model,
        [*never_run, *layers(model)],
        mesh.fsdp,
        compute_dtype=compute_dtype,
        reduce_dtype=adapter_dtype,
        reshard_after_forward=cfg.reshard_after_forward,
        cpu_offload=cfg.cpu_offload,
        experts=experts.find_experts(model),
        experts_mesh=mesh.experts.fsdp if mesh.experts else None,
    )

    # 3. Filled from files.
    if base is not None:
        loading.share_base(model, base)
    with errors_of_all(mesh):  # each rank reads its own part
        loading.load_weights(
            model, folder, mesh.device, cpu_offload=cfg.cpu_offload, setting=setting
        )
        lora.start(model)
        if model.adapters and cfg.lora.adapter:
            read_adapter(model, cfg.lora, f"{section_of(cfg)}.lora.adapter")
    if score:
        model.forward = functools.partial(score_forward, model, tp=tp)
    else:
        scale, softcap = family.head(config)
        of_head = head_kernels(mesh.device, compute_dtype)
        model.forward = functools.partial(
            packed_forward, model, tp=tp, scale=scale, softcap=softcap, kernels=of_head
        )
    return model


def head_kernels(device: torch.device, dtype: torch.dtype) -> type[torch.autograd.Function] | None:
    """Return what computes log-probs on a device in a dtype; None: the formulas."""
    if device.type != "cuda" or dtype == torch.float64:
        return None
    from minirl.model.logprob_kernels import OnePass  # needs Triton

    return OnePass


def _choose_trained(
    model: CausalModel, cfg: PolicyConfig, adapter_dtype: torch.dtype, *, score: bool
) -> None:
    """Give a model on the meta device its adapters, and freeze what is not trained."""
    section = section_of(cfg)
    if cfg.lora.rank:
        new = frozenset({SCORE} if score else ())
        model.adapters = lora.attach(model, cfg.lora, adapter_dtype, f"{section}.lora", new=new)
    if cfg.freeze:
        for name in frozen_names(model, cfg.freeze, f"{section}.freeze"):
            model.get_parameter(name).requires_grad_(False)


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
    module: Any
    for module in model.modules():
        if "embed_tokens_per_layer" in module._modules:
            module.get_per_layer_inputs = functools.partial(embed_for_layers, module)
    model.adapters = None
    model.routing = None
    model.shared = set()
    for b in buffers(model).values():  # rounded to bfloat16 they would choose other experts
        b.data = b.to(torch.promote_types(b.dtype, torch.float32))
    return model


def embed_for_layers(text_model: Any, input_ids: Tensor, _: Tensor) -> Tensor:
    """Return the embeddings of tokens that each layer of Gemma 4 has of its own.

    The library's method counts rows as there are tokens. With sequence parallelism a rank gets its
    part of them only (parallel/tensor.py).

    Args:
        text_model: the library's Gemma4TextModel.
        input_ids: [1, T].

    Returns:
        [1, T, layers, D], or this rank's part of the rows.
    """
    embedded = text_model.embed_tokens_per_layer(input_ids)
    num_layers = text_model.config.num_hidden_layers
    return embedded.unflatten(-1, (num_layers, text_model.hidden_size_per_layer_input))


def make_optimizer(model: CausalModel, cfg: PolicyConfig, mesh: Mesh) -> Optimizer:
    """Return Muon for the layers' matrices, if configured, and AdamW for everything else.

    Vectors do not decay.
    """
    fsdp.reshard(model)  # or the optimizer would get what is gathered
    trained_layers = layers(model) if cfg.optimizer == "muon" else []
    in_layers = set(nn.ModuleList(trained_layers).parameters())
    matrices, vectors, hidden = [], [], []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        # Biases of experts are [E, out], a convolution of features is [out, 1, taps], and norms of
        # queries and keys may be [heads, features].
        is_convolution = p.ndim == 3 and p.shape[1] == 1 and not lora.is_adapter(name)
        if p.ndim < 2 or name.endswith(("bias", "norm.weight")) or is_convolution:
            vectors.append(p)
        elif p in in_layers:
            hidden.append(p)
        else:
            matrices.append(p)

    parts: list[torch.optim.Optimizer] = []
    lr = cfg.learning_rate
    decays = [(matrices, cfg.weight_decay), (vectors, 0.0)]
    groups = [{"params": params, "weight_decay": decay} for params, decay in decays if params]
    if groups:
        parts.append(ShardAdamW(groups, lr=lr, betas=cfg.betas, eps=cfg.adam_eps, fused=True))
    if hidden:
        parts.append(Muon(hidden, mesh, lr=lr, weight_decay=cfg.weight_decay))
    return Optimizer(parts, cfg)
