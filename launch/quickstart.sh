#!/usr/bin/env bash
# Installs minirl into .venv if needed and runs the main job: SFT, then GRPO of a small model on
# all local GPUs, or on 2 CPU ranks. Arguments go to the program:
#   bash launch/quickstart.sh --num-steps 20 --output runs/short
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
ranks=2
read -r build _ < .venv/minirl-installed
# As CUDA_VISIBLE_DEVICES has them.
if [[ "$build" == cuda* ]]; then
    ranks=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())')
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # torchrun would set it, and say so
# Without an address, torchrun would wait for ever on a machine whose name nothing resolves.
exec .venv/bin/torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node "$ranks" \
    -m minirl.rl --config configs/quickstart_rl.yaml "$@"
