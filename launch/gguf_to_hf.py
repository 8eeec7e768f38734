"""Turn a GGUF file into an ordinary Hugging Face folder.

The folder has bfloat16 weights, config, tokenizer and chat template.

    python launch/gguf_to_hf.py FILE.gguf FOLDER

The folder has bfloat16 weights, config, tokenizer and chat template.
The weights are de-quantised, so they carry the rounding of the file's blocks (4 bits for most of
SmolLM2's), and are then trained and served like any others. Needs the `gguf` extra.
"""

import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig


def load_model(path, reader):
    """Load the file's model with dense bfloat16 weights.

    The head is the embedding unless the file has one of its own.
    """
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    shared = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if not tied == shared == model.config.tie_word_embeddings:
        raise ValueError(
            f"{path}: {tied=} in the file, {shared=} in the model, "
            f"{model.config.tie_word_embeddings=}"
        )
    ids = {
        name: getattr(model.config, name)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    model.generation_config = GenerationConfig(**ids)
    return model


def load_tokenizer(path, reader, config):
    """Load the file's tokenizer.

    It splits text as its merges expect, and its EOS token is the one that ends a turn.
    """
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if reader.get_field("tokenizer.ggml.pre").contents() == "smollm":
        # transformers has no entry for this one and falls back on GPT-2's split, which cuts the
        # spaces before a digit as the model never saw them: "=  4" would hold two tokens of one
        # space, not one token of two.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    # transformers 5.17 leaves the padding token out and makes <|im_start|> the EOS token, so the
    # ids come from the config.
    for name in ("bos_token", "eos_token", "pad_token"):
        setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(getattr(config, f"{name}_id")))
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    if not turn.rstrip().endswith(tokenizer.eos_token):
        raise ValueError(
            f"{path}: eos_token={tokenizer.eos_token!r} does not end the chat template's turn "
            f"{turn!r}"
        )
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"{path}: {len(tokenizer)} tokens do not fit vocab_size={config.vocab_size}"
        )
    tokenizer.model_max_length = config.max_position_embeddings
    return tokenizer


def convert(path, folder):
    reader = GGUFReader(path)
    model = load_model(path, reader)
    tokenizer = load_tokenizer(path, reader, model.config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(
        f"{model.num_parameters() / 1e6:.1f}M parameters, vocabulary {model.config.vocab_size}, "
        f"eos {tokenizer.eos_token} ({tokenizer.eos_token_id}), tied head "
        f"{model.config.tie_word_embeddings}"
    )


if __name__ == "__main__":
    convert(Path(sys.argv[1]).absolute(), sys.argv[2])
