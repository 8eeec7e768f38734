"""Messages to token ids, through the tokenizer's own chat template."""

from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from minirl.types import UserError


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None:
        raise UserError(f"policy.model = {folder}: its tokenizer has no chat template; add a chat_template.jinja to the folder")
    return tokenizer


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[int]:
    """Every token that ends an answer: the tokenizer's and those of generation_config.json. Raises UserError if there is none."""
    ids = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    if (folder / "generation_config.json").exists():
        eos = GenerationConfig.from_pretrained(folder).eos_token_id
        ids |= set(eos) if isinstance(eos, list) else {eos} if eos is not None else set()
    if not ids:
        raise UserError(f"policy.model = {folder}: neither tokenizer nor generation_config.json names an eos token, so no answer would end")
    return sorted(ids)


def to_messages(prompt: str | list[dict], system_prompt: str) -> list[dict]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict]) -> list[int]:
    """Token ids up to where the assistant begins to speak."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def encode_answer(tokenizer: PreTrainedTokenizerBase, messages: list[dict], answer: str, stop_ids: list[int]) -> list[int]:
    """Token ids of an assistant's answer with the token that ends it, as the policy would have to sample them."""
    prompt = encode_prompt(tokenizer, messages)
    whole = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": answer}], return_dict=True)["input_ids"]
    if whole[: len(prompt)] != prompt:
        raise UserError("the chat template renders a prompt otherwise when an answer follows, so an answer cannot be trained on")
    tail = whole[len(prompt) :]
    end = next((i for i, token in enumerate(tail) if token in stop_ids), None)
    if end is None:
        raise UserError(f"the chat template does not end an answer by one of the stop tokens {stop_ids}")
    return tail[: end + 1]  # templates put a line break behind the stop token, which the policy never samples
