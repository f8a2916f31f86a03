"""The yardstick: transformers' own processor and `generate` on the whole checkpoint."""

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    ProcessorMixin,
)
from transformers.models.auto import processing_auto

from chiasm.models.checkpoint import open_checkpoint
from chiasm.models.sources import load_image_processor

Said = tuple[str, tuple[str | PIL.Image.Image, ...]]
"""A turn: the role, and text and pictures in order."""

_CLASSES: Any = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
# Where a processor class lies in another module than its model type says.
_MODULES = {"LlavaOnevisionProcessor": "llava_onevision", "Qwen2_5_VLProcessor": "qwen2_5_vl"}


@dataclass(frozen=True, eq=False)
class Expected:
    """What the whole model does.

    Attributes:
        prompt: token ids of the prompt.
        answer: the tokens generated greedily.
        logprobs: float32 `[answer tokens, vocabulary]`.
        greatest: the greatest logit's size, which float32's rounding goes with.
    """

    prompt: list[int]
    answer: list[int]
    logprobs: torch.Tensor
    greatest: float


class Whole:
    """A whole checkpoint with its processor; one conversation at a time."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        auto: Any = AutoModelForImageTextToText
        self.model: Any = auto.from_pretrained(directory, dtype=dtype).eval()
        self.processor = processor_of(directory)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)

    @torch.inference_mode()
    def expected(self, turns: Sequence[Said], tokens: int) -> Expected:
        """The greedy answer of at most `tokens` tokens."""
        inputs = self.inputs(turns)
        prompt = inputs["input_ids"][0].tolist()
        out = self.model.generate(
            **inputs,
            max_new_tokens=tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.cat(out.logits).float()
        answer = out.sequences[0, len(prompt) :].tolist()
        return Expected(prompt, answer, logits.log_softmax(-1), float(logits.abs().max()))

    def inputs(self, turns: Sequence[Said]) -> dict[str, Any]:
        """What the processor makes of a conversation."""
        made = self._processed(turns)
        taken = inspect.signature(self.model.forward).parameters
        kept = {name: made[name] for name in made if name in taken and name != "labels"}
        return {**kept, "attention_mask": torch.ones_like(made["input_ids"])}

    def _processed(self, turns: Sequence[Said]) -> Any:
        rendered = self.tokenizer.apply_chat_template(
            [_message(turn) for turn in turns],
            chat_template=_template(self.tokenizer),
            tokenize=False,
            add_generation_prompt=True,
        )
        pictures = [part for _, parts in turns for part in parts if not isinstance(part, str)]
        if not pictures:  # PaliGemma's processor takes no text alone
            return self.tokenizer([rendered], return_tensors="pt", add_special_tokens=False)
        return self.processor(
            images=pictures, text=[rendered], return_tensors="pt", add_special_tokens=False
        )

    @torch.inference_mode()
    def features(self, picture: PIL.Image.Image) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """`[rows, width]` of one picture as the whole model's tower gives them, and its levels."""
        base = self.model.base_model
        taken = inspect.signature(base.get_image_features).parameters
        made = self._processed([("user", (picture,))])
        out = base.get_image_features(
            **{name: made[name] for name in made if name in taken}, return_dict=True
        )
        levels = getattr(out, "deepstack_features", None) or ()
        return _flat(out.pooler_output), [_flat(level) for level in levels]


def processor_of(directory: Path) -> Any:
    """The checkpoint's processor without its part for videos, which torchvision alone can make."""
    checkpoint = open_checkpoint(directory)
    settings = dict(checkpoint.processor_settings())
    name = settings.pop("processor_class", None) or checkpoint.tokenizer_settings().get(
        "processor_class"
    )
    whole = _processor_class(name or _CLASSES[checkpoint.model_type])
    if name == "PaliGemmaProcessor":
        whole = _as_the_template_says(whole)

    class WithoutVideo(whole):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    taken = inspect.signature(whole.__init__).parameters
    more = {key: value for key, value in settings.items() if key in taken}
    for part in ("image_processor", "video_processor", "tokenizer", "feature_extractor"):
        more.pop(part, None)
    images = load_image_processor(checkpoint)
    if "video_processor" in taken:
        # One family reads settings of it that its image processor has as well.
        more["video_processor"] = images
    if "feature_extractor" in taken:
        more["feature_extractor"] = None
    return WithoutVideo(
        image_processor=images,
        tokenizer=tokenizer,
        **more,
    )


def _as_the_template_says(whole: Any) -> Any:
    """PaliGemma's processor without what it adds to a text: its template has that already."""

    class Plain(whole):  # type: ignore[misc]
        prepare_inputs_layout = ProcessorMixin.prepare_inputs_layout
        validate_inputs = ProcessorMixin.validate_inputs

    return Plain


class PixtralText(ProcessorMixin):
    """Pixtral's processor, whose module cannot be imported without torchvision.

    The text follows from the sizes that the real image processor gives, after scaling.
    """

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: str | None = None,
    ) -> None:
        self.image_token = "[IMG]"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.cell = patch_size * spatial_merge_size
        base: Any = super()
        base.__init__(image_processor, tokenizer, chat_template=chat_template)

    def _process_images(self, images: Any, **options: Any) -> Any:
        cell = {"height": self.cell, "width": self.cell}
        return super()._process_images(images, **{**options, "patch_size": cell})

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        height, width = (int(side) for side in image_inputs["image_sizes"][image_idx])
        line = self.image_token * (width // self.cell)
        return "[IMG_BREAK]".join([line] * (height // self.cell)) + "[IMG_END]"


def config_of(directory: Path) -> Any:
    """transformers' config of a checkpoint."""
    return AutoConfig.from_pretrained(directory)


def _processor_class(name: str) -> Any:
    if name == "PixtralProcessor":
        return PixtralText
    for model_type, known in _CLASSES.items():
        if known == name:
            module = _MODULES.get(name, model_type)
            try:
                found = importlib.import_module(
                    f"transformers.models.{module.replace('-', '_')}.processing_{module}"
                )
            except ModuleNotFoundError as error:
                if "torchvision" in str(error):
                    raise
                continue
            return getattr(found, name)
    raise LookupError(f"transformers has no {name}")


def _message(turn: Said) -> dict[str, Any]:
    role, parts = turn
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
        for part in parts
    ]
    return {"role": role, "content": content}


def _template(tokenizer: Any) -> Any:
    return tokenizer.chat_template


def _flat(pooled: Any) -> torch.Tensor:
    pieces = [pooled] if isinstance(pooled, torch.Tensor) else list(pooled)
    return torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in pieces])
