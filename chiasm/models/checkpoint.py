"""What a checkpoint directory holds, read without loading it: settings and each tensor's place.

Only safetensors weights are read (format: https://huggingface.co/docs/safetensors), in one file or
in shards listed by `model.safetensors.index.json`. Nothing is unpickled and no code of the
directory runs.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"
PREPROCESSOR_FILE = "preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# The format's own upper bound on the JSON header, in bytes.
MAX_HEADER_BYTES = 100_000_000
CHUNK_BYTES = 4 * 1024 * 1024

_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip


class CheckpointError(Exception):
    """The directory cannot be served; `message` says what is wrong with it and how to mend it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: `byte_count` bytes at `offset` of `file`, row-major, little-endian."""

    name: str
    file: Path
    data_type: str
    shape: tuple[int, ...]
    offset: int
    byte_count: int

    def chunks(self) -> Iterator[bytes]:
        """The tensor's bytes in pieces of at most `CHUNK_BYTES`, so that none is held whole."""
        with self.file.open("rb", buffering=0) as stream:
            stream.seek(self.offset)
            left = self.byte_count
            while left:
                chunk = stream.read(min(left, CHUNK_BYTES))
                if not chunk:
                    raise CheckpointError(_truncated(self.file))
                left -= len(chunk)
                yield chunk


@dataclass(frozen=True)
class Checkpoint:
    """The readable parts of a checkpoint directory."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    def image_processor_settings(self) -> Mapping[str, Any]:
        """The image processor's settings; nested ones go first, as in transformers."""
        nested = _read_optional(self.directory / PROCESSOR_FILE).get("image_processor")
        if isinstance(nested, dict):
            return nested
        settings = _read_optional(self.directory / PREPROCESSOR_FILE)
        if not settings:
            raise CheckpointError(
                f"{self.directory} has no {PREPROCESSOR_FILE}, so images cannot be prepared for "
                "its vision tower; copy that file from the checkpoint's publisher"
            )
        return settings

    def processor_settings(self) -> Mapping[str, Any]:
        return _read_optional(self.directory / PROCESSOR_FILE)

    def tokenizer_settings(self) -> Mapping[str, Any]:
        return _read_optional(self.directory / TOKENIZER_FILE)

    def generation_settings(self) -> Mapping[str, Any]:
        return _read_optional(self.directory / GENERATION_FILE)


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read settings and tensor places.

    Raises:
        CheckpointError: a file is missing, truncated or malformed.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; give a checkpoint's directory")
    config = directory / CONFIG_FILE
    if not config.is_file():
        raise CheckpointError(
            f"{directory} has no {CONFIG_FILE}; give the directory that holds a whole checkpoint"
        )
    return Checkpoint(directory, read_json(config), _read_tensor_places(directory))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; anything else raises `CheckpointError`."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object; fetch it again")
    return content


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_tensor_places(directory: Path) -> dict[str, StoredTensor]:
    index = directory / INDEX_FILE
    if (directory / WEIGHTS_FILE).is_file():
        return _read_header(directory / WEIGHTS_FILE)
    if index.is_file():
        return _read_shards(directory, _weight_map(index))
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    if pickled:
        raise CheckpointError(
            f"{directory} holds its weights only as {', '.join(pickled)}, a pickle format that is "
            "never read here; convert them to safetensors"
        )
    raise CheckpointError(
        f"{directory} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; fetch the checkpoint's weights"
    )


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; fetch it again")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index} names a shard outside its directory: {shard!r}")
    return weight_map


def _read_shards(directory: Path, weight_map: Mapping[str, str]) -> dict[str, StoredTensor]:
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {', '.join(missing)}, which {INDEX_FILE} lists; "
            "fetch the missing shards"
        )
    headers = {shard: _read_header(directory / shard) for shard in shards}
    places: dict[str, StoredTensor] = {}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise CheckpointError(
                f"{directory / shard} lacks the tensor {name}, which {INDEX_FILE} places in it"
            )
        places[name] = headers[shard][name]
    return places


def _read_header(file: Path) -> dict[str, StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(_truncated(file))
        raw = stream.read(length)
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"{file} has no safetensors header; fetch it again") from error
    header.pop("__metadata__", None)
    places = {name: _place(file, name, entry, 8 + length) for name, entry in header.items()}
    end = max((place.offset + place.byte_count for place in places.values()), default=8 + length)
    if end != size:
        raise CheckpointError(_truncated(file))
    return places


def _place(file: Path, name: str, entry: Mapping[str, Any], data_start: int) -> StoredTensor:
    try:
        begin, end = (int(offset) for offset in entry["data_offsets"])
        shape = tuple(int(extent) for extent in entry["shape"])
        data_type = str(entry["dtype"])
        expected = math.prod(shape) * _BITS[data_type] // 8
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} describes the tensor {name} in an unknown way") from error
    if begin < 0 or end - begin != expected or min(shape, default=0) < 0:
        raise CheckpointError(
            f"{file} gives the tensor {name} a wrong number of bytes; fetch it again"
        )
    return StoredTensor(name, file, data_type, shape, data_start + begin, expected)


def _truncated(file: Path) -> str:
    return f"{file} does not have the length that its header states (truncated?); fetch it again"
