#!/usr/bin/env python3
"""Runs stages that show what minirl does on one GPU, in waves, each under a limit of its own.

    python -m benchmarks.gpu_stages                       # needs one GPU: 8.6 minutes at most
    python -m benchmarks.gpu_stages --small               # tiny shapes, on a CPU: 10 minutes
    python -m benchmarks.gpu_stages --only vs-minirl vs-trl

Start it in the root of the checkout; it may also be a copy of this file elsewhere. A stage that
fails is a line, and the next ones run; one that found no memory beside others runs once more,
alone. Models have random weights: nothing is fetched.

Under --out, as it goes: summary.txt (a line for each stage, then every figure), results.json,
log.txt (all output, each line with its stage); and gpu.json, metrics-*.jsonl and junit.xml of the
stages that make them.

$OUT is the default of --out, $GPU_RUN_SMALL means --small, $GPU_RUN_SIZE is the shape of the
model of grpo, micro and vs-* (0.6B; or 1.7B), $GPU_RUN_TOKENS the tokens of their answers (256),
and $GPU_RUN_SECTIONS names sections of bench.
"""

import argparse
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_LOG = 14_000_000  # Bytes.
MAX_KEPT = 15_000_000  # Bytes of a file.
# Seconds.
SHORTEST = 15  # With less left, a stage is not started.
AGAIN = 45  # With less left, a stage that found no memory is not started again.
END = 4  # For the tables at the end.
BEHIND_BENCH = 75  # For the stages behind the benchmarks, whose results matter more than last rows.
SMALL_LIMIT = 1200
SMALL_MINUTES = 60.0
BY_NAME = 9  # Waves from this one on run only if they are named.
# What says that others had the memory.
NO_MEMORY = re.compile(
    "Memory usage increased after sleeping|CUDA out of memory|OutOfMemoryError|"
    "is less than desired GPU memory|Error in memory profiling"
)
ERROR = re.compile(
    r"^(?:\[\S+\]:?)?\s*(minirl: error: .*|[\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE
)
TALLY = re.compile(r"^=*\s*(\d+ (?:passed|failed|skipped|deselected|error).* in [\d.]+s)", re.M)
# Tests that are disturbed by other stages.
TIMER_TEST = "test_the_timer_counts_the_device_without_waiting_for_it"
ENGINE_TESTS = ("test_sleep_refit_and_logprobs", "test_weights_change_under_running_answers")


@dataclass
class Arguments:
    minutes: float
    only: list[str]
    serial: bool
    small: bool
    out: Path
    list_stages: bool
    spent: float


def parse() -> Arguments:
    """Return the flags. The standard library reads them: this file imports nothing else."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    small = bool(os.environ.get("GPU_RUN_SMALL"))
    parser.add_argument("--minutes", type=float, help="for everything; 8.6, and 60 with --small")
    parser.add_argument("--only", nargs="*", default=[], help="stages to run")
    parser.add_argument("--serial", action="store_true", help="one stage at a time")
    parser.add_argument("--small", action="store_true", default=small, help="tiny shapes")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "runs/gpu_run"))
    parser.add_argument(
        "--list", dest="list_stages", action="store_true", help="print the stages and their waves"
    )
    parser.add_argument(
        "--spent", type=float, default=0.0, help="seconds of the minutes that are gone already"
    )
    given = vars(parser.parse_args())
    if given["minutes"] is None:
        given["minutes"] = SMALL_MINUTES if given["small"] else 8.6
    return Arguments(**given)


@dataclass(frozen=True)
class Load:
    """What minirl and TRL do in the comparison."""

    prompts: int = 16
    samples: int = 8  # Answers to each prompt.
    tokens: int = 256  # Of an answer, at most.
    steps: int = 6
    lr: float = 1e-5


SMALL_LOAD = Load(prompts=2, samples=2, tokens=4, steps=3)


@dataclass
class Command:
    words: list[str]
    unless: Path | None = None  # Where this file exists, it is not run.


@dataclass
class Stage:
    name: str
    wave: int  # Stages of a wave run at once.
    limit: float  # Seconds.
    commands: list[Command]  # One after the other; the stage passes if all do.
    keep: dict[str, Path] = field(default_factory=dict)  # Name under --out -> file to copy.
    status: str = "not run"
    seconds: float = 0.0
    note: str = ""
    alone: bool = False  # Whether it found no memory, and may pass alone.


# --------------------------------------------------------------------------------------------------
# what the stages are


def python(module: str, *flags: object) -> Command:
    """Return a command that runs a stage's module."""
    words = [sys.executable, "-m", f"benchmarks.gpu_stages.{module}"]
    return Command(words + [str(flag) for flag in flags])


def train(*flags: object) -> Command:
    """Return a command that runs minirl.rl on one rank."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", "1", "-m", "minirl.rl"]
    return Command(words + [str(flag) for flag in flags])


def run_tests(small: bool, *flags: object) -> Command:
    """Return a command that runs tests of a device, or in the small form their bodies on a CPU."""
    words = [sys.executable, "-m", "pytest", "tests/test_gpu.py", "-rfEsx"]
    words += ["-m", "not gpu" if small else "gpu"]
    words += ["--tb=short", "-p", "no:cacheprovider", "--durations=8"]
    return Command(words + [str(flag) for flag in flags])


def quickstart(folder: Path, small: bool) -> Stage:
    """Return the first page's run, from nothing, with refits that are checked."""
    steps = 2 if small else 20
    flags = ["--config", "configs/quickstart_rl.yaml", "--output", folder, "--num-steps", steps]
    flags += ["--eval.every", steps // 2, "--checkpoint.every", 0, "--debug.check-refit"]
    if small:
        flags += ["--sft.num-steps", 4, "--sft.batch-size", 8, "--data.held-out", 4]
        flags += ["--rollout.prompts-per-step", 2, "--rollout.samples-per-prompt", 2]
    else:  # Others use the device beside it.
        flags += ["--sft.num-steps", 100]
        flags += ["--engine.kv-cache-gb", 3, "--engine.gpu-memory-utilization", 0.15]
    commands = [train(*flags), python("s4_metrics", folder, steps)]
    keep = {"metrics-quickstart.jsonl": folder / "metrics.jsonl"}
    return Stage("quickstart", 1, 180, commands, keep)


def grpo(
    name: str, wave: int, limit: float, work: Path, load: Load, *, small: bool, check: bool
) -> Stage:
    """Return GRPO of a model of one of Qwen3's shapes, with the defaults.

    Args:
        name: of the stage.
        wave: that it is of.
        limit: in seconds.
        work: a folder for models and runs.
        load: what to do.
        small: the model is tiny, and computes on a CPU.
        check: refits are compared with a full gather.
    """
    output = work / name
    flags: list[object] = ["--policy.model", work / "model", "--data.train", work / "sums.jsonl"]
    flags += ["--data.held-out", 4, "--data.max-prompt-tokens", 64, "--eval.every", 0]
    flags += ["--reward.function", "trl:benchmarks/gpu_stages/parity.py:parity"]
    flags += ["--rollout.prompts-per-step", load.prompts]
    flags += ["--rollout.samples-per-prompt", load.samples]
    flags += ["--rollout.max-tokens", load.tokens, "--num-steps", load.steps]
    flags += ["--policy.lr", load.lr, "--output", output]
    flags += ["--debug.check-refit"] * check
    if small:
        flags += ["--policy.dtype", "float32", "--engine.kv-cache-gb", 0.05]
    commands = [write_model(work), train(*flags), python("s4_metrics", output, load.steps)]
    return Stage(name, wave, limit, commands, {f"metrics-{name}.jsonl": output / "metrics.jsonl"})


def trl(name: str, wave: int, work: Path, load: Load, *flags: object) -> Stage:
    """Return the same work by TRL."""
    given: list[object] = ["--prompts", load.prompts, "--samples", load.samples]
    given += ["--tokens", load.tokens, "--steps", load.steps, "--lr", load.lr]
    return Stage(name, wave, 130, [write_model(work), python("s9_trl", work, *given, *flags)])


def write_model(work: Path) -> Command:
    command = python("s5_model", work)
    command.unless = work / "sums.jsonl"  # The last that it writes.
    return command


def bench(work: Path, small: bool) -> Stage:
    """Return the benchmarks of benchmarks/gpu.py, in the minutes that are left."""
    chosen = os.environ.get("GPU_RUN_SECTIONS", "")
    sections = "step-1.7B head attention step-8B weights layer-liger layer-torch"
    if small:
        sections = "step-tiny head weights"
    out = work / "bench"
    words = [sys.executable, "benchmarks/gpu.py", "--minutes", "{minutes}", "--out", str(out)]
    words += ["--small"] * small
    # Of these sections none generates, and an engine without graphs starts sooner.
    words += ["--enforce-eager"] * (not small and not chosen)
    words += ["--sections", *(chosen or sections).split()]
    commands = [run_tests(small, "-k", TIMER_TEST), Command(words)]
    return Stage("bench", 3, 220, commands, {"gpu.json": out / "gpu.json"})


def all_stages(work: Path, small: bool) -> list[Stage]:
    """Return the stages in the order of their value.

    Args:
        work: a folder for models and runs.
        small: tiny shapes.
    """
    junit = work / "junit.xml"
    tests = ["--junitxml", junit]
    for name in (TIMER_TEST, *ENGINE_TESTS):  # They run alone.
        tests += ["--deselect", f"tests/test_gpu.py::{name}"]
    load = SMALL_LOAD if small else Load(tokens=int(os.environ.get("GPU_RUN_TOKENS", "256")))
    short = dataclasses.replace(load, steps=3)
    stages = [
        Stage("env", 0, 75, [python("s0_env")]),
        Stage("engine", 1, 170, [python("s2_engine", "dense")]),
        quickstart(work / "quickstart", small),
        Stage("kernels", 1, 120, [python("s1_kernels")]),
        Stage("oracle", 1, 150, [python("s1_oracle")]),
        Stage("tests", 1, 180, [run_tests(small, *tests)], {"junit.xml": junit}),
        grpo("grpo-0.6B", 2, 150, work, short, small=small, check=True),
        bench(work, small),
        Stage("moe", 4, 90, [python("s2_engine", "moe", "--eager")]),
        Stage("test-engine", 4, 100, [run_tests(small, "-k", " or ".join(ENGINE_TESTS))]),
        Stage("model-head", 4, 80, [python("s2_engine", "dense", "--eager", "--model-head")]),
        Stage("two-ranks", 4, 80, [python("s8_two_ranks")]),
        # Only by name, one after the other: the same work by minirl and by TRL.
        grpo("vs-minirl", BY_NAME, 130, work, load, small=small, check=False),
        trl("vs-trl", BY_NAME + 1, work, load, "--dtype", "bfloat16"),
        trl("vs-trl-128", BY_NAME + 2, work, load, "--dtype", "bfloat16", "--batch", 128),
        trl(
            "vs-trl-liger",
            BY_NAME + 3,
            work,
            load,
            "--dtype",
            "bfloat16",
            "--batch",
            128,
            "--liger",
        ),
        trl("vs-trl-float32", BY_NAME + 4, work, load, "--dtype", "float32"),
        Stage("micro", BY_NAME + 5, 150, [write_model(work), python("s10_micro", work)]),
    ]
    if small:
        for stage in stages:
            stage.limit = SMALL_LIMIT
    return stages


# --------------------------------------------------------------------------------------------------
# how they run


class Runner:
    """Runs stages and writes what they show.

    Args:
        args: of the program.
        work: a folder for what stages measure.
        stages: all that there are.
    """

    def __init__(self, args: Arguments, work: Path, stages: list[Stage]):
        self.args = args
        self.work = work
        self.began = time.monotonic() - args.spent
        self.end = self.began + 60 * args.minutes
        self.card = card()
        self.stages = stages
        self.chosen = choose(self.stages, args.only)
        args.out.mkdir(parents=True, exist_ok=True)
        self.lock = threading.Lock()
        self.num_logged = 0

    def run(self) -> int:
        """Run the chosen stages; return the program's exit code."""
        left = self.end - time.monotonic()
        self.say(f"{self.card or 'no GPU'}; {len(self.chosen)} stages; {left:.0f} s are left")
        for wave in sorted({stage.wave for stage in self.chosen}):
            self.run_wave([stage for stage in self.chosen if stage.wave == wave])
        for stage in self.chosen:
            if stage.alone and self.end - time.monotonic() > AGAIN:
                stage.note = "again, alone"
                self.run_stage(stage)
        self.write_figures()
        self.say("---- " + "  ".join(f"{stage.name} {stage.status}" for stage in self.chosen))
        self.say(f"{self.seconds():.0f} s in all")
        self.save()
        return int(any(stage.status != "PASS" for stage in self.chosen))

    def run_wave(self, stages: list[Stage]) -> None:
        if self.args.serial or self.args.small:
            for stage in stages:
                self.run_stage(stage)
            return
        threads = [threading.Thread(target=self.run_stage, args=(stage,)) for stage in stages]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def run_stage(self, stage: Stage) -> None:
        began = time.monotonic()
        is_behind = any(other.wave > stage.wave for other in self.chosen)
        reserve = BEHIND_BENCH if stage.name == "bench" and is_behind else END
        stop = min(began + stage.limit, self.end - reserve)
        if stop - began < SHORTEST:
            stage.status, stage.note = "SKIP", "no time is left"
            self.finish(stage, "")
            return
        self.rows_of(stage).unlink(missing_ok=True)
        stage.status = "PASS"
        stage.alone = False
        text: list[str] = []
        for command in stage.commands:
            if command.unless and command.unless.exists():
                continue
            code = self.run_command(stage, command, stop, text)
            if code is None:
                stage.status = "TIME"
                break
            if code:
                stage.status, stage.note = "FAIL", f"exit {code}"
        stage.seconds = time.monotonic() - began
        self.finish(stage, "\n".join(text))

    def run_command(
        self, stage: Stage, command: Command, stop: float, text: list[str]
    ) -> int | None:
        """Return the exit code of a command; None: the time was over, and it was ended.

        Args:
            stage: that it is of.
            command: to run.
            stop: time of the monotonic clock.
            text: gets its output, line by line.
        """
        minutes = max(0.3, (stop - time.monotonic() - 6) / 60)
        words = [word.replace("{minutes}", f"{minutes:.2f}") for word in command.words]
        self.log(stage, "$ " + " ".join(words))
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environment(stage, stop),
            start_new_session=True,
            text=True,
            errors="replace",
        )
        assert process.stdout
        reader = threading.Thread(target=self.read, args=(stage, process.stdout, text), daemon=True)
        reader.start()
        code: int | None = None
        try:
            code = process.wait(max(0.0, stop - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.log(stage, "the time is over")
        finally:
            kill_session(process)  # Also what it left behind, which would keep the pipe open.
        reader.join(timeout=5)
        return code

    def read(self, stage: Stage, output: Any, text: list[str]) -> None:
        for line in output:
            text.append(line.rstrip("\n"))
            self.log(stage, text[-1])

    def environment(self, stage: Stage, stop: float) -> dict[str, str]:
        own = {
            "STAGE_JSON": str(self.rows_of(stage)),
            "STAGE_LIMIT": str(int(stop - time.monotonic())),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self.args.small:
            own["GPU_RUN_SMALL"] = "1"
        paths = [os.getcwd(), os.environ.get("PYTHONPATH", "")]
        own["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        # Beside a copy of this file there may be TRL.
        beside = Path(__file__).resolve().parent.parent / "trl"
        if "TRL_SITE" not in os.environ and (beside / "trl").is_dir():
            own["TRL_SITE"] = str(beside)
        return os.environ | own

    # ----------------------------------------------------------------------------------------------
    # what is written

    def finish(self, stage: Stage, text: str) -> None:
        """Say how a stage ended, and keep its files."""
        fails = re.findall(r"^FAIL (.*)$", text, re.MULTILINE)
        num_ok = len(re.findall(r"^ok  ", text, re.MULTILINE))
        tallies = TALLY.findall(text)
        has_tests = any("pytest" in command.words for command in stage.commands)
        none_passed = has_tests and not any("passed" in tally for tally in tallies)
        if stage.status == "PASS" and none_passed:
            stage.status = "FAIL"  # All tests were skipped: none saw the device.
        notes = [stage.note, f"{num_ok} ok" if num_ok else "", *tallies[-1:], *fails[:4]]
        errors = ERROR.findall(text)
        if stage.status in ("FAIL", "TIME") and errors:
            notes.append(errors[-1][:220])
        stage.note = "; ".join(note for note in notes if note)
        stage.alone = stage.status == "FAIL" and bool(NO_MEMORY.search(text))
        self.say(f"{stage.status:<4} {stage.name:<14} {stage.seconds:6.1f} s  {stage.note[:500]}")
        for name, file in stage.keep.items():
            if file.exists() and file.stat().st_size < MAX_KEPT:
                shutil.copy(file, self.args.out / name)
        self.save()

    def rows_of(self, stage: Stage) -> Path:
        return self.work / f"{stage.name}.jsonl"

    def results(self, stage: Stage) -> list[dict[str, Any]]:
        """Return the checks and figures that a stage has written."""
        file = self.rows_of(stage)
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def save(self) -> None:
        """Write results.json, whole at any moment."""
        with self.lock:
            rows = []
            for stage in self.stages:
                rows.append(
                    {
                        "stage": stage.name,
                        "status": stage.status,
                        "seconds": round(stage.seconds, 1),
                        "note": stage.note,
                        "results": self.results(stage),
                    }
                )
            whole = {"card": self.card, "seconds": round(self.seconds(), 1), "stages": rows}
            temporary = self.args.out / "results.json.part"
            temporary.write_text(json.dumps(whole, indent=1))
            temporary.replace(self.args.out / "results.json")

    def write_figures(self) -> None:
        """Add the checks and figures of all stages to summary.txt, and print those of bench."""
        with (self.args.out / "summary.txt").open("a") as file:
            for stage in self.stages:
                results = self.results(stage)
                if results:
                    file.write(f"\n== {stage.name}\n")
                for row in results:
                    file.write(line_of(row) + "\n")
        bench = self.args.out / "gpu.json"
        if bench.exists():
            for row in json.loads(bench.read_text())["rows"]:
                numbers = f"{figure(row['value'])} {figure(row['plan'])} {row['unit']}"
                self.say(f"{row['section']:<12} {row['what'][:40]:<40} {numbers}")

    def say(self, line: str) -> None:
        with self.lock:
            print(line, flush=True)
            with (self.args.out / "summary.txt").open("a") as file:
                file.write(line + "\n")

    def log(self, stage: Stage, line: str) -> None:
        """Put a line of output into log.txt, which does not grow without end."""
        with self.lock:
            if self.num_logged < MAX_LOG:
                self.num_logged += len(line)
                with (self.args.out / "log.txt").open("a") as file:
                    file.write(f"[{stage.name}] {line}\n")


def line_of(row: dict[str, Any]) -> str:
    """Return a check or a figure as a line."""
    if "check" in row:
        return f"{'ok  ' if row['ok'] else 'FAIL'} {row['check']}  {row['note']}"
    return f"     {row['value']}: {row['number']} {row['unit']}"


def figure(number: float | None) -> str:
    return " " * 12 if number is None else f"{number:12,.2f}"


def choose(stages: list[Stage], names: list[str]) -> list[Stage]:
    """Return the stages of those names; of none: all that run without being named."""
    known = [stage.name for stage in stages]
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"--only {unknown[0]}: there is no such stage; known: {', '.join(known)}")
    if names:
        return [stage for stage in stages if stage.name in names]
    return [stage for stage in stages if stage.wave < BY_NAME]


def card() -> str:
    """Return the device's name by its driver; empty: there is none."""
    try:
        printed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return printed.stdout.strip() if printed.returncode == 0 else ""


def kill_session(process: subprocess.Popen) -> None:
    """End a command and all that it started, which is its session."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        if sign == signal.SIGTERM:
            time.sleep(0.5)
    process.wait()


def main() -> None:
    args = parse()
    if args.list_stages:
        for stage in all_stages(Path("."), args.small):
            print(stage.wave, stage.name, stage.limit)
        return
    if not Path("minirl/rl.py").exists():
        sys.exit("start it in the root of minirl's checkout")
    with tempfile.TemporaryDirectory(prefix="gpu_stages") as folder:
        runner = Runner(args, Path(folder), all_stages(Path(folder), args.small))
        if not runner.card and not args.small:
            sys.exit("there is no CUDA device; --small runs tiny shapes on a CPU")
        code = runner.run()
    sys.exit(code)


if __name__ == "__main__":
    main()
