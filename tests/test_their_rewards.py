"""Reward functions of TRL, OpenRLHF and verl run as they are: every signature that TRL's
documentation shows, TRL's shipped functions by name, OpenRLHF's mathematics, verl's managers, and
what they log."""

import asyncio
import functools
import inspect
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

import pandas
import pytest

from in_memory import ALONE, memory_rows
from minirl.base.errors import UserError
from minirl.base.oversight import Oversight
from minirl.config.shared import DataConfig, RewardConfig
from minirl.data.prompts import Prompts, open_prompts
from minirl.engine.loop import Completion
from minirl.envs.adapters.openrlhf import extract_boxed_answer, grade_answer
from minirl.model.scratch import make_tokenizer
from minirl.rewards import Answer, RewardCall, adapters, graders
from minirl.rewards.loading import ProcessReward, make_rewards, try_rewards
from minirl.rollout.conversation import Conversation, Prompt
from minirl.run.metrics import breakdown
from minirl.types.packed import Trajectory
from programs import fork

TEXT = {"prompt": "q", "rendered_prompt": "<|user|>q<|end|>", "answer": "42", "length": 5}
CHAT = {**TEXT, "prompt": [{"role": "user", "content": "q"}]}


@pytest.fixture
def file(tmp_path):
    """Writes a Python file and returns its path."""

    def write(text, name="theirs.py"):
        path = tmp_path / name
        path.write_text(inspect.cleandoc(text))
        return path

    return write


def trl(*places, **cfg):
    return make_rewards(RewardConfig(function=[f"trl:{place}" for place in places], **cfg))


# --------------------------------------------------------------------------------------------------
# TRL: signatures

SIGNATURES = {
    "ids": "def f(completion_ids, **kwargs): return [float(len(ids)) for ids in completion_ids]",
    "ids alone": "def f(completion_ids): return [float(len(ids)) for ids in completion_ids]",
    "a column": """
        def f(prompts, completions, length, **kwargs):
            return [float(len(c) + n - len(p)) for p, c, n in zip(prompts, completions, length)]
    """,
    "keyword only": "def f(*, completions, length): return [len(completions[0]) + length[0] - 1.0]",
    "state": """
        def f(completions, trainer_state, **kwargs):
            assert trainer_state.max_steps == 10 and trainer_state.is_world_process_zero
            return [3.0 * trainer_state.global_step / 3 for _ in completions]
    """,
    "asynchronous": """
        import asyncio

        async def f(prompts, completions, **kwargs):
            await asyncio.sleep(0)
            return [6.0 for _ in completions]
    """,
    "an object": """
        class F:
            async def __call__(self, completions, **kwargs):
                return [6.0 for _ in completions]

        f = F()
    """,
    "a tensor": """
        import torch

        def f(completions, **kwargs):
            return torch.tensor([6.0 for _ in completions])
    """,
    "defaults": """
        def f(completions, solution=None, log_extra=None, log_metric=None):
            assert solution is None and log_extra and log_metric
            return [6.0]
    """,
    "all": """
        def f(**kwargs):
            assert set(kwargs) == {"prompts", "completions", "completion_ids", "trainer_state",
                                   "log_extra", "log_metric", "answer", "length"}, set(kwargs)
            return [6.0]
    """,
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_signature_is_called(file, name):
    rewards = trl(f"{file(SIGNATURES[name])}:f")
    rewards.state.max_steps = 10
    rewards.state.global_step = 6
    rewards.check_row(TEXT)
    assert rewards(TEXT, "ab", {}, tokens=[7, 8, 9, 1, 1, 1]) == 6.0


def test_completions_are_messages_where_prompts_are(file):
    path = file("""
        def f(prompts, completions, **kwargs):
            [prompt], [completion] = prompts, completions
            if isinstance(prompt, str):
                return [float(completion == "42")]
            return [2.0 * (completion == [{"role": "assistant", "content": "42"}])]
    """)
    assert [trl(f"{path}:f")(row, "42") for row in (TEXT, CHAT)] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("start", "module", "cached", "owner", "made"),
    [
        (adapters.event_loop, adapters, "_start_event_loop", asyncio, "new_event_loop"),
        (lambda: graders.pool("none"), graders, "_start_pool", graders, "GraderPool"),
    ],
)
def test_threads_that_need_it_first_share_it(monkeypatch, start, module, cached, owner, made):
    fresh = functools.cache(vars(module)[cached].__wrapped__)
    monkeypatch.setattr(module, cached, fresh)
    starts = []

    def slow(*args):
        time.sleep(0.05)
        starts.append(args)
        return mock.Mock()

    monkeypatch.setattr(owner, made, slow)
    with ThreadPoolExecutor(4) as threads:
        found = [call.result() for call in [threads.submit(start) for _ in range(4)]]
    assert len(starts) == 1 and all(one is found[0] for one in found)


def test_asynchronous_functions_share_one_event_loop(file):
    """So that a client that is kept from call to call goes on working."""
    path = file("""
        import asyncio

        loops = set()

        async def f(completions, **kwargs):
            loops.add(asyncio.get_running_loop())
            return [float(len(loops))]
    """)
    rewards = trl(f"{path}:f")
    assert [rewards(TEXT, "a") for _ in range(3)] == [1.0, 1.0, 1.0]


COMPARES = """
    def shortest_wins(completions, **kwargs):
        least = min(map(len, completions))
        return [1.0 if len(c) == least else 0.0 for c in completions]

    def logs(prompts, completions, completion_ids, length, log_extra, log_metric):
        log_extra("number", range(len(completions)))
        log_metric("completions", len(completions))
        assert len(prompts) == len(length) == len(completion_ids) == len(completions)
        lengths = map(len, completion_ids)
        return [None if c == "b" else float(n) for c, n in zip(completions, lengths)]

    def uses(completions, **kwargs):
        found = []
        for completion in completions:
            called = [c["function"] for turn in completion for c in turn.get("tool_calls", ())]
            replies = [turn["content"] for turn in completion if turn["role"] == "tool"]
            sums = [call["arguments"]["a"] for call in called if call["name"] == "add"]
            is_right = (sums, replies) == ([2], ["4"]) and completion[-1]["content"] == "it is 4"
            found.append(float(is_right))
        return found

    def one(completions, **kwargs):
        return [1.0]
"""


def scored(places, *completions, row=TEXT, messages=()):
    """The answers of a prompt, once the functions have scored them as a run does."""
    rewards = trl(*places)
    answers = []
    for number, completion in enumerate(completions):
        call = RewardCall(tokens=[7] * number, messages=list(messages))
        answers.append(Answer(row=row, completion=completion, call=call))
        rewards.score_alone(answers[-1])
    rewards.score_together(answers)
    return rewards, answers


def test_functions_that_compare_get_the_completions_of_a_prompt(file):
    path = file(COMPARES)
    rewards, answers = scored([f"{path}:shortest_wins"], "aaa", "b", "cc", "d")
    assert [rewards.total(answer) for answer in answers] == [0.0, 1.0, 0.0, 1.0]

    rewards, answers = scored([f"{path}:shortest_wins", f"{path}:logs"], "aaa", "b", "cc")
    infos = [{}, {}, {}]
    totals = [rewards.total(answer, info) for answer, info in zip(answers, infos, strict=True)]
    assert totals == [0.0, 1.0, 2.0]
    assert [info["reward_columns"]["number"] for info in infos] == [0, 1, 2]
    assert {info["reward_metrics"]["completions"] for info in infos} == {3.0}
    assert [len(info["rewards"]) for info in infos] == [2, 1, 2]

    with pytest.raises(UserError, match="it returned 1 values for 2 completions .* 1 other"):
        scored([f"{path}:one"], "a", "b")


def test_functions_get_the_exchange_with_calls_and_replies(file):
    path = file(COMPARES)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    exchange = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "4"},
        {"role": "assistant", "content": "it is 4"},
    ]
    for messages, wanted in ((exchange, 1.0), (exchange[-1:], 0.0)):
        rewards, [answer] = scored([f"{path}:uses"], "it is 4", row=CHAT, messages=messages)
        assert rewards.total(answer) == wanted


def test_a_column_that_rows_lack_is_refused_before_anything_is_generated(file):
    rewards = trl(f"{file('def f(completions, environments, **kwargs): return [0.0]')}:f")
    with pytest.raises(
        UserError,
        match="needs environments, which is neither a column nor what TRL's trainer gives",
    ):
        rewards.check_row(TEXT)
    rewards.check_row({**TEXT, "environments": 1})


def test_what_is_wrong_in_a_call_is_told(file):
    path = file("""
        def two(completions, **kwargs):
            return [0.0, 1.0]

        def log(completions, log_extra, **kwargs):
            log_extra("column", [1, 2])
            return [0.0]
    """)
    for name, what in (("two", "it returned"), ("log", r"log_extra\('column', ...\) got")):
        with pytest.raises(UserError, match=f"raised ValueError: {what} 2 values for 1 complet"):
            trl(f"{path}:{name}")(TEXT, "42")


# --------------------------------------------------------------------------------------------------
# TRL: what does not apply, and what is logged


def episode(info):
    return Trajectory(tokens=[], sampled=[], logprobs=[], info={"source": None, **info}, reward=0.0)


def test_none_is_left_out_of_the_sum_and_of_the_metrics(file):
    path = file("""
        def length(completions, **kwargs):
            return [float(len(c)) for c in completions]

        def even(completions, **kwargs):
            return [1.0 if len(c) % 2 == 0 else None for c in completions]

        def never(completions, **kwargs):
            return [None]
    """)
    names = [f"trl:{path}:{name}" for name in ("length", "even", "never")]
    rewards = make_rewards(RewardConfig(function=names, weights=[1.0, 10.0, 5.0]))
    infos = [{}, {}]
    assert rewards(TEXT, "ab", infos[0]) == 12.0 and rewards(TEXT, "abc", infos[1]) == 3.0
    assert infos[0]["rewards"] == {names[0]: 2.0, names[1]: 1.0}
    assert infos[1]["rewards"] == {names[0]: 3.0}
    mesh = WithMeans()
    means = breakdown([episode(info) for info in infos], 1.0, mesh)
    assert means == {f"reward/{names[0]}": 2.5, f"reward/{names[1]}": 1.0}
    alone = make_rewards(RewardConfig(function=names[2]))
    assert alone(TEXT, "ab", {}) == 0.0


class WithMeans:
    """A mesh of one rank, as far as `breakdown` needs it."""

    def gather_named(self, values):
        import numpy as np

        named = {}
        for name, value in values:
            named.setdefault(name, []).append(float(value))
        return [{name: np.array(column) for name, column in named.items()}]


def test_what_functions_log_reaches_metrics_and_the_trajectory(file):
    path = file("""
        import torch

        def f(completions, log_extra, log_metric, **kwargs):
            log_extra("parsed", [c.upper() for c in completions])
            log_extra("object", [object])
            log_extra("numbers", [[1, float("nan")]])
            log_metric("size", torch.tensor(float(len(completions[0]))))
            log_metric("size", 0.0)
            return [1.0]
    """)
    rewards = trl(f"{path}:f")
    infos = [{}, {}]
    assert [rewards(TEXT, text, info) for text, info in zip(("ab", "abcd"), infos, strict=True)]
    assert infos[0]["reward_metrics"] == {"size": 1.0}
    assert infos[1]["reward_columns"] == {
        "parsed": "ABCD",
        "object": "<class 'object'>",
        "numbers": [1, "nan"],
    }
    json.dumps(infos, allow_nan=False)
    assert breakdown([episode(info) for info in infos], 1.0, WithMeans()) == {"reward/size": 1.5}


# --------------------------------------------------------------------------------------------------
# TRL: its own functions


def test_shipped_functions_by_name():
    pytest.importorskip("trl")
    row = {**CHAT, "solution": r"$\frac{1}{2}$", "answer": None}
    right, wrong = r"It is \boxed{\frac{1}{2}}.", r"It is \boxed{\frac{1}{3}}."
    info = {}
    accuracy = trl("accuracy_reward")
    assert [accuracy(row, text, info) for text in (right, wrong)] == [1.0, 0.0]
    assert "gold_parsed" in info["reward_columns"]
    thinking = trl("reasoning_accuracy_reward")
    assert thinking(row, f"<think>hm</think>{right}") == 1.0
    assert trl("think_format_reward")(row, "<think>\nhm\n</think>\n42") == 1.0
    # A text for a prompt, and an answer in another column.
    assert trl("accuracy_reward")(TEXT, r"\boxed{42}") == 1.0
    bare = {**CHAT, "answer": r"2\sqrt{3}"}
    assert [accuracy(bare, rf"\boxed{{{x}}}") for x in (r"2\sqrt{3}", "2")] == [1.0, 0.0]
    overlong = trl("get_soft_overlong_punishment?max_completion_len=10&soft_punish_cache=4")
    assert [overlong(TEXT, "", tokens=range(n)) for n in (6, 8, 11)] == [0.0, -0.5, -1.0]
    repeated = trl("get_repetition_penalty_reward?ngram_size=1&max_penalty=-2.0")
    assert repeated(TEXT, "", tokens=[5, 5, 5, 5]) == -1.5


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("accuracy", "trl.rewards has no accuracy; it has accuracy_reward, get_cosine"),
        ("accuracy_reward?x=1", "accuracy_reward takes no options"),
        ("get_cosine_scaled_reward", "missing 1 required positional argument: 'max_len'; give its"),
        ("get_cosine_scaled_reward?maxlen=3", "unexpected keyword argument 'maxlen'"),
    ],
)
def test_shipped_functions_that_are_not_there_are_told(place, message):
    pytest.importorskip("trl")
    with pytest.raises(UserError, match=message):
        trl(place)


def test_without_the_package_the_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl.rewards", None)
    with pytest.raises(UserError, match="its package does not import .*; pip install trl, or name"):
        trl("accuracy_reward")


def test_a_shipped_function_without_its_column_is_refused_at_the_row():
    pytest.importorskip("trl")
    with pytest.raises(UserError, match="needs solution, which is neither a column"):
        trl("accuracy_reward").check_row({**CHAT, "answer": None})


# --------------------------------------------------------------------------------------------------
# OpenRLHF: mathematics

MATH = r"""
    import torch

    from {module} import extract_boxed_answer, grade_answer


    def reward_func(queries, prompts, labels, **kwargs):
        found = []
        for query, prompt, label in zip(queries, prompts, labels):
            response = query[len(prompt):] if prompt in query else query
            found.append(float(grade_answer(extract_boxed_answer(response), label)))
        rewards = torch.tensor(found)
        logs = {{"math_accuracy": rewards.mean(), "n": rewards}}
        return {{"rewards": rewards, "scores": rewards, "extra_logs": logs}}
"""


@pytest.mark.parametrize(
    "module", ["openrlhf.utils", "openrlhf.utils.agent", "openrlhf.utils.math_utils"]
)
def test_openrlhf_mathematics(file, module):
    rewards = make_rewards(RewardConfig(function=f"openrlhf:{file(MATH.format(module=module))}"))
    row = {**TEXT, "answer": r"\frac{1}{2}"}
    info = {}
    assert rewards(row, r"so \boxed{0.5}", info) == 1.0
    assert info["reward_metrics"] == {"math_accuracy": 1.0, "n": 1.0}
    assert rewards(row, r"so \boxed{0.6}") == 0.0 and rewards(row, "so 0.5") == 0.0
    assert not [name for name in sys.modules if name.split(".")[0] == "openrlhf"]


def test_boxed_answers():
    for text, wanted in (
        (r"a \boxed{1} b \boxed{\frac{1}{2}} c", r"\frac{1}{2}"),
        (r"\fbox{x}", "x"),
        (r"\boxed{1} and \boxed{2", None),
        ("1", None),
    ):
        assert extract_boxed_answer(text) == wanted
    assert grade_answer(" 7 ", "7") and not grade_answer(None, "7") and not grade_answer("8", "7")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "from openrlhf.utils import get_tokenizer",
            "'get_tokenizer' from .*minirl's stand-in",
        ),
        (
            "from openrlhf.utils.agent import Other",
            "'Other' from 'openrlhf.utils.agent' .minirl's stand-in; install openrlhf, or do",
        ),
        ("import openrlhf.models", "No module named 'openrlhf.models'"),
    ],
)
def test_a_stand_in_says_what_it_lacks_by_its_own_name(file, line, says):
    with pytest.raises(UserError, match=says):
        make_rewards(RewardConfig(function=f"openrlhf:{file(line)}"))


# --------------------------------------------------------------------------------------------------
# verl

# Scores as verl's of gsm8k does, a number after four marks, in each form that its managers call.
GSM8K = """
    import re


    def found(solution_str):
        numbers = re.findall(r"#### (-?[0-9.,]+)", solution_str)
        return numbers[-1].replace(",", "") if numbers else None


    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        assert data_source == "openai/gsm8k"
        assert (extra_info["index"], extra_info["num_turns"]) == (7, 2), extra_info
        return 1.0 if found(solution_str) == ground_truth else 0.0


    def short(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
        if found(solution_str) is None:
            return 0
        return score if found(solution_str) == ground_truth else format_score


    def positional(data_source, solution_str, ground_truth, extra_info):
        return compute_score(data_source, solution_str, ground_truth, extra_info)


    async def asynchronous(**kwargs):
        return compute_score(**kwargs)


    def batch(data_sources, solution_strs, ground_truths, extra_infos):
        rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
        return [compute_score(*row) for row in rows]


    def several(solution_strs, ground_truths, **kwargs):
        assert set(kwargs) == {"data_sources", "extra_infos"}
        return [
            {"score": float(found(s) == g), "acc": found(s) == g, "pred": found(s)}
            for s, g in zip(solution_strs, ground_truths)
        ]
"""
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "How many apples?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "1345"},
    "extra_info": {"split": "train", "index": 7},
}


def verl(place):
    return make_rewards(RewardConfig(function=f"verl:{place}"))


@pytest.mark.parametrize(
    "name", ["compute_score", "short", "positional", "asynchronous", "batch", "several"]
)
def test_functions_of_verl_score_rows_of_verl(file, tmp_path, name):
    """From its Parquet file, as its managers score them."""
    parquet = tmp_path / "train.parquet"
    pandas.DataFrame([VERL] * 3).to_parquet(parquet)
    opened = open_prompts(str(parquet), "data.train", DataConfig(), ALONE)
    rewards = verl(f"{file(GSM8K)}:{name}")
    row = opened[0]
    rewards.check_row(row)
    info = {}
    assert rewards(row, "so 1,345\n#### 1,345", info) == 1.0
    assert rewards(row, "so #### 45") == 0.0 and rewards(row, "1345") == 0.0
    if name == "several":
        assert info["reward_metrics"] == {"acc": 1.0}
        assert info["reward_columns"] == {"pred": "1345"}


def test_arguments_of_a_function_of_verl(file):
    """Its reward_kwargs; and rows without its columns have their answer."""
    row = {**TEXT, "rendered_prompt": "q"}
    place = f"{file(GSM8K)}:short"
    assert verl(place)(row, "#### 41") == 0.0
    assert verl(f"{place}?format_score=0.1&score=2")(row, "#### 41") == 0.1
    assert verl(f"{place}?format_score=0.1&score=2")(row, "#### 42") == 2.0


def test_a_function_of_verl_returns_a_number(file):
    """As one that forgot the other sources does not."""
    rewards = verl(f"{file('def f(**kwargs): pass')}:f")
    with pytest.raises(UserError, match="returned None for .* one finite number .those of TRL"):
        rewards(VERL, "5")


def test_a_metric_with_the_name_of_a_function_is_refused(file):
    place = f"verl:{file('def f(**kwargs): return dict(score=1.0, exact=5.0)')}:f"
    with pytest.raises(UserError, match=r"f logs \['exact'\], and the metric reward/NAME"):
        tried([place, "exact"])
    tried(place)  # Alone it has no metric of its own.


def test_what_verl_does_not_give_is_refused_at_the_start(file):
    text = "def f(solution_str, gold): return 0"
    with pytest.raises(UserError, match="f needs gold, which verl does not give"):
        verl(f"{file(text)}:f")


def test_a_row_without_what_a_function_of_verl_needs_is_refused(file):
    rewards = verl(f"{file(GSM8K)}:compute_score")
    with pytest.raises(UserError, match="needs data_source, and a row has none"):
        rewards.check_row(TEXT)
    with pytest.raises(UserError, match="needs reward_model.ground_truth, and a row has neither"):
        rewards.check_row({"prompt": "q", "data_source": "a"})


@pytest.mark.parametrize(
    ("signature", "prefix"),
    [
        ("data_source, solution_str, ground_truth, extra_info=None", "verl:{file}:f"),
        ("data_sources, solution_strs, ground_truths, extra_infos", "verl:{file}:f"),
        ("completions, **kwargs", "trl:{file}:f"),
        ("prompts, completions, answer", "trl:{file}:f"),
        ("queries, prompts, labels", "openrlhf:{file}"),
    ],
)
def test_a_function_of_another_library_without_its_prefix_is_refused(file, signature, prefix):
    """Three arguments would fit most of them, and mean something else."""
    path = file(f"def f({signature}): return 0.0")
    with pytest.raises(UserError, match=f"; name it {prefix.format(file=path)}, or give") as told:
        make_rewards(RewardConfig(function=f"{path}:f"))
    assert "would be called with (prompt, completion, row)" in str(told.value)


# --------------------------------------------------------------------------------------------------
# what a run gives them


def test_the_tokens_of_the_last_completion():
    conversation = Conversation(None)
    segment = conversation.append_prompt(Prompt([1, 2], "ab", []))

    class Tokenizer:
        def decode(self, tokens, **_):
            return "x" * len(tokens)

    segment.append_completion(Completion([3, 4], [-1.0, -1.0], True, [0, 0]), Tokenizer())
    segment.append_prompt(Prompt([5], "c", []))
    segment.append_completion(Completion([6, 7, 8], [-1.0] * 3, True, [0] * 3), Tokenizer())
    assert segment.answer_tokens == [6, 7, 8]


# The first reward for mathematics that one writes. math-verify sets alarms.
MATHS = """
    import os

    from math_verify import parse, verify


    def score(prompt, completion, row):
        return float(verify(parse(str(row["answer"])), parse(completion)))


    def forgiving(prompt, completion, row):
        try:
            return score(prompt, completion, row)
        except ValueError:
            return 0.0


    def leaves(prompt, completion, row):
        if completion == "leave":
            os._exit(0)
        return score(prompt, completion, row)


    def refuses(prompt, completion, row):
        score(prompt, completion, row)
        return float(completion.split("Result:")[1])


    def logs(completions, answer, log_metric, log_extra, **kwargs):
        log_metric("length", len(completions[0]))
        log_extra("parsed", [str(parse(completions[0])[0])])
        return [float(verify(parse(answer[0]), parse(completions[0])))]
"""


def tried(function):
    """The rewards after the first call of a function, as a run has them."""
    names = function if isinstance(function, list) else str(function)
    rewards = make_rewards(RewardConfig(function=names))
    row = {"prompt": "6 * 7 = ?", "answer": "42"}
    prompts = Prompts(memory_rows([row]), make_tokenizer([]), DataConfig(), seed=0)
    try_rewards(rewards, prompts, 4, ALONE)
    return rewards


@pytest.mark.parametrize("name", ["score", "forgiving", "leaves"])
def test_functions_that_use_signals_work_in_threads(file, name):
    """Also one that takes their error for a wrong answer."""
    rewards = tried(f"{file(MATHS)}:{name}")
    with ThreadPoolExecutor(4) as threads:
        texts = [f"it is $\\boxed{{{n}}}$" for n in (41, 42, 43, 42)]
        assert list(threads.map(partial(rewards, TEXT), texts)) == [0.0, 1.0, 0.0, 1.0]
    if name == "leaves":
        with pytest.raises(UserError, match="leaves ended its process, for the completion 'leave'"):
            rewards(TEXT, "leave")


def test_functions_of_trl_that_use_signals_log_from_their_processes(file):
    rewards = tried(f"trl:{file(MATHS)}:logs")
    info = {}
    assert rewards(TEXT, "$42$", info) == 1.0
    assert info["reward_metrics"] == {"length": 4.0} and info["reward_columns"] == {"parsed": "42"}
    with pytest.raises(UserError, match="logs raised IndexError: list index out of range"):
        rewards(TEXT, "")


def test_an_error_of_signals_says_the_cure(file):
    rewards = make_rewards(RewardConfig(function=f"{file(MATHS)}:score"))
    with (
        ThreadPoolExecutor(1) as thread,
        pytest.raises(UserError, match=r"; rewards run in threads, .* parsing_timeout=None"),
    ):
        thread.submit(rewards, TEXT, "42").result()


MISTAKES = {
    "two parameters": ("def f(prompt, completion): return 0.0", "takes 2 positional arguments"),
    "no number": ("def f(prompt, completion, row): pass", "returned None .* one finite number"),
    "a name": ("def f(prompt, completion, row): return scor", "NameError: name 'scor' is not"),
    "a module": ("def f(prompt, completion, row): import nowhere", "No module named 'nowhere'"),
    "too many values of trl": (
        "def f(completions, **kwargs): return [0.0, 1.0]",
        "ValueError: it returned 2 values",
    ),
    "no score of verl": ("def f(solution_str, **kwargs): return {'acc': 1}", "KeyError: 'score'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_the_function_is_refused_at_the_first_call(file, name):
    text, message = MISTAKES[name]
    prefix = f"{name.split()[-1]}:" if name.split()[-1] in ("trl", "verl") else ""
    with pytest.raises(UserError, match=message):
        tried(f"{prefix}{file(text)}:f")


@pytest.mark.parametrize("name", ["plain", "refuses"])
def test_a_function_that_refuses_the_made_up_completion_is_taken(file, capsys, name):
    """Whether or not it uses signals: a policy may write what it wants."""
    plain = "def plain(prompt, completion, row): return float(completion.split('Result:')[1])"
    rewards = tried(f"{file(MATHS if name == 'refuses' else plain)}:{name}")
    assert "raised IndexError: list index out of range for prompt '6 * 7" in capsys.readouterr().err
    assert rewards(TEXT, "Result: 3") == 3.0


def test_the_time_of_a_call_begins_when_a_worker_is_free(file):
    watch = Oversight()
    name = f"{file('def f(prompt, completion, row): return 2.0')}:f"
    process = ProcessReward(name, None, 1, watch)
    worker = process.free.get()  # the only one

    def call() -> tuple[list, float]:
        with watch.limit(10.0, str) as limit:
            values = process.score_all([Answer(row=TEXT, completion="x", call=RewardCall())])
            return values, limit.deadline

    with ThreadPoolExecutor(1) as thread:
        called = thread.submit(call)
        while not watch.limits:
            time.sleep(0.01)
        watch.clock = 100.0
        process.free.put(worker)
        assert called.result(60) == ([2.0], 110.0)


def test_a_run_with_functions_of_trl(file, tmp_path):
    """Half a pass over 16 prompts is two steps of 2 x 2 updates. States, token ids and logs are
    those of the run."""
    path = file("""
        import pathlib

        def f(completions, completion_ids, trainer_state, n, log_metric, log_extra, **kwargs):
            with open(pathlib.Path(__file__).with_name("seen.txt"), "a") as seen:
                state = trainer_state
                print(state.global_step, state.max_steps, state.epoch, len(completion_ids[0]),
                      len(completions), file=seen)
            log_metric("number", n[0])
            log_extra("twice", [2 * number for number in n])
            return [0.1 * len(ids) for ids in completion_ids]
    """)
    rows = [{"prompt": f"{n}+", "answer": "1", "n": n} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "--output": tmp_path / "run",
        "--policy.model": "scratch",
        "--policy.dtype": "float32",
        "--num-epochs": 0.5,
        "--algo.updates-per-step": 2,
        "--algo.num-epochs": 2,
        "--data.train": tmp_path / "rows.jsonl",
        "--data.held-out": 4,
        "--data.max-prompt-tokens": 32,
        "--rollout.max-tokens": 4,
        "--engine.max-num-seqs": 16,
        "--rollout.prompts-per-step": 4,
        "--rollout.samples-per-prompt": 2,
    }
    flags = [x for pair in settings.items() for x in pair]
    flags += [
        "--rollout.dump",
        "--reward.function",
        f"trl:{path}:f",
        f"{file(MATHS, 'm.py')}:score",
    ]
    ended = fork("minirl.rl", flags, tmp_path / "log")
    assert ended.code == 0, ended.err
    seen = [line.split() for line in (tmp_path / "seen.txt").read_text().splitlines()]
    # A made-up answer before the model is loaded.
    made_up, *seen = seen
    assert made_up[:2] == ["0", "1"] and int(made_up[3]) > 40
    assert "score uses signals, which only a main thread handles: 2 processes" in ended.err
    # 4 held-out prompts before and after, and 4 prompts of 2 answers a step.
    assert [int(line[0]) for line in seen] == [0] * 8 + [4] * 4 + [8] * 4
    assert [int(line[4]) for line in seen] == [1] * 4 + [2] * 8 + [1] * 4
    assert {line[1] for line in seen} == {"8"} and {int(line[3]) for line in seen} <= set(range(5))
    assert {float(line[2]) for line in seen} == {0.0, 0.25, 0.5}  # of 16 prompts
    metrics = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    dumped = (tmp_path / "run/rollouts/step-0-rank-0.jsonl").read_text().splitlines()
    step = next(row for row in metrics if row["phase"] == "rl" and row["step"] == 0)
    infos = [json.loads(line)["info"] for line in dumped]
    logged = [info["reward_metrics"]["number"] for info in infos]
    assert step["reward/number"] == pytest.approx(sum(logged) / 8)
    assert all(i["reward_columns"]["twice"] == 2 * i["reward_metrics"]["number"] for i in infos)
