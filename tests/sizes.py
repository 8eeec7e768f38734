"""Code lines of minirl, counted alike everywhere: no blank lines, comments or docstrings.

python tests/sizes.py            # of each half, and of the path from a prompt to its gradient
"""

import ast
import io
import re
import tokenize
from pathlib import Path

from test_layers import AROUND, BELOW, STEP

ROOT = Path(__file__).parent.parent
MINIRL = ROOT / "minirl"
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
HALVES = {"the base": BELOW, "the step": STEP, "around it": AROUND}


def code_lines(file: Path) -> int:
    source = file.read_text()
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def size_of(rooms: list[str]) -> tuple[int, int]:
    """Files and code lines."""
    files = [file for room in rooms for file in (MINIRL / room).rglob("*.py")]
    return len(files), sum(map(code_lines, files))


def sizes() -> dict[str, tuple[int, int]]:
    """Files and code lines of each half, and of the programs above both."""
    found = {half: size_of(rooms) for half, rooms in HALVES.items()}
    programs = list(MINIRL.glob("*.py"))
    found["programs"] = len(programs), sum(map(code_lines, programs))
    return found


def path_of_a_prompt() -> list[Path]:
    """The files that minirl/README.md lists from a prompt to its gradient."""
    text = (MINIRL / "README.md").read_text()
    section = text.split("## From a prompt to its gradient\n")[1].split("\n## ")[0]
    return [MINIRL / name for name in re.findall(r"^\d+\. \[(\S+)\]", section, re.MULTILINE)]


if __name__ == "__main__":
    for half, (num_files, num_lines) in sizes().items():
        print(f"{half:10} {num_files:4} files {num_lines:7,} code lines")
    path = path_of_a_prompt()
    num_lines = sum(map(code_lines, path))
    print(f"{'one prompt':10} {len(path):4} files {num_lines:7,} code lines")
