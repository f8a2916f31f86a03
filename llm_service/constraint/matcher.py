"""One answer's place in its grammar: the engine's `Constraint`."""

import time
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher, LLTokenizer

from llm_service.constraint.limits import MaskBudget

_BUDGET = MaskBudget()


class ConstraintBroken(Exception):
    """The grammar library gave up on one answer. The text is for the log."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The model's tokens as the grammar library knows them.

    Attributes:
        size: rows of the model's head, which may be more than the tokenizer has.
        writable: bool `[size]`: tokens that are text, and the ends of an answer.
        eos_ids: the ends of an answer.
    """

    tokenizer: LLTokenizer
    size: int
    writable: torch.Tensor
    eos_ids: frozenset[int]

    @property
    def mask_bytes(self) -> int:
        """Bytes of a mask of one bit a token, in whole words of 32."""
        return -(-self.tokenizer.vocab_size // 32) * 4

    @classmethod
    def of(cls, tokenizer_json: str, token_count: int, size: int, eos_ids: tuple[int, ...]) -> Self:
        """From the text of a fast tokenizer. Seconds for a large one, all other threads waiting.

        Args:
            token_count: the tokenizer's largest id and one.
            size: rows of the model's head.

        Raises ValueError where the library does not understand the tokenizer.
        """
        count = max(token_count, size)
        tokenizer = LLTokenizer(tokenizer_json, n_vocab=count, eos_token=list(eos_ids))
        writable = torch.zeros(count, dtype=torch.bool)
        for token_id in range(token_count):
            writable[token_id] = not tokenizer.is_special_token(token_id)
        writable[list(eos_ids)] = True
        return cls(tokenizer, size, writable[:size], frozenset(eos_ids))


class GrammarConstraint:
    """Where one answer stands. Owned by the engine's thread once submitted.

    `allowed` gives the same buffer each time: copy it to keep it.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: Vocabulary,
        budget: MaskBudget = _BUDGET,
        *,
        ignore_eos: bool = False,
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._budget = budget
        self._ignore_eos = ignore_eos
        self._bits: npt.NDArray[np.uint8] = np.zeros(vocabulary.mask_bytes, np.uint8)
        self._allowed = torch.zeros(vocabulary.size, dtype=torch.bool)
        self._spent = 0.0
        self._tokens = 0
        self._at_end = False

    def allowed(self) -> torch.Tensor:
        """Tokens that may come now: bool `[vocab_size]`, on the CPU.

        Raises ConstraintBroken where the library gives up or takes too long.
        """
        began = time.thread_time()
        self._fill()
        self._spent += time.thread_time() - began
        if not self._budget.allows(self._spent, self._tokens):
            raise ConstraintBroken(f"masks of {self._tokens} tokens took {self._spent:.3f} s")
        return self._without_eos() if self._ignore_eos else self._allowed

    def advance(self, token_id: int) -> None:
        """Takes note of the token that was drawn. Raises ConstraintBroken if it may not come."""
        self._tokens += 1
        if token_id in self._vocabulary.eos_ids:
            self._at_end = True
        elif not self._matcher.consume_token(token_id):
            raise ConstraintBroken(self._matcher.get_error()[:500])

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        return self._at_end or self._matcher.is_stopped()

    def fork(self) -> "GrammarConstraint":
        """A copy at the same state."""
        return GrammarConstraint(
            self._matcher.deep_copy(), self._vocabulary, self._budget, ignore_eos=self._ignore_eos
        )

    def _without_eos(self) -> torch.Tensor:
        """What is allowed less the ends of an answer, unless it must end."""
        going_on = self._allowed.clone()
        going_on[list(self._vocabulary.eos_ids)] = False
        return going_on if going_on.any() else self._allowed

    def _fill(self) -> None:
        bits = self._bits
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error():
            raise ConstraintBroken(self._matcher.get_error()[:500])
        flat = np.unpackbits(bits, count=self._vocabulary.size, bitorder="little")
        torch.logical_and(
            torch.from_numpy(flat).bool(), self._vocabulary.writable, out=self._allowed
        )
