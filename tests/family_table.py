"""What the tests run of each model family, read from their parameters: the table in
minirl/model/README.md.

    python tests/family_table.py --write     # put the table into that page
"""

import sys
from collections import defaultdict

import test_families
import test_rollout
import tiny
from composition import parameters
from minirl.model.families import FAMILIES
from sweep import PAGE

BEGIN, END = "<!-- families: made by tests/family_table.py -->\n", "<!-- families end -->"
# Heading -> the mesh of tests/test_families.py.
MESHES = {
    "packed": "one rank",
    "tensor": "tensor",
    "tensor, sequence": "tensor, sequence",
    "context": "context",
    "ring": "ring",
    "experts": "experts",
}
HEADINGS = [*MESHES, "engine", "export"]


def tested() -> set[tuple[str, str]]:
    """Return each (family, heading) that a test runs."""
    found = set()
    headings = {mesh: heading for heading, mesh in MESHES.items()}
    for call in parameters(test_families.test_forward_and_gradients_are_hugging_faces):
        found.add((call["family"], headings[call["mesh"]]))
    found -= {(family, "ring") for family in test_families.NOT_ON_RING}
    for call in parameters(test_rollout.test_engine_logprobs_are_the_trainers):
        found.add((call["family"], "engine"))
    for call in parameters(test_families.test_load_and_export_give_the_same_files):
        found.add((call["family"], "export"))
    return found


def why_not(family: str, heading: str) -> str:
    """Return why no test can run it; empty: one could, and is missing."""
    row = FAMILIES[family]
    if heading == "experts" and not row.experts:
        return "has none"
    if heading == "ring" and family in test_families.NOT_ON_RING:
        return "refused"
    if heading == "engine" and family in test_rollout.NOT_ON_CPU:
        return "not on CPU"
    return ""


def kind_of(family: str) -> str:
    """Return what its models are."""
    if family in tiny.READ_IMAGES:
        return "with images"
    return "mixtures" if FAMILIES[family].experts else "dense"


def make_table() -> str:
    """Return the table in Markdown, with a row for all families of one kind with the same marks."""
    found = tested()
    by_marks = defaultdict(list)
    for family in FAMILIES:
        marks = (
            "✓" if (family, heading) in found else why_not(family, heading) for heading in HEADINGS
        )
        by_marks[kind_of(family), *marks].append(family)
    rows = [
        (kind, ", ".join(families), *marks) for (kind, *marks), families in sorted(by_marks.items())
    ]
    lines = [("kind", "families", *HEADINGS), ("---",) * (len(HEADINGS) + 2), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def inside(page: str) -> str:
    """Return what stands between the two comments."""
    return page.split(BEGIN)[1].split(END)[0]


if __name__ == "__main__":
    text = PAGE.read_text()
    if "--write" in sys.argv:
        PAGE.write_text(text.replace(BEGIN + inside(text), BEGIN + make_table()))
    print(make_table())
