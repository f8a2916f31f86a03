"""What tensors of the vision half and special tokens are called, whatever a file calls them."""

from collections.abc import Callable, Mapping

from chiasm.models.family import Sources


def under(*modules: str) -> Callable[[str], str | None]:
    """A `vision_tensor_name`: tensors below one of `modules`, with or without `model.` before."""
    prefixes = tuple(f"{module}." for module in modules)

    def name_of(stored: str) -> str | None:
        name = stored.removeprefix("model.")
        return name if name.startswith(prefixes) else None

    return name_of


def token(sources: Sources, name: str, published: str) -> str:
    """The token that tokenizer_config.json calls `name`, else the one of published checkpoints."""
    settings = sources.tokenizer
    named = settings.get("extra_special_tokens")
    stated = settings.get(name) or (named.get(name) if isinstance(named, Mapping) else None)
    if isinstance(stated, Mapping):
        stated = stated.get("content")
    return stated if isinstance(stated, str) else published
