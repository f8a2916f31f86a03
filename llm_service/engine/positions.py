"""Where a sequence's tokens stand, on one axis or, with M-RoPE, on several."""

from typing import Protocol

import torch


class Placed(Protocol):
    """A sequence whose prompt is placed as in `Prompt`."""

    @property
    def positions(self) -> torch.Tensor | None: ...
    @property
    def position_delta(self) -> int: ...


def places_of(sequence: Placed, first: int, last: int, axes: int) -> torch.Tensor:
    """The places of the tokens `first` to `last`: int64 `[axes, last - first]`."""
    indices = torch.arange(first, last).expand(axes, -1)
    if sequence.positions is None:
        return indices + sequence.position_delta
    stated = sequence.positions[:, first:last]
    behind = indices[:, stated.shape[1] :] + sequence.position_delta
    return torch.cat([stated, behind], dim=1)


def name_of_places(sequence: Placed, first: int, last: int) -> bytes:
    """Equal for tokens `first` to `last` of two sequences of one decoder if and only if they stand
    in the same places; empty where each stands at its index."""
    if sequence.positions is None:
        return b""
    places = places_of(sequence, first, last, len(sequence.positions))
    if bool((places == torch.arange(first, last)).all()):
        return b""
    return places.contiguous().numpy().tobytes()
