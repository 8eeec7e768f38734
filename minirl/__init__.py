"""minirl: reinforcement learning of language models as one torchrun program."""

import os

# Before torch is imported: its C++ side warns about memory binding each time that vLLM's CPU build
# starts.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
