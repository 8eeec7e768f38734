"""Makes this Python find a CPU with AVX2 and nothing newer, as laptops have it.

`programs.AVX2` puts this folder on PYTHONPATH, where Python imports a module of this name at its
start, and sets the variables by which torch and oneDNN take their own kernels for AVX2.
"""

import importlib.abc
import importlib.machinery
import sys

LACKING = ("avx512", "avx10", "avx_vnni", "amx")
QUESTIONS = ("_is_vnni_supported", "_is_avx512_", "_is_amx_")


class OnlyAvx2(importlib.abc.MetaPathFinder):
    """Changes `torch.cpu` as soon as it is imported: vLLM asks it which of its builds to load."""

    def find_spec(self, name, path, target=None):
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def load_and_change(module):
            load(module)
            found = dict(module.get_capabilities())
            found |= {key: False for key in found if key.startswith(LACKING)}
            module.get_capabilities = lambda: found
            for question in vars(module):
                if question.startswith(QUESTIONS):
                    setattr(module, question, lambda: False)

        spec.loader.exec_module = load_and_change
        return spec


sys.meta_path.insert(0, OnlyAvx2())
