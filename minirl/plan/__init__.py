"""What a training run would take on GPUs, found without one: `python -m minirl.plan`."""
