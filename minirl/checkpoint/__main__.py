"""Write a model of a checkpoint, or of an adapter; both also under torchrun.

python -m minirl.checkpoint export runs/mine --best
python -m minirl.checkpoint merge runs/mine/adapter
"""

import sys

from minirl.config.shared import ExportConfig, MergeConfig
from minirl.supervise import cli

if __name__ == "__main__":
    if "merge" in sys.argv[1:2]:
        cli.run(MergeConfig, "minirl.checkpoint.commands:merge")
    else:
        cli.run(ExportConfig, "minirl.checkpoint.commands:export_checkpoint")
