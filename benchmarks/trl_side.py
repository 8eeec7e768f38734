"""TRL's side of vs_trl.py, which runs this file by the Python of TRL's own environment.

    python trl_side.py CASE FOLDER STEPS ARGUMENTS

FOLDER has the model, the rows and the reward; ARGUMENTS are those of the case, as JSON. One
optimizer step is all rows. The last line of the output is a JSON list: CPU-seconds of each step.

With use_vllm among the arguments TRL generates by vLLM in its own process. vLLM's CPU build packs
the weights of linear layers once, after loading, and multiplies by these copies, which TRL's
weight syncs do not reach. `pack_again` packs them after each sync, so that TRL samples from the
policy that it trains, as fast as vLLM can.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

CLASSES = {
    "grpo": (GRPOConfig, GRPOTrainer),
    "sft": (SFTConfig, SFTTrainer),
    "dpo": (DPOConfig, DPOTrainer),
    "rm": (RewardConfig, RewardTrainer),
}


# Of vLLM in this process, on one core.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def pack_again() -> None:
    """Let vLLM keep its linear layers' weights, and pack them again after each of TRL's syncs."""
    import vllm.model_executor.layers.utils as layers
    from trl.generation.vllm_generation import VLLMGeneration

    pack = layers.dispatch_cpu_unquantized_gemm
    linear_layers: list[Any] = []

    def pack_and_keep(layer: Any, remove_weight: bool) -> None:
        linear_layers.append(layer)
        pack(layer, remove_weight=False)

    sync = VLLMGeneration.sync_weights

    def sync_and_pack(generation: VLLMGeneration) -> None:
        sync(generation)
        for layer in linear_layers:
            pack(layer, remove_weight=False)

    layers.dispatch_cpu_unquantized_gemm = pack_and_keep
    VLLMGeneration.sync_weights = sync_and_pack


class Clock(TrainerCallback):
    """Notes the CPU-seconds between the ends of steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.mark = 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.mark = time.process_time()

    def on_step_end(self, *_: object, **__: object) -> None:
        now = time.process_time()
        self.seconds.append(now - self.mark)
        self.mark = now


def main(case: str, folder: Path, steps: int, arguments: dict[str, Any]) -> None:
    program = case.split("-")[0]
    make_config, make_trainer = CLASSES[program]
    config = make_config(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        learning_rate=0.0,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
        **arguments,
        **({"max_steps": steps} if program == "grpo" else {"num_train_epochs": steps}),
    )
    rows = [json.loads(line) for line in (folder / "trl.jsonl").read_text().splitlines()]
    clock = Clock()
    more = {}
    if arguments.get("use_vllm"):
        pack_again()
    if program == "grpo":
        more["reward_funcs"] = runpy.run_path(str(folder / "reward.py"))["count_letters"]
    trainer = make_trainer(
        model=str(folder / "model"),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[clock],
        **more,
    )
    trainer.train()
    print(json.dumps(clock.seconds))


if __name__ == "__main__":
    # One core and one thread, as minirl's side. Two threads would wait for each other by spinning.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
