"""Compiles rows.c: `python -m llm_service.engine.native.build`. Also run when the package is built.

CC names the compiler. Imports nothing of the project: the build loads this file alone.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

COMMON = (
    "-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-shared", "-fPIC",
)  # fmt: skip
LIBRARIES = ("-lpthread", "-lm")
# In the order of chiasm_best_build in rows.c.
BUILDS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "avx2": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4",),
    "avx512bf16": ("-march=x86-64-v4", "-mavx512bf16"),
}


def wanted_builds() -> tuple[str, ...]:
    """The builds for this machine's kind of processor."""
    if sys.platform != "linux":
        return ()
    return tuple(BUILDS) if platform.machine() == "x86_64" else ("plain",)


def compile_build(folder: Path, name: str) -> bool:
    """Compiles one build; False, with the compiler's own words on stderr, if that fails."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        print("chiasm: no C compiler; the engine goes without native layers", file=sys.stderr)
        return False
    target = folder / f"_rows_{name}.so"
    partial = target.with_suffix(".so.new")
    command = [
        *compiler.split(), *COMMON, *BUILDS[name], "-o", str(partial), str(folder / "rows.c"),
        *LIBRARIES,
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        print(f"chiasm: {name} was not compiled:\n{done.stderr}", file=sys.stderr)
        return False
    # Renamed, not written over: a process may have the old one mapped.
    partial.replace(target)
    return True


if __name__ == "__main__":
    results = {name: compile_build(Path(__file__).parent, name) for name in wanted_builds()}
    print(", ".join(f"{name}: {'made' if made else 'failed'}" for name, made in results.items()))
    sys.exit(0 if results and all(results.values()) else 1)
