"""Fine-tuning on chats: which tokens are in the loss, to the token; the loss is Hugging Face's;
order, resume and refusals of the program."""

import dataclasses
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tiny
from harness import RankFailed, ranks
from in_memory import ALONE, encoded_rows, memory_rows, read_all, split
from minirl.algo import losses
from minirl.base.errors import UserError
from minirl.batch.packing import pack
from minirl.checkpoint.state import read_best
from minirl.config.parse import parse_flags
from minirl.config.policy import ParallelConfig, PolicyConfig
from minirl.config.supervised import ChatsConfig, SFTConfig
from minirl.config.validate import validate_supervised
from minirl.data import chat
from minirl.data.examples import Chats, encode_chat, encode_text
from minirl.data.formats import open_examples
from minirl.data.order import read_rows
from minirl.data.rows import Order
from minirl.model.scratch import make_tokenizer
from minirl.run import supervised
from minirl.run.supervised import SupervisedTrainer, make_minibatch
from minirl.train.policy import Policy
from minirl.types.packed import Trajectory
from programs import as_flags, fork, rows_of
from test_gradients import exact_norm

# --------------------------------------------------------------------------------------------------
# masks

CHATML = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
LLAMA = (
    "{{- '<bos>' -}}{%- for m in messages -%}"
    "{{ '<|start|>' + m.role + '<|header|>\n\n' + (m.content | trim) + '<|eot|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|start|>assistant<|header|>\n\n' }}{%- endif -%}"
)
MISTRAL = (
    "{{- '<bos>' -}}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{%- elif m.role == 'assistant' -%}{{ ' ' + m.content + '</s>' }}"
    "{%- else -%}{{ raise_exception('only user and assistant') }}{%- endif -%}{%- endfor -%}"
)
GEMMA = (
    "{{- '<bos>' -}}{%- if messages[0].role == 'system' -%}"
    "{{ raise_exception('System role not supported') }}{%- endif -%}"
    "{%- for m in messages -%}"
    "{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content"
    " + '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<turn>model\n' }}{%- endif -%}"
)
THINKING = (
    # like Qwen3's: what was thought in earlier turns is left out
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.last -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}"
    "{{ m.content + '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
DATED = (
    CHATML + "{%- if not add_generation_prompt -%}{{ '<eos>' }}{%- endif -%}"
)  # like Phi's: a conversation that is over ends by a token of its own
MARKS = [
    "<|im_start|>",
    "<|im_end|>",
    "<bos>",
    "<|start|>",
    "<|header|>",
    "<|eot|>",
    "[INST]",
    "[/INST]",
    "</s>",
    "<turn>",
    "<end_of_turn>",
    "<eos>",
]

SYSTEM, HI, YO, BYE, SO = (
    {"role": role, "content": content}
    for role, content in (
        ("system", "be brief"),
        ("user", "hi there"),
        ("assistant", "yo, was gibt's?"),
        ("user", "2+2? 日本"),
        ("assistant", "4\nand so on"),
    )
)


def tokenizer_for(template):
    tokenizer = make_tokenizer([])
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = template
    return tokenizer


def by_hand(tokenizer, *segments):
    """Segments of text, those in the loss between [ and ] as a list of one -> (ids, mask)."""
    ids, mask = [], []
    for segment in segments:
        new = tokenizer(
            segment[0] if isinstance(segment, list) else segment, add_special_tokens=False
        )["input_ids"]
        ids, mask = ids + new, mask + [isinstance(segment, list)] * len(new)
    return ids, mask


CASES = {  # name -> template, stop token, messages, segments
    "ChatML": (
        CHATML,
        "<|im_end|>",
        [SYSTEM, HI, YO, BYE, SO],
        [
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi there<|im_end|>\n"
            "<|im_start|>assistant\n",
            ["yo, was gibt's?<|im_end|>"],
            "\n<|im_start|>user\n2+2? 日本<|im_end|>\n<|im_start|>assistant\n",
            ["4\nand so on<|im_end|>"],
        ],
    ),
    "Llama 3": (
        LLAMA,
        "<|eot|>",
        [SYSTEM, HI, YO, BYE, SO],
        [
            "<bos><|start|>system<|header|>\n\nbe brief<|eot|>"
            "<|start|>user<|header|>\n\nhi there<|eot|><|start|>assistant<|header|>\n\n",
            ["yo, was gibt's?<|eot|>"],
            "<|start|>user<|header|>\n\n2+2? 日本<|eot|><|start|>assistant<|header|>\n\n",
            ["4\nand so on<|eot|>"],
        ],
    ),
    "Mistral": (
        MISTRAL,
        "</s>",
        [HI, YO, BYE, SO],
        [
            "<bos>[INST] hi there [/INST]",
            [" yo, was gibt's?</s>"],
            "[INST] 2+2? 日本 [/INST]",
            [" 4\nand so on</s>"],
        ],
    ),
    "Gemma": (
        GEMMA,
        "<end_of_turn>",
        [HI, YO, BYE, SO],
        [
            "<bos><turn>user\nhi there<end_of_turn>\n<turn>model\n",
            ["yo, was gibt's?<end_of_turn>"],
            "\n<turn>user\n2+2? 日本<end_of_turn>\n<turn>model\n",
            ["4\nand so on<end_of_turn>"],
        ],
    ),
    "ended": (
        DATED,
        "<|im_end|>",
        [HI, YO, BYE, SO],
        [
            "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n",
            ["yo, was gibt's?<|im_end|>"],
            "\n<|im_start|>user\n2+2? 日本<|im_end|>\n<|im_start|>assistant\n",
            ["4\nand so on<|im_end|>"],
        ],
    ),
    "two answers in a row": (
        CHATML,
        "<|im_end|>",
        [HI, YO, SO],
        [
            "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n",
            ["yo, was gibt's?<|im_end|>"],
            "\n<|im_start|>assistant\n",
            ["4\nand so on<|im_end|>"],
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("last_only", [False, True])
def test_mask_of_a_chat_is_what_the_policy_would_sample(name, last_only):
    template, stop, messages, segments = CASES[name]
    tokenizer = tokenizer_for(template)
    trained = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    stop_ids = [tokenizer.convert_tokens_to_ids(stop), tokenizer.convert_tokens_to_ids("<eos>")]
    if last_only:
        trained = trained[-1:]
        segments = [s[0] if isinstance(s, list) and s is not segments[-1] else s for s in segments]
    ((ids, mask, num_messages),) = encode_chat(tokenizer, messages, trained, stop_ids)
    assert (ids, mask) == by_hand(tokenizer, *segments) and num_messages == len(messages)
    whole = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert whole[: len(ids)] == ids
    for i in trained:  # in front of each answer stands what generation would be given
        prompt = chat.encode(tokenizer, chat.render(tokenizer, messages[:i]))
        assert ids[: len(prompt)] == prompt and mask[len(prompt)] and not mask[len(prompt) - 1]


def segments_of(template, messages, trained, *stops):
    """The ids and masks of a chat's segments."""
    tokenizer = tokenizer_for(template)
    stop_ids = tokenizer.convert_tokens_to_ids(list(stops))
    return [s[:2] for s in encode_chat(tokenizer, messages, trained, stop_ids)]


def test_each_turn_of_a_template_that_rewrites_history_is_trained_as_the_policy_sees_it():
    tokenizer = tokenizer_for(THINKING)
    ask = "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n"
    first = by_hand(tokenizer, ask, ["<think>\n\n</think>\n\nyo, was gibt's?<|im_end|>"])
    last = by_hand(
        tokenizer,
        ask + "yo, was gibt's?<|im_end|>\n<|im_start|>user\n2+2? 日本<|im_end|>\n"
        "<|im_start|>assistant\n",
        ["<think>\n\n</think>\n\n4\nand so on<|im_end|>"],
    )
    assert segments_of(THINKING, [HI, YO, BYE, SO], [1, 3], "<|im_end|>") == [first, last]
    assert segments_of(THINKING, [HI, YO, BYE, SO], [3], "<|im_end|>") == [last]


def test_turns_that_one_rendering_holds_share_a_segment():
    """What was thought before the last question goes, as in Qwen3 with tools."""
    template = (
        "{%- set ns = namespace(last=0) -%}"
        "{%- for m in messages if m.role == 'user' -%}{%- set ns.last = loop.index -%}"
        "{%- endfor -%}{%- set ns.asked = 0 -%}{%- for m in messages -%}"
        "{%- if m.role == 'user' -%}{%- set ns.asked = ns.asked + 1 -%}{%- endif -%}"
        "{{ '<|im_start|>' + m.role + '\n' }}"
        "{{ m.content if ns.asked == ns.last else m.content.split('|')[-1] }}"
        "{{ '<|im_end|>\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    )
    say = [{"role": "assistant", "content": f"hm|{n}"} for n in range(4)]
    tool = {"role": "tool", "content": "7"}
    chat = [HI, say[0], tool, say[1], BYE, say[2], tool, say[3]]
    tokenizer = tokenizer_for(template)
    answer = "<|im_start|>assistant\n"
    call = "\n<|im_start|>tool\n7<|im_end|>\n" + answer
    asked = "<|im_start|>user\nhi there<|im_end|>\n" + answer
    again = f"0<|im_end|>{call}1<|im_end|>\n<|im_start|>user\n2+2? 日本<|im_end|>\n{answer}"
    assert segments_of(template, chat, [1, 3, 5, 7], "<|im_end|>") == [
        by_hand(tokenizer, asked, ["hm|0<|im_end|>"], call, ["hm|1<|im_end|>"]),
        by_hand(tokenizer, asked + again, ["hm|2<|im_end|>"], call, ["hm|3<|im_end|>"]),
    ]


DISTILLED = (
    # like DeepSeek-R1's distilled models': the generation prompt begins to think, what was thought
    # is left out everywhere
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{{ '<|start|>' + m.content.split('</think>')[-1] + '</s>' }}"
    "{%- else -%}{{ '<|header|>' + m.content }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|start|><think>\n' }}{%- endif -%}"
)


@pytest.mark.parametrize(
    ("content", "segments"),
    [
        ("4", ["<|header|>hi there<|start|>", ["4</s>"]]),
        ("<b>", ["<|header|>hi there<|start|>", ["<b></s>"]]),  # begins as <think> does
        ("", ["<|header|>hi there<|start|>", ["</s>"]]),
        ("so</think>4", ["<|header|>hi there<|start|><think>\n", ["so</think>4</s>"]]),
        ("<think>so</think>4", ["<|header|>hi there<|start|><think>\n", ["so</think>4</s>"]]),
        ("<think>\nso</think>4", ["<|header|>hi there<|start|><think>\n", ["so</think>4</s>"]]),
    ],
)
def test_a_generation_prompt_may_begin_the_answer(content, segments):
    tokenizer = tokenizer_for(DISTILLED)
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS, "<think>", "</think>"]})
    stop_ids = [tokenizer.convert_tokens_to_ids("</s>")]
    chat = [HI, {"role": "assistant", "content": content}]
    ((ids, mask, _),) = encode_chat(tokenizer, chat, [1], stop_ids)
    assert (ids, mask) == by_hand(tokenizer, *segments)


@pytest.mark.parametrize("other", ["<turn>", ""])
def test_a_header_of_tags_is_never_in_the_loss(other):
    """The template renders an answer's header, or what stands before it, otherwise."""
    end = "('' if loop.last else '</s>')" if not other else "'</s>'"
    template = (
        "{%- for m in messages -%}{%- if m.role == 'user' -%}{{ '<|header|>' + m.content + END }}"
        "{%- else -%}{{ 'OTHER' + m.content + '</s>' }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|start|>' }}{%- endif -%}"
    ).replace("END", end)
    template = template.replace("OTHER", other or "<|start|>")
    ask = "<|header|>hi there" + ("</s>" if other else "") + "<|start|>"
    expected = by_hand(tokenizer_for(template), ask, ["yo, was gibt's?</s>"])
    assert segments_of(template, [HI, YO], [1], "</s>") == [expected]


def test_the_last_answer_of_a_template_that_ends_none_ends_as_the_others_do():
    """GLM-4.5's: an answer ends by the header of the next question."""
    template = (
        "{%- for m in messages -%}{%- if m.role == 'user' -%}{{ '<|start|>\n' + m.content }}"
        "{%- else -%}{{ '<|header|>\n' + m.content }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|header|>\n' }}{%- endif -%}"
    )
    ask = "<|start|>\nhi there<|header|>\n"
    answers = [["yo, was gibt's?<|start|>"], "\n2+2? 日本<|header|>\n", ["4\nand so on<|start|>"]]
    expected = by_hand(tokenizer_for(template), ask, *answers)
    assert segments_of(template, [HI, YO, BYE, SO], [1, 3], "<|start|>") == [expected]


CALL = {
    "role": "assistant",
    "content": "",
    "thinking": "one more",
    "tool_calls": [{"function": {"name": "add", "arguments": {}}}],
}
TOOL = {"role": "tool", "content": "5"}
DONE = {"role": "assistant", "content": "It is 5.", "thinking": "so"}


def test_a_call_ends_by_the_header_of_a_tool_where_the_template_has_it_so():
    """GLM-4.5's."""
    template = (
        "{%- for m in messages -%}"
        "{{ {'user': '<|start|>', 'tool': '<|im_start|>', 'assistant': '<|header|>'}[m.role] }}"
        "{{ '\n' + ('add' if m.tool_calls else m.content) }}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|header|>\n' }}{%- endif -%}"
    )
    ask = "<|start|>\nhi there<|header|>\n"
    reply = "\n5<|header|>\n"
    stops = ("<|start|>", "<|im_start|>")
    tokenizer = tokenizer_for(template)
    expected = by_hand(tokenizer, ask, ["add<|im_start|>"], reply, ["It is 5.<|start|>"])
    assert segments_of(template, [HI, CALL, TOOL, DONE], [1, 3], *stops) == [expected]
    alone = by_hand(tokenizer, ask, ["add<|im_start|>"])
    assert segments_of(template, [HI, CALL], [1], *stops) == [alone]


def test_an_answer_keeps_its_form_where_the_template_drops_what_was_thought_before():
    """gpt-oss's: the thoughts before a call are dropped once a final answer follows."""
    template = (
        "{%- set is_over = messages[-1].role == 'assistant' and not messages[-1].tool_calls -%}"
        "{%- for m in messages -%}{{ '<|start|>' + m.role }}"
        "{%- if m.thinking and (loop.last or not is_over) -%}{{ '(' + m.thinking + ')' }}"
        "{%- endif -%}"
        "{{ '\n' + ('add' if m.tool_calls else m.content) + '</s>' }}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}"
    )
    ask = "<|start|>user\nhi there</s><|start|>assistant"
    call = "(one more)\nadd</s>"
    reply = "<|start|>tool\n5</s><|start|>assistant"
    done = ["(so)\nIt is 5.</s>"]
    tokenizer = tokenizer_for(template)
    messages = [HI, CALL, TOOL, DONE]
    both = by_hand(tokenizer, ask, [call], reply, done)
    assert segments_of(template, messages, [1, 3], "</s>") == [both]
    last = by_hand(tokenizer, ask + call + reply, done)
    assert segments_of(template, messages, [3], "</s>") == [last]


def test_an_answer_keeps_its_form_where_the_template_drops_the_system_prompt():
    """Mistral's shows it with the last question alone, and has no header of an answer."""
    template = (
        "{%- for m in messages -%}{%- if m.role == 'user' -%}{{ '[INST] ' }}"
        "{%- if loop.last and messages[0].role == 'system' -%}{{ messages[0].content + ' ' }}"
        "{%- endif -%}{{ m.content + '[/INST]' }}{%- elif m.role == 'tool' -%}"
        "{{ '[RESULT] ' + m.content + '[/RESULT]' }}{%- elif m.role == 'assistant' -%}"
        "{{ ' ' + ('[CALL] add' if m.tool_calls else m.content) + '</s>' }}{%- endif -%}"
        "{%- endfor -%}"
    )
    tokenizer = tokenizer_for(template)
    system = {"role": "system", "content": "Sys."}
    messages = [system, HI, CALL, TOOL, DONE]
    asked = by_hand(tokenizer, "[INST] Sys. hi there[/INST]", [" [CALL] add</s>"])
    done = by_hand(
        tokenizer, "[INST] hi there[/INST] [CALL] add</s>[RESULT] 5[/RESULT]", [" It is 5.</s>"]
    )
    assert segments_of(template, messages, [2, 4], "</s>") == [asked, done]
    without = by_hand(
        tokenizer,
        "[INST] hi there[/INST]",
        [" [CALL] add</s>"],
        "[RESULT] 5[/RESULT]",
        [" It is 5.</s>"],
    )
    assert segments_of(template, messages[1:], [1, 3], "</s>") == [without]


def test_a_template_sees_no_field_that_is_none():
    """A table has all columns in each row, and all fields in each part."""
    template = (
        "{%- for m in messages -%}{%- for p in m.content -%}"
        "{{ '<image>' if 'image' in p else p.text }}{%- endfor -%}"
        "{{ '(thinks)' if 'thinking' in m else '' }}{%- endfor -%}"
    )
    part = {"type": "text", "text": "hello", "image": None}
    message = {"role": "user", "content": [part], "thinking": None}
    assert chat.render(tokenizer_for(template), [message]) == "hello"


def test_what_a_template_refuses_is_told():
    with pytest.raises(
        UserError, match=r"the chat template refuses a chat: System role not supported \(.*be brief"
    ):
        segments_of(GEMMA, [SYSTEM, HI, YO], [2], "<eos>")
    with pytest.raises(
        UserError,
        match=r"the chat template refuses a chat: TypeError: can only concatenate .*be brief",
    ):
        segments_of("{{ messages[0].content + 1 }}", [SYSTEM, HI, YO], [2], "<eos>")
    with pytest.raises(
        UserError,
        match="does not end an answer by one of the stop tokens .* by data.chat_template, or its",
    ):
        segments_of(GEMMA, [HI, YO], [1], "<eos>")
    call = {"role": "assistant", "content": ""}
    other = CHATML.replace("m.role", "('caller' if m.content == '' else m.role)")
    with pytest.raises(
        UserError, match="renders message 2 of a chat otherwise than its generation prompt begins"
    ):
        segments_of(other, [HI, call], [1], "<|im_end|>")


def test_a_template_that_drops_what_a_turn_says_or_calls_is_refused():
    """gpt-oss's shows the first of several calls, Llama 3.1's no content with a call."""
    template = (
        "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
        "{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}{{ '<|im_end|>\n' }}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    )
    (call,) = CALL["tool_calls"]
    twice = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    and_said = {"role": "assistant", "content": "I add.", "tool_calls": [call]}
    for answer in (twice, and_said):
        with pytest.raises(UserError, match="message 2 of a chat without all of its content and"):
            segments_of(template, [HI, answer], [1], "<|im_end|>")


def test_a_stop_token_of_another_turn_ends_none():
    half = CHATML.replace("'<|im_end|>\n'", "('<|im_end|>' if loop.last else '')")
    first = "<|im_start|>user\nhi there<|im_end|><|im_start|>assistant\n"
    last = (
        "<|im_start|>user\nhi there<|im_start|>assistant\nyo, was gibt's?"
        "<|im_start|>user\n2+2? 日本<|im_end|><|im_start|>assistant\n"
    )
    tokenizer = tokenizer_for(half)
    assert segments_of(half, [HI, YO, BYE, SO], [1, 3], "<|im_end|>") == [
        by_hand(tokenizer, first, ["yo, was gibt's?<|im_end|>"]),
        by_hand(tokenizer, last, ["4\nand so on<|im_end|>"]),
    ]


@pytest.mark.parametrize("trim", [True, False])
def test_a_token_across_the_border_is_not_in_the_loss(trim):
    """Tokens that hold the end of the header and the begin of the answer: a policy that was given
    the header cannot sample them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "ĊĊ", "Ġy", "Ġyo"])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ"), ("Ġ", "y"), ("Ġy", "o")]))
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoders.ByteLevel(),
    )
    inner.post_processor = processors.ByteLevel(trim_offsets=trim)
    inner.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    template = (
        "{%- for m in messages -%}{{ m.role + HEAD + m.content + '</s>' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ 'assistant' + HEAD }}{%- endif -%}"
    )
    stop = inner.token_to_id("</s>")
    for head, answer, straddles, tokens in (
        ("':\n'", "\nyo", True, ["ĊĊ", "y", "o", "</s>"]),
        ("': '", "yo", True, ["Ġyo", "</s>"]),
        ("':\n'", "yo", False, ["y", "o", "</s>"]),
        ("':'", " yo", False, ["Ġyo", "</s>"]),
        ("': '", "42", False, ["4", "2", "</s>"]),
    ):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=inner, eos_token="</s>", chat_template=template.replace("HEAD", head)
        )
        ((ids, mask, _),) = encode_chat(
            tokenizer,
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}],
            [1],
            [stop],
        )
        assert tokenizer.convert_ids_to_tokens(ids)[-len(tokens) :] == tokens
        assert mask == [False] * (len(ids) - len(tokens) + straddles) + [True] * (
            len(tokens) - straddles
        ), (head, answer)


def test_every_token_of_a_text_but_its_first_is_in_the_loss():
    tokenizer = make_tokenizer([])
    ids, mask = encode_text(tokenizer, "ab <|end|> c")
    assert tokenizer.decode(ids) == "ab <|end|> c<|end|>" and mask == [False] + [True] * (
        len(ids) - 1
    )
    assert encode_text(tokenizer, "a<|end|>")[0].count(tokenizer.eos_token_id) == 1


# --------------------------------------------------------------------------------------------------
# rows


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load_chats(source, cfg):
    return read_all(open_examples(source, "data.train", cfg, ALONE))


def test_columns_say_what_a_row_is(tmp_path):
    source = written(
        tmp_path / "a.jsonl",
        [
            {"messages": [HI, YO, BYE, SO, BYE], "text": "ignored"},
            {"prompt": "hi there", "completion": 7},
            {"prompt": [HI, YO, BYE], "completion": [SO, HI, YO]},
            {"text": "plain", "prompt": "not a pair"},
        ],
    )
    user = {"role": "user", "content": "hi there"}
    rows = load_chats(source, ChatsConfig())
    assert list(rows) == [
        {"messages": [HI, YO, BYE, SO], "trained": [1, 3]},
        {"messages": [user, {"role": "assistant", "content": "7"}], "trained": [1]},
        {"messages": [HI, YO, BYE, SO, HI, YO], "trained": [3, 5]},
        {"text": "plain"},
    ]
    rows = load_chats(source, ChatsConfig(train_on="last_turn", system_prompt="be brief"))
    assert [row.get("trained") for row in rows] == [[4], [2], [6], None] and rows[0]["messages"][
        0
    ] == SYSTEM
    renamed = written(
        tmp_path / "b.jsonl", [{"chat": [HI, YO]}, {"q": "1+1", "a": "2"}, {"body": "x"}]
    )
    names = ChatsConfig(messages_key="chat", prompt_key="q", completion_key="a", text_key="body")
    assert [list(row) for row in load_chats(renamed, names)] == [
        ["messages", "trained"],
        ["messages", "trained"],
        ["text"],
    ]
    # As OpenR1-Math has them: what the user names counts before a chat.
    both = {"problem": "1+1", "solution": "2", "body": "x", "messages": [HI, YO]}
    both_path = written(tmp_path / "c.jsonl", [both])
    named = ChatsConfig(prompt_key="problem", completion_key="solution")
    (row,) = load_chats(both_path, named)
    assert [message["content"] for message in row["messages"]] == ["1+1", "2"]
    assert load_chats(both_path, ChatsConfig(text_key="body"))[0] == {"text": "x"}
    asked = {"question": "1+1", "completion": "2", "messages": [HI, YO]}
    asked_path = written(tmp_path / "d.jsonl", [asked])
    (row,) = load_chats(asked_path, ChatsConfig(prompt_key="question"))
    assert [message["content"] for message in row["messages"]] == ["1+1", "2"]
    # OpenAI's switch of a turn.
    switched = written(tmp_path / "e.jsonl", [{"messages": [HI, YO | {"weight": 0}, BYE, SO]}])
    assert load_chats(switched, ChatsConfig())[0]["trained"] == [3]
    first = written(tmp_path / "f.jsonl", [{"messages": [HI, YO, BYE, SO | {"weight": 0}]}])
    assert load_chats(first, ChatsConfig())[0]["trained"] == [1]
    with pytest.raises(UserError, match="line 1: the last assistant turn has the weight 0"):
        load_chats(first, ChatsConfig(train_on="last_turn"))
    for unnamed in (ChatsConfig(), ChatsConfig(completion_key="solution")):
        assert load_chats(both_path, unnamed)[0]["messages"] == [HI, YO]
    gym = load_chats(
        "reasoning_gym:spell_backward?size=3&seed=1",
        ChatsConfig(completion_key="answer"),
    )
    assert len(gym) == 3 and all(row["trained"] == [1] for row in gym)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "a", "answer": "b"},
            r"line 2: data.messages_key = 'messages' must name messages, or .* \(the row has "
            r"question, answer\); correct the row, or set data.messages_key",
        ),
        ({"prompt": "a"}, "line 2: data.messages_key = 'messages' must name"),
        ({"messages": "a"}, "line 2: data.messages_key = 'messages' must name"),
        ({"messages": []}, "line 2: data.messages_key = 'messages' must name"),
        (["a"], "line 2: a row must be an object of named values, not a list"),
        ({"messages": [HI, BYE]}, "line 2: no assistant turn follows"),
        ({"prompt": [HI, YO], "completion": [BYE]}, "line 2: no assistant turn follows"),
        (
            {"messages": [HI, YO | {"weight": 0}]},
            "line 2: no assistant turn follows, or all have the weight 0",
        ),
        ({"messages": [HI, YO | {"weight": "0"}]}, "line 2: a turn has the weight '0'; give 0"),
        ({"messages": [HI, YO | {"weight": 0.5}]}, "line 2: a turn has the weight 0.5; give"),
        (
            {"prompt": "a", "completion": ["b"]},
            "line 2: .* 'completion' .*; message 1 is b",
        ),
        (
            {
                "prompt": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}],
                "completion": "a",
            },
            "line 2: .* 'prompt' .*; message 1 is .*'video'.* a content that is a text or",
        ),
        ({"messages": [SYSTEM, YO]}, "line 2: nothing is asked before the assistant's first turn"),
        (
            {"messages": [HI, {"role": "assistant", "content": None}]},
            "line 2: .*; message 2 is .*None.* a content that is a text",
        ),
        (
            {"prompt": "a", "completion": [{"role": "assistant"}]},
            "line 2: .* 'completion' .*; message 1 is {'role': 'assistant'}",
        ),
    ],
)
def test_a_row_that_is_none_of_them_is_refused_with_its_line(tmp_path, row, message):
    with pytest.raises(UserError, match=rf"data.train = .*a.jsonl: {message}"):
        load_chats(written(tmp_path / "a.jsonl", [{"text": "good"}, row]), ChatsConfig())


def encode(mesh, rows, max_tokens):
    """What steps have, and what is lost."""
    chats = Chats(
        memory_rows(rows),
        make_tokenizer([]),
        [1],
        ChatsConfig(max_tokens=max_tokens),
        mesh,
        ThreadPoolExecutor(1),
        seed=3,
    )
    steps = [chats.examples(range(4 * s, 4 * s + 4)) for s in range(5)]
    return {
        "rows": {n: (t.tokens, t.sampled) for n, (t,) in encoded_rows(chats).items()},
        "views": [n for n, (t,) in encoded_rows(chats).items() if t.tokens.base is not None],
        "lost": [step.num_lost for step in steps],
        "num_rows": [step.num_rows for step in steps],
        "steps": [
            [(t.group, t.tokens.tolist(), t.sampled.tolist()) for t in step.here] for step in steps
        ],
    }


def test_long_rows_are_cut_and_those_left_without_loss_are_dropped():
    short = {
        "messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}],
        "trained": [1],
    }
    long_answer = {
        "messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "x" * 30}],
        "trained": [1],
    }
    long_prompt = {
        "messages": [{"role": "user", "content": "y" * 30}, {"role": "assistant", "content": "cd"}],
        "trained": [1],
    }
    results = ranks(
        2,
        encode,
        [short, long_prompt, long_answer, {"text": "z" * 12}, long_prompt, {"text": ""}],
        10,
    )
    encoded = results[0]["rows"] | results[1]["rows"]
    assert sorted(encoded) == [0, 2, 3]
    # A view would keep what was cut in memory.
    assert results[0]["views"] == results[1]["views"] == []
    # Twelve examples are all six rows twice.
    assert results[0]["lost"] == results[1]["lost"]
    assert np.sum(results[0]["lost"][:3], axis=0).tolist() == [2 * 4, 2 * 3]
    assert sum(results[0]["num_rows"][:3]) == 2 * 3
    for n, mask in ((0, "FFFFFTTT"), (2, "FFFFFTTTTT"), (3, "FTTTTTTTTT")):
        assert encoded[n][1].tolist() == [c == "T" for c in mask] and len(encoded[n][0]) == len(
            mask
        )
    assert encoded[2][0][-1] != 1  # what was cut does not end
    with pytest.raises(RankFailed) as failed:
        ranks(2, encode, [long_prompt, {"text": ""}], 10)
    assert (
        failed.value.kind == "UserError"
        and "of 2 rows none is left (rows_cut 1, rows_dropped 2); correct them or raise"
        in failed.value.text
    )


def test_examples_of_a_step_depend_on_the_seed_alone():
    rows = [{"text": chr(97 + n) * (n + 1)} for n in range(7)]
    steps = [
        [sorted(sum((r["steps"][s] for r in ranks(world, encode, rows, 10)), [])) for s in range(5)]
        for world in (1, 3)
    ]
    assert steps[0] == steps[1] and all(len(step) == 4 for step in steps[0])
    tokens = [t for step in steps[0] for _, t, _ in sorted(step)]
    assert (
        sorted(map(str, tokens[:7])) == sorted(map(str, tokens[7:14]))
        and tokens[:7] != tokens[7:14]
    )  # an epoch, and the next in another order
    order = Order(7, seed=3, shuffle=True)
    assert [order[n] for n in (13, 0, 13)] == [
        order[13],
        Order(7, seed=3, shuffle=True)[0],
        order[13],
    ]
    for seed in range(5):
        train, held_out = split([*rows, rows[0]], 3, seed=seed)
        assert (
            len(held_out) == 3
            and not any(row in held_out for row in train)
            and len(train) == 5 - (rows[0] in held_out)
        )


# --------------------------------------------------------------------------------------------------
# loss


def conversations(num: int) -> list[dict]:
    """Chats of one to three turns, some of which begin alike; every fourth row is a text."""

    def turn(n: int, k: int) -> list[dict]:
        return [
            {"role": "user", "content": f"say {n % 3 + k}"},
            {"role": "assistant", "content": "abc"[: n % 3 + 1] * (1 + n % 5) + str(k)},
        ]

    return [
        {"text": "text " * (n % 7 + 1)}
        if n % 4 == 3
        else {"messages": sum((turn(n, k) for k in range(n % 3 + 1)), [])}
        for n in range(num)
    ]


def one_step(mesh, folder, source):
    LlamaRMSNorm.forward = exact_norm
    policy = Policy(PolicyConfig(dtype="float64"), folder, mesh)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows, _ = read_rows(open_examples(source, "data.train", ChatsConfig(), mesh), mesh, 0)
    chats = Chats(
        rows, tokenizer, [1], ChatsConfig(max_tokens=40), mesh, ThreadPoolExecutor(1), seed=0
    )
    batches = make_minibatch(chats.examples(range(len(chats))).here, policy, 120)
    return (
        policy.update(batches, losses.sft(), 1e-3)["loss"],
        len(batches),
        [
            (t.tokens, t.sampled)
            for part in mesh.gather(list(encoded_rows(chats).values()))
            for (t,) in part
        ],
    )


def test_packed_loss_is_the_loss_of_hugging_face_with_masked_labels(tmp_path, monkeypatch):
    folder = tiny.make(tmp_path / "model", "llama", dtype=torch.float64)
    loss, num_micro, encoded = ranks(
        2, one_step, folder, written(tmp_path / "a.jsonl", conversations(24))
    )[0]
    monkeypatch.setattr(LlamaRMSNorm, "forward", exact_norm)
    model, total, num = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), 0.0, 0
    for ids, mask in encoded:
        labels = torch.tensor(ids).long().masked_fill(~torch.tensor(mask), -100)
        with torch.no_grad():
            logits = model(torch.tensor(ids)[None].long()).logits[0]
        total += F.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum").item()
        num += int((labels[1:] != -100).sum())
    assert num_micro > 1 and len(encoded) == 24 and num > 200
    assert loss == pytest.approx(total / num, rel=1e-10)


def num_bytes(value) -> int:
    """Of all tensors in nested dataclasses and tuples."""
    if torch.is_tensor(value):
        return value.nbytes
    inner = (
        value
        if isinstance(value, tuple | list)
        else vars(value).values()
        if dataclasses.is_dataclass(value)
        else ()
    )
    return sum(map(num_bytes, inner))


def test_a_long_sequence_takes_memory_in_proportion():
    t = Trajectory(
        tokens=torch.zeros(32769).int().numpy(),
        sampled=torch.arange(32769).gt(100).numpy(),
        logprobs=torch.zeros(32769).numpy(),
    )
    assert 30 * 32768 < num_bytes(pack([t], torch.device("cpu"))) < 100 * 32768


# --------------------------------------------------------------------------------------------------
# the program


def flags(folder: Path, source: str, output: Path, *more: object) -> list[str]:
    return [
        str(x)
        for x in [
            *as_flags(f"""
            --output {output} --policy.model {folder} --policy.dtype float32 --policy.lr 3e-3
            --policy.lr-schedule cosine --data.train {source} --data.held-out 6
            --data.max-tokens 48 --batch-size 8 --tokens-per-rank 100 --eval.every 2
            --num-epochs 2
        """),
            *more,
        ]
    ]


def train(mesh, given):
    LlamaRMSNorm.forward = exact_norm
    SupervisedTrainer.main(parse_flags(SFTConfig, given), mesh)


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, ParallelConfig()),
        (4, ParallelConfig(tensor=2, sequence=True)),
        (4, ParallelConfig(replicate=2)),
        (4, ParallelConfig(context=2)),
        (2, ParallelConfig(context=2, context_engine="ring")),
    ],
)
def test_every_mesh_trains_alike(tmp_path, world, parallel):
    folder, source = (
        tiny.make(tmp_path / "model", "llama", dtype=torch.float64),
        written(tmp_path / "a.jsonl", conversations(30)),
    )
    given = flags(folder, source, tmp_path / "one", "--policy.dtype", "float64")
    ranks(1, train, given)
    more = [
        *as_flags(f"""
        --parallel.tensor {parallel.tensor} --parallel.replicate {parallel.replicate}
        --parallel.context {parallel.context}
    """),
        *["--parallel.sequence"] * parallel.sequence,
    ]
    ranks(
        world,
        train,
        flags(folder, source, tmp_path / "many", "--policy.dtype", "float64", *more),
        parallel=parallel,
    )
    for phase in ("train", "eval"):
        one, many = rows_of(tmp_path / "one", phase), rows_of(tmp_path / "many", phase)
        assert (
            [row["step"] for row in one]
            == [row["step"] for row in many]
            == ([*range(6)] if phase == "train" else [0, 2, 4, 6])
        )
        for a, b in zip(one, many, strict=True):
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-9) and a.get("tokens") == b.get(
                "tokens"
            )
    assert (
        rows_of(tmp_path / "one", "eval")[-1]["loss"] < rows_of(tmp_path / "one", "eval")[0]["loss"]
    )


def test_a_run_ends_where_its_held_out_loss_reaches_stop_at(tmp_path):
    """It is the first steps of the run without, and ends again at once when it is resumed."""
    folder = tiny.make(tmp_path / "model", "llama", dtype=torch.float64)
    source = written(tmp_path / "a.jsonl", conversations(30))
    float64 = ("--policy.dtype", "float64", "--checkpoint.every", 2)
    ranks(1, train, flags(folder, source, tmp_path / "whole", *float64))
    whole = rows_of(tmp_path / "whole", "eval")
    assert [row["step"] for row in whole] == [0, 2, 4, 6]
    goal = max(whole[2]["loss"], whole[3]["loss"])
    assert whole[1]["loss"] > goal
    reached = 4 if whole[2]["loss"] <= goal else 6

    run = tmp_path / "run"
    stops = flags(folder, source, run, *float64, "--stop-at", "loss", goal)
    for resume in ([], ["--resume"]):
        ranks(1, train, [*stops, *resume])
        assert rows_of(run, "eval") == whole[: reached // 2 + 1]
        assert rows_of(run, "train") == rows_of(tmp_path / "whole", "train")[:reached]
        summary = json.loads((run / "summary.json").read_text())
        assert summary["state"] == "finished" and summary["loss_after"] == goal
        assert (run / "model" / "config.json").exists()
        assert (run / "checkpoints" / f"step-{reached}").exists()

    with pytest.raises(RankFailed, match="an evaluation has no score 'source/a/x'; it has loss"):
        ranks(1, train, flags(folder, source, tmp_path / "x", "--stop-at", "source/a/x", 1))


def train_with_small_evaluations(mesh, given, rows):
    supervised.ROWS_OF_PART = rows
    train(mesh, given)


def test_held_out_rows_in_parts_have_the_scores_of_all(tmp_path):
    """Six rows with 4 to 40 tokens each: parts of 4 and 2, and of 5 and 1, on two ranks."""
    folder = tiny.make(tmp_path / "model", "llama", dtype=torch.float64)
    source = written(tmp_path / "a.jsonl", conversations(30))
    float64 = ("--policy.dtype", "float64", "--num-steps", 2)
    scores = {}
    for rows in (6, 4, 5):
        given = flags(folder, source, tmp_path / str(rows), *float64)
        ranks(2, train_with_small_evaluations, given, rows)
        scores[rows] = [row["loss"] for row in rows_of(tmp_path / str(rows), "eval")]
    assert len(scores[6]) == 2
    assert scores[4] == pytest.approx(scores[6], rel=1e-12)
    assert scores[5] == pytest.approx(scores[6], rel=1e-12)


@pytest.mark.skipif(torch.cuda.is_available(), reason="bitwise repeatable on CPU only")
def test_resumed_run_is_the_uninterrupted_run(tmp_path):
    """Two ranks. The second run finds the first one's folder as it was when
    step 4 was saved, but for rows of metrics that follow."""
    folder, source, output = (
        tiny.make(tmp_path / "model", "qwen3"),
        written(tmp_path / "a.jsonl", conversations(30)),
        tmp_path / "run",
    )
    given = flags(
        folder,
        source,
        output,
        "--checkpoint.every",
        2,
        "--checkpoint.best-metric",
        "loss",
        "--num-steps",
        6,
    )
    ended = fork("minirl.sft", given, tmp_path / "log", world=2)
    assert ended.code == 0, ended.err
    for title in (
        "held-out loss before",
        "held-out perplexity after",
        "tokens/s, trained",
        "seconds, forward",
        "peak memory of a rank, MiB",
    ):
        assert re.search(rf"^{title} +[\d.,]+$", ended.out, re.MULTILINE), ended.out
    assert (
        re.search(r"\d+ rows, 6 held out; writing", ended.err)
        and re.search(r"step \d: of \d+ rows, up to data.max_tokens = 48: rows_cut \d, ", ended.err)
        and ended.err.count("perplexity") == 4
    )
    assert ended.err.count("num_steps = 6 ends the run, and not num_epochs = 2\n") == 1
    summary = json.loads((output / "summary.json").read_text())
    assert (
        summary["loss_after"] < summary["loss_before"] == rows_of(output, "eval")[0]["loss"]
        and len(summary["peak_rss_mb_by_rank"]) == 2
    )
    assert (output / "curves.png").exists() and list((output / "tensorboard").iterdir())
    assert read_best(output)["value"] == min(row["loss"] for row in rows_of(output, "eval")[1:])

    again = tmp_path / "again"
    shutil.copytree(output, again)
    for name in ("model", "checkpoints/step-6"):
        shutil.rmtree(again / name)
    (again / "checkpoints" / "step-6.partial").mkdir()
    ended = fork(
        "minirl.sft",
        ["--config", output / "config.yaml", "--output", again, "--resume"],
        tmp_path / "log",
        world=2,
    )
    assert ended.code == 0 and "resuming at step 4" in ended.err, ended.err
    assert "other data than before" not in ended.err
    assert rows_of(again, "train") == rows_of(output, "train") and rows_of(
        again, "eval"
    ) == rows_of(output, "eval")
    for name in ("model/model.safetensors", "checkpoints/best.json", "model/config.json"):
        assert (again / name).read_bytes() == (output / name).read_bytes()
    assert (folder / "model.safetensors").read_bytes() != (
        output / "model" / "model.safetensors"
    ).read_bytes()


def resume_beside(mesh, given, partial):
    """Resume beside what an earlier save has left; return whether it is there as it trains."""
    partial.mkdir()
    seen = []
    make_batches = SupervisedTrainer.make_batches

    def look(trainer, examples):
        seen.append(partial.exists())
        return make_batches(trainer, examples)

    with mock.patch.object(SupervisedTrainer, "make_batches", look):
        train(mesh, [*given, "--resume"])
    return seen


def test_a_resume_frees_the_disk_of_what_was_half_written(tmp_path):
    folder = tiny.make(tmp_path / "model", "llama")
    source = written(tmp_path / "a.jsonl", conversations(30))
    given = flags(folder, source, tmp_path / "run", "--checkpoint.every", 2)
    ranks(1, train, [*given, "--num-steps", "2"])
    more = [*given, "--num-steps", "3"]
    (seen,) = ranks(1, resume_beside, more, tmp_path / "run/checkpoints/step-9.partial")
    assert seen and not any(seen)


def test_a_resumed_run_says_that_its_file_has_other_rows(tmp_path, capfd):
    folder = tiny.make(tmp_path / "model", "llama")
    source = tmp_path / "a.jsonl"
    given = flags(folder, source, tmp_path / "run", "--checkpoint.every", 2)
    written(source, conversations(30))
    ranks(1, train, given)
    before = re.search(r"parameters, (.* held out); writing", capfd.readouterr().err)[1]
    rows = conversations(32)
    for given_rows, says in ((rows[:30], False), (rows[29::-1], True), (rows, True)):
        written(source, given_rows)
        ranks(1, train, [*given, "--resume"])
        assert (f"other data than before ({before}): its" in capfd.readouterr().err) == says


BAD = {  # name -> flags, what the message must say
    "no data": (["--data.train", ""], ["data.train = ''", "JSONL file"]),
    "missing data": (
        ["--data.train", "{folder}/none.jsonl"],
        ["data.train", "none.jsonl", "no such file"],
    ),
    "columns": (
        ["--data.messages-key", "talk"],
        [
            "data.train",
            "line 1: data.messages_key = 'talk' must name messages",
            "the row has messages",
            "data.messages_key",
        ],
    ),
    "no assistant turn": (
        ["--data.train", "{folder}/asked.jsonl"],
        ["asked.jsonl: line 1: no assistant turn follows"],
    ),
    "all masked": (["--data.max-tokens", 5], ["none is left", "raise data.max_tokens = 5"]),
    "no template": (["--policy.model", "{folder}/bare"], ["bare", "no chat template"]),
    "too long for the model": (
        ["--data.max-tokens", 4096, "--tokens-per-rank", 4096],
        ["data.max_tokens = 4096", "512 positions", "lower it"],
    ),
    "sequence does not fit": (
        ["--tokens-per-rank", 40],
        ["tokens_per_rank = 40", "data.max_tokens = 48", "raise tokens_per_rank"],
    ),
    "nothing left": (["--data.held-out", 99], ["data.held_out = 99", "lower it"]),
    "nothing but repeats": (
        ["--data.train", "{folder}/same.jsonl"],
        ["data.held_out = 6", "1 distinct", "lower it"],
    ),
    "nothing held out": (["--data.held-out", 0], ["data.held_out = 0", "at least 1"]),
    "no steps": (["--num-epochs", 0], ["num_epochs = 0.0", "greater than 0"]),
    "empty batch": (["--batch-size", 0], ["batch_size = 0", "greater than 0"]),
    "unknown metric": (
        ["--checkpoint.best-metric", "accuracy"],
        ["checkpoint.best_metric = 'accuracy'", "loss, perplexity"],
    ),
    "unscored checkpoints": (
        ["--checkpoint.best-metric", "loss", "--checkpoint.every", 3],
        ["checkpoint.every = 3", "eval.every = 2"],
    ),
    "mesh": (["--parallel.tensor", 2], ["parallel.tensor", "does not divide the 1 ranks"]),
}


def test_a_context_holds_what_its_ranks_hold_together():
    cfg = SFTConfig(
        tokens_per_rank=512,
        policy=PolicyConfig(model="scratch"),
        data=ChatsConfig(train="a.jsonl", max_tokens=1024),
        parallel=ParallelConfig(context=2),
    )
    validate_supervised(cfg, world_size=4)
    cfg.data.max_tokens = 1025
    with pytest.raises(
        UserError,
        match="tokens_per_rank = 512, parallel.context = 2: the product, 1024, cannot hold one "
        "sequence of data.max_tokens = 1025",
    ):
        validate_supervised(cfg, world_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    written(
        folder / "chats.jsonl",
        [
            {"messages": [HI, YO, BYE, SO, {"role": "user", "content": str(n)}, YO]}
            for n in range(20)
        ],
    )
    written(folder / "same.jsonl", [{"messages": [HI, YO]}] * 20)
    written(folder / "asked.jsonl", [{"messages": [HI]}])
    tiny.make(folder / "model")
    shutil.copytree(folder / "model", folder / "bare")
    (folder / "bare" / "chat_template.jinja").unlink()
    return folder


@pytest.mark.parametrize("name", BAD)
def test_one_message_and_nothing_left(folder, name):
    more, says = BAD[name]
    output = folder / name.replace(" ", "-")  # flags are split at spaces
    given = flags(
        folder / "model",
        str(folder / "chats.jsonl"),
        output,
        *(x.format(folder=folder) if isinstance(x, str) else x for x in more),
    )
    ended = fork("minirl.sft", given, folder / "log" / name)
    assert ended.code == 2 and len(ended.errors()) == 1 and "Traceback" not in ended.err, ended.err
    for text in says:
        assert text in ended.errors()[0]
    assert not output.exists()
