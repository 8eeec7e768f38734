"""A small model from nothing, as an ordinary Hugging Face folder.

Qwen3 architecture, a tokenizer of bytes, a chat template.
"""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from minirl.config.policy import ScratchConfig

END = "<|end|>"
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def make_tokenizer(phrases: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte of a text, so that any text round-trips.

    Roles have special tokens.

    Args:
        phrases: each is one token, too.
    """
    special = ["<|pad|>", END, "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(special + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token=END, chat_template=TEMPLATE
    )


def make_config(
    cfg: ScratchConfig, tokenizer: PreTrainedTokenizerFast, max_len: int
) -> Qwen3Config:
    """Return the config of a model that reads this tokenizer's tokens, up to `max_len` of them."""
    return Qwen3Config(
        vocab_size=(len(tokenizer) + 63) // 64 * 64,
        hidden_size=cfg.hidden_size,
        intermediate_size=4 * cfg.hidden_size,
        num_hidden_layers=cfg.num_layers,
        num_attention_heads=cfg.num_heads,
        num_key_value_heads=cfg.num_kv_heads,
        head_dim=cfg.head_dim,
        max_position_embeddings=max_len,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def make_model(cfg: ScratchConfig, folder: Path, *, max_len: int, seed: int) -> None:
    """Write model, tokenizer and generation config to a folder.

    Args:
        cfg: the sizes.
        folder: where they go.
        max_len: tokens of the longest sequence.
        seed: the same seed gives the same weights.
    """
    tokenizer = make_tokenizer(cfg.phrases)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(make_config(cfg, tokenizer, max_len))
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
