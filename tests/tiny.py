"""Tiny random models of every family on the allow-list, as Hugging Face folders."""

from pathlib import Path
from unittest import mock

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from minirl.data.images import to_url
from minirl.model import loading
from minirl.model.scratch import make_tokenizer

COMMON = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
MULTIPLIERS = {
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "logits_scaling": 3.0,
}
TOP_2 = {"num_experts_per_tok": 2, "head_dim": 32}
DEEPSEEK = TOP_2 | {
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
# Two value heads for each key head, of other sizes.
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "head_dim": 32,
}
# Half of each head is turned, by positions in time, height and width.
PARTIAL_ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    }
}
QWEN2_MOE = {
    "num_experts_per_tok": 2,
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
# Config values beyond the common ones with which every peculiarity of a family shows.
OWN = {
    "mistral": {"sliding_window": 12, "head_dim": 32},
    "smollm3": {"no_rope_layer_interval": 2},
    "gemma": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma2": ALTERNATING
    | {
        "head_dim": 32,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": ALTERNATING
    | {"head_dim": 32, "tie_word_embeddings": True, "query_pre_attn_scalar": 20},
    # What small ones have (inputs of each layer, shared keys and values), what large ones have (no
    # matrix of values in some layers), and experts.
    "gemma4_text": {
        "num_hidden_layers": 3,
        "layer_types": [*ALTERNATING["layer_types"], "full_attention"],
        "sliding_window": 12,
        "head_dim": 32,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 264,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    },
    "phi3": {"sliding_window": 12},
    "olmo3": ALTERNATING,
    "exaone4": ALTERNATING,
    "granite": MULTIPLIERS,
    "hyperclovax": MULTIPLIERS | {"logits_scaling": 0.4},  # a factor
    "granitemoe": MULTIPLIERS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ministral": ALTERNATING | {"head_dim": 32},
    "ministral3": {
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,  # behind which queries are scaled
            "max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "starcoder2": {"sliding_window": 12},
    "helium": {"head_dim": 32},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32, "num_experts": 4, "moe_topk": 2},
    "mellum": TOP_2
    | ALTERNATING
    | {"num_experts": 4, "moe_intermediate_size": 32, "mlp_layer_types": ["dense", "sparse"]},
    "flex_olmo": TOP_2 | {"num_experts": 4},
    "cohere": {"tie_word_embeddings": True, "logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": ALTERNATING | {"tie_word_embeddings": True, "logit_scale": 0.25},
    **dict.fromkeys(("qwen3", "glm", "glm4", "seed_oss", "ernie4_5"), {"head_dim": 32}),
    "mixtral": TOP_2 | {"num_local_experts": 4, "router_jitter_noise": 0.1},
    "qwen2_moe": TOP_2
    | {
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": TOP_2 | {"num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "qwen3_vl_moe": TOP_2
    | {"num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True},  # vLLM reads that
    "olmoe": TOP_2 | {"num_experts": 4},
    "glm4_moe": DEEPSEEK | {"use_qk_norm": True},
    "dots1": DEEPSEEK | ALTERNATING,
    "gpt_oss": TOP_2
    | ALTERNATING
    | {
        "num_local_experts": 4,
        "swiglu_limit": 1.5,  # with which it clamps some
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
    "deepseek_v3": DEEPSEEK
    | {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
    "minimax_m2": TOP_2
    | {
        "num_local_experts": 4,
        "rotary_dim": 16,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "qwen3_next": DELTA_NET | QWEN2_MOE,
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": DELTA_NET | QWEN2_MOE,
    "qwen3_5": DELTA_NET | PARTIAL_ROPE,
    "qwen3_5_moe": DELTA_NET | QWEN2_MOE | PARTIAL_ROPE,
}


def make(
    folder: Path,
    family: str = "qwen3",
    *,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: object,
) -> Path:
    """Write a random model with its character tokenizer; vocabulary 261 + 3, which no tensor
    parallel size pads evenly."""
    if family == "gemma3":
        return make_gemma_vision(folder, tied=tied, seed=seed, dtype=dtype, **config)
    if family == "gemma4":
        return make_gemma4_vision(folder, seed=seed, dtype=dtype, **config)
    if family in TOWERS:
        return make_vision(folder, family, tied=tied, seed=seed, dtype=dtype, **config)
    tokenizer = make_tokenizer([])
    ids = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "vocab_size": len(tokenizer) + 3,
    }
    values = COMMON | ids | {"tie_word_embeddings": tied} | OWN.get(family, {}) | config
    disable_progress_bar()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values), dtype=dtype)
    with torch.no_grad():
        for name, p in model.state_dict().items():
            # Norms begin as ones and biases as zeros (those of experts are [E, out]): a missing one
            # would not show.
            if p.ndim == 1 or name.endswith("_bias"):
                p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
# Family -> (size of a patch, what its tower wants)
TOWERS = {
    "qwen2_vl": (14, {"embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2}),
    "qwen2_5_vl": (
        14,
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "out_hidden_size": 128,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
    ),
    "qwen3_vl": (
        16,
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "out_hidden_size": 128,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
    ),
}
TOWERS["qwen3_vl_moe"] = TOWERS["qwen3_vl"]
TOWERS |= dict.fromkeys(
    ("qwen3_5", "qwen3_5_moe"),
    (
        16,
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "out_hidden_size": 128,
            "num_position_embeddings": 64,
        },
    ),
)
READ_IMAGES = (*TOWERS, "gemma3", "gemma4")
QWEN3 = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")  # Those with Qwen3-VL's processor.
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{%- for m in messages -%}{{ '<|' + m.role + '|>' }}"
    "{%- if m.content is string -%}{{ m.content }}{%- else -%}"
    "{%- for part in m.content -%}{{ '" + IMAGE + "' if part.type == 'image' else part.text }}"
    "{%- endfor -%}{%- endif -%}{{ '<|end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def picture(width: int, height: int) -> str:
    """Noise of its own for each width."""
    return to_url(
        Image.fromarray(
            np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
        )
    )


def make_vision(
    folder: Path,
    family: str = "qwen2_vl",
    *,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: object,
) -> Path:
    """The same of a model that reads images: 2 x 2 patches of 14 or 16 pixels are a token."""
    from transformers import (
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    tokenizer = make_tokenizer([])
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": [
                "<|vision_start|>",
                "<|vision_end|>",
                "<|image_pad|>",
                "<|video_pad|>",
            ]
        }
    )
    tokenizer.chat_template = TEMPLATE
    patch, tower = TOWERS[family]
    named = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }
    text = (
        COMMON
        | {
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "vocab_size": len(tokenizer) + 3,
            "tie_word_embeddings": tied,
            "rope_parameters": ROPE | ({"mrope_interleaved": True} if family in QWEN3 else {}),
        }
        | ({"head_dim": 32} if family in QWEN3 else {})
        | OWN.get(family, {})
        | config
    )
    values = {
        "text_config": text,
        "vision_config": {"depth": 2, "num_heads": 4, "patch_size": patch, "initializer_range": 0.1}
        | tower,
        "tie_word_embeddings": tied,
        **named,
    }
    disable_progress_bar()
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(family, **values), dtype=dtype
    )
    with torch.no_grad():
        for p in model.state_dict().values():
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(folder)
    if family == "qwen3_vl_moe":
        transpose_experts(folder)
    limits = {"min_pixels": (2 * patch) ** 2, "max_pixels": 64 * (2 * patch) ** 2}
    images = Qwen2VLImageProcessor(patch_size=patch, merge_size=2, **limits)
    video, whole = (
        (Qwen3VLVideoProcessor, Qwen3VLProcessor)
        if family in QWEN3
        else (
            Qwen2VLVideoProcessor,
            Qwen2VLProcessor if family == "qwen2_vl" else Qwen2_5_VLProcessor,
        )
    )
    whole(
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=video(patch_size=patch, merge_size=2),
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return folder


GEMMA_IMAGE = "<start_of_image>"
GEMMA_TEMPLATE = TEMPLATE.replace(IMAGE, GEMMA_IMAGE)


def make_gemma_vision(
    folder: Path,
    *,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: object,
) -> Path:
    """The same of Gemma 3: every image is made 24 x 24 pixels, and has 9 tokens."""
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    tokenizer = make_tokenizer(["\n" * n for n in (1, 2, 3, 4)])
    special = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tokenizer.add_special_tokens({"additional_special_tokens": list(special.values())})
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in special.items()}
    tokenizer.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=special)
    text = (
        COMMON
        | OWN["gemma3_text"]
        | {
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "vocab_size": len(tokenizer) + 4,
            "tie_word_embeddings": tied,
        }
        | config
    )
    tower = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 24,
        "patch_size": 4,
        "vision_use_head": False,
    }
    values = AutoConfig.for_model(
        "gemma3",
        text_config=text,
        vision_config=tower,
        mm_tokens_per_image=9,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
        image_token_index=ids["image_token"],
    )
    disable_progress_bar()
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(values, dtype=dtype)
    with torch.no_grad():
        for name, p in model.state_dict().items():
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.1)
            if name.endswith("mm_input_projection_weight"):  # begins as zeros
                p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(folder)
    name_as_published(folder)
    Gemma3Processor(
        image_processor=Gemma3ImageProcessor(size={"height": 24, "width": 24}),
        tokenizer=tokenizer,
        chat_template=GEMMA_TEMPLATE,
        image_seq_length=9,
    ).save_pretrained(folder)
    return folder


GEMMA4_TOKENS = {
    "boi_token": "<|image>",
    "image_token": "<|image|>",
    "eoi_token": "<image|>",
    "boa_token": "<|audio>",
    "audio_token": "<|audio|>",
    "eoa_token": "<audio|>",
    "video_token": "<|video|>",
}
GEMMA4_TEMPLATE = TEMPLATE.replace(IMAGE, GEMMA4_TOKENS["image_token"])
# Windows hold an image, which has 70 tokens at most, and hide some of what is around it. Behind a
# layer of each kind is one with keys of its own, which shows what images saw there.
OWN["gemma4"] = OWN["gemma4_text"] | {
    "num_hidden_layers": 4,
    "layer_types": ALTERNATING["layer_types"] * 2,
    "sliding_window": 80,
    "use_bidirectional_attention": "vision",
}
GEMMA4_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 160,
    "default_output_length": 70,  # which vLLM reads
    "use_clipped_linears": True,
    "standardize": True,
    "initializer_range": 0.1,
}
GEMMA4_AUDIO = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "subsampling_conv_channels": [8, 4],
    "output_proj_dims": 48,
}


def make_gemma4_vision(
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    audio: bool = True,
    **config: object,
) -> Path:
    """The same of Gemma 4: every image is made as large as 70 tokens allow, of 8 x 8 pixels each.

    Large models have no tower for sound.
    """
    from transformers import (
        Gemma4AudioFeatureExtractor,
        Gemma4ImageProcessor,
        Gemma4Processor,
        Gemma4VideoProcessor,
    )

    tokenizer = make_tokenizer([])
    special = list(GEMMA4_TOKENS.values())
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens=GEMMA4_TOKENS)
    ids = tokenizer.convert_tokens_to_ids(special)
    text = (
        COMMON
        | OWN["gemma4"]
        | {
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": 0,
            "vocab_size": len(tokenizer) + 4,
            "vocab_size_per_layer_input": len(tokenizer) + 4,
        }
        | config
    )
    values = AutoConfig.for_model(
        "gemma4",
        text_config=text,
        vision_config=GEMMA4_TOWER,
        audio_config=GEMMA4_AUDIO if audio else None,
        initializer_range=0.1,
        **dict(
            zip(
                (
                    "boi_token_id",
                    "image_token_id",
                    "eoi_token_id",
                    "boa_token_id",
                    "audio_token_id",
                    "eoa_token_index",
                    "video_token_id",
                ),
                ids,
                strict=True,
            )
        ),
    )
    disable_progress_bar()
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(values, dtype=dtype)
    with torch.no_grad():
        for name, p in model.state_dict().items():
            if p.ndim == 1 or name.endswith("position_embedding_table"):
                p.add_(torch.randn_like(p) * 0.1)
            if "vision_tower" in name and name.endswith(("_min", "_max")):  # begin as infinity
                p.fill_(-4.0 if name.endswith("_min") else 4.0)
    model.save_pretrained(folder)
    images = Gemma4ImageProcessor(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2)
    Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=Gemma4VideoProcessor(patch_size=4, pooling_kernel_size=2),
        chat_template=GEMMA4_TEMPLATE,
        image_seq_length=70,
    ).save_pretrained(folder)
    return folder


def name_as_published(folder):
    """Name the weights of a tower as published files do; the library reads both forms."""
    path = folder / "model.safetensors"
    weights = {
        name.replace("vision_tower.", "vision_tower.vision_model."): t
        for name, t in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})


def transpose_experts(folder):
    """Write the experts of a folder as published ones have them; the library reads both forms."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, t in weights.items():
        if ".mlp.experts." in name:
            weights[name] = t.mT.contiguous()
    save_file(weights, path, metadata={"format": "pt"})


def load_counting_bytes(model, folder, device):
    """Load weights, and return the bytes read from files."""
    num_bytes = []
    view_of = loading.view_of

    def counting_view_of(t, *region):
        view = view_of(t, *region)
        if not isinstance(t, torch.Tensor):  # a weight in a file
            num_bytes.append(view.nbytes)
        return view

    with mock.patch.object(loading, "view_of", counting_view_of):
        loading.load_weights(model, folder, device)
    return sum(num_bytes)
