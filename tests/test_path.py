"""How far a reader has to walk: the files from a prompt to its gradient, and those that a plain
GRPO step enters, traced in the program that README.md prints."""

import json
import re
from pathlib import Path

import pytest
import torch

import sizes
from programs import QUICKSTART, ROOT, WORDS, fork
from test_readme import printed

# Bounds, as they were reached. They may only fall.
LISTED = 20, 3_700  # files and code lines that minirl/README.md lists
ENTERED = 40, 5_920  # and those of which a step enters a function
TRACED = """
import json, sys, threading

from my_trainer import MyTrainer
from minirl.config.rl import RLConfig
from minirl.supervise import cli


class Traced(MyTrainer):
    entered = set()
    is_noted = False

    def collect(self, step):
        if step == 0:  # Threads that score answers begin in this step, and go on in the next.
            threading.setprofile(self.note)
        if step == 1:
            self.is_noted = True
            sys.setprofile(self.note)
        if step == 2:
            sys.setprofile(None)
            threading.setprofile(None)
            files = [file for file in self.entered if file.startswith({root!r})]
            open({out!r}, "w").write(json.dumps(files))
        return super().collect(step)

    def note(self, frame, event, argument):
        if event == "call" and self.is_noted:
            self.entered.add(frame.f_code.co_filename)


if __name__ == "__main__":
    cli.run(RLConfig, Traced.main)
"""


@pytest.fixture(scope="module")
def entered(tmp_path_factory) -> set[Path]:
    """Files of minirl of which a function is called between two calls of `Trainer.collect`, by any
    thread, in a run on one rank."""
    folder = tmp_path_factory.mktemp("path")
    printed("README.md", "my_trainer.py", folder)
    out = folder / "files.json"
    (folder / "traced.py").write_text(TRACED.format(root=str(sizes.MINIRL), out=str(out)))
    settings = {
        "--config": QUICKSTART,
        "--output": folder / "run",
        "--num-steps": 3,
        "--sft.num-steps": 0,
        "--eval.every": 0,
        "--checkpoint.every": 0,
        "--data.train": WORDS,
        "--data.held-out": 2,
        "--rollout.prompts-per-step": 4,
        "--rollout.samples-per-prompt": 4,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)  # the forkserver gives it to its children
        flags = [word for setting in settings.items() for word in setting]
        ended = fork("traced", flags, folder / "log", 240, world=1)
    assert ended.code == 0, ended.err
    rows = [json.loads(x) for x in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["phase"] == "rl"]
    assert len(steps) == 3
    for row in steps:  # the printed trainer takes from rewards what its answers' lengths cost
        assert row["shaped_reward"] < row["reward"]
    return {Path(file) for file in json.loads(out.read_text())}


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="an engine on the CPU")


@on_cpu
def test_a_step_enters_few_files(entered):
    num_files, num_lines = ENTERED
    found = sorted(str(file.relative_to(sizes.MINIRL)) for file in entered)
    total = sum(map(sizes.code_lines, entered))
    assert len(found) <= num_files and total <= num_lines, (len(found), total, found)


@on_cpu
def test_the_listed_files_carry_a_prompt(entered):
    assert set(sizes.path_of_a_prompt()) <= entered


def test_a_prompt_passes_few_files():
    listed = sizes.path_of_a_prompt()
    num_files, num_lines = LISTED
    assert 10 < len(listed) == len(set(listed)) <= num_files
    assert sum(map(sizes.code_lines, listed)) <= num_lines


@pytest.mark.parametrize("page", ["README.md", "minirl/README.md"])
def test_pages_say_the_sizes_of_the_halves(page):
    """Rounded to hundreds of lines, as `python tests/sizes.py` prints them, and not far off."""
    text = (ROOT / page).read_text()
    for half, (_, num_lines) in sizes.sizes().items():
        (said,) = re.findall(rf"\*\*{half}\*\*.{{0,60}}?([\d,]+) lines", text, re.DOTALL)
        assert abs(int(said.replace(",", "")) - num_lines) <= 0.05 * num_lines, (half, num_lines)
