"""Runs a stage of benchmarks/gpu_stages whose sides, which are processes of their own, are forks.

    fork("stage_in_forks", [MODULE, FLAGS...], log)

Each side would import torch, transformers and vLLM again."""

import multiprocessing
import os
import runpy
import subprocess
import sys


class Side:
    """What the stages use of `subprocess.Popen`, for commands `python -m MODULE FLAGS...`."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=_run, args=(command[2:], env))
        self.process.start()
        self.kill = self.process.kill

    def wait(self, timeout: float | None = None) -> None:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a side", timeout)


def _run(words: list[str], env: dict[str, str]) -> None:
    os.environ.update(env)
    run(words)


def run(words: list[str]) -> None:
    """Run `python -m MODULE FLAGS...`."""
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    subprocess.Popen = Side
    run(sys.argv[1:])
