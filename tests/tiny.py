"""Tiny random models of every family on the allow-list, as Hugging Face folders."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from minirl.model.families import FAMILIES
from minirl.model.scratch import make_tokenizer

COMMON = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
          "max_position_embeddings": 512, "initializer_range": 0.1, "bos_token_id": None}


def make(folder: Path, family: str = "qwen3", *, tied: bool = False, seed: int = 0, dtype: torch.dtype = torch.float32, **config: object) -> Path:
    """Write a random model with its character tokenizer; vocabulary 261 + 3, which no tensor parallel size pads evenly."""
    tokenizer = make_tokenizer([])
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "vocab_size": len(tokenizer) + 3}
    values = COMMON | ids | {"tie_word_embeddings": tied} | FAMILIES[family].tiny | config
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
