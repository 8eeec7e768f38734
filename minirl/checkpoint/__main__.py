"""Export a checkpoint: `python -m minirl.checkpoint export runs/mine --best`, or under torchrun."""

from minirl import cli
from minirl.checkpoint.export import export_checkpoint
from minirl.config.shared import ExportConfig

if __name__ == "__main__":
    cli.run(ExportConfig, export_checkpoint)
