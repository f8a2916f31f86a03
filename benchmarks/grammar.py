"""`python -m benchmarks.grammar`: libraries that hold an answer to a JSON schema.

For each library that is installed (llguidance; xgrammar beside it, if at all): which features of
JSON Schema it enforces, refuses or silently ignores, and what compiling and masking cost with the
demo model's vocabulary and with one of 49,152 tokens, trained on Python's own library.

Answers are drawn at random from the tokens that a mask allows and checked by an independent
validator; a feature is ignored if one does not validate. Times are CPU times of the one thread, so
that other work on the machine does not count.
"""

import importlib.util
import json
import random
import statistics
import sysconfig
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jsonschema
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.grammar_schemas import FEATURES, TIMED, Schema

DEMO = Path(__file__).parents[1] / "demo_model" / "checkpoint" / "tokenizer.json"
LARGE = 49_152
EOS = "</s>"
ANSWERS, LONGEST = 60, 200
# Tokens of these alone bring an answer to its end.
CLOSING = frozenset('"}],')
Bits = npt.NDArray[np.uint8]


class Answering(Protocol):
    """One answer under a compiled grammar."""

    def mask(self) -> Bits: ...
    def push(self, token_id: int) -> None: ...
    @property
    def ended(self) -> bool: ...


class Library(Protocol):
    """A library with one vocabulary."""

    name: str

    def compile(self, schema: Schema) -> Any: ...
    def begin(self, compiled: Any) -> Answering: ...


@dataclass(frozen=True)
class Vocabulary:
    tokenizer: Tokenizer

    @property
    def size(self) -> int:
        return self.tokenizer.get_vocab_size()

    @property
    def eos(self) -> int:
        eos = self.tokenizer.token_to_id(EOS)
        assert eos is not None
        return eos

    def closing(self) -> list[int]:
        texts = ((one, self.tokenizer.decode([one])) for one in range(self.size))
        return [one for one, text in texts if text and CLOSING.issuperset(text)]


class LlguidanceAnswer:
    def __init__(self, matcher: LLMatcher, mask_bytes: int) -> None:
        self._matcher = matcher
        self._bits: Bits = np.zeros(mask_bytes, np.uint8)

    def mask(self) -> Bits:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        return self._bits

    def push(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped()


class Llguidance:
    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        text = vocabulary.tokenizer.to_str()
        self._tokenizer = LLTokenizer(text, eos_token=[vocabulary.eos])
        self._mask_bytes = -(-vocabulary.size // 32) * 4

    def compile(self, schema: Schema) -> LLMatcher:
        options: Any = {"whitespace_flexible": False}
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=options)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def begin(self, compiled: LLMatcher) -> LlguidanceAnswer:
        return LlguidanceAnswer(compiled.deep_copy(), self._mask_bytes)


class XgrammarAnswer:
    def __init__(self, matcher: Any, mask: Any) -> None:
        self._matcher, self._mask = matcher, mask

    def mask(self) -> Bits:
        self._matcher.fill_next_token_bitmask(self._mask)
        bits: Bits = self._mask.numpy()[0].view(np.uint8)
        return bits

    def push(self, token_id: int) -> None:
        self._matcher.accept_token(token_id)

    @property
    def ended(self) -> bool:
        return bool(self._matcher.is_terminated())


class Xgrammar:
    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._xgrammar: Any = importlib.import_module("xgrammar")
        self._size = vocabulary.size
        fast: Any = PreTrainedTokenizerFast
        info = self._xgrammar.TokenizerInfo.from_huggingface(
            fast(tokenizer_object=vocabulary.tokenizer, eos_token=EOS), vocab_size=self._size
        )
        self._compiler = self._xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: Schema) -> Any:
        return self._compiler.compile_json_schema(
            json.dumps(schema), any_whitespace=False, strict_mode=False
        )

    def begin(self, compiled: Any) -> XgrammarAnswer:
        mask = self._xgrammar.allocate_token_bitmask(1, self._size)
        return XgrammarAnswer(self._xgrammar.GrammarMatcher(compiled), mask)


@dataclass
class Found:
    """What answers to one schema showed. Times in CPU seconds."""

    refused: str = ""
    valid: int = 0
    invalid: list[str] = field(default_factory=list)
    compiles: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.refused:
            return "refused"
        if self.invalid:
            return f"IGNORED ({self.invalid[0][:40]!a})"
        return "enforced" if self.valid else "no answer ended"


def large_vocabulary() -> Vocabulary:
    """Byte-level BPE over the sources of Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # Its tests hold files in broken encodings.
    left_out = {"site-packages", "test", "tests"}
    files = [str(one) for one in root.rglob("*.py") if left_out.isdisjoint(one.parts)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LARGE,
        special_tokens=["<pad>", "<s>", EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(files, trainer)
    return Vocabulary(tokenizer)


def libraries(vocabulary: Vocabulary) -> list[Library]:
    found: list[Library] = [Llguidance(vocabulary)]
    if importlib.util.find_spec("xgrammar"):
        found.append(Xgrammar(vocabulary))
    return found


def tried(library: Library, vocabulary: Vocabulary, schema: Schema) -> Found:
    found = Found()
    try:
        for _ in range(3):
            began = time.thread_time()
            compiled = library.compile(schema)
            found.compiles.append(time.thread_time() - began)
    except Exception as error:  # each library has exceptions of its own
        found.refused = str(error)
        return found
    dice, closing = random.Random(1), vocabulary.closing()
    for _ in range(ANSWERS):
        text = answer(library.begin(compiled), vocabulary, closing, dice, found.tokens)
        if text is not None:
            check(text, schema, found)
    return found


def answer(
    state: Answering,
    vocabulary: Vocabulary,
    closing: Sequence[int],
    dice: random.Random,
    seconds: list[float],
) -> str | None:
    """A random answer; None if it was cut. `seconds` gains the time of each token."""
    token_ids: list[int] = []
    for _ in range(LONGEST):
        began = time.thread_time()
        bits = state.mask()
        spent = time.thread_time() - began
        allowed = np.unpackbits(bits, count=vocabulary.size, bitorder="little").view(np.bool_)
        token_id = chosen(allowed, closing, vocabulary.eos, dice)
        if token_id == vocabulary.eos:
            return decoded(vocabulary, token_ids)
        began = time.thread_time()
        state.push(token_id)
        seconds.append(spent + time.thread_time() - began)
        token_ids.append(token_id)
        if state.ended:
            return decoded(vocabulary, token_ids)
    return None


def chosen(
    allowed: npt.NDArray[np.bool_], closing: Sequence[int], eos: int, dice: random.Random
) -> int:
    if allowed[eos] and dice.random() < 0.5:
        return eos
    near = [one for one in closing if allowed[one]]
    if near and dice.random() < 0.4:
        return dice.choice(near)
    return int(dice.choice(np.flatnonzero(allowed)))


def decoded(vocabulary: Vocabulary, token_ids: Sequence[int]) -> str:
    text: str = vocabulary.tokenizer.decode(token_ids)
    return text


def check(text: str, schema: Schema, found: Found) -> None:
    validator = jsonschema.Draft202012Validator
    checked = validator(schema, format_checker=validator.FORMAT_CHECKER)
    try:
        good = checked.is_valid(json.loads(text))
    except Exception:  # no JSON, or a $ref that leads nowhere
        good = False
    if good:
        found.valid += 1
    else:
        found.invalid.append(text)


def print_row(cells: Iterable[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def print_coverage(vocabulary: Vocabulary) -> None:
    tools = libraries(vocabulary)
    print_row(["feature", *(tool.name for tool in tools)])
    print_row(["---"] * (1 + len(tools)))
    for name, schema in FEATURES.items():
        print_row([name, *(tried(tool, vocabulary, schema).verdict for tool in tools)])


def print_times(title: str, vocabulary: Vocabulary) -> None:
    print(f"\n{title}, {vocabulary.size} tokens. Times in CPU microseconds, compile in ms.\n")
    print_row(["library", "compile", "most", "token", "p99", "most"])
    print_row(["---"] * 6)
    for library in libraries(vocabulary):
        all_found = [tried(library, vocabulary, FEATURES[name]) for name in TIMED]
        compiles = sorted(one for found in all_found for one in found.compiles)
        tokens = sorted(one for found in all_found for one in found.tokens)
        p99 = tokens[int(len(tokens) * 0.99)]
        figures = (
            statistics.median(compiles) * 1e3, compiles[-1] * 1e3,
            statistics.median(tokens) * 1e6, p99 * 1e6, tokens[-1] * 1e6,
        )  # fmt: skip
        print_row([library.name, *(f"{figure:,.1f}" for figure in figures)])


def main() -> None:
    demo = Vocabulary(Tokenizer.from_file(str(DEMO)))
    print_coverage(demo)
    print_times("The demo model's vocabulary", demo)
    print_times("A large vocabulary", large_vocabulary())


if __name__ == "__main__":
    main()
