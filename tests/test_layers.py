"""The house, read from its syntax trees: which room may import which, the door of each outside
library, and what is not done here.

The step, which minirl teaches, knows nothing of what surrounds it, so that it can be read alone. A
new version of vLLM or Transformers is felt behind its door and nowhere else."""

import ast
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "minirl"
FILES = sorted(str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py"))

# A room imports only rooms before it.
BELOW = ["base", "types", "config", "sandbox"]  # what both halves stand on
STEP = [
    *("parallel", "algo", "data", "model", "batch", "rewards", "envs"),
    *("engine", "refit", "rollout", "train"),
]
AROUND = ["supervise", "checkpoint", "plan", "endpoint", "run", "view"]
PROGRAMS = ["rl.py", "sft.py", "rm.py", "dpo.py", "kto.py", "evaluate.py"]
SPLIT = "split.py"  # rl.py on ranks that train and ranks that generate
WALK = "walk.py"  # shows a step of rl.py
ROOMS = ["__init__.py", *BELOW, *STEP, *AROUND, *PROGRAMS, SPLIT, WALK]

# More that a room does without: who, what, why.
FORBIDDEN = [
    ("types/*", "config/*", "what everything exchanges has no settings"),
    ("sandbox/*", "config/*", "nor has what holds a program"),
    ("sandbox/inside/*", "base/*", "the inner side of a sandbox imports nothing else of minirl"),
    ("parallel/*", "algo/*", "wiring knows no algorithm"),
    ("model/*", "algo/*", "a model does not know what it is trained for"),
    ("model/*", "data/*", "nor where its tokens come from"),
    ("data/*", "algo/*", "nor do data"),
    ("data/*", "parallel/fsdp.py", "of parallel only the mesh: rows travel, shards do not"),
    ("algo/*", "parallel/*", "algorithms are pure functions"),
    ("batch/*", "model/*", "a batch is the same for every model"),
    ("rewards/*", "model/*", "an answer is scored as text"),
    ("envs/*", "parallel/*", "an environment runs on one rank"),
    ("envs/*", "model/*", "and knows no model"),
    ("engine/*", "algo/*", "an engine is the same for every algorithm"),
    ("engine/engine.py", "model/*", "it has its own models"),
    ("refit/*", "model/*", "a refit gets shards by name, not a model"),
    ("rollout/*", "algo/*", "a rollout is the same for every algorithm"),
    ("rollout/*", "model/*", "and for every model"),
    ("view/*", "*/[!_]*", "a page needs what a run has written, and nothing that trains"),
]
ALLOWED = [  # for all that
    ("view/*", "view/*"),
    ("view/*", "base/*"),
    ("view/*", "config/*"),
    ("view/*", "rollout/index.py"),
    ("view/*", "endpoint/*"),
    ("view/*", "checkpoint/run_folder.py"),
]
# Outside package -> the files that may import it.
DOORS = {
    "vllm": ("engine/*", "endpoint/tool_calls.py"),
    "transformers": (
        *("model/*", "data/*", "checkpoint/*", "plan/sizes.py", "engine/compat.py"),
        *("rollout/*", "endpoint/*", "run/*", "rm.py", "walk.py"),  # types of theirs
    ),
    "jinja2": ("data/chat.py",),
    "PIL": ("data/images.py",),
    "ring_flash_attn": ("model/flash.py",),
    "bitsandbytes": ("model/adapters/nf4.py",),
    "flash_attn": ("model/flash.py",),
    "flash_attn_3": ("model/flash.py",),
    "fla": ("model/delta_net.py",),
    "causal_conv1d": ("model/delta_net.py",),
    "liger_kernel": ("model/fused.py",),
    "triton": ("model/*_kernels.py",),
    "huggingface_hub": ("model/build.py", "checkpoint/exporting.py"),
    "safetensors": ("model/*", "checkpoint/*"),
    "torch.utils.tensorboard": ("run/log.py",),
    "torch.distributed.fsdp": ("parallel/*",),
    "torch.distributed.device_mesh": ("parallel/*",),
    "wandb": ("run/trackers.py",),
    "tokenizers": ("view/trajectories.py", "model/scratch.py"),
    "tqdm": ("base/log.py", "run/log.py"),
    "matplotlib": ("run/results.py",),
    "tyro": ("config/parse.py",),
    "yaml": ("config/values.py",),
    "pydantic": ("config/*", "endpoint/*"),
    "pydantic_core": ("view/server.py",),
    "math_verify": ("sandbox/inside/grading.py",),
    "sympy": ("sandbox/inside/grading.py",),
    "reasoning_gym": ("sandbox/inside/grading.py", "data/sources.py"),
    "datasets": ("data/sources.py",),
    "trl": ("rewards/adapters.py",),
    "bm25s": ("envs/tools.py",),
    "httpx": ("rewards/http.py",),
    "websockets": ("envs/adapters/openenv.py",),
    "verifiers": ("envs/adapters/verifiers.py",),
    "openai": ("envs/adapters/verifiers.py",),
    "starlette": ("endpoint/*", "view/server.py"),
    "uvicorn": ("endpoint/http.py",),
}
# Handlers that catch everything, and why nothing narrower would do.
BROAD = {
    "run/user_algorithms.py:call": "a user's estimator may raise anything; its user reads what",
    "run/user_algorithms.py:check_loss": "and so may the user's loss",
    "supervise/lifecycle.py:run": "the last handler of a program: whatever it is, this rank ends, "
    "and all others",
    "config/lookup.py:_import_file": "importing a user's file may raise anything; the user is "
    "told which file and what",
    "base/reading.py:library_reads": "a library's parser may raise anything for a broken file; the "
    "user is told which file and what",
    "base/files.py:library_writes": "tokenizers raises a bare Exception for a full disk; all else "
    "is raised again",
    "data/chat.py:render": "a chat template is a program, and may raise anything; the user is told "
    "for which chat",
    "data/images.py:_open": "Pillow may raise anything for a damaged file; the user is told which "
    "image and what",
    "sandbox/inside/program.py:main": "an untrusted program may raise anything, and is told so",
    "sandbox/inside/trial.py:serve": "and it may do so when its tests call it, as they may expect",
    "sandbox/inside/trial.py:_do_pass": "tests that end by any error have failed",
    "sandbox/inside/grading.py:work": "so may a grader at what a policy wrote, which earns 0",
    "envs/registry.py:make_env": "the constructor of a user's environment may raise anything",
    "rewards/scoring.py:grade": "so may a user's reward function; the user is told the input",
    "rollout/episode.py:_call": "and a user's environment, of which only one episode ends",
    "endpoint/reward_server.py:_score_batch": "a forward may raise anything, and every request "
    "of its batch gets an answer of its own",
    "envs/registry.py:work": "whatever it is, it is raised again where the thread was asked for",
}


@cache
def tree(file):
    return ast.parse((ROOT / file).read_text())


def file_of(module):
    """minirl.algo.losses -> algo/losses.py, minirl.algo -> algo/__init__.py, None for what is no
    module."""
    path = module.removeprefix("minirl").strip(".").replace(".", "/")
    return next((f for f in (f"{path}.py", f"{path}/__init__.py".lstrip("/")) if f in FILES), None)


def for_annotations(file):
    """The nodes below `if TYPE_CHECKING:`, which import nothing when the program runs."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from ast.walk(node)


@cache
def imports(file):
    """(module, name or None) of every import, also those inside functions."""
    ignored = set(for_annotations(file))
    found = []
    for node in ast.walk(tree(file)):
        if node in ignored:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import hides its layer"
            found += [(node.module, alias.name) for alias in node.names]
    return found


def room(file):
    """Number of the room of a file, from the bottom."""
    name = file.partition("/")[0]
    assert name in ROOMS, f"{file} has no room: give it one in ROOMS"
    return ROOMS.index(name)


@cache
def own_imports(file):
    return [
        file_of(f"{module}.{name}") or file_of(module)
        for module, name in imports(file)
        if module.split(".")[0] == "minirl"
    ]


@pytest.mark.parametrize("file", FILES)
def test_imports_only_what_lies_below(file):
    for other in own_imports(file):
        assert room(other) <= room(file), f"{file} imports {other}, which is above it"
        both_are_programs = file in PROGRAMS and other in PROGRAMS
        assert not both_are_programs, f"{file} imports {other}, another program"
        if any(fnmatch(file, who) and fnmatch(other, what) for who, what in ALLOWED):
            continue
        for who, what, why in FORBIDDEN:
            assert not (fnmatch(file, who) and fnmatch(other, what)), (
                f"{file} imports {other}: {why}"
            )


def test_the_step_knows_nothing_of_what_surrounds_it():
    """What the order of ROOMS says already, in the words of the first page."""
    for file in FILES:
        if file.partition("/")[0] in STEP:
            rooms = {other.partition("/")[0] for other in own_imports(file)}
            assert rooms <= {"__init__.py", *BELOW, *STEP}, file


@pytest.mark.parametrize("file", FILES)
def test_outside_packages_come_in_by_their_doors(file):
    for module, name in imports(file):
        for package, doors in DOORS.items():
            if f"{module}.{name}.".startswith(f"{package}."):
                assert any(fnmatch(file, door) for door in doors), (
                    f"{file} imports {module}; only {', '.join(doors)} may"
                )


def test_no_two_files_import_each_other():
    below = {file: set(own_imports(file)) for file in FILES}
    for _ in FILES:  # closure
        below = {file: found.union(*(below[f] for f in found)) for file, found in below.items()}
    assert [file for file, found in below.items() if file in found] == []


@pytest.mark.parametrize("file", FILES)
def test_no_attribute_is_read_with_a_default(file):
    """getattr(cfg, "x", default) turns a misspelt or renamed setting into a silent default."""
    for node in ast.walk(tree(file)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "getattr"
        ):
            assert len(node.args) == 2, f"{file}:{node.lineno}"


def broad_handlers(file, node=None, inside="module"):
    """file:function of each handler of everything."""
    for child in ast.iter_child_nodes(node or tree(file)):
        if isinstance(child, ast.ExceptHandler):
            caught = child.type.elts if isinstance(child.type, ast.Tuple) else [child.type]
            if any(c is None or ast.unparse(c) in ("Exception", "BaseException") for c in caught):
                yield f"{file}:{inside}"
        yield from broad_handlers(
            file,
            child,
            child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else inside,
        )


def test_nothing_catches_everything_but_where_it_is_said_why():
    assert sorted(handler for file in FILES for handler in broad_handlers(file)) == sorted(BROAD)
