"""A transformers decoder of the Llama kind as `rows.c` runs it, and the steps that it runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import LlamaModel, MistralModel, Qwen2Model, Qwen3Model

from llm_service.engine.native.library import (
    BFLOAT16,
    BLOCK_SIZE,
    FLOAT32,
    Crew,
    Layer,
    Model,
    Step,
    load_library,
)
from llm_service.engine.scheduler import Chunk
from llm_service.engine.values import DecoderParts

_KINDS: Final = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
# Their layers differ in nothing but biases of q, k and v and norms of q and k.
_DECODERS: Final = (LlamaModel, MistralModel, Qwen2Model, Qwen3Model)
# Inputs of products, and heads, are whole vectors of the widest processor.
_GRAIN: Final = 32


@dataclass(frozen=True, eq=False)
class Rows:
    """One step's rows, each a token of some sequence, in flat order.

    Attributes:
        hidden: embeddings, `[rows, width]`.
        positions: `[rows]` int64, the token's place in its sequence.
        slots: `[rows]` int64, where its key and value go.
        tables: `[rows, blocks]` int32, the blocks of its sequence, padded with anything.
        picked: `[n]` int32, the rows whose logits are wanted.
    """

    hidden: torch.Tensor
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    tables: NDArray[np.int32]
    picked: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Computed:
    """Logits float32 `[n, vocab]`, each row's likeliest token, and whether all are numbers."""

    logits: torch.Tensor
    best: list[int]
    finite: list[bool]


class NativeDecoder:
    """Computes steps over the pool's tensor, in place; inside a block the order is rows.c's own.

    Not for two threads at once. Its answers are the decoder's own but for the order of sums; a
    row's answer does not depend on the other rows, so neither on how its prompt was cut.
    """

    def __init__(self, decoder: DecoderParts, pool: torch.Tensor, crew: Crew) -> None:
        self._rotary: Any = decoder.model.rotary_emb
        self._pool = pool
        self._crew = crew
        self._head_dim = decoder.head_dim
        # The structures hold addresses only; these keep what lies there alive.
        self._kept: list[torch.Tensor] = []
        self._model = self._described(decoder)

    @classmethod
    def of(cls, decoder: DecoderParts, pool: torch.Tensor, threads: int) -> Self | None:
        """None where the decoder is of another kind, or rows.c was not compiled."""
        library = load_library()
        if library is None or not _fits(decoder, block_size=pool.shape[4]):
            return None
        return cls(decoder, pool, Crew(library, threads))

    def compute(self, rows: Rows) -> Computed:
        """Stores the rows' keys and values in all layers and gives the logits of the picked ones.

        Raises:
            OutOfMemory: there is no room for the activations; nothing was computed.
        """
        count, picked = len(rows.positions), len(rows.picked)
        hidden = rows.hidden.float().contiguous()
        if hidden.data_ptr() == rows.hidden.data_ptr():
            hidden = hidden.clone()
        cos, sin = self._turns(rows.positions)
        seen = (rows.positions + 1).astype(np.int32)
        logits = torch.empty(picked, self._model.vocab)
        best, finite = np.empty(picked, np.int32), np.empty(picked, np.int32)
        step = Step(
            pool=self._pool.data_ptr(),
            blocks=self._pool.shape[2],
            rows=count,
            hidden=hidden.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slots=rows.slots.ctypes.data,
            tables=rows.tables.ctypes.data,
            table_width=rows.tables.shape[1],
            seen=seen.ctypes.data,
            picked=rows.picked.ctypes.data,
            picked_count=picked,
            logits=logits.data_ptr(),
            best=best.ctypes.data,
            finite=finite.ctypes.data,
        )
        self._crew.compute(self._model, step)
        return Computed(logits, best.tolist(), finite.astype(bool).tolist())

    def _turns(self, positions: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the rotary embedding, float32 `[rows, head_dim]`."""
        like = torch.empty(1, dtype=torch.float32)
        cos, sin = self._rotary(like, position_ids=torch.from_numpy(positions)[None])
        return cos[0].contiguous(), sin[0].contiguous()

    def _described(self, decoder: DecoderParts) -> Model:
        model: Any = decoder.model
        config = model.config
        layers = [self._layer(layer) for layer in model.layers]
        return Model(
            kind=_KINDS[decoder.dtype],
            layers=len(layers),
            width=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=decoder.kv_head_count,
            head_dim=decoder.head_dim,
            inner=config.intermediate_size,
            vocab=decoder.lm_head.weight.shape[0],  # type: ignore[index]
            eps=config.rms_norm_eps,
            scale=model.layers[0].self_attn.scaling,
            layer=(Layer * len(layers))(*layers),
            norm=self._small(model.norm.weight),
            head=self._large(decoder.lm_head.weight),
        )

    def _layer(self, layer: Any) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = {name: getattr(attention, f"{name}_proj") for name in ("q", "k", "v")}
        norms = {f"{n}_norm": getattr(attention, f"{n}_norm", None) for n in ("q", "k")}
        return Layer(
            input_norm=self._small(layer.input_layernorm.weight),
            post_norm=self._small(layer.post_attention_layernorm.weight),
            o=self._large(attention.o_proj.weight),
            gate=self._large(mlp.gate_proj.weight),
            up=self._large(mlp.up_proj.weight),
            down=self._large(mlp.down_proj.weight),
            **{name: self._large(part.weight) for name, part in projections.items()},
            **{f"{name}_bias": self._small(part.bias) for name, part in projections.items()},
            **{name: self._small(norm.weight) for name, norm in norms.items() if norm is not None},
        )

    def _small(self, weight: torch.Tensor | None) -> int:
        """The address of a float32 copy."""
        return 0 if weight is None else self._keep(weight.detach().float().contiguous())

    def _large(self, weight: Any) -> int:
        """The address of the decoder's own tensor."""
        return self._keep(weight.detach())

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


def rows_of(chunks: Sequence[Chunk], hidden: torch.Tensor, block_size: int) -> Rows:
    """The rows of a step's chunks; `hidden` holds their embeddings in the same order."""
    positions = np.concatenate([np.arange(c.start, c.end, dtype=np.int64) for c in chunks])
    lengths = np.array([chunk.length for chunk in chunks])
    widest = max(len(chunk.blocks) for chunk in chunks)
    tables = np.zeros((len(chunks), widest), np.int32)
    for row, chunk in enumerate(chunks):
        tables[row, : len(chunk.blocks)] = chunk.blocks
    tables = np.repeat(tables, lengths, axis=0)
    blocks = np.take_along_axis(tables, (positions // block_size)[:, None], axis=1)[:, 0]
    slots = blocks.astype(np.int64) * block_size + positions % block_size
    ends = np.cumsum(lengths) - 1
    samples = np.array([chunk.samples for chunk in chunks])
    return Rows(hidden, positions, slots, tables, ends[samples].astype(np.int32))


def _fits(decoder: DecoderParts, block_size: int) -> bool:
    model: Any = decoder.model
    if type(model) not in _DECODERS or decoder.dtype not in _KINDS:
        return False
    config = model.config
    sizes = (config.hidden_size, config.intermediate_size, decoder.head_dim)
    return (
        torch.device(decoder.device).type == "cpu"
        and config.hidden_act in {"silu", "swish"}
        and all(size % _GRAIN == 0 for size in sizes)
        and block_size == BLOCK_SIZE
        and getattr(config, "sliding_window", None) is None
        and all(_plain(part, decoder.dtype) for part in _products(decoder))
        and all(_plain(part, decoder.dtype, biased=True) for part in _projections(decoder))
    )


def _products(decoder: DecoderParts) -> Iterator[nn.Module]:
    yield decoder.lm_head
    layers: Any = decoder.model.layers
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield from (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def _projections(decoder: DecoderParts) -> Iterator[nn.Module]:
    layers: Any = decoder.model.layers
    for layer in layers:
        yield from (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)


def _plain(part: Any, dtype: torch.dtype, *, biased: bool = False) -> bool:
    """Whether a module is one product and no more."""
    return (
        type(part) is nn.Linear
        and (biased or part.bias is None)
        and part.weight.dtype == dtype
        and part.weight.is_contiguous()
    )
