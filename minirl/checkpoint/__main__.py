"""Write a model of a checkpoint, also under torchrun.

python -m minirl.checkpoint export runs/mine --best
"""

from minirl.config.shared import ExportConfig
from minirl.supervise import cli

if __name__ == "__main__":
    cli.run(ExportConfig, "minirl.checkpoint.commands:export_checkpoint")
