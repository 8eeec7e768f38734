"""The shape of the package, read from its syntax trees: who may import whom, and what is not done
here.

Lower layers do not know higher ones, and each outside thing has one door, so that a new version of
vLLM or Transformers is felt in the files named here and nowhere else."""

import ast
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "minirl"
FILES = sorted(str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py"))

PROGRAMS = ("rl", "sft", "rm", "dpo", "kto", "evaluate", "walk")

# Layer of each file (first match counts). A file may import lower layers and its own, but for those
# of FORBIDDEN.
LAYERS = {
    "__init__.py": 0,
    "errors.py": 0,
    "files.py": 0,
    "imports.py": 0,
    "reading.py": 0,
    "types.py": 0,
    "log.py": 0,
    "trackers.py": 0,
    "config/*": 0,
    "schedule.py": 1,
    "confine/*": 0,
    "sandbox/*": 0,
    "serving/*": 1,
    "algo/*": 1,
    "parallel/*": 2,
    "model/*": 3,
    "data/*": 4,
    "policy.py": 5,
    "minibatches.py": 5,
    "reference.py": 6,
    "rewards/*": 6,
    "envs/*": 6,
    "rollout/*": 7,
    # Programs, and what only they use.
    "cli.py": 8,
    "lifecycle.py": 8,
    "faults.py": 8,
    "health.py": 8,
    "checkpoint/*": 8,
    "generation.py": 8,
    "inputs.py": 8,
    "own_methods.py": 8,
    "row_checks.py": 8,
    "report.py": 8,
    "results.py": 8,
    "progress.py": 8,
    "throughput.py": 8,
    "dump.py": 8,
    "view/*": 8,
    "evaluation.py": 8,
    "trainer.py": 8,
    "updates.py": 8,
    "supervised.py": 8,
    "plan/*": 8,
    "evaluate.py": 9,
    "sft.py": 9,
    "rm.py": 9,
    "dpo.py": 9,
    "kto.py": 9,
    "rl.py": 9,
    "walk_step.py": 9,  # the one file that imports a program: it shows a step of rl
    "walk.py": 9,
}
FORBIDDEN = [  # who, what, why
    ("parallel/*", "algo/*", "wiring knows no algorithm"),
    ("model/*", "algo/*", "a model does not know what it is trained for"),
    ("data/*", "algo/*", "nor do data"),
    ("data/*", "model/[!a]*", "data know tokenizers and the plan of an attention, not models"),
    ("data/*", "model/attention.py", "nor how the plan is carried out"),
    ("data/*", "parallel/fsdp.py", "of parallel only the mesh: trajectories travel, shards do not"),
    ("rollout/*", "algo/*", "a rollout is the same for every algorithm"),
    ("rollout/*", "model/[!d]*", "the engine has its own models"),
    ("rollout/*", "model/delta_net.py", "nor layers; vLLM's CPU build lacks formulas of one"),
    ("rollout/*", "policy.py", "refit gets shards by name, not a policy"),
    (
        "rollout/*",
        "rewards/model.py",
        "a reward model scores after generation, on the trainer's mesh",
    ),
    ("rollout/*", "checkpoint/*", "rollouts keep no state of their own"),
    ("rollout/episode.py", "parallel/*", "an episode runs on one rank"),
    ("envs/*", "parallel/*", "so does an environment"),
    ("envs/*", "algo/*", "and it knows no algorithm"),
    ("envs/*", "model/*", "nor a model"),
    ("algo/*", "log.py", "algorithms are pure functions"),
    *(
        ("view/*", trains, "a page needs what a run has written, and nothing that trains")
        for trains in ("parallel/*", "model/*", "data/*", "policy.py", "rollout/[!i]*", "plan/*")
    ),
    ("types.py", "config/*", "types are the bottom of the house"),
    *(
        (f"{program}.py", f"{other}.py", "a program imports no other program")
        for program in PROGRAMS
        for other in PROGRAMS
        if program != other
    ),
]
# Outside package -> the only files that may import it, and the only names if not all.
DOORS = {
    "vllm": {
        "rollout/engine.py": None,
        "rollout/vllm_patches.py": None,
        "rollout/vllm_cpu.py": None,
        "rollout/vllm_routes.py": None,
        "rollout/vllm_delta.py": None,
        "rollout/packed.py": {"_custom_ops"},
        "rollout/guides.py": None,
        "rollout/tool_calls.py": None,
    },
    "transformers": {
        "model/*": None,
        "data/chat.py": None,
        "data/turns.py": {"PreTrainedTokenizerBase"},
        "data/vision.py": None,
        "data/vision_base.py": None,
        "data/gemma_vision.py": None,
        "checkpoint/*": None,
        "data/examples.py": {"PreTrainedTokenizerBase"},
        "data/pairs.py": {"PreTrainedTokenizerBase"},
        "data/prompts.py": {"PreTrainedTokenizerBase"},
        "rollout/conversation.py": {"PreTrainedTokenizerBase"},
        "rollout/episode.py": {"PreTrainedTokenizerBase"},
        "rollout/protocol.py": {"PreTrainedTokenizerBase"},
        "rollout/server.py": {"PreTrainedTokenizerBase"},
        "rollout/tool_calls.py": {"PreTrainedTokenizerBase"},
        "rollout/choice.py": {"PreTrainedTokenizerBase"},
        "rollout/vllm_errors.py": {"AmbiguousGlobalPerLayerAttributeError"},
        "inputs.py": {"PretrainedConfig", "PreTrainedTokenizerBase"},
        "row_checks.py": {"PreTrainedTokenizerBase"},
        "dump.py": {"PreTrainedTokenizerBase"},
        "rm.py": {"PreTrainedTokenizerBase"},
        "plan/*": {"PretrainedConfig", "logging"},
        "walk_step.py": {"AutoModelForCausalLM"},  # for the plain step beside minirl's
    },
    "jinja2": {"data/chat.py": None},
    "PIL": {"data/images.py": None, "plan/dryrun.py": {"Image"}},
    "ring_flash_attn": {"model/ring_package.py": None},
    "bitsandbytes": {"model/nf4.py": None},
    "flash_attn": {"model/flash_package.py": None},
    "flash_attn_3": {"model/flash_package.py": None},
    "fla": {"model/fla_package.py": None},
    "causal_conv1d": {"model/fla_package.py": None},
    "huggingface_hub": {
        "model/build.py": None,
        "checkpoint/folder.py": {"split_torch_state_dict_into_shards"},
    },
    "safetensors": {
        "model/weight_files.py": None,
        "model/adapter_files.py": None,
        "checkpoint/*": None,
    },
    "torch.utils.tensorboard": {"log.py": None},
    "wandb": {"trackers.py": None},
    "trackio": {"trackers.py": None},
    "tokenizers": {"view/trajectories.py": None, "model/scratch.py": None},
    "tqdm": {"log.py": None},
    "matplotlib": {"report.py": None},
    "tyro": {"config/parse.py": None},
    "yaml": {"config/yaml_text.py": None},
    "math_verify": {"confine/grading.py": None},
    "sympy": {"confine/grading.py": None},
    "reasoning_gym": {"confine/grading.py": None, "data/sources.py": None},
    "datasets": {"data/sources.py": None},
    "trl": {"rewards/trl.py": None},
    "bm25s": {"envs/tools.py": None},
    "httpx": {"rewards/http.py": None},
    "websockets": {"envs/openenv.py": None},
    "verifiers": {"envs/verifiers.py": None},
    "openai": {"envs/verifiers.py": None},
    "fastapi": {"serving/limits.py": None},
    "starlette": {
        "serving/limits.py": None,
        "rollout/server.py": None,
        "rollout/response.py": {"Receive"},
        "view/server.py": None,
        "rewards/server.py": {"Request", "JSONResponse", "Route"},
    },
    "uvicorn": {"serving/server.py": None},
    "h11": {"serving/server.py": None},
    "pydantic": {
        "rollout/protocol.py": None,
        "config/parse.py": None,
        "config/*": None,
    },
    "torch.distributed.fsdp": {
        "parallel/fsdp.py": None,
        "parallel/offload.py": {"FSDPModule"},
        "plan/dryrun.py": {"FSDPState"},
    },
    "torch.distributed.device_mesh": {"parallel/*": None, "plan/dryrun.py": {"DeviceMesh"}},
    "liger_kernel": {"model/fused.py": None},
}
# Handlers that catch everything, and why nothing narrower would do.
BROAD = {
    "algo/advantages.py:call_own": "a user's estimator may raise anything; the user is told what",
    "own_methods.py:_try_loss": "and so may the user's loss",
    "lifecycle.py:run": "the last handler of a program: whatever it is, this rank ends, and all "
    "others",
    "config/lookup.py:_import_file": "importing a user's file may raise anything; the user is "
    "told which file and what",
    "reading.py:library_reads": "a library's parser may raise anything for a broken file; the user "
    "is told which file and what",
    "data/chat.py:render": "a chat template is a program, and may raise anything; the user is told "
    "for which chat",
    "confine/program.py:execute": "an untrusted program may raise anything, and is told so",
    "confine/remote.py:serve": "and it may do so when its tests call it, which they may expect",
    "confine/trial.py:_do_pass": "tests that end by any error have failed",
    "confine/grading.py:_grade": "so may a grader at what a policy wrote, which earns 0 then",
    "envs/registry.py:make_env": "the constructor of a user's environment may raise anything",
    "rollout/user_code.py:make_in_time": "and may do so later",
    "rewards/functions.py:grade": "so may a user's reward function; the user is told the input",
    "rollout/episode.py:_within_limit": "and a user's environment, of which only one episode ends",
    "plan/dryrun.py:_result": "a job that crashes is a result of its own, whatever it is; the "
    "process is for all jobs",
    "rewards/server.py:_score_batch": "a forward may raise anything, and every request "
    "of its batch gets an answer of its own",
    "rollout/engine_loop.py:work": "whatever it is, it is raised again where the thread was "
    "asked for",
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


def imports(file):
    """(module, name or None) of every import, also those inside functions."""
    ignored = set(for_annotations(file))
    for node in ast.walk(tree(file)):
        if node in ignored:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import hides its layer"
            yield from ((node.module, alias.name) for alias in node.names)


def layer(file):
    found = [n for pattern, n in LAYERS.items() if fnmatch(file, pattern)]
    assert found, f"{file} has no layer: give it one in LAYERS"
    return found[0]


def own_imports(file):
    for module, name in imports(file):
        if module.split(".")[0] == "minirl":
            yield file_of(f"{module}.{name}") or file_of(module)


@pytest.mark.parametrize("file", FILES)
def test_imports_only_what_lies_below(file):
    for other in own_imports(file):
        assert layer(other) <= layer(file), (
            f"{file} (layer {layer(file)}) imports {other} (layer {layer(other)})"
        )
        for who, what, why in FORBIDDEN:
            assert not (fnmatch(file, who) and fnmatch(other, what)), (
                f"{file} imports {other}: {why}"
            )


@pytest.mark.parametrize("file", FILES)
def test_outside_packages_come_in_by_their_doors(file):
    for module, name in imports(file):
        for package, doors in DOORS.items():
            if f"{module}.{name}.".startswith(f"{package}."):
                names = [allowed for door, allowed in doors.items() if fnmatch(file, door)]
                assert names, f"{file} imports {module}; only {', '.join(doors)} may"
                assert names[0] is None or name in names[0], (
                    f"{file} imports {name} of {module}; only {names[0]} is meant to be known there"
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
