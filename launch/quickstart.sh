#!/usr/bin/env bash
# Installs minirl into .venv if needed and runs the main job: SFT, then GRPO of a small model on
# all local GPUs, or on 2 CPU ranks. Arguments go to the program:
#   bash launch/quickstart.sh --num-steps 20 --output runs/short
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
ranks=2
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then ranks=$(nvidia-smi -L | grep -c GPU); fi
exec .venv/bin/torchrun --standalone --nproc-per-node "$ranks" -m minirl.rl --config configs/quickstart_rl.yaml "$@"
