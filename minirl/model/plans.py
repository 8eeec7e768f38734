"""Tensor-parallel styles that the library's own plans lack, by names of modules."""

QWEN2_MOE = {
    "model.layers.*.mlp.experts": "moe_tp_experts",
    "model.layers.*.mlp.shared_expert.gate_proj": "colwise",
    "model.layers.*.mlp.shared_expert.up_proj": "colwise",
    "model.layers.*.mlp.shared_expert.down_proj": "rowwise",
}
QWEN3_VL = {
    "model.language_model.layers.*.self_attn.q_proj": "colwise",
    "model.language_model.layers.*.self_attn.k_proj": "colwise",
    "model.language_model.layers.*.self_attn.v_proj": "colwise",
    "model.language_model.layers.*.self_attn.o_proj": "rowwise",
    "model.language_model.layers.*.mlp.gate_proj": "colwise",
    "model.language_model.layers.*.mlp.up_proj": "colwise",
    "model.language_model.layers.*.mlp.down_proj": "rowwise",
}
_ATTENTION = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise",
}
_MLP = {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
DENSE = {f"model.layers.*.{name}": style for name, style in {**_ATTENTION, **_MLP}.items()}
GRANITE_MOE = {
    **{f"model.layers.*.{name}": style for name, style in _ATTENTION.items()},
    "model.layers.*.block_sparse_moe.experts": "moe_tp_experts",
}
HUNYUAN_MOE = {
    **{f"model.layers.*.{name}": style for name, style in _ATTENTION.items()},
    "model.layers.*.mlp.experts": "moe_tp_experts",
    "model.layers.*.mlp.shared_mlp.gate_proj": "colwise",
    "model.layers.*.mlp.shared_mlp.up_proj": "colwise",
    "model.layers.*.mlp.shared_mlp.down_proj": "rowwise",
}
GEMMA4 = {
    "model.embed_tokens_per_layer": "embedding",
    "model.layers.*.router": "router_alone",
    "model.layers.*.router.proj": "whole",
    "model.layers.*.experts": "experts_alone",
}
GEMMA4_VL = {
    "model.language_model.embed_tokens_per_layer": "embedding",
    "model.language_model.layers.*.router": "router_alone",
    "model.language_model.layers.*.router.proj": "whole",
    "model.language_model.layers.*.experts": "experts_alone",
    # The library's plan splits the tower, too. As other towers here it is whole on every rank.
    **{
        f"model.vision_tower.encoder.layers.*.{name}": ""
        for name in ("self_attn.q_norm", "self_attn.k_norm", *_ATTENTION, *_MLP)
    },
}
GPT_OSS = {
    "model.layers.*.self_attn": "heads",  # its sinks
    **{f"model.layers.*.{name}": style for name, style in _ATTENTION.items()},
    "model.layers.*.mlp.experts": "moe_tp_experts",
}
# Latent attention by heads; what all of them share is whole on every rank.
MLA = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.q_a_proj": "whole",
    "model.layers.*.self_attn.kv_a_proj_with_mqa": "whole",
    "model.layers.*.self_attn.q_b_proj": "colwise",
    "model.layers.*.self_attn.kv_b_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}
# Gated delta nets by heads. The library computes all of them on every rank.
_DELTA_NET = {
    "": "delta_net",
    ".conv1d": "parts",
    ".in_proj_qkvz": "colwise",
    ".in_proj_ba": "colwise",
    ".in_proj_qkv": "colwise_parts",
    ".in_proj_z": "colwise",
    ".in_proj_b": "colwise",
    ".in_proj_a": "colwise",
    ".out_proj": "rowwise",
}
HYBRID = {f"model.layers.*.linear_attn{name}": style for name, style in _DELTA_NET.items()}
HYBRID_VL = {
    f"model.language_model.layers.*.linear_attn{name}": style for name, style in _DELTA_NET.items()
}
