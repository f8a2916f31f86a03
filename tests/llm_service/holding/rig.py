"""Rows to hold, and a small contract that they keep."""

import numpy as np
import torch

from chiasm.models.contract import FixedRows, ImageContract
from chiasm.models.identity import EncoderIdentity
from llm_service.embeddings import Rows

WIDTH, COUNT = 8, 4
IDENTITY = EncoderIdentity("tiny", "a" * 64, "b" * 64, "float32", WIDTH)
CONTRACT = ImageContract(IDENTITY, WIDTH, 0, FixedRows(COUNT))


class Clock:
    """Seconds since the epoch, as a test sets them."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def rows(seed: int, *, checked: bool = True) -> Rows:
    """Named rows that differ from those of any other seed."""
    values = np.random.default_rng(seed).standard_normal((COUNT, WIDTH)).astype(np.float32)
    form = CONTRACT.of_rows(COUNT, None, None)
    return Rows(torch.from_numpy(values), form, checked, image_size=(20, 30)).named(IDENTITY)


def same(one: Rows, other: Rows) -> bool:
    """Equal in every bit and every claim."""
    return (
        torch.equal(one.rows, other.rows)
        and one.digest == other.digest
        and one.form == other.form
        and one.identity_checked == other.identity_checked
        and one.image_size == other.image_size
    )
