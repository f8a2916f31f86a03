"""Attention over paged keys and values, in the shape transformers' attention registry wants.

Tokens of many sequences lie in one flat row, so no token may see its neighbour in the row: each
sequence attends to its own blocks. Chunks of one token (decoding) are grouped by the power of two
that holds their block count and computed together; longer chunks one by one. The padding of a
token thus depends on its own sequence alone, and its result hardly on who shares the step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from llm_service.engine.block_pool import ZERO_BLOCK
from llm_service.engine.refusals import UnsupportedDecoder
from llm_service.engine.scheduler import Chunk

NAME = "chiasm_paged"


@dataclass(frozen=True, eq=False)
class KvPool:
    """Keys and values of all layers: `[layer, key or value, block, kv head, block_size, head_dim]`.

    A head's share of a block lies together, so that one head is read in a line.

    A block's content is undefined until `clear`ed, but for block 0, which is zero for good: a
    masked read of NaN would still poison a sum.
    """

    tensor: torch.Tensor

    @classmethod
    def allocate(
        cls, layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device | str,
    ) -> "KvPool":  # fmt: skip
        shape = (layers, 2, blocks, kv_heads, block_size, head_dim)
        # Not zeros: the system gives pages as they are first touched, and most never are.
        pool = cls(torch.empty(shape, dtype=dtype, device=device))
        pool.clear([ZERO_BLOCK])
        return pool

    @property
    def block_size(self) -> int:
        return self.tensor.shape[4]

    @property
    def token_count(self) -> int:
        """Tokens that all blocks but the zero one hold."""
        return (self.tensor.shape[2] - 1) * self.block_size

    def clear(self, blocks: Sequence[int]) -> None:
        if blocks:
            index = torch.tensor(blocks, device=self.tensor.device)
            self.tensor.index_fill_(2, index, 0)

    def store(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Writes `[T, kv head, head_dim]` to the token slots `[T]`."""
        blocks, places = slots // self.block_size, slots % self.block_size
        self.tensor[layer, 0][blocks, :, places] = keys
        self.tensor[layer, 1][blocks, :, places] = values

    def read(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[blocks, kv head, block_size, head_dim]`, copied together.

        Selected along the first axis: along another of a transposed view torch would first copy the
        whole pool on the CPU.
        """
        return (
            self.tensor[layer, 0].index_select(0, blocks),
            self.tensor[layer, 1].index_select(0, blocks),
        )


@dataclass(frozen=True, eq=False)
class _DecodeGroup:
    """One-token chunks at `begin:end` of the flat row, each with equally many blocks."""

    begin: int
    end: int
    blocks: torch.Tensor  # [rows * blocks each]
    visible: torch.Tensor  # bool [rows, 1, 1, slots]


@dataclass(frozen=True, eq=False)
class _Span:
    """One chunk at `begin:end` of the flat row, with `end - begin` or more tokens to see."""

    begin: int
    end: int
    blocks: torch.Tensor | None  # None: it starts its sequence and sees only itself
    visible: torch.Tensor | None  # bool [tokens, tokens seen]


@dataclass(frozen=True, eq=False)
class StepLayout:
    """Where each token of a flat row reads and writes, made once a step for all layers."""

    pool: KvPool
    slots: torch.Tensor
    groups: tuple[_DecodeGroup, ...]
    spans: tuple[_Span, ...]
    context_length: int


def flat_order(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The order of chunks in the flat row: one-token chunks by width first, then the others."""
    return sorted(chunks, key=lambda chunk: (chunk.length > 1, _width(chunk)))


def lay_out(ordered: Sequence[Chunk], pool: KvPool, context_length: int) -> StepLayout:
    """The layout of chunks that are in `flat_order`."""
    slots = [slot for chunk in ordered for slot in _slots(chunk, pool.block_size)]
    singles = [chunk for chunk in ordered if chunk.length == 1]
    longer = [chunk for chunk in ordered if chunk.length > 1]
    return StepLayout(
        pool,
        torch.tensor(slots, device=pool.tensor.device),
        tuple(_groups(singles, pool)),
        tuple(_spans(longer, len(singles), pool)),
        context_length,
    )


def _width(chunk: Chunk) -> int:
    return 1 << (len(chunk.blocks) - 1).bit_length()


def _slots(chunk: Chunk, size: int) -> Iterator[int]:
    return (
        chunk.blocks[position // size] * size + position % size
        for position in range(chunk.start, chunk.end)
    )


def _groups(singles: Sequence[Chunk], pool: KvPool) -> Iterator[_DecodeGroup]:
    begin = 0
    device = pool.tensor.device
    for width, members in groupby(singles, key=_width):
        rows = list(members)
        padded = [[*row.blocks, *[ZERO_BLOCK] * (width - len(row.blocks))] for row in rows]
        seen = torch.tensor([row.end for row in rows], device=device)
        places = torch.arange(width * pool.block_size, device=device)
        yield _DecodeGroup(
            begin,
            begin + len(rows),
            torch.tensor(padded, device=device).flatten(),
            (places[None] < seen[:, None])[:, None, None],
        )
        begin += len(rows)


def _spans(longer: Sequence[Chunk], begin: int, pool: KvPool) -> Iterator[_Span]:
    device = pool.tensor.device
    for chunk in longer:
        end = begin + chunk.length
        if chunk.start == 0:
            yield _Span(begin, end, None, None)
        else:
            places = torch.arange(chunk.end, device=device)
            visible = places[None] <= places[chunk.start :, None]
            used = chunk.blocks[: -(-chunk.end // pool.block_size)]
            yield _Span(begin, end, torch.tensor(used, device=device), visible)
        begin = end


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    paged: StepLayout,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Stores the step's keys and values and attends each token to its own sequence.

    Args:
        query: `[1, head, T, head_dim]`; key and value `[1, kv head, T, head_dim]`.

    Returns:
        `[1, T, head, head_dim]` and None.

    Raises:
        UnsupportedDecoder: the layer asks for a window, a soft cap or sinks.
    """
    _refuse_unknown(options, paged.context_length)
    layer: Any = module.layer_idx
    kv_heads, tokens, head_dim = key.shape[1:]
    paged.pool.store(layer, paged.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    # Query heads lie grouped by the key head they share: [kv head, group, T, head_dim].
    grouped = query[0].view(kv_heads, -1, tokens, head_dim)
    out = query.new_empty(tokens, *grouped.shape[:2], head_dim)
    for group in paged.groups:
        rows = grouped[:, :, group.begin : group.end]
        out[group.begin : group.end] = _decode(layer, rows, group, paged.pool, scaling)
    for span in paged.spans:
        here = slice(span.begin, span.end)
        seen = _seen_by(span, layer, paged.pool, key[0, :, here], value[0, :, here])
        out[here] = _prefill(grouped[:, :, here], seen, span.visible, scaling)
    return out.flatten(1, 2)[None], None


def _decode(
    layer: int, query: torch.Tensor, group: _DecodeGroup, pool: KvPool, scaling: float
) -> torch.Tensor:
    rows = group.end - group.begin
    # [rows * blocks, kv head, block_size, head_dim] to [rows, kv head, slots, head_dim]
    keys, values = (
        part.view(rows, -1, *part.shape[1:]).transpose(1, 2).flatten(2, 3)
        for part in pool.read(layer, group.blocks)
    )
    return functional.scaled_dot_product_attention(
        query.permute(2, 0, 1, 3), keys, values, attn_mask=group.visible, scale=scaling
    )


def _seen_by(
    span: _Span, layer: int, pool: KvPool, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[kv head, tokens seen, head_dim]`."""
    if span.blocks is None or span.visible is None:
        return keys, values
    seen = span.visible.shape[1]
    read_keys, read_values = (
        part.transpose(0, 1).flatten(1, 2)[:, :seen] for part in pool.read(layer, span.blocks)
    )
    return read_keys, read_values


def _prefill(
    query: torch.Tensor,
    seen: tuple[torch.Tensor, torch.Tensor],
    visible: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    keys, values = (part[:, None].expand(-1, query.shape[1], -1, -1) for part in seen)
    answer = functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=visible, is_causal=visible is None, scale=scaling
    )
    return answer.permute(2, 0, 1, 3)


def _refuse_unknown(options: dict[str, Any], context_length: int) -> None:
    window = options.get("sliding_window")
    if window is not None and window < context_length:
        raise UnsupportedDecoder(
            f"attention has a window of {window} tokens, shorter than the context of "
            f"{context_length}; lower the context length to it"
        )
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise UnsupportedDecoder(f"attention uses {name}")


def _no_mask(*args: Any, **options: Any) -> None:
    """Paged attention masks by itself."""


def use_paged_attention(decoder: Any) -> None:
    """Makes a transformers decoder call `paged_attention`, which needs `paged=` in its forward.

    Raises:
        UnsupportedDecoder: its attention cannot be replaced.
    """
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    try:
        decoder.set_attn_implementation(NAME)
    except (AttributeError, ValueError) as error:
        raise UnsupportedDecoder(
            f"{type(decoder).__name__} has no replaceable attention"
        ) from error
    if decoder.config._attn_implementation != NAME:
        raise UnsupportedDecoder(f"{type(decoder).__name__} keeps its own attention")
