"""What composes with what, read from the parameters of the tests: the README's table.

    python tests/composition.py --write     # put the table into README.md

A cell is filled if some test runs both together and compares with one process, with a full gather,
or bit by bit with another run."""

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import test_checkpoint
import test_families
import test_gradients
import test_optimizer
import test_rollout
import test_sft
import tiny
from minirl.config.shared import ParallelConfig

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- composition: made by tests/composition.py -->\n", "<!-- composition ends -->"

FEATURES = [
    "FSDP",
    "HSDP",
    "tensor",
    "sequence",
    "context",
    "context ring",
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
    }
    return {name for name, on in names.items() if on}


def parameters(test: Callable) -> Iterator[dict]:
    """What pytest calls a test with: {argument: value}."""
    marks = [mark.args for mark in test.pytestmark if mark.name == "parametrize"]
    for values in itertools.product(*(values for _, values in marks)):
        call = {}
        for (names, _), value in zip(marks, values, strict=True):
            names = [names] if isinstance(names, str) else names
            call |= dict(zip(names, value if len(names) > 1 else [value], strict=True))
        yield call


def of_settings(settings: dict) -> set[str]:
    names = {
        "Muon": settings.get("optimizer") == "muon",
        "offloaded state": settings.get("optimizer_state") == "offload",
        "8-bit state": settings.get("optimizer_state") == "8bit",
        "checkpointing": settings.get("activation_checkpointing", False),
    }
    return {name for name, on in names.items() if on}


def cases() -> Iterator[set[str]]:
    """The features of each case of each test of parity."""
    for call in parameters(test_gradients.test_every_mesh_is_one_process):
        world, parallel = test_gradients.MESHES[call["mesh"]]
        on = axes(world, parallel) | {
            "micro-batches",
            "shared prompts",
            "checkpointing",
            "sliding window",
        }
        yield on | ({"sequence"} if parallel.tensor > 1 else set())  # run with and without
    for call in parameters(test_families.test_forward_and_gradients_are_hugging_faces):
        family = test_families.FAMILIES[call["family"]]
        world, parallel = test_families.MESHES[call["mesh"]]
        names = {
            "experts": family.experts is not None,
            "sliding window": "sliding_window" in tiny.OWN.get(call["family"], {}),
            "checkpointing": parallel and parallel.sequence,
        }
        yield (
            axes(world, parallel) | {"shared prompts"} | {name for name, on in names.items() if on}
        )
    for call in parameters(test_families.test_experts_over_data_ranks):
        yield axes(4, call["parallel"]) | {"experts"}
    for call in parameters(test_rollout.test_refit_equals_full_gather_and_a_fresh_engine):
        yield (
            axes(call["world"], call["parallel"])
            | {"refit"}
            | ({"experts"} if "moe" in call["family"] else set())
        )
    for call in parameters(test_checkpoint.test_saved_on_one_mesh_resumed_on_another):
        for world, parallel in [(call["world"], call["parallel"]), *call["targets"]]:
            yield axes(world, parallel) | {"resume on another mesh"}
    for call in parameters(test_optimizer.test_muon_on_every_mesh_is_muon_on_whole_matrices):
        yield axes(*test_optimizer.MESHES[call["name"]]) | {"Muon"}
    yield {
        "FSDP",
        "HSDP",
        "tensor",
        "Muon",
        "moving average",
        "offloaded state",
        "resume on another mesh",
    }  # test_muon_and_average_resume_on_another_mesh
    for call in parameters(
        test_optimizer.test_offloaded_state_takes_no_memory_between_steps_and_changes_nothing
    ):
        yield (
            axes(*test_optimizer.MESHES[call["name"]])
            | of_settings({**call, "optimizer_state": "offload"})
            | {"moving average"}
        )
    for call in parameters(
        test_optimizer.test_8bit_state_takes_a_byte_an_element_and_trains_like_the_full_one
    ):
        yield {"FSDP", "moving average"} | of_settings({**call, "optimizer_state": "8bit"})
    for call in parameters(test_optimizer.test_the_average_is_its_formula):
        yield (
            axes(*test_optimizer.MESHES[call["name"]])
            | of_settings({"optimizer_state": call["rest"]})
            | {"moving average"}
        )
    for call in parameters(test_optimizer.test_cpu_offload_changes_no_bit):
        yield (
            axes(*test_optimizer.MESHES[call["name"]])
            | of_settings(call["settings"])
            | {"CPU offload"}
        )
    for call in parameters(test_optimizer.test_sleep_frees_everything_and_changes_nothing):
        yield (
            axes(*test_optimizer.MESHES[call["name"]])
            | of_settings({"optimizer": "muon", "optimizer_state": call["rest"]})
            | {"moving average", "sleep"}
        )
    for call in parameters(test_sft.test_every_mesh_trains_alike):
        yield axes(call["world"], call["parallel"]) | {"minirl.sft"}


def table() -> str:
    together = {frozenset(pair) for case in cases() for pair in itertools.combinations(case, 2)}
    lines = [
        "| | " + " | ".join(str(i + 1) for i in range(len(FEATURES))) + " |",
        "|---" * (len(FEATURES) + 1) + "|",
    ]
    for i, row in enumerate(FEATURES):
        cells = [
            "•" if i == j else "✓" if frozenset((row, column)) in together else ""
            for j, column in enumerate(FEATURES)
        ]
        lines.append(f"| {i + 1} {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def inside(readme: str) -> str:
    return readme.split(BEGIN)[1].split(END)[0]


if __name__ == "__main__":
    text = README.read_text()
    if "--write" in sys.argv:
        README.write_text(text.replace(BEGIN + inside(text), BEGIN + table()))
    print(table())
