"""Guided decoding: what vLLM holds an answer to; log-probs in the loss are the policy's,
without the mask."""

import asyncio
import json
import math
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from harness import ranks
from minirl.base.errors import UserError
from minirl.config.shared import EngineConfig
from minirl.data import chat
from minirl.data.tokenizer import load_tokenizer
from minirl.endpoint.tool_calls import make_reader
from minirl.engine import engine as engine_module
from minirl.engine.engine import RolloutEngine, Sampling
from minirl.engine.grammars import MassRecorder, json_guide
from minirl.engine.loop import Completion, EngineLoop, Request
from minirl.model.scratch import make_tokenizer
from minirl.rollout.conversation import Prompt, Segment
from test_server import TEMPLATE

PICK = {
    "type": "object",
    "properties": {"choice": {"enum": ["left", "right"]}},
    "required": ["choice"],
}
TOOL = {"type": "function", "function": {"name": "pick", "description": "", "parameters": PICK}}
TEMPERATURE = 0.7


def white_weights(folder, tokenizer):
    """The weights of a model that says white space wherever it may."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}
    weights["model.embed_tokens.weight"] += 1
    weights["model.norm.weight"] += 1
    weights["lm_head.weight"][chat.encode(tokenizer, " \n\t")] += 0.3
    return weights


def guided_program(mesh, folder):
    """Answers that are held to a schema, to a call, and to nothing, side by side; one of them is
    interrupted."""
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE
    engine_module.LEAST_MASS = 1e-9  # so that all log-probs can be looked at
    engine = RolloutEngine(
        EngineConfig(max_model_len=600, max_num_seqs=8, kv_cache_gb=0.05),
        folder,
        mesh,
        dtype="float32",
        load_weights=True,
        guides=True,
    )
    loop = EngineLoop(engine, repeatable=False)
    prompt = chat.encode(tokenizer, "<|user|>left or right?<|end|><|assistant|>")
    sampling = Sampling(
        max_tokens=400,
        stop_token_ids=(tokenizer.eos_token_id,),
        temperature=TEMPERATURE,
    )
    reader = make_reader(tokenizer, [TOOL], "required", "auto")
    restarts = []
    requests = [
        Request(
            tokens=prompt,
            sampling=sampling,
            seed=number,
            images=[],
            name=(number,),
            guide=guide,
            on_restart=lambda: restarts.append(1),
            top_logprobs=2,
        )
        for number, guide in enumerate([json_guide(PICK), reader.guide(), None, json_guide(PICK)])
    ]

    async def begin():
        task = loop.loop.create_task(loop.generate(requests[3]))
        while not engine.llm.llm_engine.has_unfinished_requests():
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        return task

    waiting = loop.run(begin())
    num_before = len(requests[3].done.tokens)
    loop.resume()

    async def finish():
        for request in requests[:3]:
            await loop.generate(request)
        await waiting

    loop.run(finish())
    done = [request.done for request in requests]

    engine.load_weights(white_weights(folder, tokenizer).items())
    white = []
    for guide in (json_guide(PICK), reader.guide()):
        request = Request(
            tokens=prompt, sampling=sampling, seed=0, images=[], name=(len(white),), guide=guide
        )
        loop.run(loop.generate(request))
        white.append(tokenizer.decode(request.done.tokens, skip_special_tokens=True))
    loop.close()
    engine.close()
    texts = [tokenizer.decode(each.tokens, skip_special_tokens=True) for each in done]
    fields = [(each.tokens, each.logprobs, each.guided, each.stopped, each.top) for each in done]
    calls = [reader.read(texts[1]), reader.read(white[1])]
    return prompt, fields, texts, calls, (num_before, restarts), white


def test_answers_are_held_to_a_grammar_and_keep_the_policys_log_probs(tmp_path):
    folder = tiny.make(tmp_path / "model", max_position_embeddings=1024)
    prompt, fields, texts, read, (num_before, restarts), white = ranks(1, guided_program, folder)[0]
    (content, calls), (_, white_calls) = read
    for number in (0, 3):
        assert json.loads(texts[number])["choice"] in ("left", "right"), texts
        assert fields[number][3]
    assert num_before == 0 and restarts == [1]  # what began was dropped, and begun anew
    assert calls[0][0] == "pick" and calls[0][1]["choice"] in ("left", "right") and not content
    assert fields[2][2] == []  # nothing was guided
    assert json.loads(white[0])["choice"] in ("left", "right")
    assert white_calls[0][1]["choice"] in ("left", "right")
    for text in white:
        assert max(map(len, re.findall(r"\s+", text))) == 7, text

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for tokens, logprobs, _, _, top in fields:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        all_own = (logits / TEMPERATURE).log_softmax(-1)
        own = all_own[range(len(tokens)), tokens]
        torch.testing.assert_close(torch.tensor(logprobs), own, atol=1e-4, rtol=1e-4)
        assert len(top) == len(tokens) and {1, 2} >= set(map(len, top))
        for place, likeliest in enumerate(top):  # those that the grammar allowed
            for token, logprob in likeliest:
                assert logprob == pytest.approx(all_own[place, token].item(), abs=1e-3)


def test_mass_is_that_of_the_allowed_tokens():
    recorder = MassRecorder()
    recorder.begin("7", 2.0)
    recorder.begin("8", 1.0)
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [5.0, 5.0, 5.0]])
    whole = logits.clone()

    def mask():
        logits[0, 2] = -torch.inf

    recorder.around(logits, {"7-abc": 0, "8-def": 1, "9-other": 2}, mask)
    share = (whole[0] / 2).softmax(0)[:2].sum().item()
    assert recorder.take("7", 2) == [pytest.approx(math.log(share)), -math.inf]
    assert recorder.take("8", 1) == [0.0] and recorder.take("9", 1) is None
    recorder.end(["8", "none"])
    assert recorder.take("8", 1) is None


def test_guided_tokens_are_outside_the_loss():
    tokenizer = make_tokenizer([])
    segment = Segment()
    segment.append_prompt(Prompt([5, 6], "ab", []))
    completion = Completion([7, 8, 9], [-1.0, -2.0, -3.0], True, [4, 4, 4], [True, False, True])
    segment.append_completion(completion, tokenizer)
    assert segment.sampled == [False, False, False, True, False]
    assert segment.logprobs == [0, 0, 0, -2.0, 0] and segment.versions == [-1, -1, -1, 4, -1]
    assert segment.answer_tokens == [7, 8, 9] and segment.num_guided == 2
    assert segment.end() == 4


def test_what_no_grammar_can_hold_is_refused():
    with pytest.raises(UserError, match="cannot hold an answer to this JSON schema"):
        json_guide({"type": "no type"})
    deep: dict = {"type": "object"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(UserError, match="more than 50 levels"):
        json_guide(deep)


@pytest.mark.parametrize("num", [201, 5000])
def test_a_schema_of_many_properties_is_refused_at_once(num):
    """Compiling one of 1,600 takes a minute, in which nothing else goes on."""
    schema = {"type": "object", "properties": {f"p{i}": {} for i in range(num)}}
    with pytest.raises(UserError, match="more than 20000 characters|has 201 properties"):
        json_guide(schema)
    tool = {"type": "function", "function": {"name": "pick", "parameters": schema}}
    tokenizer = make_tokenizer([])
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(UserError, match=f"has {num} properties, more than 200; send a smaller"):
        make_reader(tokenizer, [tool], "required", "auto").guide()
