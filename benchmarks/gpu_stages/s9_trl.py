"""TRL's GRPO with vLLM in its process, on what s5_model.py wrote: seconds of each step.

The model, the prompts, the numbers of prompts and answers, their length, the learning rate and the
reward are those of the stage vs-minirl: see runner.py, which starts both. TRL's engine stays awake
beside the trainer, and gradients are not checkpointed. $TRL_SITE may name a folder with an unpacked
wheel of TRL. On a CPU TRL generates by Transformers, its default there.
"""

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from benchmarks.gpu_stages import lib
from benchmarks.gpu_stages.lib import GIB, ON_GPU, check, part, value
from benchmarks.gpu_stages.parity import parity
from benchmarks.gpu_stages.s4_metrics import NUM_WARMUP

# Of a world of one, which TRL's engine asks for.
WORLD = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29655",
}


@dataclass(kw_only=True)
class Arguments:
    folder: Annotated[Path, tyro.conf.Positional]
    """Has the model and the rows."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the trainer's weights; it computes in bfloat16."""
    batch: int = 32
    """Answers in a forward and backward."""
    liger: bool = False
    """The head, loss and norms by liger-kernel."""
    prompts: int
    """Of a step."""
    samples: int
    """Answers to each prompt."""
    tokens: int
    """Of an answer, at most."""
    steps: int
    lr: float


def settings(args: Arguments) -> dict[str, Any]:
    """Return the arguments of TRL's `GRPOConfig`."""
    num_answers = args.prompts * args.samples
    batch = min(args.batch, num_answers)
    of_engine: dict[str, Any] = {}
    if ON_GPU:
        of_engine = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.3,
            "vllm_max_model_length": 512,
            "generation_kwargs": {"detokenize": False},
        }
    return of_engine | {
        "output_dir": str(args.folder / "trl"),
        "max_steps": args.steps,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": num_answers // batch,
        "num_generations": args.samples,
        "max_completion_length": args.tokens,
        "beta": 0.0,
        "learning_rate": args.lr,
        "bf16": ON_GPU,
        "use_cpu": not ON_GPU,
        "gradient_checkpointing": False,
        "use_liger_kernel": args.liger,
        "model_init_kwargs": {"dtype": args.dtype},
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def make_trainer(args: Arguments, times: list[float], lengths: list[int]) -> Any:
    """Return TRL's trainer.

    Args:
        args: of the program.
        times: gets the seconds of each step.
        lengths: gets the tokens of each step.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    def reward(completion_ids: list[list[int]], **columns: object) -> list[float | None]:
        lengths.append(sum(map(len, completion_ids)))
        return [*parity(completion_ids)]

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            lib.synchronize()
            self.began = time.perf_counter()

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            lib.synchronize()
            times.append(time.perf_counter() - self.began)

    lines = (args.folder / "sums.jsonl").read_text().splitlines()
    return GRPOTrainer(
        model=str(args.folder / "model"),
        args=GRPOConfig(**settings(args)),
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(args.folder / "model"),
        reward_funcs=reward,
        callbacks=[Clock()],
    )


def main(args: Arguments) -> None:
    if args.liger and not ON_GPU:
        print("liger's kernels need a GPU: left out")
        lib.leave()
    if "TRL_SITE" in os.environ:
        sys.path.insert(0, os.environ["TRL_SITE"])
    for name, default in WORLD.items():
        os.environ.setdefault(name, default)
    import trl

    value("trl", trl.__version__)
    times: list[float] = []
    lengths: list[int] = []
    trainer = None
    with part("start"):
        trainer = make_trainer(args, times, lengths)
    if trainer is None:
        lib.leave()
    with part("train"):
        trainer.train()
    check(f"{args.steps} steps", len(times) == args.steps, f"{len(times)}")
    value("seconds of each step", " ".join(f"{seconds:.3f}" for seconds in times))
    if len(times) > NUM_WARMUP:
        value("time/step", statistics.median(times[NUM_WARMUP:]), "s, median")
        value("tokens of a step", statistics.median(lengths[NUM_WARMUP:]))
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    check("it learns", any(norms), f"gradient norms {norms}")
    if ON_GPU:
        value("peak of tensors", torch.cuda.max_memory_allocated() / GIB, "GiB")
    lib.leave()


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
