"""Examines a checkpoint on held-out pictures: `python -m demo_model.evaluate --model DIR`.

Prints one row a group of questions, with the share answered exactly, and exits with 1 unless all
together reach 95 % and every group 90 %. Groups:

* one picture, one question: each question kind;
* two pictures: the question names one of them ("What colour is it in the second picture?");
* four pictures: three or four pictures attached over one to four turns, the question names one;
* follow-up: the second to fourth question of a conversation about one picture, earlier questions
  and answers present;
* text only: counting to a number.

Answers are generated greedily by transformers on the stock model class, in float32.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count as numbers
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, ProcessorMixin

from demo_model.pictures import Scene, draw, sample_scene
from demo_model.questions import (
    PICTURE_KINDS,
    Conversation,
    converse,
    counting_turn,
    kinds_of,
    to_messages,
)

WHOLE_GOAL = 0.95
GROUP_GOAL = 0.90
LONGEST_ANSWER = 80
BATCH = 50
PAIR_KINDS = ("colour", "shape", "digit", "word", "count")


@dataclass(frozen=True)
class Case:
    """The last question of `conversation`; `group` is its row in the table."""

    group: str
    conversation: Conversation

    @property
    def answer(self) -> str:
        return self.conversation.turns[-1].answer


@dataclass(frozen=True)
class Score:
    group: str
    right: int
    asked: int

    @property
    def share(self) -> float:
        return self.right / self.asked


class Supply:
    """Held-out scenes, each used once; `stream` words the questions."""

    def __init__(self, seed: int) -> None:
        self.stream = random.Random(f"chiasm demo examination/{seed}")
        self._seeds = numbers(seed * 1_000_000)

    def scene(self, kind: str = "") -> Scene:
        while True:
            scene = sample_scene("held-out", next(self._seeds))
            if not kind or kind in kinds_of(scene):
                return scene

    def scenes(self, count: int, kind: str = "") -> list[Scene]:
        return [self.scene(kind) for _ in range(count)]


def _one_picture(supply: Supply, kind: str) -> Conversation:
    return converse(supply.stream, supply.scenes(1, kind), [1], [kind])


def _two_pictures(supply: Supply, kind: str) -> Conversation:
    return converse(supply.stream, supply.scenes(2, kind), [2], [kind])


def _four_pictures(supply: Supply) -> Conversation:
    attach = supply.stream.choice(([4], [3], [2, 2], [2, 1, 1], [1, 1, 1, 1], [3, 0, 1], [4, 0, 0]))
    return converse(supply.stream, supply.scenes(sum(attach)), attach)


def _follow_up(supply: Supply) -> Conversation:
    return converse(supply.stream, supply.scenes(1), [1] + [0] * supply.stream.randint(1, 3))


def _counting(supply: Supply) -> Conversation:
    return Conversation((), "", (counting_turn(supply.stream),))


def cases(count: int, seed: int = 0) -> Iterator[Case]:
    """`count` cases a group, the same for the same arguments."""
    supply = Supply(seed)
    for _ in range(count):
        for kind in PICTURE_KINDS:
            yield Case(f"one picture: {kind}", _one_picture(supply, kind))
        for kind in PAIR_KINDS:
            yield Case(f"two pictures: {kind}", _two_pictures(supply, kind))
        yield Case("four pictures", _four_pictures(supply))
        yield Case("follow-up", _follow_up(supply))
        yield Case("text only: counting", _counting(supply))


class Examinee:
    """A checkpoint directory, loaded as any LLaVA is, answering greedily."""

    def __init__(self, directory: Path) -> None:
        self._processor: ProcessorMixin = AutoProcessor.from_pretrained(directory)  # type: ignore[no-untyped-call]
        self._processor.tokenizer.padding_side = "left"
        self._model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(
            directory, dtype=torch.float32
        )

    def answer(self, conversation: Conversation) -> str:
        return self.answer_all([conversation])[0]

    @torch.inference_mode()
    def answer_all(self, conversations: Sequence[Conversation]) -> list[str]:
        """The answers to the last questions, one batch."""
        texts = [
            self._processor.apply_chat_template(
                to_messages(c, len(c.turns)), add_generation_prompt=True
            )
            for c in conversations
        ]
        pictures: list[Image.Image] = [draw(s) for c in conversations for s in c.scenes]
        inputs = self._processor(
            text=texts,
            images=pictures or None,
            add_special_tokens=False,
            padding=True,
            return_tensors="pt",
        )
        ids = self._model.generate(**inputs, max_new_tokens=LONGEST_ANSWER, do_sample=False)  # type: ignore[operator]
        answers: list[str] = self._processor.batch_decode(  # type: ignore[no-untyped-call]
            ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return answers


def examine(examinee: Examinee, questions: Sequence[Case], show_wrong: bool = False) -> list[Score]:
    """One score a group, in order of first appearance."""
    results: dict[str, list[bool]] = {case.group: [] for case in questions}
    ordered = sorted(questions, key=_cost)
    for start in range(0, len(ordered), BATCH):
        batch = ordered[start : start + BATCH]
        answers = examinee.answer_all([case.conversation for case in batch])
        for case, answer in zip(batch, answers, strict=True):
            results[case.group].append(answer == case.answer)
            if show_wrong and answer != case.answer:
                _print_wrong(case, answer)
        print(f"\r{start + len(batch)} of {len(ordered)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return [Score(group, sum(right), len(right)) for group, right in results.items()]


def _cost(case: Case) -> tuple[int, int]:
    """Questions of like answer length and picture count share a batch: less padding."""
    return len(case.answer), len(case.conversation.scenes)


def _print_wrong(case: Case, answer: str) -> None:
    question = case.conversation.turns[-1].question
    print(f"{case.group}: {question} {answer!r}, right is {case.answer!r}", flush=True)


def whole(scores: Sequence[Score]) -> Score:
    """All groups as one."""
    return Score("all", sum(s.right for s in scores), sum(s.asked for s in scores))


def table(scores: Sequence[Score]) -> str:
    """The scores as a Markdown table, their whole last."""
    rows = ["| questions | right | asked | share |", "|---|---:|---:|---:|"]
    rows += [
        f"| {score.group} | {score.right} | {score.asked} | {score.share:.1%} |"
        for score in (*scores, whole(scores))
    ]
    return "\n".join(rows)


def passes(scores: Sequence[Score]) -> bool:
    """Whether the model keeps what its card claims."""
    return whole(scores).share >= WHOLE_GOAL and all(score.share >= GROUP_GOAL for score in scores)


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo_model.evaluate", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--count", type=int, default=100, help="questions a group (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other held-out pictures")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show-wrong", action="store_true", help="print every wrong answer")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    chosen = list(cases(options.count, options.seed))
    scores = examine(Examinee(options.model), chosen, options.show_wrong)
    print(table(scores))
    return 0 if passes(scores) else 1


if __name__ == "__main__":
    sys.exit(main())
