"""minirl: reinforcement learning of language models as one torchrun program."""
