"""Tiny random models of every family on the allow-list, as Hugging Face folders."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from minirl.model.scratch import make_tokenizer

COMMON = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
          "max_position_embeddings": 512, "initializer_range": 0.1, "bos_token_id": None}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
TOP_2 = {"num_experts_per_tok": 2, "head_dim": 32}
DEEPSEEK = TOP_2 | {"n_routed_experts": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 2, "n_group": 2, "topk_group": 1,
                    "norm_topk_prob": True, "routed_scaling_factor": 1.5}
# Config values beyond the common ones with which every peculiarity of a family shows.
OWN = {
    "mistral": {"sliding_window": 12, "head_dim": 32}, "smollm3": {"no_rope_layer_interval": 2}, "gemma": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma2": ALTERNATING | {"head_dim": 32, "tie_word_embeddings": True, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": ALTERNATING | {"head_dim": 32, "tie_word_embeddings": True, "query_pre_attn_scalar": 20},
    "phi3": {"sliding_window": 12}, "olmo3": ALTERNATING, "exaone4": ALTERNATING,
    "granite": {"embedding_multiplier": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    "cohere": {"tie_word_embeddings": True, "logit_scale": 0.25, "use_qk_norm": True}, "cohere2": ALTERNATING | {"tie_word_embeddings": True, "logit_scale": 0.25},
    **dict.fromkeys(("qwen3", "glm", "glm4", "seed_oss", "ernie4_5"), {"head_dim": 32}),
    "mixtral": TOP_2 | {"num_local_experts": 4, "router_jitter_noise": 0.1},
    "qwen2_moe": TOP_2 | {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]},
    "qwen3_moe": TOP_2 | {"num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True}, "olmoe": TOP_2 | {"num_experts": 4},
    "glm4_moe": DEEPSEEK | {"use_qk_norm": True}, "dots1": DEEPSEEK | ALTERNATING,
    "minimax_m2": TOP_2 | {"num_local_experts": 4, "rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
}


def make(folder: Path, family: str = "qwen3", *, tied: bool = False, seed: int = 0, dtype: torch.dtype = torch.float32, **config: object) -> Path:
    """Write a random model with its character tokenizer; vocabulary 261 + 3, which no tensor parallel size pads evenly."""
    tokenizer = make_tokenizer([])
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "vocab_size": len(tokenizer) + 3}
    values = COMMON | ids | {"tie_word_embeddings": tied} | OWN.get(family, {}) | config
    disable_progress_bar()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values), dtype=dtype)
    with torch.no_grad():
        for p in model.state_dict().values():
            if p.ndim == 1:  # norms are ones and biases zeros at birth, which would hide a missing one
                p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
