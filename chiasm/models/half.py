"""Load one half of a checkpoint through transformers' `from_pretrained`; the other is never made.

The unwanted modules are replaced while the model is still on the meta device. So the loader finds
no place for their tensors and never reads them, and its rename rules for old key layouts keep
working.
"""

import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Never

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from chiasm.models.checkpoint import Checkpoint, CheckpointError
from chiasm.models.family import Family

# A report of every missing tensor of a large model is of no use.
_NAMES_SHOWN = 8


class Absent(nn.Module):
    """Stands where a module of the other half would be; using it is a bug."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, *args: Any, **kwargs: Any) -> Never:
        raise RuntimeError(f"{self.path} belongs to the half of the checkpoint that is not loaded")


def load_config(checkpoint: Checkpoint, family: Family) -> PreTrainedConfig:
    """The checkpoint's config as transformers understands it, if the family can serve it."""
    with _as_checkpoint_error(checkpoint, "its config.json"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            checkpoint.directory, local_files_only=True, trust_remote_code=False
        )
    reason = family.refusal(config)
    if reason is not None:
        raise CheckpointError(f"{checkpoint.directory} cannot be served: {reason}")
    return config


def load_half(
    checkpoint: Checkpoint,
    config: PreTrainedConfig,
    absent: tuple[str, ...],
    dtype: torch.dtype,
    device: torch.device | str,
) -> PreTrainedModel:
    """The model without the modules at the paths `absent`, in evaluation mode.

    Raises:
        CheckpointError: a tensor of this half is missing, unknown or of a wrong shape.
    """
    with _as_checkpoint_error(checkpoint, "its weights"), _no_progress_bars():
        loaded: tuple[PreTrainedModel, dict[str, Any]] = half_class(config, absent).from_pretrained(
            checkpoint.directory,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            # They are reported by name below; the library's own error has no names.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    model, report = loaded
    _require_exact(checkpoint, report)
    model.requires_grad_(False).train(False)
    nn.Module.to(model, device)
    return model


def half_class(config: PreTrainedConfig, absent: tuple[str, ...]) -> Any:
    """The checkpoint's own model class, except that the modules at `absent` are `Absent`."""
    whole: Any = AutoModelForImageTextToText._model_mapping[type(config)]

    def build_half(model: Any, config: PreTrainedConfig) -> None:
        whole.__init__(model, config)
        _leave_out(model, absent)

    # transformers applies its rename rules for old key layouts to its own classes, by their name.
    own = {"__init__": build_half, "__module__": whole.__module__}
    return type(whole.__name__, (whole,), own)


def _leave_out(model: Any, absent: tuple[str, ...]) -> None:
    for path in absent:
        # Some checkpoints of a family lack a whole tower, e.g. that for sound.
        if _holds(model, path):
            model.set_submodule(path, Absent(path))
    model._keys_to_ignore_on_load_unexpected |= {_stored_under(path) for path in absent}
    model.all_tied_weights_keys = {
        target: source
        for target, source in model.all_tied_weights_keys.items()
        if not target.startswith(absent) and not source.startswith(absent)
    }


def _holds(model: nn.Module, path: str) -> bool:
    parent, _, name = path.rpartition(".")
    return getattr(model.get_submodule(parent), name, None) is not None


def brief(error: Exception) -> str:
    """A library's own words in one line; some of its messages list everything it knows."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", width=300)


def _stored_under(path: str) -> str:
    """A pattern for the tensors of an absent module: old layouts put it under other parents."""
    return rf"(^|\.){re.escape(path.rpartition('.')[2])}\."


def _require_exact(checkpoint: Checkpoint, report: dict[str, Any]) -> None:
    for problem, words in (
        ("missing_keys", "lacks"),
        ("mismatched_keys", "has another shape than its config.json states for"),
        ("unexpected_keys", "has tensors that its config.json has no place for:"),
    ):
        names = sorted(key if isinstance(key, str) else key[0] for key in report[problem])
        if names:
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            raise CheckpointError(
                f"{checkpoint.directory} {words} {', '.join(names[:_NAMES_SHOWN])}{more}; "
                "fetch config and weights of one and the same checkpoint"
            )


@contextmanager
def _as_checkpoint_error(checkpoint: Checkpoint, part: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint.directory}: transformers cannot load {part}: {brief(error)}"
        ) from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    log: Any = transformers_logging
    shown = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            log.enable_progress_bar()
