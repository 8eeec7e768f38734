"""Tools between a question and its answer. The policy calls one by a fenced block with its name,
the last of its answer,

    ```python
    print(sum(n for n in range(1000) if n % 7 == 0))
    ```

and reads what came of it as the next message. An answer without such a block is the final one,
which the reward functions score.

    --env.name tools:python --env.max-turns 4 --data.system-prompt "To run a program, write it in a
    ```python block and wait for what it prints."
    --env.name 'tools:search,calculate?corpus=passages.jsonl' --env.max-turns 6

Nothing tells the policy of its tools but the prompt: what it is told is yours. A program that is
the answer goes in a block without a name.
"""

import ast
import operator
import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from functools import cache, partial

import bm25s
import numpy as np

from minirl import sandbox
from minirl.data.sources import open_source
from minirl.envs.base import Result, State
from minirl.envs.single_turn import SingleTurn
from minirl.errors import UserError


class Tools(SingleTurn):
    """One question, any of the tools below, one final answer."""

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
        """`names`: of tools, with commas. `output`: characters of a reply. `seconds`, `memory_mb`:
        limits of a program. `corpus`: a source of passages (data/sources.py), `passages` of which
        answer a search. Raises ValueError, UserError.
        """
        if min(output, seconds, memory_mb, passages) <= 0:
            raise ValueError("output, seconds, memory_mb and passages are above 0")
        limits = sandbox.Limits(
            seconds=seconds, memory_mb=memory_mb, output=4 * output
        )  # bytes, of which a character has 4 at most
        known = {
            "python": partial(python, limits=limits),
            "search": partial(search, corpus=corpus, passages=passages),
            "calculate": calculate,
        }
        if unknown := set(names.split(",")) - known.keys():
            raise ValueError(
                f"no tool {min(unknown)!r}; there are {', '.join(known)}, to be named with commas between them"
            )
        self.tools, self.output = {name: known[name] for name in names.split(",")}, output
        self.call = re.compile(rf"```({'|'.join(self.tools)})\n(.*?)```", re.DOTALL)
        if "python" in self.tools:
            sandbox.check_supported()
        if "search" in self.tools:
            open_corpus(corpus)

    def step(self, state: State) -> Result:
        calls = self.call.findall(state.answer)
        if not calls:
            return Result(done=True)
        name, text = calls[-1]
        try:
            reply = self.tools[name](text)
        except ValueError as error:
            reply = f"Error: {error}"
        return Result(
            observation=reply if len(reply) <= self.output else f"{reply[: self.output]}\n... (cut)"
        )


def python(program: str, limits: sandbox.Limits) -> str:
    """What the program prints, and how it ended if not well."""
    result = sandbox.run(program, limits)
    ended = "" if result.status == "ok" else f"({result.status})"
    return "\n".join(filter(None, (ended, result.output.strip()))) or "(no output)"


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def evaluate(expression: str) -> Fraction:
    """The exact value of a sum, difference, product or quotient of numbers. The syntax tree is
    walked, nothing is executed; there are no powers, ten characters of which can take a year.
    Raises ValueError for anything else.
    """

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int() | float()):
                return Fraction(str(node.value))  # 0.1 is 1/10
            case ast.UnaryOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](value(node.operand))
            case ast.BinOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"{ast.unparse(node)} is neither a number nor one of + - * /")

    if len(expression) > 200:
        raise ValueError("an expression has 200 characters at most")
    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError) as error:
        raise ValueError(str(error)) from error


def calculate(expression: str) -> str:
    """Its value to 28 digits. Raises ValueError."""
    value = evaluate(expression)
    return str(Decimal(value.numerator) / value.denominator)


def search(query: str, corpus: str, passages: int) -> str:
    """The passages that score highest by BM25 (Robertson and Zaragoza 2009), best first; only those
    with a word of the query.
    """
    index, texts = open_corpus(corpus)
    (words,) = bm25s.tokenize([query], return_ids=False, show_progress=False)
    scores = index.get_scores(words) if words else np.zeros(len(texts))
    best = [i for i in np.argsort(-scores, kind="stable")[:passages].tolist() if scores[i] > 0]
    return "\n\n".join(texts[i] for i in best) or "Nothing found."


@cache
def open_corpus(corpus: str) -> tuple[bm25s.BM25, Sequence[str]]:
    """Index and passages of rows with a `text`, and a `title` if they have one; made once in a
    process. Raises UserError.
    """
    source = open_source(corpus, "env.name: corpus")
    for n, row in enumerate(source.rows):
        if not isinstance(row, dict) or not str(row.get("text") or "").strip():
            raise UserError(
                f"{source.where(n)} has no `text`; a passage is a row with `text` and, if it has one, `title`"
            )
    texts = ["\n".join(filter(None, (row.get("title"), row["text"]))) for row in source.rows]
    index = bm25s.BM25()
    index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    return index, texts
