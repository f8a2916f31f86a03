"""A vision half behind a gate: it computes what the real one does, when the test lets it."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import PIL.Image

from chiasm.models.contract import ImageContract, PixelOptions
from chiasm.models.vision import ImageFeatures, PixelInputs, VisionHalf


class GatedTower:
    """`half`, which waits before each forward while it is held."""

    def __init__(self, half: VisionHalf) -> None:
        self._half = half
        self._gate = threading.Event()
        self._gate.set()
        # Set once a forward waits at the gate.
        self.waiting = threading.Event()
        self.encoded_images = 0

    @property
    def contract(self) -> ImageContract:
        return self._half.contract

    def preprocess(self, image: PIL.Image.Image, options: PixelOptions) -> PixelInputs:
        return self._half.preprocess(image, options)

    def encode(self, batch: Sequence[PixelInputs], *, bit_exact: bool) -> list[ImageFeatures]:
        if not self._gate.is_set():
            self.waiting.set()
            self._gate.wait(30)
        self.encoded_images += len(batch)
        return self._half.encode(batch, bit_exact=bit_exact)

    @contextmanager
    def held(self) -> Iterator[None]:
        """No forward begins inside."""
        self.waiting.clear()
        self.encoded_images = 0
        self._gate.clear()
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        self._gate.set()
