"""From a Hugging Face folder to a sharded model: meta init -> FSDP2 -> each rank reads its own
slices.
"""

import functools
import json
import re
import types
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from minirl.config.shared import PolicyConfig
from minirl.errors import UserError, require
from minirl.model import attention, experts, families
from minirl.model.logprob import logprob_entropy
from minirl.parallel import fsdp, tensor
from minirl.parallel.mesh import Mesh
from minirl.parallel.regions import CheckpointSlice, intersect, view_of
from minirl.parallel.tensor import TensorParallel
from minirl.types import Packed

SCORE = "score.weight"


def find_folder(model: str, setting: str) -> Path:
    """The local folder of a model; a hub id is downloaded. Raises UserError, naming `setting`, if
    there is neither.
    """
    folder = Path(model)
    if not folder.is_dir():
        try:
            folder = Path(
                snapshot_download(
                    model,
                    ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*", "consolidated*"],
                )
            )
        except (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
            OSError,
        ) as error:
            raise UserError(
                f"{setting} = {model!r} is neither a folder nor a hub id that can be had: {error}"
            ) from error
    for needed, pattern in (
        ("config.json", "config.json"),
        ("weights", "*.safetensors"),
        ("tokenizer", "tokenizer*"),
    ):
        require(list(folder.glob(pattern)), f"{setting} = {folder} has no {needed} ({pattern})")
    return folder


def read_config(folder: Path) -> PretrainedConfig:
    """Raises UserError for a model type that this version of transformers does not know."""
    try:
        return AutoConfig.from_pretrained(folder)
    except (ValueError, OSError) as error:
        raise UserError(f"{folder}/config.json: {error}") from error


class ScoreHead(nn.Linear):
    """One number for each hidden state, float32 at least: the head of
    `AutoModelForSequenceClassification` with one label.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [...]"""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return hidden.to(wide) @ self.weight[0].to(wide)


class Weights:
    """Lazy reader of a checkpoint's safetensors files; reads only the bytes of the slices asked
    for.
    """

    def __init__(self, folder: Path):
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            names = (
                [single.name]
                if single.exists()
                else sorted(p.name for p in folder.glob("*.safetensors"))
            )
        self.bytes_read = 0
        self.slices: dict[
            str, Any
        ] = {}  # by the names of the weights: what has a shape, and reads what an index asks for
        for name in names:
            try:
                file = safe_open(folder / name, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise UserError(f"policy.model: cannot read {folder / name}: {error}") from error
            self.slices |= {weight: file.get_slice(weight) for weight in file.keys()}

    def fill(self, t: Tensor, parts: list[CheckpointSlice]) -> None:
        """Read this rank's block of a parameter, in place, from the file weights that it is made
        of.
        """
        box = fsdp.local_region(t)
        for part in parts:
            if common := intersect(
                part.region, box
            ):  # a small tensor may leave a rank with nothing
                target = view_of(fsdp.local(t), common, box[0])
                read = view_of(self.slices[part.name], part.to_file(common))
                self.bytes_read += read.nbytes
                target.copy_(read.view(target.shape))


def layers(model: nn.Module) -> list[nn.Module]:
    """What is gathered and recomputed one at a time: the layers of the language model and of a
    tower for images.
    """
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """The few buffers that are no function of the config: a router's correction."""
    return {
        f"{prefix}.{name}": b
        for prefix, module in model.named_modules()
        for name, b in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    }


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """All that a checkpoint holds. A tied head appears once, under the embedding's name."""
    return dict(model.named_parameters()) | buffers(model)


def load_weights(
    model: nn.Module, folder: Path, device: torch.device, *, cpu_offload: bool = False
) -> int:
    """Materialise a sharded meta model (on the host with `cpu_offload`, but for buffers) and fill
    this rank's shards. Returns the bytes read. A score head that the folder lacks, being a language
    model's, starts at 0. Raises UserError on other names or shapes than the model's.
    """
    weights = Weights(folder)
    held = tensors(model)
    parts = {name: families.parts(model.config, name, t.shape) for name, t in held.items()}
    new = {SCORE} - weights.slices.keys()
    expected = {
        part.name: list(part.to_file(part.region)[1])
        for of_one in parts.values()
        for part in of_one
        if part.name not in new
    }
    wrong = [
        n
        for n, shape in expected.items()
        if n not in weights.slices or weights.slices[n].get_shape() != shape
    ]
    # Some old files keep buffers that are a function of the config, some new ones layers that only
    # a speculating engine uses.
    unused = [r"rotary_emb\.inv_freq$", *(model._keys_to_ignore_on_load_unexpected or [])]
    derived = {n for n in weights.slices if any(re.search(pattern, n) for pattern in unused)}
    extra = weights.slices.keys() - expected.keys() - {"lm_head.weight"} - derived
    require(
        not wrong and not extra,
        f"policy.model = {folder}: the weights do not fit its config.json; missing or of another shape: {wrong[:3]}, "
        f"not of the model: {sorted(extra)[:3]}",
    )
    model.to_empty(device="cpu" if cpu_offload else device)
    for p in model.parameters():
        p._is_hf_initialized = True  # or the next lines would draw it anew
    for module in model.modules():
        if module._buffers:  # rotary frequencies and the like are in no checkpoint
            model._init_weights(module)
            module._buffers.update(
                {name: b if b is None else b.to(device) for name, b in module._buffers.items()}
            )
    with torch.no_grad():
        for name, t in tensors(model).items():
            if name in new:
                t.zero_()
            else:
                weights.fill(t, parts[name])
    return weights.bytes_read


def last_hidden(model: nn.Module, batch: Packed, tp: TensorParallel | None) -> Tensor:
    """[1, T, H], or this rank's part of the rows. What the tower makes of images stands in place of
    the embeddings of their tokens; Qwen3-VL adds more of it behind the first layers.
    """
    if batch.images is None:
        return model.model(
            input_ids=batch.inputs[None],
            position_ids=batch.positions[None],
            use_cache=False,
            pack=batch,
        ).last_hidden_state
    tower, language = (
        model.model.visual(batch.images.pixels, grid_thw=batch.images.grids),
        model.model.language_model,
    )
    embedded = language.embed_tokens(batch.inputs[None])[0]
    rows, features = batch.images.rows, batch.images.features
    if tp and tp.sequence:
        rows = rows - tp.group.rank() * len(embedded)
        own = (rows >= 0) & (rows < len(embedded))
        rows, features = rows[own], features[own]
    embedded = embedded.index_copy(
        0, rows, tower.pooler_output.index_select(0, features).to(embedded.dtype)
    )
    deep = {}
    if "deepstack_features" in tower:
        deep = {
            "visual_pos_masks": torch.zeros_like(embedded[:, 0], dtype=torch.bool).index_fill(
                0, rows, True
            )[None],
            "deepstack_visual_embeds": [
                more.index_select(0, features) for more in tower.deepstack_features
            ],
        }
    return language(
        inputs_embeds=embedded[None],
        position_ids=batch.images.positions[:, None],
        use_cache=False,
        pack=batch,
        **deep,
    ).last_hidden_state


def packed_forward(
    self: nn.Module,
    batch: Packed,
    entropy_gradient: bool = False,
    *,
    tp: TensorParallel | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, both [T], 0 where the target is not
    in the loss.

    Stands in for the model's own `forward`, so that the head's weight is used while FSDP has the
    root gathered.
    """
    hidden = last_hidden(self, batch, tp)
    hidden = tp.gather_tokens(hidden)[0] if tp else hidden[0]
    scale, softcap = families.FAMILIES[self.config.model_type].head(self.config)
    values = logprob_entropy(
        hidden.index_select(0, batch.loss_rows),
        fsdp.local(self.lm_head.weight),
        batch.targets[batch.loss_rows],
        batch.temperature / scale,
        softcap=softcap,
        entropy_gradient=entropy_gradient,
        group=tp and tp.group,
    )
    logprobs, entropy = (
        v.new_zeros(len(batch.inputs)).index_copy(0, batch.loss_rows, v) for v in values
    )
    return logprobs, entropy


def score_forward(
    self: nn.Module,
    batch: Packed,
    entropy_gradient: bool = False,
    *,
    tp: TensorParallel | None = None,
) -> tuple[Tensor, None]:
    """The score of what has been read up to each row, [T]; 0 where the target is not in the loss.
    Stands where `packed_forward` does.
    """
    hidden = last_hidden(self, batch, tp)
    scores = tp.gather_tokens(self.score(hidden)) if tp else self.score(hidden)
    return scores[0].masked_fill(~batch.loss_mask, 0), None


def build_model(
    cfg: PolicyConfig,
    folder: Path,
    mesh: Mesh,
    *,
    trainable: bool,
    score: bool,
    sequence_parallel: bool,
) -> nn.Module:
    """A sharded causal language model whose `forward` is `packed_forward`; with `score`, one with a
    score head in place of its own, and `score_forward`.

    Trainable parameters are float32 masters (float64 for dtype float64); frozen ones are kept in
    `cfg.dtype`.
    """
    compute = getattr(torch, cfg.dtype)
    master = compute if not trainable or compute == torch.float64 else torch.float32
    config = families.without_dropout(read_config(folder))
    families.check_supported(config, f"policy.model = {folder}")
    with torch.device("meta"):
        kind = (
            AutoModelForImageTextToText if families.reads_images(config) else AutoModelForCausalLM
        )
        model = kind.from_config(
            config,
            dtype=master,
            attn_implementation=attention.NAMES,
            experts_implementation=experts.NAME,
        )
        if score:
            del model.lm_head
            model.score = ScoreHead(
                config.get_text_config().hidden_size, 1, bias=False, dtype=master
            )
    for b in buffers(model).values():  # rounded to bfloat16 they would choose other experts
        b.data = b.to(torch.promote_types(b.dtype, torch.float32))
    model.requires_grad_(trainable)
    if cfg.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train(trainable)
    tp = TensorParallel(mesh.tensor, sequence_parallel) if mesh.tensor.size() > 1 else None
    if tp:
        tensor.check_divides(families.divided(config), tp.group.size())
        tensor.apply(model, tp, model._tp_plan | families.FAMILIES[config.model_type].plan)
    fsdp.shard(
        model,
        layers(model),
        mesh.fsdp,
        compute_dtype=compute,
        reduce_dtype=master,
        reshard_after_forward=cfg.reshard_after_forward,
        cpu_offload=cfg.cpu_offload,
    )
    load_weights(model, folder, mesh.device, cpu_offload=cfg.cpu_offload)
    model.forward = types.MethodType(
        functools.partial(score_forward if score else packed_forward, tp=tp), model
    )
    return model
