"""What `torch.save` says about one dense tensor, read without unpickling.

A tensor's description is a pickle of protocol 2 (CPython's Lib/pickletools.py lists the opcodes).
This interpreter knows the opcodes and the names that such a description needs, and no others. It
imports nothing, calls nothing, and builds integers, texts, tuples and the symbols below.

    _rebuild_tensor_v2(storage, offset, sizes, strides, requires_grad, OrderedDict())
    _rebuild_parameter(tensor, requires_grad, OrderedDict())
    storage = persistent id ("storage", torch.FloatStorage, key, location, element count)
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeAlias

from gateway.containers.array import ContainerError, printable

_MEND: Final = "save a dense CPU tensor with torch.save(tensor.detach().contiguous().cpu(), f)"
_PROTOCOL: Final = 2
_MAX_STEPS: Final = 256  # a parameter takes 55
_MAX_TEXT: Final = 256  # bytes of one text or name
_MAX_INTEGER: Final = 8  # bytes


class _Symbol(Enum):
    MARK = auto()
    REBUILD_TENSOR = auto()
    REBUILD_PARAMETER = auto()
    ORDERED_DICT = auto()
    NO_HOOKS = auto()


@dataclass(frozen=True, slots=True)
class _StorageType:
    dtype: str


@dataclass(frozen=True, slots=True)
class Storage:
    """`key`: the name of the record `data/<key>`. `count`: elements. The device it was on is not
    kept: its bytes are in the file."""

    dtype: str
    key: str
    count: int


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A view of a storage; `offset` and `strides` count elements and are 0 or more."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_Value: TypeAlias = (
    "int | str | tuple[_Value, ...] | _Symbol | _StorageType | Storage | DenseTensor"
)

_SYMBOLS: Final = {
    "torch._utils _rebuild_tensor_v2": _Symbol.REBUILD_TENSOR,
    "torch._utils _rebuild_parameter": _Symbol.REBUILD_PARAMETER,
    "collections OrderedDict": _Symbol.ORDERED_DICT,
}
_STORAGES: Final = {
    "torch FloatStorage": "float32",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
    "torch DoubleStorage": "float64",
    "torch LongStorage": "int64",
    "torch IntStorage": "int32",
    "torch ShortStorage": "int16",
    "torch CharStorage": "int8",
    "torch ByteStorage": "uint8",
    "torch BoolStorage": "bool",
    "torch ComplexFloatStorage": "complex64",
    "torch ComplexDoubleStorage": "complex128",
}
_KNOWN_OTHERS: Final = {
    "torch._utils _rebuild_tensor": "a tensor of a PyTorch older than 1.6",
    "torch._utils _rebuild_tensor_v3": "a tensor of an element type such as float8",
    "torch._utils _rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils _rebuild_sparse_csr_tensor": "a sparse tensor",
    "torch._utils _rebuild_nested_tensor": "a nested tensor",
    "torch._utils _rebuild_qtensor": "a quantised tensor",
    "torch._utils _rebuild_meta_tensor_no_storage": "a meta tensor, which has no data",
    "torch._utils _rebuild_wrapper_subclass": "a tensor subclass",
    "torch._utils _rebuild_parameter_with_state": "a parameter with attributes",
    "torch._tensor _rebuild_from_type_v2": "a tensor subclass, or a tensor with attributes",
    "torch.storage UntypedStorage": "a storage without a tensor",
    "numpy.core.multiarray _reconstruct": "a NumPy array",
    "numpy._core.multiarray _reconstruct": "a NumPy array",
    "numpy.core.multiarray scalar": "a NumPy number",
    "numpy._core.multiarray scalar": "a NumPy number",
}
_CONTAINERS: Final = {
    ord("}"): "a dict",
    ord("d"): "a dict",
    ord("s"): "a dict, or a tensor with attributes",
    ord("u"): "a dict",
    ord("]"): "a list",
    ord("l"): "a list",
    ord("a"): "a list",
    ord("e"): "a list",
    ord("N"): "None",
    ord("G"): "a float",
    ord("b"): "an object with a state",
    0x81: "an object",
    0x8F: "a set",
}


def refusal(found: str) -> ContainerError:
    """The error for a torch file that holds, or is, `found`."""
    return ContainerError("torch", f"the torch file holds {found}; {_MEND}")


def read_description(text: bytes | memoryview) -> DenseTensor:
    """The one dense tensor that the pickle `text` describes.

    Every number in it is still a claim: sizes and strides are known to be non-negative, of equal
    count and below 2**63, and nothing else. Raises `ContainerError`.
    """
    return _Machine(memoryview(text)).run()


class _Machine:
    """The stack, the memo and the place in the text."""

    def __init__(self, text: memoryview) -> None:
        self._text = text
        self._at = 0
        self._stack: list[_Value] = []
        self._memo: dict[int, _Value] = {}

    def run(self) -> DenseTensor:
        for _ in range(_MAX_STEPS):
            code = self._take(1)[0]
            if code == _STOP:
                return self._result()
            step = _STEPS.get(code)
            if step is None:
                raise refusal(_CONTAINERS.get(code, f"a pickle with opcode {code:#04x}"))
            step(self)
        raise refusal("a description far longer than that of one tensor")

    def protocol(self) -> None:
        if self._take(1)[0] != _PROTOCOL:
            raise refusal(f"a pickle of another protocol than {_PROTOCOL}, torch.save's default")

    def name(self) -> None:
        name = f"{self._line()} {self._line()}"
        if name in _SYMBOLS:
            self._stack.append(_SYMBOLS[name])
        elif name in _STORAGES:
            self._stack.append(_StorageType(_STORAGES[name]))
        else:
            other = f"an object of {printable(name.replace(' ', '.'))}"
            raise refusal(_KNOWN_OTHERS.get(name, other))

    def text(self) -> None:
        length = self._unsigned(4)
        if length > _MAX_TEXT:
            raise refusal("a long text")
        self._stack.append(_decode(self._take(length)))

    def unsigned(self, width: int) -> None:
        self._stack.append(self._unsigned(width))

    def signed(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def long(self) -> None:
        width = self._unsigned(1)
        if width > _MAX_INTEGER:
            raise refusal("a number of more than 64 bits")
        self._stack.append(int.from_bytes(self._take(width), "little", signed=True))

    def push(self, value: _Value) -> None:
        self._stack.append(value)

    def tuple_of(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._stack.append(tuple(reversed(values)))

    def tuple_to_mark(self) -> None:
        values: list[_Value] = []
        while (value := self._pop(mark=True)) is not _Symbol.MARK:
            values.append(value)
        self._stack.append(tuple(reversed(values)))

    def put(self, width: int) -> None:
        key = self._unsigned(width)
        self._memo[key] = value = self._pop()
        self._stack.append(value)

    def get(self, width: int) -> None:
        key = self._unsigned(width)
        if key not in self._memo:
            raise _damaged()
        self._stack.append(self._memo[key])

    def storage(self) -> None:
        self._stack.append(_storage(self._pop()))

    def reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        self._stack.append(_rebuild(function, arguments))

    def _result(self) -> DenseTensor:
        if len(self._stack) != 1 or self._at != len(self._text):
            raise _damaged()
        value = self._stack[0]
        if isinstance(value, DenseTensor):
            return value
        raise refusal(_kind(value))

    def _pop(self, *, mark: bool = False) -> _Value:
        if not self._stack or (self._stack[-1] is _Symbol.MARK and not mark):
            raise _damaged()
        return self._stack.pop()

    def _take(self, count: int) -> memoryview:
        taken = self._text[self._at : self._at + count]
        if len(taken) != count:
            raise _damaged()
        self._at += count
        return taken

    def _unsigned(self, width: int) -> int:
        return int.from_bytes(self._take(width), "little")

    def _line(self) -> str:
        length = bytes(self._text[self._at : self._at + _MAX_TEXT]).find(b"\n")
        if length < 0:
            raise _damaged()
        return _decode(self._take(length + 1)[:-1])


_STOP: Final = ord(".")
_STEPS: Final[dict[int, Callable[[_Machine], None]]] = {
    0x80: _Machine.protocol,
    ord("c"): _Machine.name,
    ord("X"): _Machine.text,
    ord("K"): lambda m: m.unsigned(1),
    ord("M"): lambda m: m.unsigned(2),
    ord("J"): _Machine.signed,
    0x8A: _Machine.long,
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("("): lambda m: m.push(_Symbol.MARK),
    ord(")"): lambda m: m.push(()),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("t"): _Machine.tuple_to_mark,
    ord("q"): lambda m: m.put(1),
    ord("r"): lambda m: m.put(4),
    ord("h"): lambda m: m.get(1),
    ord("j"): lambda m: m.get(4),
    ord("Q"): _Machine.storage,
    ord("R"): _Machine.reduce,
}


def _storage(identity: _Value) -> Storage:
    match identity:
        case ("storage", _StorageType(dtype=dtype), str(key), str(), int(count)):
            if key.isascii() and key.isdecimal() and type(count) is int and count >= 0:
                return Storage(dtype, key, count)
    raise _damaged()


def _rebuild(function: _Value, arguments: _Value) -> _Value:
    match function, arguments:
        case (_Symbol.ORDERED_DICT, ()):
            return _Symbol.NO_HOOKS
        case (_Symbol.REBUILD_PARAMETER, (DenseTensor() as tensor, bool(), _Symbol.NO_HOOKS)):
            return tensor
        case (
            _Symbol.REBUILD_TENSOR,
            (Storage() as storage, offset, sizes, strides, bool(), _Symbol.NO_HOOKS),
        ):
            return _tensor(storage, offset, sizes, strides)
    raise _damaged()


def _tensor(storage: Storage, offset: _Value, sizes: _Value, strides: _Value) -> DenseTensor:
    (first,) = _counts((offset,))
    shape, steps = _counts(sizes), _counts(strides)
    if len(shape) != len(steps):
        raise refusal(f"a tensor of {len(shape)} sizes and {len(steps)} strides")
    return DenseTensor(storage, first, shape, steps)


def _counts(values: _Value) -> tuple[int, ...]:
    if not isinstance(values, tuple):
        raise _damaged()
    counts = tuple(value for value in values if type(value) is int)
    if len(counts) != len(values):
        raise _damaged()
    if any(count < 0 for count in counts):
        raise refusal("a tensor of a negative size, stride or offset")
    return counts


def _kind(value: _Value) -> str:
    if value is _Symbol.NO_HOOKS:
        return "a dict"
    if isinstance(value, Storage):
        return "a storage without a tensor"
    return {int: "a number", bool: "a number", str: "a text", tuple: "a tuple"}.get(
        type(value), "no tensor"
    )


def _decode(text: memoryview) -> str:
    try:
        return str(text, "utf-8")
    except UnicodeDecodeError:
        raise _damaged() from None


def _damaged() -> ContainerError:
    return refusal("a damaged description, or that of something else than one tensor")
