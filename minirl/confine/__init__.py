"""The code on the inner side of a sandbox. It imports the standard library only."""
