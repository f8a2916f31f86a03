"""Tiny checkpoints with random weights, one module a family, as people have them on disk."""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path


def _found() -> dict[str, Callable[[Path], None]]:
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in names}
    return {name: module.build for name, module in modules.items() if hasattr(module, "build")}


BUILDERS = _found()
"""Writes the checkpoint of the family named into a directory."""
