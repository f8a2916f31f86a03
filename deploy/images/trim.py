"""Takes out of an installed folder what no service reads, and keeps the records true.

Runs in the build stage, with the standard library alone: `python trim.py SITE [--keep NAME ...]`.
Of Chiasm itself only the packages that --keep names stay.
"""

import argparse
import csv
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# Below site-packages. Tests, headers and test programs; nothing that a module imports.
DROPPED: Final = (
    "numpy/**/tests",
    "numpy/_core/include",
    "numpy/_core/lib",
    "networkx/**/tests",
    "sympy/**/tests",
    "mpmath/tests",
    "psutil/tests",
    "torch/bin/[!t]*",
    "torch/bin/test_*",  # what is left: torch_shm_manager, which torch looks for
    "torch/include",
    "torch/lib/libbackend_with_compiler.so",
    "torch/lib/libjitbackend_test.so",
    "torch/lib/libtorchbind_test.so",
    "torch/lib/*.a",
    "torch/share",
    "torch/test",
    "torch/testing/_internal/py312_intrinsics.py",  # no Python 3.11 compiles it
)
# Programs of packages (torchrun, hf, tqdm …): the services start none of them.
PROGRAMS_KEPT: Final = ("python", "python3", "python3.11")
OWN: Final = ("chiasm", "demo_model", "encoder_service", "gateway", "llm_service")


def trim(prefix: Path, keep: tuple[str, ...]) -> None:
    """`prefix` holds bin/ and lib/python3.11/site-packages."""
    site = prefix / "lib" / "python3.11" / "site-packages"
    patterns = [*DROPPED, *(name for name in OWN if name not in keep)]
    for pattern in patterns:
        for path in sorted(site.glob(pattern)):
            _remove(path)
    for path in sorted((prefix / "bin").glob("*")):
        if path.name not in PROGRAMS_KEPT:
            _remove(path)
    for record in sorted(site.glob("*.dist-info/RECORD")):
        _keep_record_true(record, site)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        path.unlink()


def _keep_record_true(record: Path, site: Path) -> None:
    rows = list(_rows(record.read_text(encoding="utf-8"), site))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(sorted(rows))
    record.write_text(text.getvalue(), encoding="utf-8")


def _rows(text: str, site: Path) -> Iterator[list[str]]:
    for row in csv.reader(io.StringIO(text)):
        if row and (site / row[0]).exists():
            yield row


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("prefix", type=Path)
    parser.add_argument("--keep", nargs="*", default=())
    arguments = parser.parse_args()
    trim(arguments.prefix, tuple(arguments.keep))
