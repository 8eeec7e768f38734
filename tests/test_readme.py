"""The documents tell the truth where that can be checked: links, paths, flags, commands, code.

Above each block of commands or code stands a comment:

    <!-- runs: tests/test_x.py::test_name -->   tests that run it, in its smallest form
    <!-- not run: reason -->                    why no test does
    <!-- run -->                                a test of this file runs it as it stands
"""

import ast
import dataclasses
import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

import composition
import contents
import family_table
from minirl.algo import advantages, losses
from minirl.base.oversight import Oversight
from minirl.config.lookup import find_function
from minirl.config.parse import parse_flags
from minirl.config.rl import AlgoConfig, RLConfig
from minirl.config.shared import EvaluateConfig, ExportConfig
from minirl.config.supervised import DPOConfig, KTOConfig, RMConfig, ServeConfig, SFTConfig
from minirl.envs import Agent, Session, State
from minirl.envs.registry import make_env
from minirl.model.families import FAMILIES
from minirl.plan.__main__ import parser
from minirl.run import user_algorithms
from minirl.view import __main__ as view
from programs import QUICKSTART, ROOT, fork

README = ROOT / "README.md"
CHANGES = ROOT / "minirl" / "CHANGES.md"  # names what is gone, so its names are not looked up
PAGES = [
    README,
    CHANGES,
    *(
        page
        for folder in ("minirl", "configs", "benchmarks", "tests", "launch")
        for page in sorted((ROOT / folder).rglob("README.md"))
    ),
]
PROGRAMS = {
    "minirl.rl": RLConfig,
    "minirl.sft": SFTConfig,
    "minirl.rm": RMConfig,
    "minirl.rm serve": ServeConfig,
    "minirl.dpo": DPOConfig,
    "minirl.kto": KTOConfig,
    "minirl.evaluate": EvaluateConfig,
    "minirl.checkpoint": ExportConfig,
    "minirl.plan": None,  # flags of its own, and those of what it plans
    "minirl.view": None,  # flags of its own
    "minirl.walk": None,  # flags of its own
}
PLAN_FLAGS = set(re.findall(r"--[\w-]+", parser().format_help()))
VIEW_FLAGS = set(re.findall(r"--[\w-]+", view.parser().format_usage()))
# Flags in the text that belong to no config of minirl.
OTHER_FLAGS = {
    "--break",
    "--config",
    "--figures",
    "--find-links",
    "--fix",
    "--help",
    "--cpu",
    "--cuda",
    "--dev",
    "--dry-run",
    "--local-addr",
    "--max-restarts",
    *PLAN_FLAGS,
    *VIEW_FLAGS,
    "--nodes",
    "--nproc-per-node",
    "--profile",
    "--requeue",
    "--signals-to-handle",  # torchrun's
    "--shutdown-timeout",
    "--warm",
    "--write",
}
# Files of users and of runs that documents speak of.
OTHER_FILES = {
    "adapter/",
    "agent_func.py",
    "answers.jsonl",
    "config.yaml",
    "configs/mine.yaml",
    "curves.png",
    "file.yaml",
    "my_env.py",
    "my_reward.py",
    "my_trainer.py",
    "reward_func.py",
    "rewards.py",
    "logs/JOB/",
    *("checkpoints/", "model/", "model_ema/", "references/", "rollouts/", "scratch/", "sft/"),
    "tensorboard/",
}
FILE = re.compile(r"[\w.-]+(/[\w.-]+)*(\.(py|sh|sbatch|yaml|md|toml|png)|/)")


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


each_page = pytest.mark.parametrize("page", PAGES, ids=names(PAGES))


# ----------------------------------------------------------------------------------------------
# reading a page


@dataclasses.dataclass
class Block:
    page: Path
    language: str
    marker: str  # what the comment above it says
    text: str


def blocks(page: Path) -> list[Block]:
    found, inside = [], None
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            if inside:
                inside.text += line + "\n"
        elif inside:
            inside = None
        else:
            above = re.fullmatch(r"<!-- (.*) -->", lines[number - 1])
            inside = Block(page, line[3:], above[1] if above else "", "")
            found.append(inside)
    assert inside is None, f"{page}: a block does not end"
    return found


def prose(page: Path) -> str:
    """The page without its blocks and comments."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def code_spans(page: Path) -> list[str]:
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def anchors(page: Path) -> set[str]:
    """What the headings are called in links, as GitHub does."""
    titles = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {contents.anchor(title) for title in titles}


def commands(block: Block) -> list[list[str]]:
    """The words of each command."""
    lines = block.text.replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    return [words for words in split if words]


def shell_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language == "bash"]


def exists(name: str, page: Path) -> bool:
    return any((folder / name).exists() for folder in (ROOT, ROOT / "minirl", page.parent))


# ----------------------------------------------------------------------------------------------
# links, paths and names


@each_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{target}: no such file"
        assert place.is_relative_to(ROOT), f"{target} leads out of the repository"
        assert not anchor or anchor in anchors(place), f"{target}: no such heading"


@pytest.mark.parametrize("page", contents.pages(), ids=names(contents.pages()))
def test_long_pages_begin_with_a_list_of_their_sections(page):
    text = page.read_text()
    if contents.needs_contents(page):
        assert text == contents.with_contents(text), "python tests/contents.py --write"


def test_every_page_is_two_clicks_from_the_first():
    def linked(page: Path) -> set[Path]:
        targets = re.findall(r"\]\(([^)#\s]+)", prose(page))
        return {(page.parent / target).resolve() for target in targets} & set(PAGES)

    first = linked(README)
    assert set(PAGES) - {README} <= first.union(*map(linked, first))


@each_page
def test_files_and_modules_that_are_named_exist(page):
    if page == CHANGES:
        return
    for span in code_spans(page):
        if FILE.fullmatch(span) and span not in OTHER_FILES:
            assert exists(span, page), f"`{span}`: no such file"
        if re.fullmatch(r"minirl(\.\w+)+", span):
            assert defined(span), f"`{span}`: no such module"
        for program in re.findall(r"-m (minirl[\w.]*)", span):
            assert program in PROGRAMS, f"`{span}`: no such program"


def defined(dotted: str) -> bool:
    """A module, or a name in one."""
    path = ROOT / dotted.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    module = path.parent.with_suffix(".py")
    if not module.exists():
        module = path.parent / "__init__.py"
    return module.exists() and re.search(rf"\b{path.name}\b", module.read_text()) is not None


def settings(cls: type, prefix: str = "") -> Iterator[str]:
    """Dotted names of a config class, those of its sections included."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield prefix + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            yield from settings(hints[field.name], f"{prefix}{field.name}.")


def test_nobody_is_sent_to_the_index_for_minirl():
    """Its name there is another project's."""
    for place in ("README.md", "pyproject.toml", "launch", "minirl", "configs", "benchmarks"):
        path = ROOT / place
        for file in path.rglob("*") if path.is_dir() else [path]:
            if file.suffix in (".md", ".py", ".sh", ".sbatch", ".toml", ".yaml"):
                assert not re.search(r"pip install ['\"]?minirl\b", file.read_text()), file


@each_page
def test_flags_and_settings_that_are_named_exist(page):
    known = {name for cls in PROGRAMS.values() if cls for name in settings(cls)}
    flags = {f"--{name.replace('_', '-')}" for name in known} | OTHER_FLAGS
    flags |= {re.sub(r"[\w-]+$", r"no-\g<0>", flag) for flag in flags}
    sections = {name.partition(".")[0] for name in known if "." in name}
    for span in code_spans(page):
        for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*", span):
            assert flag in flags, f"`{span}`: no such flag"
        setting = re.match(r"(\w+)\.[a-z_.]+(?=$|:)", span)
        if setting and setting[1] in sections and not FILE.fullmatch(span):
            assert setting[0] in known, f"`{span}`: no such setting"


# ----------------------------------------------------------------------------------------------
# blocks


@each_page
def test_blocks_say_what_runs_them(page):
    for block in blocks(page):
        assert block.language in ("bash", "python", "json", "yaml", "mermaid", "text"), block
        if block.language not in ("bash", "python", "yaml"):
            continue
        kind, _, rest = block.marker.partition(": ")
        assert kind in ("run", "runs", "not run"), f"say above it what runs it:\n{block.text}"
        assert (kind == "run") == (not rest), block.marker
        for file, test in re.findall(r"(tests/\w+\.py)(?:::(\w+))?", rest):
            tree = ast.parse((ROOT / file).read_text())
            tests = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert not test or test in tests, f"{file} has no {test}"
        if kind == "runs":
            assert re.fullmatch(r"tests/\w+\.py::\w+(, tests/\w+\.py::\w+)*", rest), rest


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_commands_have_flags_that_parse(page, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")
    for words in (
        words for block in shell_blocks() if block.page == page for words in commands(block)
    ):
        for word in words:
            if FILE.fullmatch(word) and word not in OTHER_FILES and not word.startswith("runs/"):
                assert exists(word, page), f"{shlex.join(words)}: no {word}"
        program = words[words.index("-m") + 1 :] if "-m" in words else [""]
        script = next((n for n, word in enumerate(words) if word.startswith("benchmarks/")), None)
        if program[0].startswith("minirl"):
            parse_program(program)
        elif program[0].startswith("benchmarks."):
            script_of_module = program[0].replace(".", "/")
            if (ROOT / script_of_module).is_dir():
                script_of_module += "/__main__"
            parse_script(f"{script_of_module}.py", program[1:], monkeypatch, capsys)
        elif script is not None:
            text = (ROOT / words[script]).read_text()
            assert "from benchmarks" not in text, f"start it by -m: {shlex.join(words)}"
            parse_script(words[script], words[script + 1 :], monkeypatch, capsys)


def parse_program(words: list[str]) -> None:
    """Words behind -m."""
    module, *flags = words
    if module == "minirl.plan":
        own, of_run = parser().parse_known_args(flags)
        parse_flags(RLConfig, ["--config", own.config, *of_run])
        return
    command = " ".join([module, *flags[:1]])
    cls = PROGRAMS[command if command in PROGRAMS else module]
    if cls and flags != ["--help"]:
        parse_flags(cls, flags)


def parse_script(script: str, flags: list[str], monkeypatch, capsys) -> None:
    """Benchmarks that are minirl.rl take its flags; the others name theirs in their help."""
    text = (ROOT / script).read_text()
    if "cli.run(RLConfig" in text:
        parse_flags(RLConfig, flags)
        return
    named = [flag for flag in flags if flag.startswith("--")]
    if not named:
        return
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    text = capsys.readouterr().out
    assert all(flag in text for flag in named), text


AS_THEY_STAND = [block for block in shell_blocks() if block.marker == "run"]


@pytest.mark.parametrize("block", AS_THEY_STAND, ids=lambda block: block.text.strip())
def test_cheap_commands_run(block, tmp_path):
    for _, option, module, *flags in commands(block):
        assert option == "-m"
        ended = fork(module, flags, tmp_path)
        assert ended.code == 0, ended.err
        assert "--help" not in flags or "usage: python -m" in ended.out


def printed(page: str, name: str, folder: Path) -> Path:
    """The code block of a page that begins with this file name, as a user copies it."""
    texts = [block.text for block in blocks(ROOT / page) if block.language in ("python", "yaml")]
    (text,) = [text for text in texts if text.startswith(f"# {name}\n")]
    (folder / name).write_text(text)
    return folder / name


def test_the_printed_environment_plays(tmp_path):
    file = printed("minirl/envs/README.md", "my_env.py", tmp_path)
    assert len([line for line in file.read_text().splitlines() if line.strip()]) <= 20
    make = make_env(f"{file}:Guess")

    def reply(env, answer, turn=0):
        result = env.step(State(row={}, answer=answer, stopped=True, turn=turn, messages=[]))
        return result.observation, result.reward, result.done

    env = make()
    assert env.reset({"answer": 42}).startswith("I think of a number")
    assert [reply(env, "7"), reply(env, " 90\n", 1), reply(env, "42", 2)] == [
        ("higher", 0.0, False),
        ("lower", 0.0, False),
        (None, 1.0, True),
    ]
    assert reply(make(), "what?") == (None, 0.0, True)


def test_the_printed_rewards(tmp_path):
    def load(page: str, name: str):
        folder = tmp_path / name  # a file is imported once
        folder.mkdir()
        return find_function(
            "reward.function", f"{printed(page, 'my_reward.py', folder)}:{name}", {}
        )

    score = load("README.md", "score")
    assert [score("?", " 4\n", {"answer": "4"}), score("?", "5", {"answer": "4"})] == [1.0, 0.0]
    assert load("minirl/rewards/README.md", "brevity")("?", "x" * 50, {}) == -0.5


def test_the_printed_algorithm(tmp_path):
    """Its two functions are let through, and do what they say."""
    path = printed("minirl/algo/README.md", "my_algorithm.py", tmp_path)
    advantage, loss = f"{path}:above_mean", f"{path}:soft_gate"
    cfg = RLConfig(algo=AlgoConfig(advantage=advantage, loss=loss))
    estimator = user_algorithms.check_methods(cfg, Oversight())
    rewards = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    assert estimator(rewards, torch.tensor([0, 0, 1])).tolist() == [0.5, -0.5, 0.0]
    batch = user_algorithms.make_batch(2, with_reference=False)
    value, metrics = losses.find_own(loss)(batch, batch.old_logprobs, batch.old_entropy, cfg.algo)
    assert torch.equal(value, -2 * batch.advantages) and bool((metrics["ratio"] == 1).all())


def test_the_printed_estimator(tmp_path):
    """With the flag that the page names."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.5], dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    file = printed("minirl/algo/README.md", "my_dr_grpo.py", tmp_path)
    copied = advantages.find(f"{file}:dr_grpo")
    assert torch.equal(copied(rewards, groups), advantages.dr_grpo(rewards, groups))


def test_the_printed_agent_talks_to_its_endpoint(tmp_path, monkeypatch):
    """With a client that knows the answer; tests/test_episodes.py has the real one."""
    asked = {}

    def create(model, messages):
        asked.update(model=model, messages=messages)
        message = SimpleNamespace(content="It is 4.")
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    def with_options(base_url, api_key):
        asked.update(base_url=base_url, api_key=api_key)
        return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))

    file = printed("minirl/endpoint/README.md", "my_agent.py", tmp_path)
    agent = make_env(f"{file}:Mine")()
    monkeypatch.setattr(sys.modules[type(agent).__module__].CLIENT, "with_options", with_options)
    assert isinstance(agent, Agent)
    session = Session(base_url="http://here/v1", api_key="secret", model="policy")
    result = agent.run({"prompt": "2 + 2?", "answer": "4"}, session)
    assert (result.reward, result.done) == (1.0, True)
    assert agent.run({"prompt": "2 + 3?", "answer": "5"}, session).reward == 0.0
    assert asked == {
        "base_url": "http://here/v1",
        "api_key": "secret",
        "model": "policy",
        "messages": [{"role": "user", "content": "2 + 3?"}],
    }


def test_the_printed_sweep_starts_a_run(tmp_path):
    """The words that W&B's agent runs, by its own functions, with another program in torchrun's
    place that prints what it is given."""
    # Here, because it takes two seconds to import, which no other worker has to spend.
    from wandb.sdk.launch.sweeps import utils as sweeps

    sweep = yaml.safe_load(printed("minirl/run/README.md", "sweep.yaml", tmp_path).read_text())
    chosen = {name: {"value": given["values"][1]} for name, given in sweep["parameters"].items()}
    args = sweeps.create_sweep_command_args({"args": chosen})["args"]
    words = [
        word
        for part in sweeps.create_sweep_command(sweep["command"])
        for word in (args if part == "${args}" else [part])
    ]
    words = [word.replace(".venv/bin/torchrun", "printf '%s\\n'") for word in words]
    words = [word.replace("configs/mine.yaml", str(QUICKSTART)) for word in words]
    out = subprocess.run(
        words, env={**os.environ, "WANDB_RUN_ID": "x1"}, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert out[:4] == ["--nproc-per-node", "8", "-m", sweep["program"]]
    cfg = parse_flags(RLConfig, out[4:])
    assert (cfg.output, cfg.log.wandb) == ("runs/sweep-x1", "my-project")
    assert (cfg.policy.lr, cfg.rollout.samples_per_prompt) == (3e-6, 16)


def test_the_printed_cell_reads_a_run(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    rows = [
        '{"phase": "rl", "step": 0, "loss": 1.0}',
        '{"phase": "rl", "step": 1, "accuracy": 0.5}',
    ]
    (run / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    cell = printed("minirl/run/README.md", "in a notebook", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert runpy.run_path(str(cell))["accuracy"] == {1: 0.5}


def test_the_printed_distributed_test(tmp_path, monkeypatch):
    printed("tests/README.md", "test_mine.py", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("test_mine").test_ranks_add_up()


# ----------------------------------------------------------------------------------------------
# what the pages say about the code


def test_the_first_page_is_short_and_has_its_pictures():
    assert len(README.read_text().splitlines()) <= 170
    assert "mermaid" in [block.language for block in blocks(README)]
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README.read_text())
    assert 0 < (ROOT / picture).stat().st_size < 100_000


def test_the_first_page_counts_the_families():
    assert f"{len(FAMILIES)} families" in README.read_text()


def test_every_method_recipe_benchmark_and_test_has_its_place():
    text = {
        name: (ROOT / name / "README.md").read_text() for name in ("configs", "benchmarks", "tests")
    }
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        assert f"({path.name})" in text["configs"], path.name
    everything = "".join(page.read_text() for page in PAGES)
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        assert re.search(rf"benchmarks[/.]{path.stem}\b", everything), path.name
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        assert f"`tests/{path.name}`" in text["tests"], path.name
    methods = (ROOT / "minirl" / "algo" / "README.md").read_text()
    for name in advantages.ESTIMATORS:
        assert f"--algo.advantage {name}" in methods, name


def test_table_of_what_composes_is_that_of_the_tests():
    assert composition.inside(composition.PAGE.read_text()) == composition.table(), (
        "run `python tests/composition.py --write`"
    )


def test_table_of_families_is_that_of_the_tests():
    assert family_table.inside(family_table.PAGE.read_text()) == family_table.make_table(), (
        "run `python tests/family_table.py --write`"
    )


def test_every_axis_composes_with_every_other():
    """Shards, replicas, tensor, sequence, context and expert parallelism: no pair without a test,
    but the two engines of one axis."""
    together = list(composition.cases())
    axes = composition.FEATURES[:7]
    pairs = [(a, b) for number, a in enumerate(axes) for b in axes[number + 1 :]]
    missing = [pair for pair in pairs if not any(set(pair) <= case for case in together)]
    assert missing == [("context", "context ring")]
