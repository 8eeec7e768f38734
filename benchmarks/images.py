"""Makes a small Qwen2-VL from nothing and pictures to count squares in, for configs/images.yaml.

    python benchmarks/images.py runs/squares          # leaves model/, pictures/ and rows.jsonl

Prints how many rows it made and where they and the model are.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.utils.logging import disable_progress_bar

from minirl.model.scratch import make_tokenizer

SIDE, CELL = 56, 14  # pixels of a picture, and of a cell of its grid
SPECIAL = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
TEMPLATE = (
    "{%- for m in messages -%}"
    "{{ '<|' + m.role + '|>' }}"
    "{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for part in m.content -%}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}"
    "{%- endfor -%}{%- endif -%}"
    "{{ '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
QUESTION = "How many squares?"
COLOURS = ["red", "green", "blue", "black"]


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2VLConfig:
    """Return the shape of the model: 2 layers of 128 behind a tower of 2 layers of 64."""
    text = {
        "vocab_size": (len(tokenizer) + 63) // 64 * 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
        },
    }
    tower = {
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 128,
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": CELL,
    }
    ids: dict[str, Any] = {
        name: tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL.items()
    }
    return Qwen2VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **ids)


def make_model(folder: Path) -> None:
    """Write model, tokenizer and image processor."""
    tokenizer = make_tokenizer([QUESTION])
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL.values())})
    tokenizer.chat_template = TEMPLATE
    disable_progress_bar()
    torch.manual_seed(0)
    Qwen2VLForConditionalGeneration(make_config(tokenizer)).save_pretrained(folder)
    images = Qwen2VLImageProcessor(
        patch_size=CELL, merge_size=2, min_pixels=(2 * CELL) ** 2, max_pixels=SIDE**2
    )
    Qwen2VLProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(patch_size=CELL, merge_size=2),
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


def draw(count: int, rng: random.Random) -> Image.Image:
    """Return a picture with squares of any colour in cells of a grid, so that none touch."""
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(picture)
    per_row = SIDE // CELL
    for cell in rng.sample(range(per_row**2), count):
        x = cell % per_row * CELL + 2
        y = cell // per_row * CELL + 2
        pen.rectangle([x, y, x + CELL - 5, y + CELL - 5], fill=rng.choice(COLOURS))
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num", type=int, default=4000, help="pictures")
    args = parser.parse_args()
    (args.folder / "pictures").mkdir(parents=True)
    make_model(args.folder / "model")
    rng = random.Random(0)
    with (args.folder / "rows.jsonl").open("w") as file:
        for i in range(args.num):
            count = rng.randint(1, 6)
            path = args.folder / "pictures" / f"{i}.png"
            draw(count, rng).save(path)
            row = {"prompt": QUESTION, "image": str(path), "answer": str(count)}
            file.write(json.dumps(row) + "\n")
    print(f"{args.num} rows in {args.folder / 'rows.jsonl'}, a model in {args.folder / 'model'}")


if __name__ == "__main__":
    main()
