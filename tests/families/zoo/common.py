"""What tiny checkpoints share: a tokenizer, weights that matter, and how they are saved."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
EOS = "<|im_end|>"
CONTEXT = 8192


def chatml(image: str) -> str:
    """The ChatML template with `image` where a picture stands, as Qwen's checkpoints write it."""
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
        + image
        + "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def tokenizer(
    special: Sequence[str], template: str, processor_class: str, **named: Any
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of about 400 entries with the special tokens of a family."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    words = list(dict.fromkeys((*SPECIAL, *special)))
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(words) + 60,
        special_tokens=[AddedToken(word, special=True) for word in words],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_sentences(), trainer)
    fast: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerFast = fast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token=EOS,
        pad_token="<pad>",
        additional_special_tokens=words[3:],
        chat_template=template,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        processor_class=processor_class,
        **named,
    )
    return made


def token_id(made: PreTrainedTokenizerFast, token: str) -> int:
    found = made.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


def text_settings(made: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Settings that every tiny decoder shares."""
    return {
        "vocab_size": len(made),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "bos_token_id": token_id(made, "<s>"),
        "eos_token_id": token_id(made, EOS),
        "pad_token_id": token_id(made, "<pad>"),
    }


def save(
    directory: Path,
    kind: Callable[[Any], nn.Module],
    config: PreTrainedConfig,
    made: PreTrainedTokenizerFast,
    image_processor: Any,
    seed: int,
    *,
    processor: Mapping[str, Any] | None = None,
    rename: Callable[[str], str] = str,
) -> None:
    """Writes a checkpoint of random weights as people have it on disk.

    `rename` gives the key under which a tensor is stored; tied tensors are stored once.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = kind(config)
        _scatter(model)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    generation: Any = GenerationConfig
    generation(
        bos_token_id=token_id(made, "<s>"),
        eos_token_id=[token_id(made, EOS)],
        pad_token_id=token_id(made, "<pad>"),
    ).save_pretrained(directory)
    tied = set(model.all_tied_weights_keys)
    tensors = {
        rename(name): tensor.contiguous()
        for name, tensor in sorted(model.state_dict().items())
        if name not in tied
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    made.save_pretrained(directory)
    image_processor.save_pretrained(directory)
    if processor is not None:
        (directory / "processor_config.json").write_text(json.dumps(processor, indent=2))


def _scatter(model: nn.Module) -> None:
    """Biases and free parameters start as constants, which would hide how they are used."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" not in name:
            nn.init.normal_(parameter, std=0.1)
        elif parameter.ndim == 1:
            nn.init.normal_(parameter, mean=1.0 if parameter.mean() > 0.5 else 0.0, std=0.1)
        elif not parameter.any():
            nn.init.normal_(parameter, std=0.2)


def _sentences() -> Iterator[str]:
    for colour in ("red", "green", "blue", "yellow", "white", "black"):
        for shape in ("circle", "square", "triangle", "star", "cross"):
            yield f"What is the {colour} {shape}? It is left of the {shape}."
