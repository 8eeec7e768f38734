"""Turns are token-exact: over several turns, in the styles of the common chat templates and
tokenizers, a segment's tokens are those of the rendered chat; where a template rewrites history,
and only there, a new segment begins; nothing that was sampled is lost."""

import asyncio
import contextlib
import enum
import functools
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from minirl.base.errors import UserError
from minirl.base.oversight import Oversight
from minirl.config.shared import DataConfig, EnvConfig, EvaluateConfig
from minirl.data import chat
from minirl.data.examples import encode_chat
from minirl.data.tokenizer import load_tokenizer
from minirl.engine.engine import Sampling
from minirl.engine.loop import Completion
from minirl.envs import Env, EnvMaker, Raw, Result
from minirl.model.scratch import make_tokenizer
from minirl.rollout import conversation, records
from minirl.rollout.conversation import Conversation, Segment
from minirl.rollout.episode import EnvFailed, Episode, EpisodeRunner

# --------------------------------------------------------------------------------------------------
# templates
# Each has the habits of the family it is named after: its marks, what it trims, leaves out, moves,
# refuses.

TOOLS = "{%- for t in tools or [] -%}{{ '\n<tool>' + t.function.name }}{%- endfor -%}"
REPLY = "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
HEADER = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
CHATML = (
    "{{- '<|im_start|>system\n' + (messages[0].content if messages[0].role == 'system' else "
    "'You are helpful.') -}}" + TOOLS + "{{- '<|im_end|>\n' -}}"
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}"
    + REPLY
    + "{%- elif m.role != 'system' -%}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif -%}{%- endfor -%}"
    + HEADER
)
# Qwen 3: thoughts are left out before the last question (replies of tools are no question), and
# written in one form behind it.
THINKING = (
    "{%- set ns = namespace(asked=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.asked = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}"
    + REPLY
    + "{%- elif m.role != 'assistant' -%}{{ '<|im_start|>' + m.role + '\n' + m.content + "
    "'<|im_end|>\n' }}"
    "{%- else -%}{%- set said = m.content.split('</think>') -%}{%- set thought = "
    "said[0].split('<think>')[-1].strip('\n') if said|length > 1 else '' -%}"
    "{{ '<|im_start|>assistant\n' }}{%- if loop.index0 > ns.asked and (loop.last or thought) -%}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' + said[-1].lstrip('\n') }}{%- else -%}{{ "
    "said[-1].lstrip('\n') if said|length > 1 else m.content }}{%- endif -%}"
    "{{ '<|im_end|>\n' }}{%- endif -%}{%- endfor -%}" + HEADER
)
LLAMA = (
    "{{- bos_token -}}{%- for m in messages -%}{{ '<|start|>' + ('ipython' if m.role == 'tool' "
    "else m.role) + '<|header|>\n\n' + (m.content | trim) + '<|eot|>' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|start|>assistant<|header|>\n\n' }}{%- "
    "endif -%}"
)
# Mistral v0.3: the system prompt and the tools stand before the last question.
MISTRAL = (
    "{%- set ns = namespace(system='', last=-1) -%}{%- for m in messages -%}{%- if m.role == "
    "'system' -%}{%- set ns.system = m.content + '\n\n' -%}"
    "{%- elif m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{{- bos_token -}}{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}{%- if loop.index0 == ns.last and tools -%}{{ '[TOOLS]' }}{%- "
    "endif -%}"
    "{{ '[INST] ' + (ns.system if loop.index0 == ns.last else '') + m.content + '[/INST]' }}"
    "{%- elif m.role == 'tool' -%}{{ '[RESULT] ' + m.content + '[/RESULT]' }}{%- elif m.role == "
    "'assistant' -%}{{ ' ' + (m.content | trim) + eos_token }}"
    "{%- endif -%}{%- endfor -%}"
)
GEMMA = (
    "{{- bos_token -}}{%- for m in messages -%}{%- if (m.role == 'user') != (loop.index0 % 2 == "
    "0) -%}{{ raise_exception('Roles must alternate') }}{%- endif -%}"
    "{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (m.content | trim) + "
    "'<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<turn>model\n' }}{%- endif -%}"
)
# Zephyr: the names of roles are ordinary text.
ZEPHYR = (
    "{%- for m in messages -%}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{%- "
    "endfor -%}{%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- endif -%}"
)
# Phi 3: its marks swallow the line break behind them; a chat that is over ends by a token of its
# own.
PHI = (
    "{%- for m in messages -%}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- else -%}{{ eos_token }}{%- "
    "endif -%}"
)
# DeepSeek R1: the header of an answer begins its thoughts, which are left out of every chat; behind
# the reply of a tool there is no header.
DEEPSEEK = (
    "{{- bos_token -}}{%- for m in messages -%}{%- if m.role == 'user' -%}{{ '<user>' + "
    "m.content }}{%- elif m.role == 'tool' -%}{{ '<result>' + m.content + '</result>' }}"
    "{%- elif m.role == 'system' -%}{{ m.content }}{%- else -%}{{ (m.content if "
    "messages[loop.index0 - 1].role == 'tool' else '<assistant>' + "
    "m.content.split('</think>')[-1]) + eos_token }}"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt and messages[-1].role != 'tool' -%}"
    "{{ '<assistant><think>\n' }}{%- endif -%}"
)

# --------------------------------------------------------------------------------------------------
# tokenizers

WORDS = [
    "the",
    "there",
    "Hello",
    "world",
    "user",
    "assistant",
    "and",
    "so",
    "system",
    "answer",
    "tool",
    "\n\n",
    "  ",
    "naïve",
    "reads",
    "本",
]


def bpe(tokens, spell, **options):
    """A BPE model of these tokens, and of those WORDS with and without a space before them that
    `spell` can spell with them."""
    vocab, merges = {token: i for i, token in enumerate(tokens)}, []
    for word in [
        w for word in WORDS for prefix in ("", " ") if set(w := spell(prefix + word)) <= set(tokens)
    ]:
        for i in range(1, len(word)):
            vocab.setdefault(word[: i + 1], len(vocab))
            if (word[:i], word[i]) not in merges:
                merges.append((word[:i], word[i]))
    return Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))


def byte_level(marks, nfc=False):
    """Like GPT's, Llama 3's, and (nfc) Qwen's."""
    speller = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner = bpe(
        sorted(pre_tokenizers.ByteLevel.alphabet()),
        lambda word: speller.pre_tokenize_str(word)[0][0],
    )
    inner.normalizer = normalizers.NFC() if nfc else None
    parts = pre_tokenizers.Split(
        Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"), "isolated"
    )
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.Sequence([parts, speller]),
        decoders.ByteLevel(),
    )
    return wrap(inner, marks)


def sentencepiece(marks, begin="first", rstrip=False):
    """Like Llama 2's and Mistral's; a space is put before the text ("first"), before each part
    between marks ("always"), or ("never") not, as in Gemma."""
    letters = [chr(c) for c in range(33, 127)] + ["▁", "ï", "本"] + ["\n"] * (begin == "never")
    inner = bpe(
        ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *letters],
        lambda word: word.replace(" ", "▁"),
        byte_fallback=True,
        unk_token="<unk>",
        fuse_unk=True,
    )
    if begin == "first":
        inner.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement="▁", prepend_scheme="first", split=False
        )
    else:
        inner.normalizer = normalizers.Sequence(
            [
                *([normalizers.Prepend("▁")] if begin == "always" else []),
                normalizers.Replace(" ", "▁"),
            ]
        )
    strip = [decoders.Strip(" ", 1, 0)] if begin != "never" else []
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return wrap(inner, marks, rstrip)


def wrap(inner, marks, rstrip=False):
    inner.add_special_tokens(
        [
            AddedToken(
                mark, special=True, normalized=False, rstrip=rstrip and mark.startswith("<|")
            )
            for mark in ["<s>", "</s>", "<other>", *marks]
        ]
    )
    inner.add_tokens([AddedToken("</code>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def smollm2():
    """A real one, with its own template."""
    folder = Path(__file__).parent.parent / "models/SmolLM2-135M-Instruct"
    return (
        AutoTokenizer.from_pretrained(folder)
        if folder.exists()
        else pytest.skip("launch/get_smollm2.sh fetches it")
    )


IM = ["<|im_start|>", "<|im_end|>"]
STYLES = {  # template, tokenizer, what ends an answer, what an answer begins with, who else speaks
    "Qwen 2.5": (CHATML, lambda: byte_level(IM, nfc=True), "<|im_end|>", "", "tool"),
    "Qwen 3": (THINKING, lambda: byte_level(IM, nfc=True), "<|im_end|>", "", "tool"),
    "Llama 3": (
        LLAMA,
        lambda: byte_level(["<|start|>", "<|header|>", "<|eot|>"]),
        "<|eot|>",
        "",
        "tool",
    ),
    "Mistral": (
        MISTRAL,
        lambda: sentencepiece(["[INST]", "[/INST]", "[RESULT]", "[/RESULT]", "[TOOLS]"]),
        "</s>",
        " ",
        "tool",
    ),
    "Gemma": (
        GEMMA,
        lambda: sentencepiece(["<turn>", "<end_of_turn>"], "never"),
        "<end_of_turn>",
        "",
        "user",
    ),
    "Zephyr": (ZEPHYR, lambda: sentencepiece([]), "</s>", "", "user"),
    "Yi": (CHATML, lambda: sentencepiece(IM), "<|im_end|>", "", "tool"),
    "Phi 3": (
        PHI,
        lambda: sentencepiece(
            ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], "always", rstrip=True
        ),
        "<|end|>",
        " ",
        "user",
    ),
    "DeepSeek": (
        DEEPSEEK,
        lambda: byte_level(["<user>", "<assistant>", "<result>", "</result>"]),
        "</s>",
        "",
        "tool",
    ),
    "SmolLM2": (None, smollm2, "<|im_end|>", "", "user"),
    "scratch": (None, lambda: make_tokenizer([]), "<|end|>", "", "user"),
}


@functools.cache
def tokenizer_of(style):
    template, make, *_ = STYLES[style]
    tokenizer = make()
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# --------------------------------------------------------------------------------------------------
# an episode


@dataclass
class Play(Env):
    """An episode in which environment and policy go by the book. It is its own driver."""

    style: str
    answers: list
    """Texts, or (text, what ends it), of which None: it is cut."""
    observations: list
    system: str = ""
    exact: bool = True
    """Of the last segment: all that was sampled is as the tokenizer encodes it."""
    said: list = field(default_factory=list)
    """Of each answer: the rendered chat before it, tokens, log-probs."""
    version: int = 0
    max_turns: int = 100

    def __post_init__(self):
        self.tokenizer, self.stop, self.lead = tokenizer_of(self.style), *STYLES[self.style][2:4]
        self.texts = [
            answer if isinstance(answer, tuple) else (answer, self.stop) for answer in self.answers
        ]
        shown = [
            end
            and self.tokenizer.decode(encode(self.tokenizer, end)[-1:], skip_special_tokens=True)
            for _, end in self.texts
        ]
        self.contents = [
            self.lead + text + (end if s else "")
            for (text, end), s in zip(self.texts, shown, strict=True)
        ]
        self.ends = [
            "" if s or not end else end for (_, end), s in zip(self.texts, shown, strict=True)
        ]
        self.engine, self.at_work = (
            SimpleNamespace(cfg=SimpleNamespace(max_model_len=10**6)),
            contextlib.nullcontext,
        )
        self.watch = Oversight()
        runner = EpisodeRunner(
            self,
            None,
            EvaluateConfig(
                env=EnvConfig(max_turns=self.max_turns, max_tokens=10**6, on_error="raise"),
                data=DataConfig(system_prompt=self.system),
            ),
            EnvMaker(lambda: self, self),
        )
        sampling = Sampling(max_tokens=10**6, stop_token_ids=())
        self.e = Episode(
            ticket=7,
            number=3,
            row={"prompt": self.observations[0]},
            conversation=Conversation(self.tokenizer),
            sampling=sampling,
        )
        asyncio.run(runner.run(self.e))
        self.segments, self.trajectories = (
            self.e.conversation.segments,
            runner.finish([self.e], [runner.score(self.e)]),
        )
        self.since_prompt = self.e.said

    def reset(self, row):
        return row["prompt"]

    def step(self, state):
        n = state.turn
        assert n == len(self.said) - 1
        if state.messages:
            self.contents[n] = (
                state.messages[-1]["content"] if self.style == "Phi 3" else self.contents[n]
            )  # its tokens do not hold all spaces
            assert state.messages[-1] == {"role": "assistant", "content": self.contents[n]}
        return (
            Result(reward=2.0**n, done=True)
            if n + 1 == len(self.answers)
            else Result(reward=2.0**n, observation=self.observations[n + 1])
        )

    def render(self):
        return (
            self.tokenizer.apply_chat_template(
                self.e.messages, tokenize=False, add_generation_prompt=True
            )
            if self.e.messages
            else self.e.segment.text
        )

    def same_text(self, tokens, others):
        return (
            self.tokenizer.decode(tokens) == self.tokenizer.decode(others) or self.style == "Phi 3"
        )

    async def generate_for_episode(self, request):
        """The tokens that the tokenizer gives the answer behind the rendered chat, if it leaves
        those of the chat as they are."""
        rendered, (text, end) = self.render(), self.texts[len(self.said)]
        prompt, text = encode(self.tokenizer, rendered), self.lead + text + (end or "")
        self.exact |= not any(self.e.segment.sampled)
        assert request.tokens == self.e.segment.tokens
        assert request.tokens == prompt or not self.exact and self.same_text(request.tokens, prompt)
        whole = encode(self.tokenizer, rendered + text)
        fits = whole[: len(prompt)] == prompt
        tokens = whole[len(prompt) :] if fits else encode(self.tokenizer, text)
        self.exact &= fits and not (
            self.style == "Phi 3" and "<s>" in text
        )  # there a space behind <s> comes with decoding
        self.said.append(
            (rendered, tokens, [-len(self.said) * 1000.0 - i for i in range(len(tokens))])
        )
        return Completion(
            list(tokens), list(self.said[-1][2]), bool(end), [len(self.said) + 10] * len(tokens)
        )

    def check(self, turns):
        """Which answers are in which segment; and that each is there, once, after what it was
        sampled after."""
        assert (
            self.e.row["rendered_prompt"] == self.said[0][0]
            and self.trajectories[0].info["prompt"] == self.observations[0]
        )
        for t, numbers in zip(self.trajectories, turns, strict=True):
            assert sorted(set(t.versions.tolist()) - {-1}) == [n + 11 for n in numbers]
        for i, (segment, numbers, t) in enumerate(
            zip(self.segments, turns, self.trajectories, strict=True)
        ):
            assert (
                segment.text
                == self.said[numbers[-1]][0] + self.contents[numbers[-1]] + self.ends[numbers[-1]]
            )
            tokens, sampled, logprobs, rewards, versions = [], [], [], [], []
            for n in numbers:
                _, said, logp = self.said[n]
                prompt = t.tokens[len(tokens) : t.versions.tolist().index(n + 11)].tolist()
                assert self.same_text(tokens + prompt, encode(self.tokenizer, self.said[n][0]))
                num = len(prompt)
                tokens, sampled, logprobs = (
                    tokens + prompt + said,
                    sampled + [False] * num + [True] * len(said),
                    logprobs + [0.0] * num + logp,
                )
                versions, rewards = (
                    versions + [-1] * num + [n + 11] * len(said),
                    rewards + [0.0] * (num + len(said) - 1) + [2.0**n],
                )
            assert (
                t.tokens.tolist(),
                t.sampled.tolist(),
                t.logprobs.tolist(),
                t.versions.tolist(),
                t.turn_rewards.tolist(),
            ) == (tokens, sampled, logprobs, versions, rewards)
            assert (t.group, t.episode, t.segment, t.version, t.reward) == (
                7,
                3,
                i,
                numbers[0] + 11,
                2.0 ** len(self.said) - 1,
            )

    def trained(self):
        """What fine-tuning on the same chat trains on."""
        messages = self.e.messages
        segments = encode_chat(
            self.tokenizer,
            messages,
            [i for i, m in enumerate(messages) if m["role"] == "assistant"],
            [self.tokenizer.convert_tokens_to_ids(self.stop)],
        )
        return [(segment.ids, segment.mask) for segment in segments]


def asked(style, system=""):
    """A question, a reply (of a tool, if the template knows one), another question, another
    reply."""
    other = STYLES[style][4]
    begin = [{"role": "system", "content": system}] if system else []
    return [
        [*begin, {"role": "user", "content": "What is 2+2?\n"}],
        [{"role": other, "content": "and  so on, 日本 e\u0301\n\n"}],
        [{"role": "user", "content": " the tool reads <b>: 42"}],
        [{"role": other, "content": "🙂"}],
    ]


SCRIPTS = {
    "plain": ["Hello, the world.", "日本 🙂 naïve é", "the answer:\n\n\t- a  b \\ '<b>'", "4"],
    "empty": ["", "", "x", ""],
    "spaced": ["Hello ", " there", "so\n", "\n\nthe "],
    "cut": [("It is so", None), ("日本 🙂", None), "4", ("and the", None)],
    "cut in a letter": [("naïve \ufffd", None), "so", ("\ufffd", None), ("4", None)],
    "marked": ["so <s>Hello", ("</code>x<s>", None), "<b></code>", ("x</code>", "</code>")],
    "ended otherwise": [("so", "<other>"), ("Hello", "</code>"), "4", ("x", "<other>")],
    "thinking": [
        f"<think>\n{thought}\n</think>\n\n{n}"
        for n, thought in enumerate(["so", "Hello\n\nthere", "日本", "the"])
    ],
}
ONE, TWO, EACH = [[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]
REWRITTEN = {  # by the template, unless it is this: all in ONE
    **{(style, "spaced"): EACH for style in ("Llama 3", "Gemma", "Mistral")},  # it trims
    **{
        (style, "ended otherwise"): [[0], [1, 2, 3]]
        for style in STYLES
        if style not in ("SmolLM2", "scratch")
    },  # where <other> is ordinary text
    **{
        ("Mistral, system", script): TWO for script in SCRIPTS
    },  # the system prompt goes on to the next question
    ("Mistral, system", "spaced"): EACH,
    ("Mistral, system", "ended otherwise"): [[0], [1], [2, 3]],
    **{("DeepSeek", script): [[0], [1, 2], [3]] for script in SCRIPTS},  # the header's <think> goes
    ("Qwen 3", "thinking"): TWO,  # thoughts before the last question go
}
INEXACT = {("spaced", style) for style in ("Qwen 2.5", "Qwen 3", "SmolLM2", "Gemma")} | {
    ("marked", "Phi 3")
}
"""An answer that begins with a line break is encoded together with the header's: what the tokenizer
gives cannot be sampled. And a mark in a text gets a space behind it."""


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("style", sorted(STYLES))
def test_a_segment_is_the_rendered_chat_token_by_token_and_a_new_one_begins_where_it_is_rewritten(
    style, script
):
    for system in ["", "Be brief,  日本."]:
        if system and style == "Gemma":
            with pytest.raises(
                UserError, match="the chat template refuses a chat: Roles must alternate"
            ):
                Play(style, SCRIPTS[script], asked(style), system)
            continue
        play = Play(style, SCRIPTS[script], asked(style), system)
        turns = (REWRITTEN.get((style + ", system", script)) if system else None) or REWRITTEN.get(
            (style, script), ONE
        )
        play.check(turns)
        assert play.exact != ((script, style) in INEXACT), (style, script)
        # Where the template neither trims nor adds, fine-tuning on the chat has the same segments.
        adds = style == "DeepSeek" or (style == "Qwen 3" and script != "thinking")
        are_ended = all(end == play.stop for _, end in play.texts)
        if turns in (ONE, TWO) and play.exact and are_ended and not adds:
            assert play.trained() == [
                (t.tokens.tolist(), t.sampled.tolist()) for t in play.trajectories
            ]


# --------------------------------------------------------------------------------------------------
# segments

TEXTS = [
    "",
    " ",
    "x",
    "日本",
    " 🙂",
    "e\u0301",
    "\n\n",
    "  two",
    " the",
    "there ",
    "\ufffd",
    "ï",
    "</code>",
    "<s>",
    "4,2",
    "\t",
]


@pytest.mark.parametrize("style", sorted(STYLES))
def test_the_text_of_an_answer_is_what_it_adds_to_the_text_of_all_tokens(style):
    """Decoded from a border near the end, against all decoded twice, which takes long."""
    tokenizer, rng, most = tokenizer_of(style), random.Random(0), 0

    def decode(tokens, **options):
        nonlocal most
        most = max(most, len(tokens))
        return tokenizer.decode(tokens, **options)

    for _ in range(300):
        before, answer = (
            encode(tokenizer, "".join(rng.choices(TEXTS, k=k)))
            for k in (rng.randint(30, 40), rng.randint(0, 4))
        )
        before, answer = before[: rng.randint(25, len(before))], answer[: rng.randint(0, 9)]
        read, whole = tokenizer.decode(before), tokenizer.decode(before + answer)
        segment = Segment(tokens=list(before))
        text = segment.append_completion(
            Completion(answer, [0.0] * len(answer), False, [0] * len(answer)),
            SimpleNamespace(decode=decode),
        )
        if whole.startswith(read) and not (style != "Phi 3" and read.endswith("\ufffd")):
            assert text == segment.text == whole[len(read) :], (before, answer)
    assert most < 25


def test_raw_texts_and_tokens_go_on_where_they_are_said():
    """Sentencepiece would write a space before a text."""
    texts = ["Q: 日本\n", "\nwhy?\n", "so", " the tool"]
    play = Play(
        "Zephyr",
        [("Hello", None), ("the", None), "x", "4"],
        [Raw(texts[0]), Raw(texts[1]), encode(tokenizer_of("Zephyr"), texts[2]), Raw(texts[3])],
    )
    assert [s.text for s in play.segments] == ["Q: 日本\nHello\nwhy?\nthe sox</s> the tool4</s>"]
    assert play.tokenizer.decode(play.trajectories[0].tokens) == play.segments[0].text


@pytest.mark.parametrize("style", sorted(STYLES))
def test_what_follows_an_answer_that_is_cut_anywhere(style):
    """In the middle of a character, too: to what was sampled is added what is rendered, and no byte
    else."""
    tokenizer = tokenizer_of(style)
    for tokens in ([t] for t in range(min(len(tokenizer), 700))):
        for rest in (STYLES[style][2] + " x", "\nx", "x"):
            segment = Segment(text="?", tokens=[*encode(tokenizer, "x"), *tokens])
            num = len(segment.tokens)
            Conversation(tokenizer).append_raw(rest, segment)
            if style != "Phi 3" or rest[0] == "<":  # where every text gets a space
                assert (
                    tokenizer.decode([tokenizer.eos_token_id, *segment.tokens[num:]])
                    == tokenizer.eos_token + rest
                ), (tokens, rest)


def say(segment, tokenizer, text):
    tokens = [*encode(tokenizer, text), tokenizer.eos_token_id]
    return segment.append_completion(
        Completion(tokens, [-1.0] * len(tokens), True, [4] * len(tokens)), tokenizer
    )


def chat_of(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_a_chat_goes_on_from_the_longest_segment_that_it_begins_with():
    tokenizer = make_tokenizer([])
    c = Conversation(tokenizer)
    first = c.continue_with_messages(chat_of("q"))
    assert c.continue_with_messages(chat_of("q")) is first and first.tokens == chat.encode(
        tokenizer, chat.render(tokenizer, chat_of("q"))
    )  # nothing was sampled in between
    assert say(first, tokenizer, "a") == "a"
    assert c.continue_with_messages(chat_of("q", "a", "r")) is first
    say(first, tokenizer, "b")
    second = c.continue_with_messages(chat_of("q", "other", "r"))
    say(second, tokenizer, "c")
    assert (
        c.continue_with_messages(chat_of("q", "a", "r", "b", "s"))
        is first
        is c.append_raw("raw ", first)
        is c.append_raw([60, 61], first)
    )  # back to an older one
    third = c.continue_with_messages(chat_of("q", "a", "s"))
    assert c.segments == [first, second, third] and sum(sum(s.sampled) for s in c.segments) == 6
    third.add_reward(9.0)  # there is no answer that it could be for
    second.add_reward(0.5)
    first.add_reward(1.0)
    trajectories = c.trajectories(group=1, episode=2, reward=1.5, info={})
    assert [(t.segment, t.version, t.turn_rewards.sum(), t.reward) for t in trajectories] == [
        (0, 4, 1.0, 1.5),
        (1, 4, 0.5, 1.5),
    ]


def test_tools_are_part_of_the_chat():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    answer, reply, question = (
        {"role": role, "content": "4"} for role in ("assistant", "tool", "user")
    )
    for style, segments in (
        ("Qwen 2.5", [0, 0, 0, 1]),
        ("Mistral", [0, 0, 1, 2]),
    ):  # Mistral: the tools go on to the next question
        tokenizer = tokenizer_of(style)
        c, messages = Conversation(tokenizer), [question]
        for more, given, n in zip(
            ([], [answer, reply], [answer, question], [answer, question]),
            (tools, tools, tools, None),
            segments,
            strict=True,
        ):
            messages = messages + more
            prompt = chat.render(tokenizer, messages, tools=given)
            segment = c.append_prompt(c.tokenize_prompt(prompt, ()))
            assert c.segments.index(segment) == n
            whole = tokenizer.apply_chat_template(
                messages, tools=given, tokenize=False, add_generation_prompt=True
            )
            assert segment.text == whole and segment.tokens == encode(tokenizer, whole)
            text = STYLES[style][3] + "4" + STYLES[style][2]
            tokens = encode(tokenizer, whole + text)[len(segment.tokens) :]
            assert (
                segment.append_completion(
                    Completion(tokens, [0.0] * len(tokens), True, [0] * len(tokens)), tokenizer
                )
                == STYLES[style][3] + "4"
            )


def test_a_message_that_a_template_cannot_write_is_told():
    for content in (None, ["a part"]):
        with pytest.raises(
            UserError, match="template refuses a chat: TypeError: can only concat.*'content'"
        ):
            Conversation(tokenizer_of("Qwen 2.5")).continue_with_messages(
                [{"role": "user", "content": content}]
            )


def test_a_tokenizer_gives_back_what_was_said(tmp_path):
    """Some are saved with an order to tidy up what they decode."""
    inner = Tokenizer(models.WordLevel({"x": 0, ",": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=inner, clean_up_tokenization_spaces=True
    ).save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).decode([0, 1]) == "x,"
    assert load_tokenizer(tmp_path, chats=False).decode([0, 1]) == "x ,"


class Reply(str, enum.Enum):  # noqa: UP042  # of StrEnum str() is the value
    YES = "yes"


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (Result(observation="no", messages=[{"role": "user", "content": "new"}]), "new"),
        (Result(observation=[1, 2], messages=[{"role": "user", "content": "new"}]), "new"),
        (Result(observation="yes"), "yes"),
        (Result(observation=[{"role": "user", "content": "yes"}]), "yes"),
        (Result(observation=np.str_("yes")), "yes"),
        (Result(observation=Reply.YES), "yes"),
        (Result(observation="no", messages=[]), None),
        (Result(observation=np.array([1, 2])), None),
        (Result(observation="no", messages=["new"]), None),
        (Result(messages="new"), None),
        (Result(observation=[{"content": "x"}]), None),
        (Result(observation=[{"role": "user", "content": "x"}, 3]), None),
        (Result(observation=[{"role": None, "content": "x"}]), None),
        (Result(), None),
    ],
)
def test_the_messages_of_a_result_count_before_its_observation(result, shown):
    tokenizer = tokenizer_of("Qwen 2.5")
    runner = SimpleNamespace(system_prompt="")
    episode = SimpleNamespace(
        segment=None, messages=[], turn=0, conversation=Conversation(tokenizer)
    )
    if shown is None:
        with pytest.raises(EnvFailed, match="give"):
            EpisodeRunner._observe(runner, episode, result)
        return
    EpisodeRunner._observe(runner, episode, result)
    assert [m["content"] for m in episode.messages] == [shown]
    assert shown in episode.segment.text and "no" not in episode.segment.text


class Meddler(Play):
    def step(self, state):
        result = super().step(state)
        state.messages.append({"role": "user", "content": "meddled"})
        state.messages[0]["content"] = "meddled"
        return result


def test_an_environment_that_changes_the_messages_of_its_state_changes_no_chat():
    play = Meddler("Qwen 2.5", ["a", "b"], ["one?", "two?"])
    assert [message["content"] for message in play.e.messages] == ["one?", "a", "two?", "b"]
    assert "meddled" not in play.segments[0].text


def test_an_episode_without_tokens_is_a_trajectory_that_is_dumped_and_read():
    conversation = Conversation(tokenizer_of("scratch"))
    conversation.append_raw("no answer")
    info = {"error": "refused", "prompt": "p", "completion": ""}
    (t,) = conversation.trajectories(group=3, episode=1, reward=-2.0, info=info, version=5)
    assert (len(t.tokens), t.sampled.any(), t.reward, t.version) == (0, False, -2.0, 5)
    line = json.dumps(records.to_record(t), default=np.ndarray.tolist)
    again = records.from_record(json.loads(line))
    assert (again.group, again.episode, again.reward, len(again.tokens)) == (3, 1, -2.0, 0)


def test_reward_functions_get_the_turns_since_the_prompt():
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    reply = [{"role": "tool", "content": "3"}]
    observations = [[*prompt, {"role": "user", "content": "c"}], reply]
    play = Play("Qwen 2.5", ["1 + 2", "it is 3"], observations, "be short")
    assert play.since_prompt == [
        {"role": "assistant", "content": "1 + 2"},
        *reply,
        {"role": "assistant", "content": "it is 3"},
    ]


@pytest.mark.parametrize("style", ["Qwen 2.5", "DeepSeek"])
def test_a_reply_after_which_no_turn_is_left_hides_no_answer_from_reward_functions(style):
    question = [{"role": "user", "content": "a"}]
    reply = [{"role": "user", "content": "3"}]
    given = [question, reply, reply]
    play = Play(style, ["1 + 2", "it is 3", "no"], given, exact=False, max_turns=2)
    assert play.e.truncated
    assert [m["role"] for m in play.since_prompt] == ["assistant", "user", "assistant"]
    assert play.since_prompt[-1]["content"] == play.e.answer
    assert (
        play.tokenizer.decode(play.e.last.answer_tokens, skip_special_tokens=True) == play.e.answer
    )


# --------------------------------------------------------------------------------------------------
# broken characters


def test_a_reply_after_many_broken_bytes_is_read_at_once(monkeypatch):
    """A policy that repeats the second byte of a letter; the text after it looks back a little."""
    tokenizer = make_tokenizer([])
    first, second = chat.encode(tokenizer, "é")
    num_decoded = []

    def counting(tokenizer, tokens, **options):
        num_decoded.append(len(tokens))
        return str(tokenizer.decode(tokens, **options))

    monkeypatch.setattr(conversation, "decode", counting)
    reply = chat.encode(tokenizer, "so")
    assert conversation.decode_after(tokenizer, [second] * 5000, reply) == "so"
    assert sum(num_decoded) < 100
    assert conversation.decode_after(tokenizer, [second] * 5000, [first, second]) == "é"


def test_a_prompt_is_tokenized_once_for_its_samples(monkeypatch):
    """A long one takes milliseconds, in which the engine waits."""
    tokenizer = make_tokenizer([])
    texts = []
    encode = chat.encode

    def counting(tokenizer, text):
        texts.append(text)
        return encode(tokenizer, text)

    monkeypatch.setattr(chat, "encode", counting)
    begun = [conversation.Conversation(tokenizer).append_raw("a long prompt") for _ in range(16)]
    assert texts == ["a long prompt"]
    begun[0].tokens.append(3)
    assert begun[1].tokens == encode(tokenizer, "a long prompt")
