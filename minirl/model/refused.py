"""The families that users ask for and that minirl refuses, each with the reason."""

_SPARSE = "its indexer chooses the keys of each query, which packed attention does not take"

REFUSED = {
    "nemotron": "it does not call the attention interface",
    "deepseek_v32": _SPARSE,
    "glm_moe_dsa": _SPARSE,
    "kimi_k25": "its attention is compared as deepseek_v3 only, not with its tower for images",
    "kimi_linear": "its delta attention leaks from one packed sequence into the next",
    "llama4_text": "its experts have a layout of their own",
}
