"""What pyproject.toml cannot say: the recipes of configs/ are in a wheel, as minirl/recipes."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Copies the recipes beside the modules; an editable install reads them where they are."""

    def run(self):
        """Build the modules, then copy the recipes."""
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / "minirl" / "recipes"
        folder.mkdir(parents=True, exist_ok=True)
        for recipe in sorted(Path("configs").glob("*.yaml")):
            shutil.copy(recipe, folder)


setup(cmdclass={"build_py": BuildWithRecipes})
