"""Let a torchvision that was built for CUDA be imported beside a CPU build of torch.

Such a torchvision is the one of the common index. vLLM and the image processors of transformers
need it; of its compiled operators they need none, but the import declares implementations for two
whose library cannot be loaded.

launch/install.sh puts this in site-packages with a .pth file, so that the processes that vLLM
starts have it, too. It does nothing until torchvision is imported, and nothing to a torchvision
that was built for the CPU.
"""

import sys


class DeclareOperators:
    """An import finder that finds nothing, but sees torchvision being imported."""

    library = None

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(cls)
            from importlib.metadata import version

            import torch

            if torch.version.cuda is None and not version("torchvision").endswith("+cpu"):
                cls.library = torch.library.Library("torchvision", "FRAGMENT")
                for operator in ("nms", "qnms"):
                    cls.library.define(
                        f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    )
        # None: the next finder finds the module.


sys.meta_path.insert(0, DeclareOperators)
