"""`make exactness`: how the split of every family compares with the whole model, as a table."""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.families import zoo
from tests.families.conversations import conversations
from tests.families.oracle import Expected, Whole
from tests.families.split import Answer, Split, difference

TOKENS = 16
WAIT_SECONDS = 300
SAID = conversations(9)


@dataclass(frozen=True)
class Compared:
    """Of `SAID`: prompts and answers equal to the whole model's, and how far logits are apart."""

    prompts: int
    answers: int
    apart: float


def main() -> int:
    """Prints the table; exits with 0 only if every float32 answer is the whole model's."""
    print("| family | prompts | answers | log-probabilities apart | bfloat16 answers |")
    print("|---|---|---|---|---|")
    exact = True
    for number, name in enumerate(sorted(zoo.BUILDERS), 1):
        print(f"\r{number} of {len(zoo.BUILDERS)}: {name} ...", end="", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as directory:
            zoo.BUILDERS[name](Path(directory))
            full = _compare(Path(directory), torch.float32)
            half = _compare(Path(directory), torch.bfloat16)
        exact &= full.answers == len(SAID)
        print(end="\r\033[K", file=sys.stderr)
        print(
            f"| {name} | {full.prompts} of {len(SAID)} | {full.answers} of {len(SAID)} "
            f"| {full.apart:.1e} | {half.answers} of {len(SAID)} |",
            flush=True,
        )
    return 0 if exact else 1


@torch.inference_mode()
def _compare(directory: Path, dtype: torch.dtype) -> Compared:
    whole = Whole(directory, dtype)
    expected = [whole.expected(turns, TOKENS) for turns in SAID]
    with Split(directory, dtype="float32" if dtype == torch.float32 else "bfloat16") as split:
        answers = [split.submit(split.prompt(turns), TOKENS) for turns in SAID]
        for answer in answers:
            if not answer.ended.wait(WAIT_SECONDS):
                raise TimeoutError("an answer did not end")
    pairs = list(zip(answers, expected, strict=True))
    return Compared(
        prompts=sum(list(answer.prompt) == told.prompt for answer, told in pairs),
        answers=sum(answer.tokens == told.answer for answer, told in pairs),
        apart=max(_apart(answer, told) for answer, told in pairs),
    )


def _apart(answer: Answer, expected: Expected) -> float:
    """Over the tokens that both have in common, and the first that differs."""
    same = 0
    for found, told in zip(answer.tokens, expected.answer, strict=False):
        same += 1
        if found != told:
            break
    return difference(answer.logprobs[:same], expected.logprobs[:same])


if __name__ == "__main__":
    sys.exit(main())
