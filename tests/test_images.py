"""Images on their way: from what users have to data URLs, into chats and tokens, between ranks,
through whole programs. What a model makes of them is in test_families.py and test_rollout.py,
environments that show them in test_episodes.py."""

import base64
import dataclasses
import io
import json
import os
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoProcessor,
)
from transformers.image_utils import load_image

import tiny
from harness import ranks
from in_memory import ALONE, memory_rows, read_all
from minirl.algo import losses
from minirl.base.errors import UserError
from minirl.batch.exchange import exchange
from minirl.batch.packing import pack, unpack
from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.config.rl import AlgoConfig
from minirl.config.shared import DataConfig
from minirl.config.supervised import ChatsConfig, LabelledConfig, PairsConfig
from minirl.data import chat
from minirl.data.chat import parts_of
from minirl.data.examples import MISMATCHED, Labelled, to_examples
from minirl.data.formats import open_examples, with_images
from minirl.data.images import BadImage, attach, rgb, to_url
from minirl.data.prompts import open_prompts
from minirl.data.tokenizer import load_tokenizer, stop_token_ids
from minirl.data.vision import read_vision
from minirl.parallel.fsdp import local
from minirl.rollout.conversation import Conversation
from minirl.run.inputs import find_other_model
from minirl.train.frozen import RewardModel
from minirl.train.policy import Policy
from minirl.types.packed import Trajectory
from programs import ROOT, fork
from test_families import show, stay_float64
from test_gradients import batches_of, trajectories, worst

PIXELS = np.random.default_rng(0).integers(0, 256, (30, 50, 3), dtype=np.uint8)
WAITS = {"type": "image"}


def file_bytes(kind="PNG"):
    Image.fromarray(PIXELS).save(file := io.BytesIO(), kind)
    return file.getvalue()


@pytest.fixture(scope="module", params=["qwen2_vl", "gemma3", "gemma4"])
def folder(request, tmp_path_factory):
    """Images of any size, and images that are all made one size."""
    return tiny.make(tmp_path_factory.mktemp("model") / request.param, request.param)


def mark_of(folder):
    """What a text has in an image's place."""
    marks = {"gemma3": tiny.GEMMA_IMAGE, "gemma4": tiny.GEMMA4_TOKENS["image_token"]}
    return marks.get(folder.name, tiny.IMAGE)


def test_whatever_holds_an_image_becomes_a_data_url(tmp_path):
    (tmp_path / "a.png").write_bytes(file_bytes())
    url = f"data:image/png;base64,{base64.b64encode(file_bytes()).decode()}"
    forms = [
        str(tmp_path / "a.png"),
        file_bytes(),
        Image.fromarray(PIXELS),
        url,
        {"bytes": file_bytes(), "path": None},
        {"path": str(tmp_path / "a.png"), "bytes": None},
    ]
    for form in forms:
        assert np.array_equal(np.asarray(rgb(to_url(form))), PIXELS)
    assert (
        to_url(url) == url and len({to_url(form) for form in forms if form is not url}) == 1
    )  # the same image is the same text


@pytest.mark.parametrize(
    ("image", "why"),
    [
        ("/no/such.png", "cannot be read"),
        (b"no image", "cannot be read"),
        ("data:image/png;base64,AAAA", "cannot be read"),
        ("data:image/png;base64,?", "cannot be read"),
        (7, "not a int"),
        ({}, "not a NoneType"),
        (file_bytes("BMP")[:-40], "cannot be read.*truncated"),
    ],
)
def test_what_is_no_image_is_refused(image, why):
    with pytest.raises(BadImage, match=why):
        to_url(image)


def test_files_without_an_end_and_huge_ones_are_no_images(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "huge.png").open("wb") as file:
        file.truncate(2**40)  # it takes no room
    (tmp_path / "link.png").symlink_to("/dev/zero")
    for place, why in (
        (tmp_path / "fifo", "it is no regular file"),
        (tmp_path / "link.png", "it is no regular file"),
        ("/dev/zero", "it is no regular file"),
        (tmp_path, "it is no regular file"),
        (tmp_path / "huge.png", "it has more than 64 MiB"),
    ):
        for image in (str(place), {"bytes": None, "path": str(place)}):
            with pytest.raises(BadImage, match=f"cannot be read .{why}.; give a path"):
                to_url(image)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_an_image_is_turned_as_its_file_says(tmp_path, orientation):
    """As the library, vLLM and `datasets` do."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "photo.png"
    Image.fromarray(PIXELS).save(path, exif=exif)
    expected = np.asarray(load_image(str(path)))
    for form in (str(path), path, path.read_bytes(), Image.open(path)):
        assert np.array_equal(np.asarray(rgb(to_url(form))), expected)


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "F", "RGBX", "RGBa", "I;16", "P"])
def test_pictures_of_every_mode_are_taken(mode):
    through = {"RGBa": "RGBA", "I;16": "I", "F": "L"}.get(mode, "RGB")
    picture = Image.fromarray(PIXELS).convert("L" if mode == "I;16" else through)
    assert rgb(to_url(picture.convert(through).convert(mode))).size == (50, 30)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "as it is"])
def test_of_16_bits_the_upper_8_are_read(kind):
    """Pillow's own conversion makes all above 255 white."""
    ramp = Image.fromarray(np.arange(65536, dtype=np.uint16).reshape(256, 256))
    assert ramp.mode == "I;16"
    given: object = ramp
    if kind != "as it is":
        file = io.BytesIO()
        ramp.save(file, kind)
        given = file.getvalue()
    pixels = np.asarray(rgb(to_url(given)))
    assert (pixels == np.arange(256)[:, None, None]).all()


@pytest.mark.parametrize(("kind", "largest"), [(np.int32, 256), (np.float32, 300), (np.float32, 1)])
def test_numbers_without_a_scale_are_refused(kind, largest):
    picture = Image.fromarray(np.full((9, 9), largest, kind))
    with pytest.raises(BadImage, match="scale them to 0 to 255"):
        to_url(picture)
    assert (np.asarray(rgb(to_url(Image.fromarray(np.full((9, 9), 200, kind))))) == 200).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_on_white_as_on_a_server(mode):
    """Without alpha, a drawing in black on nothing would be black all over."""
    from vllm.multimodal.image import convert_image_mode

    drawing = Image.new("RGBA", (4, 1))
    drawing.putdata([(0, 0, 0, 0), (0, 0, 0, 255), (0, 0, 0, 100), (255, 0, 0, 255)])
    file = io.BytesIO()
    drawing.convert(mode).save(file, "PNG")
    read = rgb(to_url(file.getvalue()))
    with Image.open(io.BytesIO(file.getvalue())) as image:
        assert np.array_equal(np.asarray(read), np.asarray(convert_image_mode(image, "RGB")))
    if mode != "P":
        assert np.asarray(read)[0, :3, 0].tolist() == [255, 0, 155]
    alone = rgb(to_url(drawing.convert("RGBa")))
    assert np.asarray(alone)[0, :2, 0].tolist() == [255, 0]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000"])
def test_images_of_every_format_are_read(kind):
    assert rgb(to_url(file_bytes(kind))).size == (50, 30)


def test_images_take_their_places():
    url = to_url(file_bytes())
    image, text = {"type": "image", "image": url}, {"type": "text", "text": "what?"}
    assert attach([{"role": "user", "content": "what?"}], [file_bytes()]) == [
        {"role": "user", "content": [image, text]}
    ]
    assert attach([{"role": "user", "content": [text, WAITS, text, WAITS]}], [url, url]) == [
        {"role": "user", "content": [text, image, text, image]}
    ]
    assert attach(
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}], []
    ) == [{"role": "user", "content": [image]}]
    chatted = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "what?"},
        {"role": "assistant", "content": "this"},
        {"role": "user", "content": "and?"},
    ]
    assert attach(chatted, [url]) == [
        chatted[0],
        {"role": "user", "content": [image, text]},
        *chatted[2:],
    ]
    assert attach([{"role": "tool", "content": "what?"}], [url]) == [
        {"role": "tool", "content": [image, text]}
    ]
    plain = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]
    assert attach(plain, []) == plain
    for parts, given in (([WAITS], []), ([WAITS], [url, url]), ([WAITS, WAITS, WAITS], [url])):
        with pytest.raises(
            BadImage, match=f"places for {len(parts)} images came with {len(given)}"
        ):
            attach([{"role": "user", "content": parts}], given)


def test_tokens_of_a_chat_are_the_processors(folder):
    """Of its text and images together; the engine is told one token for each image, which it makes
    as many of itself."""
    processor, tokenizer, vision = (
        AutoProcessor.from_pretrained(folder),
        load_tokenizer(folder),
        read_vision(folder),
    )
    urls = [tiny.picture(56, 84), tiny.picture(100, 60), tiny.picture(300, 200)]
    messages = attach(
        [
            {"role": "user", "content": [WAITS, {"type": "text", "text": "a"}, WAITS]},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": [{"type": "text", "text": "c"}, WAITS]},
        ],
        urls,
    )
    conversation = Conversation(tokenizer, vision)
    first = conversation.continue_with_messages(messages[:1])
    segment = conversation.continue_with_messages(messages[:1])
    assert segment is first and [p.url for p in segment.images] == urls[:2]
    whole = Conversation(tokenizer, vision).continue_with_messages(messages)
    text = chat.render(tokenizer, messages)
    assert whole.tokens == processor(text=[text], images=[rgb(url) for url in urls])["input_ids"][0]
    assert vision.unexpanded(whole.tokens, whole.images) == chat.encode(tokenizer, text)
    other = conversation.continue_with_messages(
        attach(
            [{"role": "user", "content": [WAITS, {"type": "text", "text": "a"}, WAITS]}],
            [urls[0], tiny.picture(101, 60)],
        )
    )
    assert (
        other is not first and other.tokens == first.tokens
    )  # another image as large: not the same chat
    narrow = [to_url(Image.new("RGB", (1, 300)))]
    if folder.name in ("gemma3", "gemma4"):
        num_tokens = vision.expand([vision.place], narrow).tokens.count(vision.token)
        assert num_tokens == {"gemma3": 9, "gemma4": 70}[folder.name]
    else:
        with pytest.raises(BadImage, match="1 x 300 pixels cannot be read"):
            vision.expand([vision.place], narrow)
    with pytest.raises(BadImage, match="tokens for images came with"):
        conversation.continue_with_messages(
            [{"role": "user", "content": f"a text with {mark_of(folder)}"}]
        )
    with pytest.raises(UserError, match="reads none"):
        Conversation(tokenizer).continue_with_messages(messages)


def test_images_without_places_are_the_first_messages_or_the_lasts():
    """Those of a row, and those that an environment shows with a chat that it has rewritten."""
    url = tiny.picture(30, 40)
    chat = [{"role": role, "content": role} for role in ("user", "assistant", "user", "tool")]
    for last, place in ((False, 0), (True, 2)):
        shown = attach(chat, [url], last=last)
        has_image = [any(part["type"] == "image" for part in parts_of(m)) for m in shown]
        assert has_image == [i == place for i in range(4)]


def test_images_in_two_columns_are_refused():
    row = {"prompt": "a", "image": tiny.picture(30, 40), "images": [tiny.picture(30, 40)]}
    with pytest.raises(UserError, match="a row has images in images and in image; keep one"):
        with_images("a", row, "rows", DataConfig())


def test_a_message_without_a_text_gets_its_image_alone():
    url = tiny.picture(30, 40)
    for content in (None, ""):
        (message,) = attach([{"role": "user", "content": content}], [url])
        assert message["content"] == [{"type": "image", "image": url}]


@pytest.mark.parametrize(
    ("family", "section", "values", "message"),
    [
        ("gemma3", "text_config", {"sliding_window": 4}, "mm_tokens_per_image = 9 is above slid"),
        ("gemma4", "text_config", {"sliding_window": 4}, "processor = 70 is above sliding_window"),
        ("gemma4", "vision_config", {"default_output_length": 50}, "default_output_length = 50"),
        ("gemma4", "vision_config", None, "vision_config is null, and family gemma4"),
    ],
)
def test_images_that_a_model_of_gemma_cannot_see_are_refused(
    tmp_path, family, section, values, message
):
    folder = tiny.make(tmp_path / "model", family)
    config = json.loads((folder / "config.json").read_text())
    if family == "gemma4":
        config["text_config"]["use_bidirectional_attention"] = "vision"
    config[section] = values and config[section] | values
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        read_vision(folder)


def test_a_model_without_its_image_processor_is_one_error(tmp_path):
    folder = tiny.make(tmp_path / "model", "gemma3")
    config = AutoConfig.from_pretrained(folder)
    for file in folder.glob("*processor_config.json"):
        file.unlink()
    message = r"the image processor of .*model \(\*processor_config.json\) cannot be read"
    with pytest.raises(UserError, match=message):
        find_other_model(str(folder), config, ParallelConfig(), "critic.model", scores=None)


def test_another_image_is_another_prompt(folder):
    """KTO takes the answer to one for its estimate, though both are asked the same."""
    rows = []
    for number in range(4):
        picture = {"type": "image", "image": tiny.picture(56 + number // 2, 56)}
        asked = {"role": "user", "content": [picture, {"type": "text", "text": "which?"}]}
        answer = {"role": "assistant", "content": chr(ord("a") + number)}
        rows.append({"messages": [asked, answer], "trained": [1], "label": True})
    tokenizer = load_tokenizer(folder)
    labelled = Labelled(
        memory_rows(rows),
        tokenizer,
        stop_token_ids(tokenizer, folder),
        LabelledConfig(max_tokens=256),
        ALONE,
        ThreadPoolExecutor(1),
        seed=0,
        shuffle=False,
        vision=read_vision(folder),
    )
    examples = labelled.examples(range(4)).here
    others = [t for t in examples if t.episode == MISMATCHED]
    said = [tokenizer.decode(t.tokens[t.sampled])[0] for t in others]
    assert said == ["d", "d", "b", "b"]


def test_rows_with_images(tmp_path, folder):
    """Of RL, SFT and DPO, in TRL's layout and in short; a place in the file where one is bad. In
    the loss is what it would be without."""
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(file_bytes())
    a, b = (str(tmp_path / f"{name}.png") for name in "ab")
    Image.fromarray(PIXELS[:, ::-1]).save(b)
    parts = [{"role": "user", "content": [WAITS, {"type": "text", "text": "which?"}]}]
    rows = [
        {"prompt": "which?", "image": a, "answer": "1"},
        {"prompt": parts, "images": [b], "answer": "2"},
        {"prompt": "none", "answer": "3"},
        {"prompt": "which?", "images": [a], "answer": "1"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = read_all(open_prompts(str(tmp_path / "rows.jsonl"), "data.train", DataConfig(), ALONE))
    assert len(found) == 3  # the last one is the first again
    assert (
        found[0]["prompt"]
        == [
            {
                "role": "user",
                "content": [{"type": "image", "image": to_url(a)}, parts[0]["content"][1]],
            }
        ]
        and found[2]["prompt"] == "none"
    )
    assert (
        found[1]["prompt"] == attach(parts, [b]) != found[0]["prompt"] and "images" not in found[1]
    )
    for bad, why in (
        ({"prompt": "x", "image": "/none.png"}, "none.png"),
        ({"prompt": parts, "answer": "1"}, "places for 1 images came with 0"),
    ):
        (tmp_path / "bad.jsonl").write_text(json.dumps(rows[0]) + "\n" + json.dumps(bad))
        with pytest.raises(UserError, match=f"line 2.*{why}"):
            read_all(open_prompts(str(tmp_path / "bad.jsonl"), "data.train", DataConfig(), ALONE))

    (tmp_path / "chats.jsonl").write_text(
        json.dumps({"messages": [*parts, {"role": "assistant", "content": "this"}], "images": [a]})
    )
    (tmp_path / "pairs.jsonl").write_text(
        json.dumps({"prompt": parts, "images": [a], "chosen": "this", "rejected": "that"})
    )
    (row,), (pair,) = (
        open_examples(str(tmp_path / "chats.jsonl"), "data.train", ChatsConfig(), ALONE),
        open_examples(str(tmp_path / "pairs.jsonl"), "data.train", PairsConfig(), ALONE),
    )
    assert pair["prompt"] == row["messages"][:1] == attach(parts, [a])
    tokenizer, vision = load_tokenizer(folder), read_vision(folder)
    (t,) = to_examples(tokenizer, vision, row, stop_token_ids(tokenizer, folder))
    assert tokenizer.decode(t.tokens[t.sampled]) == "this<|end|>" and [
        p.num_tokens for p in t.images
    ] == [vision.num_tokens(to_url(a))]
    assert (t.tokens == vision.token).sum() == t.images[0].num_tokens and len(t.tokens) == len(
        t.sampled
    ) == len(t.logprobs)
    with pytest.raises(UserError, match="reads none"):
        to_examples(tokenizer, None, row, [])


def step(mesh, folder, budget):
    """Weights after two updates on trajectories of which some have images: in the prompt that
    siblings share, or behind what was sampled."""
    stay_float64()
    policy = Policy(
        PolicyConfig(
            dtype="float64",
            max_grad_norm=0.0,
            activation_checkpointing="full" if mesh.world_size > 1 else "off",
        ),
        folder,
        mesh,
    )
    for _ in range(2):
        everything = trajectories(8)
        for t in everything:
            if t.group % 2:
                show(t, policy.vision, 1, tiny.picture(56 + 28 * (t.group > 2), 56))
            if t.group == 3 and t.episode:
                show(t, policy.vision, len(t.tokens) - 2, tiny.picture(84, 84))
        # Of two ranks one brings all that have images; without a budget, each sequence alone.
        own = (
            everything
            if mesh.world_size == 1
            else [t for t in everything if mesh.rank == bool(t.images)]
        )
        (micros,) = exchange(own, mesh, budget) if budget else [[[t] for t in own]]
        policy.update(batches_of(micros, policy), losses.policy(AlgoConfig(), 20), lr=1e-3)
    shards = policy.shards()
    return {n: shards[n].full_tensor() for n, _ in policy.model.named_parameters()}


def test_weights_after_steps_on_images_do_not_depend_on_the_split(folder):
    (expected,) = ranks(1, step, folder, 0)
    for parallel in (None, ParallelConfig(context=2)):
        budget = 280 if folder.name == "gemma4" else 70
        for found in ranks(2, step, folder, budget, parallel=parallel):
            assert worst(found, expected) < 1e-10


def gradient_norm(mesh, folder, accumulate):
    cfg = PolicyConfig(dtype="bfloat16", accumulate=accumulate)
    policy = Policy(cfg, folder, mesh)
    batches = batches_of([[t] for t in trajectories(4)], policy)
    return policy.update(batches, losses.policy(AlgoConfig(), 20), lr=1e-3)["grad_norm"]


def test_gradients_of_several_micro_batches_are_kept_in_another_dtype(folder):
    """Gemma 4 has a tower for sound, too, which never runs."""
    (whole,) = ranks(1, gradient_norm, folder, "whole")
    (sharded,) = ranks(1, gradient_norm, folder, "sharded")
    assert whole == pytest.approx(sharded, rel=1e-3)


REWARD = """
def colour(prompt, completion, row):
    assert prompt[0]["content"][0]["image"].startswith("data:")
    return float(row["answer"] in completion.encode("utf-8", "replace").hex())
"""


def test_programs(tmp_path, folder):
    """SFT, DPO or a reward model, and RL on two ranks with a reference, a dump, a replay and an
    evaluation; what they leave is what the library loads, and reads images."""
    rng = np.random.default_rng(0)
    for i in range(12):
        Image.fromarray(rng.integers(0, 256, (56, 28 + 28 * (i % 3), 3), dtype=np.uint8)).save(
            tmp_path / f"{i}.png"
        )
    (tmp_path / "reward.py").write_text(REWARD)
    rows = {
        "rl": [
            {"prompt": f"which {i}?", "image": f"{tmp_path}/{i}.png", "answer": str(i % 10)}
            for i in range(12)
        ],
        "sft": [
            {"prompt": f"which {i}?", "completion": "this", "image": f"{tmp_path}/{i}.png"}
            for i in range(12)
        ],
        "dpo": [
            {
                "prompt": f"which {i}?",
                "chosen": "this",
                "rejected": "that one",
                "image": f"{tmp_path}/{i}.png",
            }
            for i in range(12)
        ],
    }
    rows["rm"] = rows["dpo"]
    for name, those in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, those)))
    common = ["--policy.dtype", "float32", "--num-steps", 2, "--data.held-out", 2]
    # Of Gemma 3 the library has a class with a score head that reads images. What pairs, and what
    # replayed rollouts, do with images is the same for all families.
    pairs = {"gemma3": ("rm",), "qwen2_vl": ("dpo",)}
    supervised = ("sft", *pairs.get(folder.name, ()))
    programs_of_rl = ["rl", "replay"] if folder.name == "qwen2_vl" else ["rl"]
    ends = {
        name: fork(
            f"minirl.{name}",
            [
                *common,
                "--policy.model",
                folder,
                "--data.train",
                tmp_path / f"{name}.jsonl",
                "--output",
                tmp_path / name,
                "--batch-size",
                4,
                "--data.max-tokens",
                256,
            ],
            tmp_path / "log" / name,
        )
        for name in supervised
    }
    play = [
        *common,
        "--policy.model",
        tmp_path / "sft" / "model",
        "--data.train",
        tmp_path / "rl.jsonl",
        "--reward.function",
        f"{tmp_path}/reward.py:colour",
        "--rollout.prompts-per-step",
        4,
        "--rollout.samples-per-prompt",
        2,
        "--rollout.max-tokens",
        12,
        "--data.max-prompt-tokens",
        128,
        "--algo.kl-coef",
        0.01,
        "--engine.kv-cache-gb",
        0.05,
        "--algo.correction.preset",
        "off",
    ]
    ends["rl"] = fork(
        "minirl.rl",
        [*play, "--rollout.dump", "--debug.check-refit", "--output", tmp_path / "rl"],
        tmp_path / "log" / "rl",
        world=2,
    )
    if "replay" in programs_of_rl:
        dumped = ["--rollout.replay", tmp_path / "rl" / "rollouts"]
        ends["replay"] = fork(
            "minirl.rl",
            [*play, *dumped, "--output", tmp_path / "replay"],
            tmp_path / "log" / "replay",
        )
    for name, end in ends.items():
        assert end.code == 0, f"{name}: {end.err}"
    for name in programs_of_rl:
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        steps = [row for row in map(json.loads, lines) if row["phase"] == "rl"]
        assert len(steps) == 2 and steps[0]["mismatch_max"] < 1e-4
        # The policy of a replay learns from what that of the dump sampled.
        assert name == "replay" or steps[1]["mismatch_max"] < 1e-4
    for name in (*supervised, "rl"):
        kind = AutoModelForSequenceClassification if name == "rm" else AutoModelForImageTextToText
        model = kind.from_pretrained(tmp_path / name / "model", dtype="auto")
        processor = AutoProcessor.from_pretrained(tmp_path / name / "model")
        inputs = processor(
            text=[f"{mark_of(folder)}x"], images=[rgb(tiny.picture(56, 56))], return_tensors="pt"
        )
        assert model(**inputs).logits.isfinite().all() and model.dtype == torch.float32


def test_the_recipe(tmp_path, monkeypatch):
    """As it stands, with the model and the pictures that the benchmark makes."""
    monkeypatch.setattr(sys, "argv", ["images.py", str(tmp_path / "squares"), "--num", "40"])
    runpy.run_path(str(ROOT / "benchmarks" / "images.py"), run_name="__main__")
    end = fork(
        "minirl.rl",
        [
            "--config",
            ROOT / "configs" / "images.yaml",
            "--policy.model",
            tmp_path / "squares" / "model",
            "--data.train",
            tmp_path / "squares" / "rows.jsonl",
            "--output",
            tmp_path / "out",
            "--num-steps",
            2,
            "--sft.num-steps",
            2,
            "--data.held-out",
            4,
            "--eval.every",
            0,
        ],
        tmp_path / "log",
    )
    assert end.code == 0, end.err
    answers = (tmp_path / "out" / "answers.jsonl").read_text()
    assert (
        len(json.loads(answers.splitlines()[-1])["answers"]) == 4 and "How many squares?" in end.err
    )


def judged(mesh, folder):
    """Scores of two answers that differ in their image alone: in a rollout, and as trained."""
    policy = Policy(PolicyConfig(dtype="float32"), folder, mesh, score=True)
    with torch.no_grad():
        local(policy.model.score.weight).normal_()
    vision = policy.vision
    answers = []
    for group, width in enumerate((30, 60)):
        read = vision.expand([5, vision.place, 6], [tiny.picture(width, 40)])
        tokens = np.array([*read.tokens, 9, 10, 11], np.int32)
        sampled = np.array([False] * len(read.tokens) + [True] * 3)
        answers.append(
            Trajectory(
                tokens=tokens,
                sampled=sampled,
                logprobs=np.zeros(len(tokens), np.float32),
                group=group,
                images=read.spans,
            )
        )
    scores = RewardModel(policy, [11], 11, 1000)
    policy.sleeper.wake_parameters()
    got = scores(answers)
    expected = []
    for answer in answers:
        whole = dataclasses.replace(
            answer,
            tokens=np.append(answer.tokens, np.int32(11)),
            sampled=np.append(answer.sampled, True),
            logprobs=np.zeros(len(answer.tokens) + 1, np.float32),
        )
        with policy.inference():
            batch = pack([whole], mesh.device, layout=policy.layout)
            outputs, _ = policy.model(batch)
            expected.append(float(unpack(outputs, [whole], batch)[0][-1]))
    return got, expected


def test_a_reward_model_sees_the_images_of_answers(tmp_path):
    folder = tiny.make_gemma_vision(tmp_path / "model")
    ((got, expected),) = ranks(1, judged, folder)
    assert got == pytest.approx(expected, abs=1e-5)
    assert abs(expected[0] - expected[1]) > 0.01
