"""The native layers give what the decoder's own modules give, row by row, on any neighbours."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from llm_service.engine.attention import KvPool
from llm_service.engine.native import library
from llm_service.engine.native.build import wanted_builds
from llm_service.engine.native.decoder import Computed, NativeDecoder, rows_of
from llm_service.engine.runner import Predictions, Runner
from llm_service.engine.scheduler import Chunk, Step
from llm_service.engine.values import ImageSpan
from tests.llm_service.engine.rig import VOCABULARY, parts

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
BLOCK = 16
FOLDER = Path(library.__file__).parent

pytestmark = pytest.mark.skipif(
    library.load_library() is None, reason="rows.c was not compiled: there is no C compiler"
)


class Known:
    """A sequence of given tokens."""

    images: tuple[ImageSpan, ...] = ()
    positions: torch.Tensor | None = None
    position_delta = 0

    def __init__(self, seed: int, length: int) -> None:
        numbers = torch.Generator().manual_seed(seed)
        self.token_ids: list[int] = torch.randint(VOCABULARY, (length,), generator=numbers).tolist()
        self.prompt_tokens = length


def seeded(make: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = make().eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                # Norms of one and biases of zero would hide that they are left out.
                if weight.ndim == 1:
                    weight.copy_(torch.rand(weight.shape) * 0.5 + (0.5 if "norm" in name else 0))
        return model


def llama(**more: Any) -> Any:
    return seeded(lambda: LlamaForCausalLM(LlamaConfig(**SIZES | more)))


DECODERS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "one query head a key head": lambda: llama(num_key_value_heads=6),
    "six query heads a key head": lambda: llama(num_key_value_heads=1),
    "tied": lambda: llama(tie_word_embeddings=True),
    "long rope": lambda: llama(
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
        }
    ),
    "mistral": lambda: seeded(
        lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None))
    ),
    "qwen2": lambda: seeded(lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES))),
    "qwen3": lambda: seeded(lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES))),
}  # fmt: skip


def blocks_of(number: int, length: int) -> tuple[int, ...]:
    """Blocks that no other sequence has, not in order."""
    return tuple(range(number * 8 + 8, number * 8, -1))[: -(-length // BLOCK)]


def chunk_to(key: int, start: int, end: int) -> Chunk:
    blocks = blocks_of(key, end)
    return Chunk(key, start, end - start, True, blocks, blocks[-(-start // BLOCK) :])


def chunks_to(lengths: dict[int, int], start: dict[int, int]) -> tuple[Chunk, ...]:
    return tuple(chunk_to(key, start.get(key, 0), end) for key, end in lengths.items())


def runner_of(model: Any, *, native: bool) -> Runner:
    made = Runner(parts(model), 64, BLOCK, native=native)
    assert made.native is native
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_the_decoders_own(name: str, dtype: torch.dtype) -> None:
    model = DECODERS[name]().to(dtype)
    sequences = {key: Known(key, 120) for key in range(4)}
    # A whole prompt, a prompt's second part, and two that decode, across borders of blocks.
    first = chunks_to({1: 16, 2: 33, 3: 15}, {})
    second = chunks_to({0: 20, 1: 37, 2: 34, 3: 16}, {1: 16, 2: 33, 3: 15})
    found, own = (
        [made.run(Step(chunks), sequences) for chunks in (first, second)]
        for made in (runner_of(model, native=True), runner_of(model, native=False))
    )
    for step, wanted in zip(found, own, strict=True):
        assert sorted(step.keys) == sorted(wanted.keys)
        for key in step.keys:
            mine, theirs = row_of(step, key), row_of(wanted, key)
            most = (1e-5 if dtype == torch.float32 else 0.05) * theirs.abs().max()
            assert (mine - theirs).abs().max() <= most
        assert step.best == step.logits.argmax(-1).tolist()
        assert all(step.whole)


def row_of(predictions: Predictions, key: int) -> torch.Tensor:
    return predictions.logits[predictions.keys.index(key)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_neighbours_and_order_change_no_bit(dtype: torch.dtype) -> None:
    runner = runner_of(llama().to(dtype), native=True)
    sequences = {key: Known(key, 60) for key in range(7)}
    ends = {key: 9 + 6 * key for key in range(7)}
    for chunk in chunks_to({key: end - 1 for key, end in ends.items()}, {}):
        runner.run(Step((chunk,)), sequences)
    decoding = chunks_to(ends, {key: end - 1 for key, end in ends.items()})
    alone = [runner.run(Step((chunk,)), sequences) for chunk in decoding]
    together = runner.run(Step(decoding), sequences)
    backwards = runner.run(Step(decoding[::-1]), sequences)
    for key, one in enumerate(alone):
        assert torch.equal(row_of(together, key), row_of(one, key))
        assert torch.equal(row_of(backwards, key), row_of(one, key))


def computed(model: Any, crew: library.Crew, dtype: torch.dtype) -> Computed:
    decoder = parts(model)
    pool = KvPool.allocate(3, 64, BLOCK, 2, 32, dtype, "cpu")
    pool.tensor.zero_()
    native = NativeDecoder(decoder, pool.tensor, crew)
    chunks = [Chunk(0, 0, 40, True, blocks_of(0, 40)), Chunk(1, 0, 9, True, blocks_of(1, 9))]
    ids = torch.tensor([*Known(0, 40).token_ids, *Known(1, 9).token_ids])
    with torch.inference_mode():
        return native.compute(rows_of(chunks, model.get_input_embeddings()(ids), BLOCK))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_build_and_thread_count_gives_the_same(dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    best = library.load_library()
    assert best is not None
    wanted = computed(model, library.Crew(best, 1), dtype).logits
    for threads in (2, 3, 5):
        assert torch.equal(computed(model, library.Crew(best, threads), dtype).logits, wanted)
    for name in library.runnable_builds():
        build = library.open_build(name)
        assert build is not None
        found = computed(model, library.Crew(build, 2), dtype).logits
        most = 2e-5 if dtype == torch.float32 else 0.03  # its products are rounded in other places
        assert (found - wanted).abs().max() <= most * wanted.abs().max()


def test_all_builds_of_this_kind_of_machine_are_there() -> None:
    assert all((FOLDER / f"_rows_{name}.so").is_file() for name in wanted_builds())


def test_a_row_that_is_no_number_is_told_and_spoils_no_other() -> None:
    model = llama()
    pool = KvPool.allocate(3, 64, BLOCK, 2, 32, torch.float32, "cpu")
    native = NativeDecoder.of(parts(model), pool.tensor, 2)
    assert native is not None
    pool.tensor.zero_()
    chunks = [Chunk(key, 0, 1, True, blocks_of(key, 1)) for key in range(3)]
    hidden = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = native.compute(rows_of(chunks, hidden, BLOCK))
        hidden[1, 5] = float("nan")
        found = native.compute(rows_of(chunks, hidden, BLOCK))
    assert (wanted.finite, found.finite) == ([True] * 3, [True, False, True])
    assert torch.equal(found.logits[[0, 2]], wanted.logits[[0, 2]])


def test_other_decoders_are_left_alone() -> None:
    gemma = Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=4096))
    narrow = llama(head_dim=16)
    relu = llama(hidden_act="relu")
    for model in (gemma, narrow, relu, llama().double()):
        pool = KvPool.allocate(1, 2, BLOCK, 2, model.config.head_dim, model.dtype, "cpu")
        assert NativeDecoder.of(parts(model), pool.tensor, 1) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_how_a_prompt_is_cut_changes_no_bit(dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    sequences = {0: Known(0, 100)}
    whole = runner_of(model, native=True).run(Step(chunks_to({0: 100}, {})), sequences)
    cut = runner_of(model, native=True)
    for start, end in ((0, 7), (7, 8), (8, 61), (61, 99), (99, 100)):
        last = cut.run(Step(chunks_to({0: end}, {0: start})), sequences)
    assert torch.equal(last.logits, whole.logits)


def test_the_structures_are_as_long_as_the_compiler_says() -> None:
    build = library.load_library()
    assert build is not None
    sizes = (ctypes.c_int64 * 3)()
    build.chiasm_sizes(sizes)
    assert list(sizes) == [ctypes.sizeof(s) for s in (library.Layer, library.Model, library.Step)]
