"""What composes with what, read from the parameters of the tests: the table in
minirl/parallel/README.md.

    python tests/composition.py --write     # put the table into that page

A test counts if it runs both together and compares with one process, with a full gather, or bit by
bit with another run.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import test_checkpoint
import test_expert_parallel
import test_families
import test_gradients
import test_lora
import test_nf4
import test_optimizer
import test_rollout
import test_sft
import test_split_compose
import tiny
from minirl.config.policy import ParallelConfig

PAGE = Path(__file__).parent.parent / "minirl" / "parallel" / "README.md"
BEGIN, END = "<!-- composition: made by tests/composition.py -->\n", "<!-- composition ends -->"

FEATURES = [
    "FSDP",
    "HSDP",
    "tensor",
    "sequence",
    "context",
    "context ring",
    "expert parallel",
    "checkpointing",
    "micro-batches",
    "shared prompts",
    "sliding window",
    "experts",
    "refit",
    "resume on another mesh",
    "Muon",
    "offloaded state",
    "8-bit state",
    "moving average",
    "CPU offload",
    "sleep",
    "minirl.sft",
    "adapters",
    "base in 4 bits",
    "generators",
]


def axes(world: int, parallel: ParallelConfig | None) -> set[str]:
    p = parallel or ParallelConfig()
    names = {
        "FSDP": world // (p.replicate * p.context * p.tensor) > 1,
        "HSDP": p.replicate > 1,
        "tensor": p.tensor > 1,
        "sequence": p.sequence,
        "context": p.context > 1 and p.context_engine == "all_gather",
        "context ring": p.context > 1 and p.context_engine == "ring",
        "expert parallel": p.experts > 1,
    }
    return {name for name, on in names.items() if on}


def parameters(test: Callable) -> Iterator[dict]:
    """Yield what pytest calls a test with: {argument: value}."""
    marks = [mark.args for mark in test.pytestmark if mark.name == "parametrize"]
    for values in itertools.product(*(values for _, values in marks)):
        call = {}
        for (names, _), value in zip(marks, values, strict=True):
            names = [names] if isinstance(names, str) else names
            call |= dict(zip(names, value if len(names) > 1 else [value], strict=True))
        yield call


def features_of(settings: dict) -> set[str]:
    """The features that settings of the policy turn on."""
    names = {
        "Muon": settings.get("optimizer") == "muon",
        "offloaded state": settings.get("optimizer_state") == "offload",
        "8-bit state": settings.get("optimizer_state") == "8bit",
        "checkpointing": settings.get("activation_checkpointing", "off") != "off",
        "CPU offload": settings.get("cpu_offload", False),
    }
    return {name for name, on in names.items() if on}


def cases() -> Iterator[set[str]]:
    """The features of each case of each test of parity."""
    yield from gradient_cases()
    yield from expert_cases()
    yield from family_cases()
    yield from program_cases()
    yield from optimizer_cases()
    yield from adapter_cases()
    yield from split_cases()


def gradient_cases() -> Iterator[set[str]]:
    always = {"micro-batches", "shared prompts", "checkpointing", "sliding window"}
    for call in parameters(test_gradients.test_every_mesh_is_one_process):
        world, parallel = test_gradients.MESHES[call["mesh"]]
        with_sequence = {"sequence"} if parallel.tensor > 1 else set()  # run with and without
        yield axes(world, parallel) | always | with_sequence


def expert_cases() -> Iterator[set[str]]:
    always = {"experts", "micro-batches", "shared prompts", "moving average"}
    tests = test_expert_parallel
    for world, parallel in tests.MESHES.values():
        yield axes(world, parallel) | always
    for mesh, settings in [*tests.SAME.values(), *tests.OTHER.values()]:
        yield axes(*tests.MESHES[mesh]) | features_of(settings) | always
    for world, parallel in [tests.SAVED, *tests.TARGETS.values()]:
        yield axes(world, parallel) | {"experts", "moving average", "resume on another mesh"}
    yield axes(*tests.LEARNS) | {"experts", "minirl.sft"}


def family_cases() -> Iterator[set[str]]:
    for call in parameters(test_families.test_forward_and_gradients_are_hugging_faces):
        family = test_families.FAMILIES[call["family"]]
        world, parallel = test_families.MESHES[call["mesh"]]
        names = {
            "experts": family.experts is not None,
            "sliding window": "sliding_window" in tiny.OWN.get(call["family"], {}),
            "checkpointing": parallel and parallel.sequence,
        }
        on = {name for name, tested in names.items() if tested}
        yield axes(world, parallel) | {"shared prompts"} | on
    for call in parameters(test_families.test_experts_over_data_ranks):
        yield axes(4, call["parallel"]) | {"experts"}


def program_cases() -> Iterator[set[str]]:
    for call in parameters(test_rollout.test_refit_equals_full_gather_and_a_fresh_engine):
        experts = {"experts"} if "moe" in call["family"] else set()
        yield axes(call["world"], call["parallel"]) | {"refit"} | experts
    for call in parameters(test_checkpoint.test_saved_on_one_mesh_resumed_on_another):
        for world, parallel in [(call["world"], call["parallel"]), *call["targets"]]:
            yield axes(world, parallel) | {"resume on another mesh"}
    for call in parameters(test_sft.test_every_mesh_trains_alike):
        yield axes(call["world"], call["parallel"]) | {"minirl.sft"}


def adapter_cases() -> Iterator[set[str]]:
    always = {"adapters", "moving average", "micro-batches", "shared prompts"}

    def on_mesh(name: str) -> set[str]:
        world, parallel, _ = test_lora.MESHES[name]
        return axes(world, parallel) | always

    for call in parameters(test_lora.test_every_mesh_trains_adapters_as_one_process):
        yield on_mesh(call["name"])
    for call in parameters(test_lora.test_every_mesh_trains_adapters_of_experts_as_one_process):
        yield on_mesh(call["name"]) | {"experts"}
    for call in parameters(test_lora.test_settings_of_memory_train_adapters_alike):
        mesh, settings = test_lora.SAME[call["name"]]
        offload = {"CPU offload"} if settings.get("cpu_offload") else set()
        yield on_mesh(mesh) | features_of(settings) | offload
    for mesh in test_lora.MUON_MESHES:
        yield on_mesh(mesh) | {"Muon"}
    # test_checkpoints_hold_adapters_and_move_between_meshes
    yield {"adapters", "resume on another mesh", "FSDP", "tensor"}
    # tests/test_lora_program.py and tests/test_lora_supervised.py, with the real engine
    yield {"adapters", "base in 4 bits", "FSDP", "refit", "sleep"}
    yield {"adapters", "FSDP", "minirl.sft"}
    for call in parameters(test_nf4.test_training_equals_that_of_the_dequantised_base):
        experts = {"experts"} if "moe" in call["family"] else set()
        for world, parallel in test_nf4.MESHES:
            yield axes(world, parallel) | always | {"base in 4 bits"} | experts


def split_cases() -> Iterator[set[str]]:
    """Of ranks that only train, beside others that only generate."""
    for name, (trainers, _, _, _, mesh, _) in test_split_compose.REFITS.items():
        features = {
            "experts": "experts" in mesh or "copies" in name,
            "adapters": "adapters" in name,
        }
        on = {feature for feature, tested in features.items() if tested}
        yield axes(trainers, ParallelConfig(**mesh)) | {"generators", "refit"} | on
    for trainers, _, settings in test_split_compose.MESHES.values():
        mesh = {
            name.removeprefix("parallel."): value
            for name, value in settings.items()
            if name.startswith("parallel.")
        }
        yield axes(trainers, ParallelConfig(**mesh)) | {"generators", "refit", "micro-batches"}
    # test_lockstep_samples_one_step_behind
    yield {"generators", "refit", "adapters", "base in 4 bits"}


def optimizer_cases() -> Iterator[set[str]]:
    def on_mesh(call: dict) -> set[str]:
        return axes(*test_optimizer.MESHES[call["name"]])

    for call in parameters(test_optimizer.test_muon_on_every_mesh_is_muon_on_whole_matrices):
        yield on_mesh(call) | {"Muon"}
    # test_muon_and_average_resume_on_another_mesh
    meshes = {"FSDP", "HSDP", "tensor", "resume on another mesh"}
    yield meshes | {"Muon", "moving average", "offloaded state"}
    for call in parameters(
        test_optimizer.test_offloaded_state_takes_no_memory_between_steps_and_changes_nothing
    ):
        offloaded = features_of({**call, "optimizer_state": "offload"})
        yield on_mesh(call) | offloaded | {"moving average"}
    for call in parameters(
        test_optimizer.test_8bit_state_takes_a_byte_an_element_and_trains_like_the_full_one
    ):
        yield {"FSDP", "moving average"} | features_of({**call, "optimizer_state": "8bit"})
    for call in parameters(test_optimizer.test_the_average_is_its_formula):
        state = features_of({"optimizer_state": call["rest"]})
        yield on_mesh(call) | state | {"moving average"}
    for call in parameters(test_optimizer.test_cpu_offload_changes_no_bit):
        yield on_mesh(call) | features_of(call["settings"]) | {"CPU offload"}
    for call in parameters(test_optimizer.test_sleep_frees_everything_and_changes_nothing):
        state = features_of({"optimizer": "muon", "optimizer_state": call["rest"]})
        yield on_mesh(call) | state | {"moving average", "sleep"}


def table() -> str:
    """The table in Markdown: of each feature those tested with it, or those that are not."""
    together = {frozenset(pair) for case in cases() for pair in itertools.combinations(case, 2)}
    lines = ["| feature | tested together with |", "|---|---|"]
    for row in FEATURES:
        tested = [name for name in FEATURES if frozenset((row, name)) in together]
        missing = [name for name in FEATURES if name not in (row, *tested)]
        said = f"only {', '.join(tested)}"
        if len(missing) < len(tested):
            said = f"all but {', '.join(missing)}" if missing else "all"
        lines.append(f"| {row} | {said} |")
    return "\n".join(lines) + "\n"


def inside(page: str) -> str:
    """What stands between the two comments."""
    return page.split(BEGIN)[1].split(END)[0]


if __name__ == "__main__":
    text = PAGE.read_text()
    if "--write" in sys.argv:
        PAGE.write_text(text.replace(BEGIN + inside(text), BEGIN + table()))
    print(table())
