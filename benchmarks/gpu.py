r"""All figures of a GPU in one call: kernels, optimizer steps, refit, sleep, RL steps.

    python benchmarks/gpu.py                             # needs one GPU; no weights, no data
    python benchmarks/gpu.py --small                     # tiny shapes, on a CPU too
    python benchmarks/gpu.py --sections attention head

Models have the shapes of Qwen3 and random weights. Each section is a process of its own
(benchmarks/gpu_sections.py), which has the device to itself and whose failure is a line of the
table. Sections come in the order of their value, and those that `--minutes` do not suffice for are
listed. Times are medians, after a warm-up, of the device's time.

Beside them stands what the roofline of minirl.plan says, where it says something: the same calls
are made on a pretended device, after all that is measured. Where that is not possible (it needs
g++), the column is empty and the last line says why. Writes gpu.json and log.txt to `--out` after
each section, and prints the table last.

device      what the hardware can do: the yardsticks for the rest.
step-*      forward, backward and optimizer of a model, two micro-batches of 8k rows, packed from
            sequences of 1k with shared prompts. MFU counts 6 operations for a weight and row, and
            of attention what is causal; no recomputation. A model that is too large for the device
            has as many layers as fit.
attention   over the rows of such a micro-batch; and over few rows, by FlashAttention in bfloat16
            and by the formula in float32.
head        log-probs and entropies of 8k rows.
layer-*     a layer of the largest model by each of `policy.kernels` and each way of activation
            checkpointing, per layer.
weights     the trainer's state to host memory and back, the weights into the engine.
grpo-*      minirl.rl itself, by phase.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

ROOT = Path(__file__).parent.parent
# Section -> seconds that it may take, the most valuable first.
SECTIONS = {
    "device": 120,
    "step-1.7B": 90,
    "attention": 60,
    "head": 60,
    "layer-liger": 90,
    "step-8B": 90,
    "weights": 150,
    "grpo-1.7B": 200,
    "layer-torch": 90,
    "grpo-0.6B": 200,
    "layer-compile": 120,
}
SMALL_SECTIONS = dict.fromkeys(
    ["device", "step-tiny", "attention", "head", "layer-torch", "layer-liger", "layer-compile"]
    + ["weights", "grpo-tiny"],
    240,
)
NEED_GPU = ("layer-liger", "layer-compile")
SHORTEST = 15  # Seconds: with less left, a section is not started.
# The line of a traceback, or of a program, that says what is wrong.
ERROR = re.compile(r"^(minirl: error: .*|[\w.]*(Error|Exception|Interrupt)\b.*)$", re.MULTILINE)

# What sections write: section, what, value (None: there is none), unit (or why there is no value);
# and the plan's value.
Row = dict[str, Any]


@dataclass(kw_only=True)
class Arguments:
    minutes: float = 8.0
    """For everything together."""
    small: bool = False
    """Tiny shapes: everything is called, and the figures mean nothing."""
    sections: tuple[str, ...] = ()
    """Those to run; empty: all."""
    card: str = ""
    """One of minirl.plan, to whose data sheet MFU and the plan refer; empty: the one that the
    device is, and h200 without a device."""
    enforce_eager: bool = False
    """Engines run without CUDA graphs, and start sooner."""
    out: str = "runs/bench_gpu"
    """Folder for gpu.json and log.txt."""


class Sections:
    """Runs sections, each in a process of its own, until the time is over.

    Args:
        args: of the program.
        folder: for models, runs and rows.
    """

    def __init__(self, args: Arguments, folder: Path):
        self.args = args
        self.folder = folder
        self.end = time.monotonic() + 60 * args.minutes
        self.log = Path(args.out) / "log.txt"
        self.log.write_text("")

    def run(self, section: str, limit: float) -> list[Row]:
        """Return the rows of a section, the last of which says how it failed, if it did.

        Args:
            section: its name.
            limit: seconds that it may take.
        """
        left = self.end - time.monotonic()
        if left < SHORTEST:
            return [_no_value(section, "not run: out of time")]
        file = self.folder / f"{section}.jsonl"
        file.touch()
        began = time.monotonic()
        problem = self._start(section, file, min(left, limit))
        print(f"{section}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        if problem:
            rows.append(_no_value(section, problem))
        return rows

    def _start(self, section: str, rows: Path, seconds: float) -> str:
        """Run a section, which writes its rows to a file, and return what went wrong."""
        args = self.args
        command = [sys.executable, "-m", "benchmarks.gpu_sections", "--section", section]
        command += ["--folder", str(self.folder), "--json", str(rows)]
        command += (
            ["--card", args.card] * bool(args.card)
            + ["--small"] * args.small
            + ["--enforce-eager"] * args.enforce_eager
        )
        environment = dict(os.environ)
        if section == "plan":  # it pretends to have a device, and is not to touch a real one
            environment["CUDA_VISIBLE_DEVICES"] = ""
        # A file, because processes that this one may leave behind would keep a pipe open.
        output = self.folder / f"{section}.txt"
        code: int | None = None
        with output.open("w") as file, contextlib.suppress(subprocess.TimeoutExpired):
            ended = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            )
            code = ended.returncode
        text = output.read_text(errors="replace")
        with self.log.open("a") as log:
            log.write(f"\n===== {section}\n{text}")
        if code is None:
            return f"not finished in {seconds:.0f} s"
        return f"failed: {_last_error(text)}" if code else ""


def _last_error(text: str) -> str:
    """Return the line of a failed program's output that says why it failed."""
    errors = [found.group() for found in ERROR.finditer(text)]
    lines = text.strip().splitlines() or ["it printed nothing"]
    return errors[-1] if errors else lines[-1]


def _no_value(section: str, why: str) -> Row:
    return {"section": section, "what": "", "value": None, "unit": why}


def with_plan(rows: list[Row], planned: list[Row]) -> list[Row]:
    """Return the rows with the plan's values, and what went wrong with the plan."""
    values = {(row["section"], row["what"], row["unit"]): row["value"] for row in planned}
    out = []
    for row in rows:
        key = row["section"], row["what"], row["unit"]
        out.append(row | {"plan": values.get(key)})
    return out + [row | {"plan": None} for row in planned if row["section"] == "plan"]


def write(args: Arguments, rows: list[Row]) -> None:
    """Write the JSON."""
    result = {"arguments": asdict(args), "rows": rows}
    (Path(args.out) / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")


def print_table(rows: list[Row]) -> None:
    print(f"\n{'section':<14} {'':<42} {'measured':>11} {'plan':>11}")
    for row in rows:
        start = f"{row['section']:<14} {row['what']:<42}"
        if row["value"] is None:
            print(f"{start} {row['unit']}")
        else:
            print(f"{start} {figure(row['value'])} {figure(row['plan'])} {row['unit']}")


def figure(value: float | None) -> str:
    if value is None:
        return " " * 11
    return f"{value:11,.{1 if abs(value) >= 100 else 3}f}"


def run(args: Arguments, folder: Path) -> list[Row]:
    """Run the sections; return all rows."""
    limits = SMALL_SECTIONS if args.small else SECTIONS
    unknown = [name for name in args.sections if name not in limits]
    if unknown:
        sys.exit(f"--sections {unknown[0]}: there is no such section; known: {', '.join(limits)}")
    sections = Sections(args, folder)
    rows = sections.run("device", limits["device"])
    if not (folder / "layers").is_dir():  # the last of the models that it makes for the others
        sys.exit(f"device: {rows[-1]['unit']}")
    on_gpu = any(row["what"].startswith("free memory") for row in rows)
    for name, limit in limits.items():
        if name == "device" or name not in (args.sections or limits):
            continue
        if name in NEED_GPU and not on_gpu:
            rows.append(_no_value(name, "needs a GPU"))
        else:
            rows += sections.run(name, limit)
        write(args, with_plan(rows, []))
    # Not beside a section: most of them wait for the host.
    rows = with_plan(rows, sections.run("plan", 60 * args.minutes))
    write(args, rows)
    return rows


def main(args: Arguments) -> None:
    Path(args.out).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = run(args, Path(folder))
    print_table(rows)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
