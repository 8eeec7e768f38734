"""The code on the inner side of a sandbox. It imports nothing else of minirl."""
