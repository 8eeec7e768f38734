"""Supervised fine-tuning on chats, prompts with completions or plain text.

    torchrun --nproc-per-node 2 -m minirl.sft --config configs/sft_spell_backward.yaml

The mesh, the steps and the files of a run are those of RL.
"""

from minirl.config.supervised import SFTConfig
from minirl.supervise import cli

if __name__ == "__main__":
    cli.run(SFTConfig, "minirl.run.supervised:SupervisedTrainer.main")
