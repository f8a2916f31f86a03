"""What is added to or taken off the logits of single tokens: biases, and penalties for repeating.

All of it is sparse: a row pays for the tokens that its text holds, never for the vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llm_service.engine.values import SamplingParams

_FIRST_ROOM = 64
_LARGEST = 1e30


class Seen:
    """The tokens of one text, each once, and how often the answer holds each. Grows with it."""

    def __init__(self, prompt_ids: Iterable[int] = ()) -> None:
        distinct = [*dict.fromkeys(prompt_ids)]
        self._place = {token_id: place for place, token_id in enumerate(distinct)}
        room = max(_FIRST_ROOM, 2 * len(distinct))
        self._ids = np.zeros(room, np.int64)
        self._ids[: len(distinct)] = distinct
        self._counts = np.zeros(room, np.float32)

    def __len__(self) -> int:
        return len(self._place)

    def add(self, token_id: int) -> None:
        """Counts a token of the answer."""
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._counts[place] += 1

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Times that the answer holds each of `ids`; 0 for those of the prompt alone."""
        return self._counts[: len(self._place)]


def seen_of(sampling: SamplingParams, prompt_ids: Iterable[int]) -> Seen | None:
    """What a new sequence's penalties begin with, or None if it has none."""
    if sampling.repetition_penalty != 1:
        return Seen(prompt_ids)
    return Seen() if sampling.presence_penalty or sampling.frequency_penalty else None


@dataclass(frozen=True, eq=False)
class Bias:
    """A request's logit biases: `values[i]` belongs to token `ids[i]`."""

    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


def bias_of(sampling: SamplingParams) -> Bias | None:
    """The request's biases as arrays, or None if it has none."""
    if not sampling.logit_bias:
        return None
    ids, values = zip(*sampling.logit_bias, strict=True)
    return Bias(np.array(ids, np.int64), np.array(values, np.float32))


def add_biases(logits: torch.Tensor, biases: Sequence[tuple[int, Bias]]) -> None:
    """Adds each row's biases in place; `biases` names rows of `logits`."""
    places = _places([(row, bias.ids) for row, bias in biases], logits)
    values = np.concatenate([bias.values for _, bias in biases])
    logits[places] += torch.from_numpy(values).to(logits)


def penalise(logits: torch.Tensor, rows: Sequence[tuple[int, SamplingParams, Seen]]) -> None:
    """Applies each row's penalties in place; `rows` names rows of `logits`.

    First the repetition penalty (Keskar et al. 2019, CTRL, section 4.1, in the form for negative
    logits that transformers and vLLM use), then frequency and presence as OpenAI's API defines
    them, in vLLM's order (`vllm/model_executor/layers/utils.py`, `apply_penalties`).
    """
    places = _places([(row, seen.ids) for row, _, seen in rows], logits)
    counts = torch.from_numpy(np.concatenate([seen.counts for *_, seen in rows])).to(logits)

    def spread(values: Sequence[float]) -> torch.Tensor:
        each = np.repeat(np.array(values, np.float32), [len(seen) for *_, seen in rows])
        return torch.from_numpy(each).to(logits)

    repetition = spread([sampling.repetition_penalty for _, sampling, _ in rows])
    values = logits[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    # A penalty near 0 may overflow; this leaves room for a division by the temperature.
    values.clamp_(max=_LARGEST)
    values -= spread([sampling.frequency_penalty for _, sampling, _ in rows]) * counts
    values -= spread([sampling.presence_penalty for _, sampling, _ in rows]) * (counts > 0)
    logits[places] = values


def _places(
    rows: Sequence[tuple[int, npt.NDArray[Any]]], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every token of `rows`."""
    numbers = np.repeat([row for row, _ in rows], [len(ids) for _, ids in rows])
    ids = np.concatenate([ids for _, ids in rows])
    return torch.from_numpy(numbers).to(like.device), torch.from_numpy(ids).to(like.device)
