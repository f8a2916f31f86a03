"""The language half of a checkpoint: decoder, tokenizer, template, and its contract on images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from chiasm import colours
from chiasm.models.checkpoint import Checkpoint, CheckpointError, open_checkpoint, read_json
from chiasm.models.contract import Grid, ImageContract
from chiasm.models.families import family_of
from chiasm.models.family import Layers, Positions
from chiasm.models.half import brief, load_config, load_half
from chiasm.models.identity import feature_type, identity_of
from chiasm.models.sources import read_sources

CHAT_TEMPLATE_FILE = "chat_template.json"


@dataclass(frozen=True)
class GenerationDefaults:
    """What generation_config.json suggests; None where it says nothing."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class LanguageHalf:
    """The text decoder of one checkpoint and what goes with it.

    Attributes:
        model: the whole model's class with the vision modules absent.
        decoder: the bare decoder, e.g. `LlamaModel`: embeddings in, hidden states out.
        embed_tokens: token ids `[...]` to `[..., width]`.
        lm_head: hidden states `[..., width]` to logits `[..., vocab_size]`.
        marker: what the chat template writes, once an image.
        image_token: the token that feature rows take the place of, spelled out.
        image_token_id: its id.
        positions_kind: how tokens are placed; `positions` does it.
        layers: how the decoder runs.
        options: request options about images that change something here.
        eos_ids: ids that end an answer.
        context_length: prompt and answer together, in tokens.
        contract: what the model itself says about image embeddings.
    """

    family: str
    model: PreTrainedModel
    decoder: nn.Module
    embed_tokens: nn.Module
    lm_head: nn.Module
    tokenizer: PreTrainedTokenizerFast
    chat_template: str
    marker: str
    image_token: str
    image_token_id: int
    eos_ids: tuple[int, ...]
    context_length: int
    width: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    vocab_size: int
    generation: GenerationDefaults
    contract: ImageContract
    positions_kind: Positions
    layers: Layers
    options: tuple[str, ...]

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        model_id: str,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        encoder_dtype: torch.dtype | None = None,
        background: str = colours.WHITE,
    ) -> Self:
        """Load decoder and head only; tower and projector never touch memory.

        `encoder_dtype` is the type the encoders run in, by default the decoder's own; `background`
        is the colour over which they decode pictures, `#rrggbb`.

        Raises:
            CheckpointError: the directory is incomplete, damaged or of a family that is not served.
        """
        checkpoint = open_checkpoint(directory)
        family = family_of(checkpoint.model_type)
        encoder_type = feature_type(str(encoder_dtype or dtype).removeprefix("torch."))
        identity = identity_of(checkpoint, encoder_type, model_id, background)
        config = load_config(checkpoint, family)
        tokenizer = _load_tokenizer(checkpoint)
        sources = read_sources(checkpoint, config)
        image_token_id = family.image_token_id(config)
        image_token = _image_token(checkpoint, config, image_token_id, tokenizer)
        model: Any = load_half(checkpoint, config, family.vision_modules, dtype, device)
        text = config.text_config
        _check_width(checkpoint, text.hidden_size, identity.width)
        return cls(
            family=family.model_type,
            model=model,
            decoder=model.get_decoder(),
            embed_tokens=model.get_input_embeddings(),
            lm_head=model.get_output_embeddings(),
            tokenizer=tokenizer,
            chat_template=_chat_template(checkpoint, tokenizer),
            marker=_marker(checkpoint, family.marker(sources), tokenizer) or image_token,
            image_token=image_token,
            image_token_id=image_token_id,
            eos_ids=_eos_ids(checkpoint, config, tokenizer),
            context_length=text.max_position_embeddings,
            width=text.hidden_size,
            layer_count=text.num_hidden_layers,
            head_count=text.num_attention_heads,
            kv_head_count=_most(text, "num_key_value_heads"),
            head_dim=_most(text, "head_dim") or text.hidden_size // text.num_attention_heads,
            vocab_size=text.vocab_size,
            generation=_generation_defaults(checkpoint.generation_settings()),
            contract=family.contract(sources, identity),
            positions_kind=family.positions,
            layers=family.layers(config),
            options=family.options,
        )

    def positions(
        self, token_ids: Sequence[int], grids: Sequence[Grid]
    ) -> tuple[torch.Tensor, int] | None:
        """Where the tokens of a prompt stand, and what generated tokens stand off their index.

        `grids` are those of the prompt's images in order. The positions are int64 `[3, tokens]`
        (time, height, width); None where every token stands at its index.
        """
        if self.positions_kind == "flat" or not grids:
            return None
        ids = torch.tensor([token_ids])
        base: Any = self.model.base_model
        placed, delta = base.get_rope_index(
            ids,
            mm_token_type_ids=(ids == self.image_token_id).int(),
            image_grid_thw=torch.tensor(grids),
        )
        return placed[:, 0], int(delta)


def _most(text: Any, name: str) -> int:
    """The greatest value of a setting that may differ from layer to layer; 0 if none has it."""
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    return max(getattr(layer, name, None) or 0 for layer in layers)


def _load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerFast:
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            checkpoint.directory, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise CheckpointError(
            f"{checkpoint.directory}: transformers cannot load its tokenizer ({brief(error)}); "
            "it needs tokenizer.json and tokenizer_config.json"
        ) from error
    if not tokenizer.is_fast:
        raise CheckpointError(
            f"{checkpoint.directory} has no fast tokenizer; add its tokenizer.json"
        )
    fast: PreTrainedTokenizerFast = tokenizer
    return fast


def _chat_template(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerFast) -> str:
    template: Any = tokenizer.chat_template
    legacy = checkpoint.directory / CHAT_TEMPLATE_FILE
    if not template and legacy.is_file():
        template = read_json(legacy).get("chat_template")
    if isinstance(template, Mapping):
        template = template.get("default")
    if not isinstance(template, str) or not template:
        raise CheckpointError(
            f"{checkpoint.directory} has no chat template; add chat_template.jinja from the "
            "checkpoint's publisher"
        )
    return template


def _image_token(
    checkpoint: Checkpoint,
    config: PreTrainedConfig,
    token_id: int,
    tokenizer: PreTrainedTokenizerFast,
) -> str:
    added = tokenizer.added_tokens_decoder.get(token_id)
    if added is None or not 0 <= token_id < config.text_config.vocab_size:
        raise CheckpointError(
            f"{checkpoint.directory}: config.json's image token {token_id} is no added token of "
            "the tokenizer; take both files from one checkpoint"
        )
    return str(added.content)


def _marker(
    checkpoint: Checkpoint, marker: str | None, tokenizer: PreTrainedTokenizerFast
) -> str | None:
    if marker is not None and marker not in tokenizer.get_vocab():
        raise CheckpointError(
            f"{checkpoint.directory}: the tokenizer lacks {marker}, which marks an image in "
            "prompts; take tokenizer and config of one checkpoint"
        )
    return marker


def _eos_ids(
    checkpoint: Checkpoint, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast
) -> tuple[int, ...]:
    stated = (
        checkpoint.generation_settings().get("eos_token_id"),
        getattr(config.text_config, "eos_token_id", None),
        tokenizer.eos_token_id,
    )
    for ids in stated:
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
    raise CheckpointError(
        f"{checkpoint.directory} states no token that ends an answer; add eos_token_id to "
        "generation_config.json"
    )


def _check_width(checkpoint: Checkpoint, decoder_width: int, row_width: int) -> None:
    if decoder_width != row_width:
        raise CheckpointError(
            f"{checkpoint.directory}: its projector makes rows {row_width} wide, its decoder takes "
            f"{decoder_width}; fetch config and weights of one and the same checkpoint"
        )


def _generation_defaults(settings: Mapping[str, Any]) -> GenerationDefaults:
    return GenerationDefaults(
        do_sample=settings.get("do_sample"),
        temperature=settings.get("temperature"),
        top_p=settings.get("top_p"),
        top_k=settings.get("top_k"),
        min_p=settings.get("min_p"),
        repetition_penalty=settings.get("repetition_penalty"),
        max_new_tokens=settings.get("max_new_tokens"),
    )
