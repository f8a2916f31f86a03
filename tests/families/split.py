"""A checkpoint in its two halves, run as the services run it: contract, prompt and engine."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import PIL.Image
import torch

from chiasm import torch_tensors
from chiasm.models.contract import DEFAULT_OPTIONS
from chiasm.models.identity import FeatureType
from chiasm.models.language import LanguageHalf
from chiasm.models.vision import VisionHalf
from chiasm.v1 import llm_service_pb2
from llm_service.app import decoder_parts
from llm_service.embeddings import Rows
from llm_service.engine.engine import EmbeddedEngine
from llm_service.engine.values import (
    Delta,
    EngineSettings,
    Event,
    Failed,
    Finished,
    Prompt,
    SamplingParams,
    TokenDecoder,
)
from llm_service.pictures import Ready
from llm_service.prompt import PromptBuilder
from llm_service.request import Conversation, Part, Picture, RawImage, Text, Turn
from llm_service.servicer import as_prompt
from llm_service.settings import LlmSettings
from tests.families.oracle import Said

MODEL_ID = "tiny"
TOP = 20


@dataclass(eq=False)
class Answer:
    """A greedy answer as it comes; `logprobs[i]` are the likeliest tokens in place of token i."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    cached_tokens: int = 0
    failed: Failed | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def take(self, event: Event) -> None:
        match event:
            case Delta():
                self.tokens += event.token_ids
                self.logprobs += [
                    {one.token_id: one.logprob for one in told.top} for told in event.logprobs
                ]
            case Failed():
                self.failed = event
                self.ended.set()
            case Finished():
                self.cached_tokens = event.cached_tokens
                self.ended.set()


class Split:
    """Both halves of a checkpoint and an engine; a context that ends the engine's thread."""

    def __init__(
        self,
        directory: Path,
        settings: EngineSettings | None = None,
        dtype: FeatureType = "float32",
    ) -> None:
        kind = torch_tensors.dtype_of(dtype)
        self.vision = VisionHalf.load(directory, model_id=MODEL_ID, dtype=kind)
        self.language = LanguageHalf.load(directory, model_id=MODEL_ID, dtype=kind)
        self.builder = PromptBuilder(self.language)
        self.broken = False
        served = LlmSettings(model=directory, vision="none", dtype=dtype)
        self.engine = EmbeddedEngine(
            decoder_parts(served, self.language),
            cast(TokenDecoder, self.language.tokenizer),
            settings or EngineSettings(kv_bytes=16 * 1024 * 1024),
            on_fatal=self._note,
        )

    def __enter__(self) -> Self:
        self.engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()

    def prompt(self, turns: Sequence[Said], salt: bytes = b"") -> Prompt:
        """A conversation's prompt, its pictures encoded one by one."""
        conversation = _conversation(turns)
        pictures = [part for _, parts in turns for part in parts if not isinstance(part, str)]
        contract = self.language.contract
        forms = [contract.of_size((one.height, one.width)) for one in pictures]
        layout = self.builder.lay_out(self.builder.render(conversation), forms)
        return as_prompt(layout, [self.ready(one) for one in pictures], salt)

    def ready(self, picture: PIL.Image.Image) -> Ready:
        """A picture with the rows of the vision half, as the LLM service holds it."""
        (features,) = self.vision.encode([self.vision.preprocess(picture)])
        form = self.language.contract.of_rows(
            len(features.rows), features.grid_thw, features.image_size
        )
        rows = Rows(features.rows, form, identity_checked=True, levels=features.levels)
        rows = rows.named(self.vision.identity)
        nothing = Picture(RawImage(memoryview(b""), DEFAULT_OPTIONS), 0, 0)
        return Ready(nothing, rows, llm_service_pb2.IMAGE_SOURCE_LOCAL)

    def submit(self, prompt: Prompt, tokens: int) -> Answer:
        """Begins a greedy answer of at most `tokens` tokens."""
        answer = Answer(prompt.token_ids)
        sampling = SamplingParams(temperature=0, max_tokens=tokens, top_logprobs=TOP)
        self.engine.submit("test", prompt, sampling, None, answer.take)
        return answer

    def _note(self) -> None:
        self.broken = True


def _conversation(turns: Sequence[Said]) -> Conversation:
    read: list[Turn] = []
    for number, (role, parts) in enumerate(turns):
        pieces: list[Part] = [
            Text(part)
            if isinstance(part, str)
            else Picture(RawImage(memoryview(b""), DEFAULT_OPTIONS), number, index)
            for index, part in enumerate(parts)
        ]
        read.append(Turn(cast(Any, role), tuple(pieces)))
    return Conversation(tuple(read), "")


def difference(found: Sequence[dict[int, float]], expected: torch.Tensor) -> float:
    """The greatest difference of any log-probability that the engine told."""
    return max(
        abs(logprob - float(row[token]))
        for told, row in zip(found, expected, strict=True)
        for token, logprob in told.items()
    )
