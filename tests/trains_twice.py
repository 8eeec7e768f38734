"""A program of a user that trains two times, each into a folder of its own."""

import copy

from minirl.config.rl import RLConfig
from minirl.rl import Trainer
from minirl.supervise import cli


def main(cfg, mesh):
    for name in ("first", "second"):
        again = copy.deepcopy(cfg)
        again.output = f"{cfg.output}/{name}"
        Trainer.main(again, mesh)


if __name__ == "__main__":
    cli.run(RLConfig, main)
