"""Trains the demo model from nothing: `python -m demo_model.train --out DIR`.

Stages, because one does not work: trained as a whole from scratch, a model this small learns
how answers look and never learns to look at the picture.

1. *Seeing*: the tower and the projector alone, under throw-away linear heads: on the mean of the
   projected rows (kind, colour, shape, digit, word, count, position), and on each row (which
   object, if any, has its centre in that part of the picture).
2. *Answering*: the whole model on conversations, loss on the answers and their end token only,
   every answer weighing the same; the tower and the projector learn at a fifth of the rate. Two
   more throw-away heads, on the output of the decoder's first layer, must name the picture that
   each image row belongs to and the picture that each question is about: without them the model
   learns to see, and not to tell two pictures apart. It begins with one picture a conversation,
   then mixes all kinds. Random gaps in the positions between turns stand for long text, so that
   positions far beyond those of the data are trained.
3. *Polishing*: the whole model again, in smaller batches, the tower and the projector at half the
   rate, on more of what stage 2 finds hard: several pictures of one kind in a conversation, so
   that nothing but a picture's number says which is meant, and the kinds with many answers. It
   takes over before stage 2's rate is low.

The same arguments give the same weights on the same machine: seeds, step counts and the thread
count are fixed, and nothing depends on the clock. Another thread count or processor rounds
otherwise and gives other weights.
"""

import argparse
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlavaForConditionalGeneration, LlavaProcessor

from demo_model.model import WIDTH, build_model, save_checkpoint
from demo_model.pictures import (
    CANVAS,
    COLOURS,
    COUNTS,
    DIGITS,
    POSITIONS,
    SHAPES,
    WORDS,
    Scene,
    draw,
    sample_scene,
)
from demo_model.questions import (
    MAX_PICTURES,
    NO_PICTURE,
    Conversation,
    answer_of,
    converse,
    counting_turn,
    kinds_of,
)
from demo_model.text import (
    IMAGE_ROWS,
    ConversationEncoder,
    Sample,
    build_image_processor,
    build_processor,
    build_tokenizer,
)

ANSWERS: dict[str, tuple[str, ...]] = {
    "kind": ("shapes", "digit", "word"),
    "colour": tuple(COLOURS),
    "shape": SHAPES,
    "digit": DIGITS,
    "word": WORDS,
    "count": COUNTS,
    "position": tuple(POSITIONS),
}
OBJECTS = (*SHAPES, *DIGITS, *WORDS)
EMPTY = len(OBJECTS)
EMPTY_WEIGHT = 0.2
UNKNOWN = -100
HARD_KINDS = ("shape", "count", "digit", "word", "describe")
# What the pictures of an alike conversation all show; words and shapes are learnt more slowly.
ALIKE_KINDS = ("word", "word", "shapes", "shapes", "digit")
LONGEST_GAP = 300
TEXT_ONLY_SHARE = 0.03
TELLING_SHARE = 0.3


@dataclass(frozen=True)
class Settings:
    """Step counts, rates and sizes; `picture_count` seeds of the training split are drawn once."""

    picture_count: int = 70_000
    see_steps: int = 3_200
    see_batch: int = 64
    see_rate: float = 1e-3
    answer_steps: int = 1_700
    answer_stop: int = 1_000
    answer_batch: int = 40
    answer_rate: float = 1.2e-3
    answer_vision_share: float = 0.2
    single_share: float = 0.25
    polish_steps: int = 4_000
    polish_batch: int = 30
    polish_rate: float = 7e-4
    polish_vision_share: float = 0.5
    weight_decay: float = 0.05
    save_every: int = 200
    threads: int = 2
    seed: int = 7


@dataclass(frozen=True)
class Album:
    """Training pictures: scenes, and their pixels `[count, 3, IMAGE_SIZE, IMAGE_SIZE]` uint8."""

    scenes: tuple[Scene, ...]
    pixels: Tensor

    def values(self, indices: Sequence[int]) -> Tensor:
        """Pixel values in [-1, 1], float32, as the image processor gives them."""
        return self.pixels[list(indices)].to(torch.float32) / 127.5 - 1


def _small_picture(seed: int) -> NDArray[np.uint8]:
    """A training picture resized by the model's own image processor, before rescaling."""
    processor = build_image_processor()
    picture = draw(sample_scene("train", seed))
    values = processor(picture, do_rescale=False, do_normalize=False)["pixel_values"][0]
    pixels: NDArray[np.uint8] = np.clip(np.rint(values), 0, 255).astype(np.uint8)
    return pixels


def make_album(count: int, workers: int) -> Album:
    with ProcessPoolExecutor(workers) as pool:
        pixels = np.stack(list(pool.map(_small_picture, range(count), chunksize=500)))
    scenes = tuple(sample_scene("train", seed) for seed in range(count))
    return Album(scenes, torch.from_numpy(pixels))


class Progress:
    """Prints a line every so many steps: mean loss and accuracy since the last, time left."""

    def __init__(self, name: str, steps: int, every: int = 50) -> None:
        self._name, self._steps, self._every = name, steps, every
        self._begun = time.monotonic()
        self._losses: list[float] = []
        self._right: Counter[str] = Counter()
        self._asked: Counter[str] = Counter()

    def add(self, step: int, loss: float, results: Sequence[tuple[str, bool]]) -> None:
        self._losses.append(loss)
        for kind, right in results:
            self._asked[kind] += 1
            self._right[kind] += right
        if step % self._every == 0 or step == self._steps:
            self._print(step)

    def _print(self, step: int) -> None:
        spent = time.monotonic() - self._begun
        left = spent / step * (self._steps - step)
        loss = sum(self._losses) / len(self._losses)
        rates = " ".join(
            f"{k} {100 * self._right[k] / n:.0f}" for k, n in sorted(self._asked.items())
        )
        bar = "#" * (20 * step // self._steps)
        print(
            f"{self._name} [{bar:<20}] {step}/{self._steps} loss {loss:.3f} | {rates} |"
            f" {spent / 60:.1f} min, {left / 60:.1f} left",
            flush=True,
        )
        self._losses.clear()
        self._right.clear()
        self._asked.clear()


def warm_cosine(step: int, steps: int, warm: int = 100) -> float:
    """Share of the peak rate: linear rise, then half a cosine down to a fiftieth."""
    if step < warm:
        return (step + 1) / warm
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _optimizer(
    groups: list[tuple[list[nn.Parameter], float]], decay: float, steps: int
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    split = []
    for parameters, rate in groups:
        split.append({"params": [p for p in parameters if p.ndim > 1], "lr": rate})
        split.append(
            {"params": [p for p in parameters if p.ndim < 2], "lr": rate, "weight_decay": 0}
        )
    optimizer = torch.optim.AdamW(split, weight_decay=decay, betas=(0.9, 0.98))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: warm_cosine(s, steps))


def image_rows(model: LlavaForConditionalGeneration, values: Tensor) -> Tensor:
    """Projected rows `[pictures, rows, WIDTH]`: what the decoder gets for each picture."""
    features = model.model.vision_tower(values).last_hidden_state[:, 1:]
    rows: Tensor = model.model.multi_modal_projector(features)
    return rows


def augment(values: Tensor, generator: torch.Generator) -> Tensor:
    """Brightness, contrast and noise, so that the tower does not lean on exact pixels."""
    count = values.shape[0]
    gain = 1 + 0.1 * (torch.rand(count, 1, 1, 1, generator=generator) - 0.5)
    offset = 0.1 * (torch.rand(count, 1, 1, 1, generator=generator) - 0.5)
    noise = 0.03 * torch.randn(values.shape, generator=generator)
    return values * gain + offset + noise


def row_labels(scene: Scene) -> list[int]:
    """For each image row, the index in OBJECTS of what is centred in its patch, or EMPTY."""
    side = math.isqrt(IMAGE_ROWS)
    labels = [EMPTY] * IMAGE_ROWS
    for x, y in (placement.centre for placement in scene.placements):
        labels[int(y * side / CANVAS) * side + int(x * side / CANVAS)] = OBJECTS.index(
            scene.content
        )
    return labels


class Seeing:
    """Stage 1: tower and projector under one throw-away linear head a question kind."""

    def __init__(
        self, model: LlavaForConditionalGeneration, album: Album, settings: Settings
    ) -> None:
        self._model, self._album, self._settings = model, album, settings
        self._heads = nn.ModuleDict({k: nn.Linear(WIDTH, len(a)) for k, a in ANSWERS.items()})
        self._row_head = nn.Linear(WIDTH, len(OBJECTS) + 1)
        self._row_weights = torch.tensor([1.0] * len(OBJECTS) + [EMPTY_WEIGHT])
        self._labels = {kind: self._label(kind) for kind in ANSWERS}
        self._row_labels = torch.tensor([row_labels(scene) for scene in album.scenes])

    def _label(self, kind: str) -> Tensor:
        answers = ANSWERS[kind]
        return torch.tensor(
            [
                answers.index(answer_of(scene, kind)) if kind in kinds_of(scene) else UNKNOWN
                for scene in self._album.scenes
            ]
        )

    def run(self) -> None:
        model, settings = self._model, self._settings
        generator = torch.Generator().manual_seed(settings.seed)
        heads = [*self._heads.parameters(), *self._row_head.parameters()]
        learnt = vision_parameters(model) + heads
        optimizer, schedule = _optimizer(
            [(learnt, settings.see_rate)], settings.weight_decay, settings.see_steps
        )
        progress = Progress("seeing", settings.see_steps)
        for step in range(1, settings.see_steps + 1):
            picked = torch.randint(
                len(self._album.scenes), (settings.see_batch,), generator=generator
            ).tolist()
            loss, results = self._loss(picked, generator)
            _step(loss, optimizer, schedule, learnt)
            progress.add(step, loss.item(), results)

    def _loss(
        self, picked: list[int], generator: torch.Generator
    ) -> tuple[Tensor, list[tuple[str, bool]]]:
        values = augment(self._album.values(picked), generator)
        rows = image_rows(self._model, values)
        pooled, results = rows.mean(1), []
        loss = F.cross_entropy(
            self._row_head(rows).flatten(0, 1),
            self._row_labels[picked].flatten(),
            weight=self._row_weights,
        )
        for kind, head in self._heads.items():
            labels = self._labels[kind][picked]
            known = labels != UNKNOWN
            logits = head(pooled[known])
            loss = loss + F.cross_entropy(logits, labels[known])
            right = (logits.argmax(-1) == labels[known]).tolist()
            results += [(kind, bool(r)) for r in right]
        return loss, results


def vision_parameters(model: LlavaForConditionalGeneration) -> list[nn.Parameter]:
    tower, projector = model.model.vision_tower, model.model.multi_modal_projector
    unused = set(tower.post_layernorm.parameters())
    return [p for p in (*tower.parameters(), *projector.parameters()) if p not in unused]


def _step(
    loss: Tensor,
    optimizer: torch.optim.AdamW,
    schedule: torch.optim.lr_scheduler.LambdaLR,
    learnt: list[nn.Parameter],
) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(learnt, 1.0)
    optimizer.step()
    schedule.step()


def sample_conversation(
    stream: random.Random, scenes: Sequence[Scene], single: bool, kinds: Sequence[str] = ()
) -> Conversation:
    """One training conversation: text-only, over one picture, or over up to MAX_PICTURES."""
    if not single and stream.random() < TEXT_ONLY_SHARE:
        return Conversation((), "", (counting_turn(stream),))
    if single or stream.random() < 0.3:
        return converse(stream, scenes[:1], [1] + [0] * stream.randint(0, 3), kinds)
    pictures = stream.choice((1, 2, 2, 2, 3, 4))
    return converse(stream, scenes[:pictures], _attach(stream, pictures), kinds)


def _attach(stream: random.Random, pictures: int) -> list[int]:
    """How many pictures each turn attaches: the first at least one, some turns none."""
    attach = []
    while pictures:
        now = stream.randint(1, pictures)
        attach += [now] + [0] * stream.choice((0, 1, 1, 2))
        pictures -= now
    return attach if len(attach) > 1 else [*attach, 0]


@dataclass(frozen=True)
class Batch:
    """`ids`, `positions` and `weights` are `[size, length]`; pictures in the order of the rows."""

    ids: Tensor
    positions: Tensor
    weights: Tensor
    pictures: tuple[int, ...]
    kinds: tuple[tuple[str, ...], ...]
    row_pictures: Tensor
    asked_pictures: Tensor


@dataclass(frozen=True)
class Example:
    sample: Sample
    pictures: tuple[int, ...]
    kinds: tuple[str, ...]


def collate(examples: Sequence[Example], stream: random.Random) -> Batch:
    length = max(len(e.sample.ids) for e in examples)
    return Batch(
        torch.tensor([[*e.sample.ids, *[0] * (length - len(e.sample.ids))] for e in examples]),
        torch.tensor([_positions(e.sample, length, stream) for e in examples]),
        torch.tensor(
            [[*e.sample.answer_weights, *[0.0] * (length - len(e.sample.ids))] for e in examples]
        ),
        tuple(index for e in examples for index in e.pictures),
        tuple(e.kinds for e in examples),
        _padded([e.sample.row_pictures for e in examples], length),
        _padded([e.sample.asked_pictures for e in examples], length),
    )


def _padded(rows: Sequence[Sequence[int]], length: int) -> Tensor:
    return torch.tensor([[*row, *[NO_PICTURE] * (length - len(row))] for row in rows])


def _positions(sample: Sample, length: int, stream: random.Random) -> list[int]:
    positions = list(range(length))
    if stream.random() < 0.25:
        start, gap = stream.choice(sample.turn_starts), stream.randint(1, LONGEST_GAP)
        positions = [p + gap if i >= start else p for i, p in enumerate(positions)]
    return positions


@dataclass(frozen=True)
class Round:
    """A descent of the rate over `steps`, left at `stop`.

    In the first `single_steps` steps conversations have one picture. `hard` is the share of
    conversations that ask only for HARD_KINDS, and, apart from that, of those whose pictures are
    all of one kind, so that only a picture's number tells which is meant.
    """

    name: str
    steps: int
    stop: int
    single_steps: int
    batch: int
    rate: float
    vision_share: float
    seed: int
    hard: float


def answering_round(settings: Settings) -> Round:
    return Round(
        name="answering",
        steps=settings.answer_steps,
        stop=settings.answer_stop,
        single_steps=int(settings.single_share * settings.answer_steps),
        batch=settings.answer_batch,
        rate=settings.answer_rate,
        vision_share=settings.answer_vision_share,
        seed=settings.seed,
        hard=0.0,
    )


def polishing_round(settings: Settings) -> Round:
    return Round(
        name="polishing",
        steps=settings.polish_steps,
        stop=settings.polish_steps,
        single_steps=0,
        batch=settings.polish_batch,
        rate=settings.polish_rate,
        vision_share=settings.polish_vision_share,
        seed=settings.seed + 1,
        hard=0.6,
    )


class Answering:
    """Stages 2 and 3: the whole model on conversations."""

    GROUP = 8

    def __init__(
        self,
        model: LlavaForConditionalGeneration,
        encoder: ConversationEncoder,
        album: Album,
        settings: Settings,
    ) -> None:
        self._model, self._encoder, self._album, self._settings = model, encoder, album, settings
        self._stream = random.Random()
        self._row_head = nn.Linear(WIDTH, MAX_PICTURES)
        self._asked_head = nn.Linear(WIDTH, MAX_PICTURES)
        self._by_kind: dict[str, list[int]] = {}
        for index, scene in enumerate(album.scenes):
            self._by_kind.setdefault(scene.kind, []).append(index)

    def run(self, plan: Round, save: Callable[[], None]) -> None:
        settings, model = self._settings, self._model
        self._stream = random.Random(f"chiasm demo conversations/{plan.seed}")
        generator = torch.Generator().manual_seed(plan.seed + 1)
        seeing = vision_parameters(model)
        heads = [*self._row_head.parameters(), *self._asked_head.parameters()]
        speaking = [*model.model.language_model.parameters(), *model.lm_head.parameters(), *heads]
        optimizer, schedule = _optimizer(
            [(seeing, plan.rate * plan.vision_share), (speaking, plan.rate)],
            settings.weight_decay,
            plan.steps,
        )
        progress = Progress(plan.name, plan.stop)
        waiting: list[Batch] = []
        for step in range(1, plan.stop + 1):
            waiting = waiting or self._group(plan, step <= plan.single_steps)
            loss, results = self._loss(waiting.pop(), generator)
            _step(loss, optimizer, schedule, seeing + speaking)
            progress.add(step, loss.item(), results)
            if step % settings.save_every == 0:
                save()

    def _group(self, plan: Round, single: bool) -> list[Batch]:
        """Several batches at once, conversations of like length together: less padding."""
        size = plan.batch
        examples = [self._example(plan, single) for _ in range(size * self.GROUP)]
        examples.sort(key=lambda e: len(e.sample.ids))
        batches = [
            collate(examples[i : i + size], self._stream) for i in range(0, len(examples), size)
        ]
        self._stream.shuffle(batches)
        return batches

    def _example(self, plan: Round, single: bool) -> Example:
        stream, scenes = self._stream, self._album.scenes
        kinds = HARD_KINDS if plan.hard and stream.random() < plan.hard else ()
        picked = self._pick(alike=bool(plan.hard) and stream.random() < plan.hard)
        conversation = sample_conversation(stream, [scenes[i] for i in picked], single, kinds)
        return Example(
            self._encoder.encode(conversation),
            tuple(picked[: len(conversation.scenes)]),
            tuple(turn.kind for turn in conversation.turns),
        )

    def _pick(self, alike: bool) -> list[int]:
        stream = self._stream
        if not alike:
            return [stream.randrange(len(self._album.scenes)) for _ in range(MAX_PICTURES)]
        among = self._by_kind[stream.choice(ALIKE_KINDS)]
        return [stream.choice(among) for _ in range(MAX_PICTURES)]

    def _loss(
        self, batch: Batch, generator: torch.Generator
    ) -> tuple[Tensor, list[tuple[str, bool]]]:
        hidden, first = self._hidden(batch, generator)
        weights = batch.weights[:, 1:]
        spoken = weights > 0
        logits = self._model.lm_head(hidden[:, :-1][spoken])
        targets = batch.ids[:, 1:][spoken]
        losses = F.cross_entropy(logits, targets, reduction="none")
        loss = (losses * weights[spoken]).sum() / weights.sum()
        right = torch.ones_like(spoken)
        right[spoken] = logits.argmax(-1) == targets
        telling, told = self._telling(batch, first)
        return loss + TELLING_SHARE * telling, _results(batch, spoken, right) + told

    def _telling(self, batch: Batch, first: Tensor) -> tuple[Tensor, list[tuple[str, bool]]]:
        """The loss of naming pictures from the first layer's output, and what was named rightly."""
        loss, results = torch.zeros(()), []
        for name, head, labels in (
            ("row's", self._row_head, batch.row_pictures),
            ("asked", self._asked_head, batch.asked_pictures),
        ):
            known = labels != NO_PICTURE
            if known.any():
                logits = head(first[known])
                loss = loss + F.cross_entropy(logits, labels[known])
                right = (logits.argmax(-1) == labels[known]).tolist()
                results += [(name, bool(r)) for r in right]
        return loss, results

    def _hidden(self, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The decoder's last hidden states and those after its first layer."""
        model = self._model.model
        embeds = model.language_model.embed_tokens(batch.ids)
        if batch.pictures:
            values = augment(self._album.values(batch.pictures), generator)
            rows = image_rows(self._model, values).flatten(0, 1)
            here = (batch.ids == self._model.config.image_token_id).unsqueeze(-1)
            embeds = embeds.masked_scatter(here, rows)
        # Padding is on the right, so the causal mask alone hides it from every answer.
        output = model.language_model(
            inputs_embeds=embeds,
            position_ids=batch.positions,
            use_cache=False,
            output_hidden_states=True,
        )
        return output.last_hidden_state, output.hidden_states[1]


def _results(batch: Batch, spoken: Tensor, right: Tensor) -> list[tuple[str, bool]]:
    """Whether each answer is right in every token; answers are runs of spoken tokens."""
    results = []
    for kinds, mask, row in zip(batch.kinds, spoken.tolist(), right.tolist(), strict=True):
        runs: list[bool] = []
        for index, inside in enumerate(mask):
            if not inside:
                continue
            if index == 0 or not mask[index - 1]:
                runs.append(True)
            runs[-1] &= row[index]
        results += list(zip(kinds, runs, strict=True))
    return results


def train(out: Path, continue_from: Path | None, settings: Settings) -> None:
    """Trains and writes a checkpoint directory at `out`, replaced whole at every save.

    With `continue_from`, a checkpoint that this module wrote, only stage 3 runs.
    """
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(settings.seed)
    begun = time.monotonic()
    tokenizer = build_tokenizer()
    processor: LlavaProcessor = build_processor(tokenizer)
    model = _begin(continue_from, len(tokenizer))
    album = make_album(settings.picture_count, settings.threads)
    print(
        f"{sum(p.numel() for p in model.parameters())} parameters, {len(tokenizer)} tokens,"
        f" {len(album.scenes)} pictures, {(time.monotonic() - begun) / 60:.1f} min",
        flush=True,
    )
    answering = Answering(model, ConversationEncoder(tokenizer), album, settings)

    def save() -> None:
        save_checkpoint(model, processor, out)

    if continue_from is None:
        Seeing(model, album, settings).run()
        save()
        answering.run(answering_round(settings), save)
    answering.run(polishing_round(settings), save)
    save()
    print(f"{out}: {(time.monotonic() - begun) / 60:.1f} min in all", flush=True)


def _begin(continue_from: Path | None, vocabulary: int) -> LlavaForConditionalGeneration:
    if continue_from is None:
        return build_model(vocabulary)
    model: LlavaForConditionalGeneration = LlavaForConditionalGeneration.from_pretrained(
        continue_from, dtype=torch.float32
    )
    model.train()
    return model


def parse(arguments: Sequence[str] | None = None) -> tuple[Path, Path | None, Settings]:
    parser = argparse.ArgumentParser(prog="demo_model.train", description="Train the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument("--continue-from", type=Path, help="checkpoint to run stage 3 alone on")
    for field in fields(Settings):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), default=field.default)
    found = vars(parser.parse_args(arguments))
    return found.pop("out"), found.pop("continue_from"), Settings(**found)


if __name__ == "__main__":
    train(*parse())
