"""Tools between a question and its answer.

The policy calls one by a fenced block with its name, the last of its answer,

    ```python
    print(sum(n for n in range(1000) if n % 7 == 0))
    ```

and reads the result as the next message. An answer without such a block is the final one, which the
reward functions score.

    --env.name tools:python --env.max-turns 4 --data.system-prompt
        "To run a program, write it in a ```python block and wait for what it prints."
    --env.name 'tools:search,calculate?corpus=passages.jsonl' --env.max-turns 6

Only the prompt tells the policy about its tools: write it as you like. A program that is the answer
goes in a block without a name.
"""

import ast
import math
import operator
import re
import textwrap
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import cache, partial

import bm25s
import numpy as np

from minirl.base.errors import UserError
from minirl.data.sources import open_source
from minirl.envs import Env, Observation, Result, State
from minirl.sandbox import runner


class Tools(Env):
    """One question, calls of the tools below, one final answer.

    Args:
        names: of tools, separated by commas.
        output: longest reply in characters.
        seconds: wall time that a program may take; twice that where no core is free.
        memory_mb: address space of a program in MiB.
        corpus: a source of passages (data/sources.py).
        passages: number of passages that answer a search.

    Raises:
        ValueError: for an unknown tool or a limit that is not above 0.
        UserError: if the sandbox or the corpus is not there.
    """

    graded = True
    needs_prompt = True

    def __init__(
        self,
        names: str,
        *,
        output: int = 2000,
        seconds: float = 5.0,
        memory_mb: int = 1024,
        corpus: str = "",
        passages: int = 3,
    ):
        if min(output, seconds, memory_mb, passages) <= 0:
            raise ValueError("output, seconds, memory_mb and passages must be above 0")
        # The sandbox counts bytes, of which a character has at most 4.
        limits = runner.ProgramLimits(seconds=seconds, memory_mb=memory_mb, output=4 * output)
        self.tools: dict[str, Callable[[str], str]] = {
            "python": partial(python, limits=limits),
            "search": partial(search, corpus=corpus, passages=passages),
            "calculate": calculate,
        }
        chosen = names.split(",")
        unknown = set(chosen) - self.tools.keys()
        if unknown:
            raise ValueError(
                f"no tool {min(unknown)!r}; there are {', '.join(self.tools)}, to be named with "
                "commas between them"
            )
        if "python" in chosen:
            runner.check_supported()
        if "search" in chosen:
            open_corpus(corpus)
        self.output = output
        fence = rf"```({'|'.join(chosen)})[ \t]*\r?\n(.*?)```"
        self.call = re.compile(fence, re.DOTALL | re.IGNORECASE)

    async def reset(self, row: dict) -> Observation:
        """Return the row's prompt."""
        return row["prompt"]

    def step(self, state: State) -> Result:
        """Carry out the last call of an answer; without one the episode is done."""
        calls = self.call.findall(state.answer)
        if not calls:
            return Result(done=True)
        name, text = calls[-1]
        try:
            reply = self.tools[name.lower()](textwrap.dedent(text))  # it may be in a list
        except ValueError as error:
            reply = f"Error: {error}"
        if len(reply) > self.output:
            reply = f"{reply[: self.output]}\n... (cut)"
        return Result(observation=reply)


def python(program: str, limits: runner.ProgramLimits) -> str:
    """Return what a program prints, and how it ended if not well."""
    result = runner.run(program, limits)
    output = result.output.strip()
    if result.status == "ok":
        return output or "(no output)"
    return f"({result.status})\n{output}".strip()


OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def evaluate(expression: str) -> Fraction:
    """Return the exact value of an expression of numbers with + - * / and parentheses.

    The syntax tree is walked, nothing is executed. There are no powers: ten characters of them can
    take a year.

    Raises:
        ValueError: for anything else.
    """

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=float() as number) if 0.0 < number < math.inf:
                # As it is written: 0.1 is 1/10.
                return Fraction(str(ast.get_source_segment(source, node)).replace("_", ""))
            case ast.Constant(value=int() | float()):
                return Fraction(str(node.value))
            case ast.UnaryOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](value(node.operand))
            case ast.BinOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"{ast.unparse(node)} is neither a number nor one of + - * /")

    if len(expression) > 200:
        raise ValueError("an expression has 200 characters at most")
    source = expression.strip()
    try:
        return value(ast.parse(source, mode="eval").body)
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except SyntaxError as error:
        raise ValueError(str(error)) from error


def calculate(expression: str) -> str:
    """Return the value of an expression, to 28 digits unless it is whole.

    Raises:
        ValueError: it has none.
    """
    value = evaluate(expression)
    if value.denominator == 1 and abs(value) < 10**100:
        return str(value.numerator)
    return str(Decimal(value.numerator) / value.denominator)


def search(query: str, corpus: str, passages: int) -> str:
    """Return the passages that score highest by BM25, best first.

    Only passages with a word of the query count. Robertson and Zaragoza 2009.
    """
    index, texts = open_corpus(corpus)
    (words,) = bm25s.tokenize([query], return_ids=False, show_progress=False)
    scores = index.get_scores(words) if words else np.zeros(len(texts))
    best = np.argsort(-scores, kind="stable")[:passages].tolist()
    matching = [texts[i] for i in best if scores[i] > 0]
    return "\n\n".join(matching) or "Nothing found."


@cache
def open_corpus(corpus: str) -> tuple[bm25s.BM25, Sequence[str]]:
    """Index a corpus, once in a process.

    Returns:
        The index, and the passages: `text` of each row, below its `title` if it has one.

    Raises:
        UserError: for a corpus that is not there, or a row without `text`.
    """
    source = open_source(corpus, "env.name: corpus")
    texts = []
    for number, row in enumerate(source.rows):
        if not isinstance(row, dict) or not str(row.get("text") or "").strip():
            raise UserError(
                f"{source.where(number)} has no `text`; a passage is a row with `text` and, if it "
                "has one, `title`"
            )
        parts = [str(part) for part in (row.get("title"), row["text"]) if part]
        texts.append("\n".join(parts))
    index = bm25s.BM25()
    index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    return index, texts
