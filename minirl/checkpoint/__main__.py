"""Export a checkpoint: `python -m minirl.checkpoint export runs/mine --best`, or under torchrun."""

from minirl import cli
from minirl.config.shared import ExportConfig

if __name__ == "__main__":
    cli.run(ExportConfig, "minirl.checkpoint.exporting:export_checkpoint")
