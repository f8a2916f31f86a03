"""The compiled `rows.c` as ctypes sees it: the best build that this processor runs."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent
FLOAT32, BFLOAT16 = 0, 1
# Tokens a block of keys and values holds, BLOCK in rows.c.
BLOCK_SIZE: Final = 16
# Builds of rows.c, in the order of `chiasm_best_build`; the names are those of hatch_build.py.
_BUILDS: Final = ("plain", "avx2", "avx512", "avx512bf16")
_POINTER = ctypes.c_void_p
_COUNT = ctypes.c_int64


class Layer(ctypes.Structure):
    """Addresses of one layer's weights, as `Layer` in rows.c; 0 where a weight is absent."""

    _fields_ = tuple(
        (name, _POINTER)
        for name in (
            "input_norm", "post_norm", "q_norm", "k_norm",
            "q", "k", "v", "o", "gate", "up", "down",
            "q_bias", "k_bias", "v_bias",
        )
    )  # fmt: skip


class Model(ctypes.Structure):
    """Sizes and weights of a decoder, as `Model` in rows.c."""

    _fields_ = (
        *(
            (name, _COUNT)
            for name in (
                "kind", "layers", "width", "heads", "kv_heads", "head_dim", "inner", "vocab",
            )
        ),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("layer", ctypes.POINTER(Layer)),
        ("norm", _POINTER),
        ("head", _POINTER),
    )  # fmt: skip


class Step(ctypes.Structure):
    """One step's input and output, as `Step` in rows.c."""

    _fields_ = (
        ("pool", _POINTER),
        ("blocks", _COUNT),
        ("rows", _COUNT),
        ("hidden", _POINTER),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("slots", _POINTER),
        ("tables", _POINTER),
        ("table_width", _COUNT),
        ("seen", _POINTER),
        ("picked", _POINTER),
        ("picked_count", _COUNT),
        ("logits", _POINTER),
        ("best", _POINTER),
        ("finite", _POINTER),
    )


class OutOfMemory(Exception):
    """The native step found no memory for its activations."""


class Crew:
    """The threads that compute steps, the calling one included. Not for two callers at once."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = library
        self._address = library.chiasm_crew_new(threads)
        if not self._address:
            raise OutOfMemory

    def compute(self, model: Model, step: Step) -> None:
        """Computes `step`; the interpreter's lock is free meanwhile."""
        done = self._library.chiasm_step(self._address, ctypes.byref(model), ctypes.byref(step))
        if not done:
            raise OutOfMemory

    def __del__(self) -> None:
        if getattr(self, "_address", None):
            self._library.chiasm_crew_free(self._address)
            self._address = None


@cache
def load_library() -> ctypes.CDLL | None:
    """The best build there is for this processor; None where none was compiled."""
    builds = (open_build(name) for name in reversed(runnable_builds()))
    return next((build for build in builds if build is not None), None)


def runnable_builds() -> tuple[str, ...]:
    """The builds that this processor runs, the best last; empty where none was compiled."""
    plain = open_build("plain")
    return () if plain is None else _BUILDS[: plain.chiasm_best_build() + 1]


def open_build(name: str) -> ctypes.CDLL | None:
    """One build, whether or not this processor runs it; None where it was not compiled."""
    path = _HERE / f"_rows_{name}.so"
    return _declared(ctypes.CDLL(str(path))) if path.is_file() else None


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.chiasm_crew_new.restype = _POINTER
    library.chiasm_crew_new.argtypes = [_COUNT]
    library.chiasm_crew_free.restype = None
    library.chiasm_crew_free.argtypes = [_POINTER]
    library.chiasm_step.restype = ctypes.c_int
    library.chiasm_step.argtypes = [_POINTER, ctypes.POINTER(Model), ctypes.POINTER(Step)]
    library.chiasm_sizes.restype = None
    return library
