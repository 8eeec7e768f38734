"""Rows, their order, and what answers earn: every mistake of a user's file or function is answered
with its place and its mend."""

import json
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import reasoning_gym
from tokenizers import AddedToken

import tiny
from in_memory import ALONE, memory_rows, read_all, split
from minirl.base.errors import UserError
from minirl.config.lookup import find_function
from minirl.config.shared import DataConfig, RewardConfig
from minirl.data import chat
from minirl.data.lengths import check_lengths
from minirl.data.order import Curriculum
from minirl.data.prompts import Prompts, open_prompts
from minirl.data.tokenizer import check_tokens, forget_tokens, load_tokenizer
from minirl.model.scratch import make_tokenizer
from minirl.rewards import loading, scoring


def jsonl(path, *rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return str(path)


def load(source, **cfg):
    return read_all(open_prompts(str(source), "data.train", DataConfig(**cfg), ALONE))


# --------------------------------------------------------------------------------------------------
# JSONL


def test_rows_come_in_file_order_under_the_names_prompt_and_answer(tmp_path):
    source = jsonl(
        tmp_path / "a.jsonl",
        {"question": "1+1", "solution": 2, "level": 3},
        "",
        {"question": "3+4", "solution": "7"},
        {"question": "no answer"},
    )
    rows = load(source, prompt_key="question", answer_key="solution")
    assert [row["prompt"] for row in rows] == ["1+1", "3+4", "no answer"]
    assert [row.get("answer") for row in rows] == [2, "7", None]
    assert "answer" not in rows[2]
    assert rows[0]["level"] == 3  # a reward function may want the rest


def test_a_row_seen_before_is_dropped(tmp_path):
    messages = [{"role": "user", "content": "b"}]
    rows = load(
        jsonl(
            tmp_path / "a.jsonl",
            *(
                {"prompt": p, "answer": answer}
                for p, answer in [
                    ("a", "1"),
                    (messages, "1"),
                    ("a", "1"),
                    ("c", "1"),
                    (messages, "1"),
                    ("a", "2"),
                    ("a", "1"),
                ]
            ),
        )
    )
    found = [(row["prompt"], row["answer"]) for row in rows]
    assert found == [("a", "1"), (messages, "1"), ("c", "1"), ("a", "2")]


def test_rows_stay_in_file_order_where_later_ones_repeat_a_prompt(tmp_path):
    rows = load(jsonl(tmp_path / "a.jsonl", *({"prompt": p} for p in "abacb")))
    assert [row["prompt"] for row in rows] == ["a", "b", "c"]


def test_line_separators_inside_a_text_do_not_end_its_line(tmp_path):
    """JSON lines end at a line feed; U+2028, U+0085 and their like may stand in a JSON string as
    they are."""
    text = "a\u2028b\u2029c\x85d"
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"prompt": text, "answer": "1"}, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    assert load(tmp_path / "a.jsonl")[0]["prompt"] == text


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"prompt": "a"}, "", '{"prompt": "b"'], r"line 3 is not JSON"),
        (
            [{"prompt": "a"}, {"question": "b", "level": 1}],
            r"line 2: data.prompt_key = 'prompt' must name a text or messages \(the row has "
            r"question, level\); correct the row, or set data.prompt_key to another column",
        ),
        ([["a"]], "line 1: a row must be an object of named values, not a list"),
        ([{"prompt": ""}], r"line 1: data.prompt_key = 'prompt' must name a text"),
        (
            [{"prompt": [{"role": "user"}]}],
            r"line 1: data.prompt_key = 'prompt' must name a text or messages; message 1 is",
        ),
        ([{"prompt": []}], r"line 1: data.prompt_key = 'prompt' must name a text"),
        ([], r"no rows"),
        (["", "  "], r"no rows"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path, lines, message):
    with pytest.raises(UserError, match=rf"data.train = .*a.jsonl: {message}"):
        load(jsonl(tmp_path / "a.jsonl", *lines))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(
        UserError,
        match=(
            r"data.train = '.*none.jsonl': no such file; give a JSONL, JSON, Parquet or CSV "
            r"file, a folder or hub id of datasets or reasoning_gym:NAME"
        ),
    ):
        load(tmp_path / "none.jsonl")


# --------------------------------------------------------------------------------------------------
# reasoning-gym


def test_generated_rows_are_the_library_s_own_and_distinct():
    rows = load("reasoning_gym:spell_backward?min_word_len=3&max_word_len=3&size=300&seed=4")
    direct = list(
        reasoning_gym.create_dataset(
            "spell_backward", min_word_len=3, max_word_len=3, size=300, seed=4
        )
    )
    answers = {entry["question"]: entry["answer"] for entry in direct}
    assert len(answers) < 300  # or nothing would have to be dropped
    assert sorted(row["prompt"] for row in rows) == sorted(answers)
    assert all(
        row["answer"] == answers[row["prompt"]]
        and row["metadata"]["source_dataset"] == "spell_backward"
        for row in rows
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("spell_bakward", r"reasoning-gym has no 'spell_bakward'; did you mean spell_backward\?"),
        ("zzzzzz", r"reasoning-gym has no 'zzzzzz'$"),
        ("products?terms=2", r"reasoning_gym:products\?terms=2: .*'terms'"),
        ("products?min_terms=5&max_terms=2", r"max_terms must be >= min_terms"),
        ("products?size=many", r"reasoning_gym:products\?size=many"),
        ("products?size", r"'size'"),
    ],
)
def test_a_bad_generator_or_option_is_refused(source, message):
    with pytest.raises(UserError, match=message):
        load(f"reasoning_gym:{source}")


# --------------------------------------------------------------------------------------------------
# split and order

ROWS = [{"prompt": f"row {i}", "answer": i} for i in range(40)]


def test_split_is_disjoint_whole_and_independent_of_row_order():
    train, held_out = split(ROWS, 7, seed=3)
    assert len(held_out) == 7
    assert sorted(row["answer"] for row in train + held_out) == list(range(40))
    assert [row["answer"] for row in train] == sorted(row["answer"] for row in train)
    shuffled = [ROWS[i] for i in np.random.default_rng(0).permutation(40)]
    again, same = split(shuffled, 7, seed=3)
    assert same == held_out
    assert sorted(again, key=lambda row: row["answer"]) == train
    assert split(ROWS, 7, seed=4)[1] != held_out
    # More rows do not bring a held-out prompt into training: the choice is by prompt.
    assert {row["prompt"] for row in split(ROWS + [{"prompt": "new"}], 8, seed=3)[1]} >= {
        row["prompt"] for row in split(ROWS, 7, seed=3)[1]
    }


def test_held_out_messages_stay_out_of_training():
    rows = [{"prompt": [{"role": "user", "content": str(i)}]} for i in range(5)]
    train, held_out = split(rows, 2, seed=0)
    assert len(train) == 3
    assert not any(row in held_out for row in train)


@pytest.mark.parametrize("held_out", [40, 41])
def test_holding_out_everything_is_refused(held_out):
    with pytest.raises(
        UserError, match=rf"data.held_out = {held_out} leaves nothing of the 40 distinct prompts"
    ):
        split(ROWS, held_out, seed=0)


def prompts(seed=0, shuffle=True, rows=ROWS, **cfg):
    return Prompts(rows, make_tokenizer([]), DataConfig(**cfg), seed=seed, shuffle=shuffle)


def test_a_ticket_s_row_depends_on_seed_and_ticket_alone():
    in_turn = [prompts().row(t)["answer"] for t in range(100)]
    one, order = prompts(), np.random.default_rng(1).permutation(100)
    asked = {
        int(t): one.row(int(t))["answer"] for t in order
    }  # over epochs back and forth, as engines that pull tickets do
    assert [asked[t] for t in range(100)] == in_turn
    assert [prompts(seed=1).row(t)["answer"] for t in range(100)] != in_turn


def test_each_epoch_is_a_new_permutation_and_evaluation_keeps_file_order():
    p = prompts()
    answers = [p.row(ticket)["answer"] for ticket in range(3 * 40)]
    epochs = [answers[:40], answers[40:80], answers[80:]]
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, range(40)]}) == 4
    assert [prompts(shuffle=False).row(t)["answer"] for t in range(80)] == [*range(40), *range(40)]


# --------------------------------------------------------------------------------------------------
# the curriculum


def drawn(order, first, num):
    order.start(first)
    return [order[first + i] for i in range(num)]


def test_a_curriculum_is_a_function_of_seed_ticket_and_outcomes():
    """Whatever was drawn before, on whatever rank; of a new step another draw, and no prompt twice
    before all have come."""
    one, other = (Curriculum(prompts().order, 0.1) for _ in range(2))
    assert sorted(drawn(one, 0, 40)) == list(range(40)) and drawn(one, 0, 80) == 2 * drawn(
        one, 0, 40
    )
    assert drawn(one, 16, 40) != drawn(one, 0, 40) == drawn(other, 0, 40)
    assert drawn(Curriculum(prompts(seed=1).order, 0.1), 0, 40) != drawn(one, 0, 40)
    results = 4 * [(row, row % 3 == 0) for row in range(30)]
    one.record(np.array(results))
    assert drawn(one, 16, 40) != drawn(other, 16, 40)
    for result in reversed(results):
        other.record(np.array([result]))
    resumed = Curriculum(prompts().order, 0.1, json.loads(json.dumps(one.save())))
    assert drawn(one, 16, 40) == drawn(other, 16, 40) == drawn(resumed, 16, 40)
    asked = [one[16 + i] for i in (5, 0, 39, 5)]
    assert asked == [drawn(one, 16, 40)[i] for i in (5, 0, 39, 5)]


@pytest.mark.parametrize("floor", [0.1, 0.5, 1.0])
def test_a_curriculum_draws_by_the_variance_of_success(floor):
    """First draws of many steps against the weights by hand: never tried, half right, always right,
    hardly ever right."""
    tried = {0: [0, 0], 1: [8, 4], 2: [98, 98], 3: [18, 1]}
    order = Curriculum(prompts(rows=[{"prompt": str(n)} for n in range(4)]).order, floor)
    for row, (tries, right) in tried.items():
        results = [(row, n < right) for n in range(tries)]
        order.record(np.array(results, int).reshape(-1, 2))
    weights = np.array(
        [
            max(4 * (right + 1) / (tries + 2) * (1 - (right + 1) / (tries + 2)), floor)
            for tries, right in tried.values()
        ]
    )
    assert weights[0] == weights[1] == 1.0 and weights[2] == floor
    counts = np.bincount([drawn(order, step, 1)[0] for step in range(4000)], minlength=4)
    assert np.abs(counts / 4000 - weights / weights.sum()).max() < 0.03


def test_a_curriculum_leaves_no_room_for_weighted_sources(tmp_path):
    rows = [{"prompt": f"row {n}"} for n in range(5)]
    sources = [jsonl(tmp_path / f"{name}.jsonl", *rows) + "?weight=1" for name in "ab"]
    mixed = Prompts(
        open_prompts(sources, "data.train", DataConfig(), ALONE),
        make_tokenizer([]),
        DataConfig(),
        seed=0,
    )
    with pytest.raises(
        UserError,
        match=(
            "rollout.curriculum_floor = 0.1 draws prompts by their success, and the `weight` "
            "of sources .* give no weights"
        ),
    ):
        Curriculum(mixed.order, 0.1)


def test_a_prompt_above_the_limit_is_refused_with_its_length_and_row():
    rows = memory_rows([{"prompt": "short"}, {"prompt": "x" * 30}])
    rows.marks[:] = 1
    length = (
        30 + len("sys") + 5
    )  # a token a byte, and <|system|> <|end|> <|user|> <|end|> <|assistant|>
    fits = prompts(rows=rows, system_prompt="sys", max_prompt_tokens=length)
    assert len(fits.encode(rows[1])) == length
    assert check_lengths(fits, ALONE, 1) == 0
    tight = prompts(rows=rows, system_prompt="sys", max_prompt_tokens=length - 1)
    with pytest.raises(
        UserError,
        match=(
            rf"data.train = memory: row 2: a prompt has {length} tokens, more than "
            rf"data.max_prompt_tokens = {length - 1}; .*'x+'"
        ),
    ):
        check_lengths(tight, ALONE, 1)
    rows.marks[1] = 2  # it is known not to be too long
    assert check_lengths(tight, ALONE, 1) == 0


def test_special_tokens_that_the_model_lacks_are_text(tmp_path):
    """As the token of images in a model for text alone."""
    folder = tiny.make(tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    size = len(tokenizer)
    tokenizer.add_tokens([AddedToken("<image>", special=True)], special_tokens=True)
    assert chat.encode(tokenizer, "a<image>")[-1] == size
    check_tokens(tokenizer, folder, size, "policy.model = x")
    forget_tokens(tokenizer, size)
    tokens = chat.encode(tokenizer, "a<image>")
    assert max(tokens) < len(tokenizer) == size and tokenizer.decode(tokens) == "a<image>"


# --------------------------------------------------------------------------------------------------
# rewards known by name


def reward(name, completion, answer):
    return loading.make_rewards(RewardConfig(function=name))(
        {"prompt": "q", "answer": answer}, completion
    )


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("42", "42", 1),
        (" 42\n", 42, 1),
        ("42", 42.0, 1),
        ("0.00005", 5e-5, 1),
        ("42.", "42", 0),
        ("", "42", 0),
        ("Sun", "sun", 0),
    ],
)
def test_exact(completion, answer, value):
    assert reward("exact", completion, answer) == value


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("6 * 7 = 42. Answer: 42", "42", 1),
        ("answer:  $1,234.", 1234, 1),
        ("Answer: 41. No, Answer: 42", "42", 1),
        ("Answer: -3", "-3", 1),
        ("Answer: 2.5", "2.5", 1),
        ("that makes 42", "42", 0.3),
        ("Answer: 42 or 41", "42", 1),
        ("Answer: 41, not 42", "42", 0.3),
        ("Answer: 42. Answer: 41", "42", 0),
        ("42 or 41", "42", 0),
        ("Answer: 420", "42", 0),
        ("", "42", 0),
        ("Answer: forty-two", "42", 0),
        ("**Answer: 5**", "5", 1),
        ("Answer: 5 - that is all", 5.0, 1),
        ("Answer: 1/2", "1", 0),
        ("Answer: 12e5", "1", 0),
        ("Answer: 3.0", 3.0, 1),
        ("Answer: 72.00", "72", 1),
        ("so 3.50", "3.5", 0.3),
        ("Answer: \N{MINUS SIGN}5", -5, 1),
        ("**Answer:** 72", "72", 1),
        ("Answer: 9007199254740993", "9007199254740992", 0),
        ("Answer: 3 1/2", "3", 0),
        ("Answer: 3\\frac{1}{2}", "3", 0),
        ("Answer: 1 000", "1", 0),
        ("Answer: 3 × 4", "3", 0),
        ("Answer: 3**2", "3", 0),
        ("Answer: 3:4", "3", 0),
        ("Answer: 1,2", "12", 0),
        ("Answer: 1,234,567", "1234567", 1),
        ("Answer: $\\boxed{42}$", "42", 1),
        ("Answer: (10)", "10", 1),
        ("Answer: €10", "10", 1),
        ("Answer: 18. She sells 9", "18", 1),
        ("Answer: 30, 2 hours later", "30", 1),
        ("Answer: 18 3 times", "18", 1),
        ("Answer: (3)/(4)", "3", 0),
        ("Answer: \\boxed{3}/4", "3", 0),
        ("Answer: \\boxed{2}+3", "2", 0),
        ("Answer: (3)^2", "3", 0),
        ("Answer: (5)(3)", "5", 0),
        ("Answer: \\boxed{3}\\frac{1}{2}", "3", 0),
        ("<think>Answer: 42</think>I do not know", "42", 0),
        ("<think>41?</think>Answer: 42", "42", 1),
        ("<think>Answer: 42, or", "42", 0),
    ],
)
def test_final_answer(completion, answer, value):
    assert reward("final_answer", completion, answer) == value


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("0.5", "1/2", 1),
        ("$\\frac{1}{2}$", "0.5", 1),
        ("so \\boxed{\\frac{2}{4}}", "\\frac{1}{2}", 1),
        ("The answer is 72.", 72, 1),
        ("1/3", "1/2", 0),
        ("", "1", 0),
        ("it is \\boxed{x^2 + 1}", "$1 + x^2$", 1),
        ("\\boxed{7}", "8", 0),
        # the forms in which data sets write their answers: bare LaTeX, without dollars
        ("\\boxed{\\sqrt{2}}", "\\sqrt{2}", 1),
        ("\\boxed{2\\pi}", "2\\pi", 1),
        ("\\boxed{10^{-6}}", "1e-6", 1),
        ("\\boxed{100000}", "1E5", 1),
        ("\\boxed{\\frac{3}{2}}", "1 1/2", 1),
        ("\\boxed{1}", "1 1/2", 0),
        ("\\boxed{-1.5}", "-1 1/2", 1),
        ("\\boxed{2}", "2\\pi", 0),
        ("\\boxed{(1, 2)}", "(1,2)", 1),
        ("\\boxed{18.90}", "\\$18.90", 1),
        ("\\boxed{32348}", "\\$32,\\!348", 1),
        ("\\boxed{5}", "\\[5\\]", 1),
        ("<think>\\boxed{5}</think> no", "5", 0),
    ],
)
def test_math_verify_compares_values(completion, answer, value):
    assert reward("math_verify", completion, answer) == value


def test_math_verify_works_in_threads():
    """Its own time limits use signals, which only the main thread may set."""
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda c: reward("math_verify", c, "1/2"), ["0.5", "2"])) == [1, 0]


def test_reasoning_gym_scores_with_the_generator_s_own_grader():
    (row, *_) = load("reasoning_gym:spell_backward?size=3&seed=1")
    graded = loading.make_rewards(RewardConfig(function="reasoning_gym"))
    assert graded(row, f" {row['answer']}\n") == 1
    own = reasoning_gym.create_dataset("spell_backward", size=3, seed=1).score_answer
    for completion in ("", "zzz", row["answer"][:-1]):
        assert graded(row, completion) == own(completion, row) < 1


# --------------------------------------------------------------------------------------------------
# rewards of the user's own


def written(tmp_path, body, name="my_reward.py"):
    (tmp_path / name).write_text(body)
    return tmp_path / name


def test_a_function_of_a_file_is_called_with_prompt_completion_and_row(tmp_path):
    file = written(
        tmp_path,
        "def score(prompt, completion, row):\n"
        "    return len(prompt) + 10 * len(completion) + 100 * row['x']\n",
    )
    graded = loading.make_rewards(RewardConfig(function=f"{file}:score"))
    row = {"prompt": "ab", "x": 3}
    assert graded(row, "abcd") == 342.0


@pytest.mark.parametrize(
    ("body", "function", "message"),
    [
        (None, "{folder}/none.py:score", r"no file .*none\.py"),
        ("", "{folder}/my_reward.py:score", r"my_reward\.py has no function score"),
        ("score = 3\n", "{folder}/my_reward.py:score", r"my_reward\.py has no function score"),
        (
            "def score(:\n",
            "{folder}/my_reward.py:score",
            r"my_reward\.py does not import: SyntaxError",
        ),
        (
            "import no_such_module\n",
            "{folder}/my_reward.py:score",
            r"does not import: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        (
            None,
            "exakt",
            r"'exakt' is neither registered \(exact, final_answer, math_verify, reasoning_gym, "
            r"python_tests\) nor of the form file.py:function",
        ),
    ],
)
def test_a_reward_that_cannot_be_had_is_refused(tmp_path, body, function, message):
    if body is not None:
        written(tmp_path, body)
    with pytest.raises(UserError, match=rf"reward.function = .*{message}"):
        loading.make_rewards(RewardConfig(function=function.format(folder=tmp_path)))


def test_files_of_one_name_are_modules_of_their_own(tmp_path):
    """What they define can be pickled, too."""
    path = list(sys.path)
    for number, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        text = f"import dataclasses\n@dataclasses.dataclass\nclass Own:\n    y: int = {number}\n"
        file = written(tmp_path / name, text + "def made():\n    return Own()\n", "same.py")
        made = find_function("x", f"{file}:made", {})()
        assert made.y == number and pickle.loads(pickle.dumps(made)) == made
    assert sys.path == path


def test_a_neighbour_is_imported_and_another_of_its_name_is_refused(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        written(tmp_path / name, f"x = {name!r}\n", "a_helper.py")
        written(tmp_path / name, "raise ValueError\n", "json.py")  # Python's own stays
        text = "import a_helper, json\ndef f():\n    return json.dumps(a_helper.x)\n"
        written(tmp_path / name, text, "m.py")
    assert find_function("x", f"{tmp_path}/a/m.py:f", {})() == '"a"'
    with pytest.raises(UserError, match="its neighbour a_helper has the name of one in .*/a, "):
        find_function("x", f"{tmp_path}/b/m.py:f", {})
    lonely = written(tmp_path, "import another_helper\n", "lonely.py")
    with pytest.raises(UserError, match="No module named 'another_helper'"):
        find_function("x", f"{lonely}:f", {})
    assert "minirl_user_lonely" not in sys.modules


def test_a_file_is_imported_once(tmp_path):
    file = written(
        tmp_path, "seen = []\ndef f():\n    return seen\ndef g():\n    return seen\n", "n.py"
    )
    assert find_function("x", f"{file}:f", {})() is find_function("x", f"{file}:g", {})()


def test_a_file_that_is_not_python_is_refused(tmp_path):
    file = written(tmp_path, "def score(*_): return 1.0\n", "my_reward.txt")
    with pytest.raises(UserError, match="my_reward.txt"):
        loading.make_rewards(RewardConfig(function=f"{file}:score"))


def test_a_file_with_a_dataclass_and_postponed_annotations_imports(tmp_path):
    """dataclasses looks its module up in sys.modules."""
    file = written(
        tmp_path,
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n\n@dataclass\nclass Score:\n    value: float\n\n"
        "def score(prompt, completion, row):\n    return Score(0.5).value\n",
    )
    assert loading.make_rewards(RewardConfig(function=f"{file}:score"))({"prompt": "q"}, "a") == 0.5


def graded_by(function):
    return scoring.Rewards((1.0, function, "my.py:score"))({"prompt": "the prompt"}, "the answer")


@pytest.mark.parametrize(
    "value", [None, "0.5", [1.0], float("nan"), float("inf"), np.array([1.0, 2.0]), 1j], ids=str
)
def test_a_result_that_is_not_one_finite_number_is_refused_with_its_value(value):
    with pytest.raises(UserError) as error:
        graded_by(lambda *_: value)
    for part in (
        "reward.function = my.py:score returned",
        repr(value),
        "'the prompt'",
        "'the answer'",
        "must return one finite number",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "value",
    [True, False, 0, 1, -0.5, np.float32(0.25), np.float64(-2), np.int64(3), np.bool_(True)],
    ids=repr,
)
def test_bools_and_numpy_scalars_are_numbers(value):
    got = graded_by(lambda *_: value)
    assert type(got) is float
    assert got == value


def test_an_exception_of_the_function_is_told_with_its_input():
    def broken(prompt, completion, row):
        return row["nothing"]

    with pytest.raises(
        UserError,
        match=(
            r"my.py:score raised KeyError: 'nothing' for prompt 'the prompt', completion 'the "
            r"answer'"
        ),
    ):
        graded_by(broken)


# --------------------------------------------------------------------------------------------------
# rows that a reward needs


def check_rows(rewards, rows):
    for row in rows:
        rewards.check_row(row)


@pytest.mark.parametrize("name", ["exact", "final_answer", "math_verify"])
def test_rows_without_an_answer_are_refused_before_anything_runs(name):
    check_rows(scoring.Rewards((1.0, None, name)), ROWS)
    with pytest.raises(
        UserError,
        match=(
            rf"reward.function = {name} compares with the answer, and a row has none "
            r"\(data.answer_key\): .*no answer here"
        ),
    ):
        check_rows(scoring.Rewards((1.0, None, name)), [*ROWS, {"prompt": "no answer here"}])
    with pytest.raises(UserError, match=r"data.answer_key"):
        check_rows(
            scoring.Rewards((1.0, None, name)), [{"prompt": "p", "answer": None}]
        )  # or the answer `None` would be right


@pytest.mark.parametrize("answer", ["so 5\n#### 5", "3/4", "$5", "B", "1e-3", "+5", ".5"])
def test_an_answer_that_is_no_number_is_refused_where_numbers_are_compared(answer):
    rewards = scoring.Rewards((1.0, None, "final_answer"))
    row = {"prompt": "p", "answer": answer}
    with pytest.raises(UserError, match="compares numbers, and .*; take exact or math_verify"):
        check_rows(rewards, [*ROWS, row])
    check_rows(rewards, [{"prompt": "p", "answer": fine} for fine in ("1,234", "-3.50", 1e-7)])


@pytest.mark.parametrize(
    "row",
    [{"prompt": "p"}, {"prompt": "p", "metadata": {}}, {"prompt": "p", "metadata": None}],
    ids=["none", "empty", "null"],
)
def test_rows_without_a_generator_are_refused_by_reasoning_gym(row):
    check_rows(
        scoring.Rewards((1.0, None, "reasoning_gym")),
        [{"prompt": "p", "metadata": {"source_dataset": "products"}}],
    )
    with pytest.raises(UserError, match=r"needs rows with metadata.source_dataset"):
        check_rows(scoring.Rewards((1.0, None, "reasoning_gym")), [row])


def test_a_function_of_the_user_s_takes_any_row():
    check_rows(scoring.Rewards((1.0, None, "my.py:score")), [{"prompt": "p"}])
