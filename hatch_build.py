"""Compiles the native decoder layers when the package is built, where there is a C compiler.

Without one the package is complete all the same: the engine computes every step through the
decoder itself. CHIASM_NATIVE=require makes a failure an error.
"""

import os
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("llm_service", "engine", "native")


class NativeBuildHook(BuildHookInterface[Any]):  # type: ignore[misc]
    """Puts `_rows_*.so` beside rows.c and into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root, FOLDER)
        build = runpy.run_path(str(folder / "build.py"))
        wanted: tuple[str, ...] = build["wanted_builds"]()
        made = [name for name in wanted if build["compile_build"](folder, name)]
        if os.environ.get("CHIASM_NATIVE") == "require" and list(wanted) != made:
            raise RuntimeError("rows.c was not compiled, and CHIASM_NATIVE=require is set")
        if made:
            build_data["artifacts"] += [f"/{FOLDER.as_posix()}/_rows_{name}.so" for name in made]
            build_data["pure_python"] = False
            build_data["infer_tag"] = True

    def clean(self, versions: list[str]) -> None:
        for path in Path(self.root, FOLDER).glob("_rows_*.so"):
            path.unlink()
