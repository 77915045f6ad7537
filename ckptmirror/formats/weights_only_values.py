"""Values that ``torch.load(weights_only=True)`` gives back: encoding on save, decoding on load.

Rules:
* An encoded tree holds only dicts, lists, tuples, tensors and plain values. Its containers are new, so later changes by
  the training do not reach them; its tensors share the same memory.
* A value that the safe loader would not load back exactly is either written in a marked plain form (``MARK``), or
  refused while saving, with its place in the state; a load never finds one. Only keys change type: a NumPy number used
  as a key becomes the equal Python number.
* A DTensor must be reachable by keys and positions, so that a load finds its pieces in the other ranks' files.
* Decoding builds only types on the list below.
"""

from __future__ import annotations

import io
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.serialization import get_safe_globals

from ckptmirror.core.containers import leaves
from ckptmirror.core.errors import IntegrityError, UnsafePickle, UsageError
from ckptmirror.formats.live_only import SavedGenerator, SavedMember
from ckptmirror.formats.tensor_bytes import is_wrapper
from ckptmirror.formats.text_values import text_of, value_of
from ckptmirror.formats.versions import attached, checked, is_plain
from ckptmirror.untrusted.read_limits import Budget
from ckptmirror.untrusted.tensor_files import load_bytes

__all__ = ["MARK", "as_torch_has_it", "decode", "encode", "has_shards"]

MARK = "__ckptmirror__"

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device)
_INT_BITS = 1024  # of longer ones pickle makes an opcode (from 2,040 bits on) that the safe loader does not know
_TENSORS = (torch.Tensor, torch.nn.Parameter, DTensor)
_FACTORIES = {"none": None, **{kind.__name__: kind for kind in (list, dict, set, int, float, str)}}


def encode(value: Any, where: str) -> Any:
    """Return ``value`` as a tree of plain values and tensors.

    Args:
        value: Any value of a training state.
        where: The place of the value in the state, for messages (``"extra.history"``).

    Raises:
        UsageError: The safe loader could not load this value back; the message names the place and the type.
    """
    kind = type(value)
    if kind is int and value.bit_length() > _INT_BITS:
        return {MARK: "int", "hex": hex(value)}
    if kind is bytes and not value:
        return {MARK: "bytes"}  # pickle makes of it a call that the safe loader does not know
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, where)
    if kind is dict:
        if MARK in value:
            raise UsageError(f"{where} has a key {MARK!r}, which ckptmirror uses itself.")
        return {_key(key, where): encode(item, f"{where}.{key}") for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(encode(item, f"{where}[{i}]") for i, item in enumerate(value))
    marked = _encode_marked(value, where)
    if marked is not None:
        return marked
    if not _loads_back(value):
        raise UsageError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which a safe load could not read back.",
            hint="Save numbers, text, lists, dicts and tensors, or an object with state_dict() and load_state_dict().",
        )
    if isinstance(value, (Mapping, list)):
        return {MARK: "object", "items": (value,)}  # its own kind of container: nothing may walk into it on the way
    return value


def decode(value: Any, leaf: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return what :func:`encode` was given, from what was loaded.

    Args:
        value: What was loaded.
        leaf: Called with a marked dict whose mark is unknown here (a shard); without it such a dict is an error.

    Raises:
        IntegrityError: A marked value has an unknown mark or a wrong form.
    """
    if type(value) is OrderedDict:
        metadata = vars(value).get("_metadata")
        items = {key: decode(item, leaf) for key, item in value.items()}
        return attached(items, None if metadata is None else checked(metadata, "the save"))
    if type(value) is dict:
        name = value.get(MARK)
        if name is None:
            return {key: decode(item, leaf) for key, item in value.items()}
        build = _DECODERS.get(name) if isinstance(name, str) else None
        if build is None:
            if leaf is not None:
                return leaf(value)
            raise IntegrityError(f"The save holds a marked value {name!r}, which this version does not know.")
        try:
            if type(value.get("items", [])) not in (list, tuple):
                raise TypeError(f"its items are a {type(value['items']).__name__}")
            return build({key: decode(item, leaf) for key, item in value.items()})
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            raise IntegrityError(f"The save holds a broken {name!r} value: {error}") from error
    if type(value) in (list, tuple):
        return type(value)(decode(item, leaf) for item in value)
    return value


def as_torch_has_it(value: Any) -> Any:
    """Return an encoded value without the marks that the safe loader does not need."""
    if type(value) in (list, tuple):
        return type(value)(map(as_torch_has_it, value))
    if type(value) is not dict:
        return value
    plain = {key: as_torch_has_it(item) for key, item in value.items()}
    name = value.get(MARK)
    if name == "ordered":
        return _decode_ordered(plain)
    if name == "size":
        return torch.Size(value["items"])
    if name == "set" and not any(type(item) in (dict, tuple, torch.Tensor) for item in value["items"]):
        return set(value["items"])
    return plain


def has_shards(tree: Any) -> bool:
    """Whether any tensor in a tree, or in a module in it, is a DTensor."""
    found = (leaf for leaf in leaves(tree) if isinstance(leaf, (DTensor, torch.nn.Module)))
    return any(isinstance(leaf, DTensor) or has_shards([*leaf.parameters(), *leaf.buffers()]) for leaf in found)


def _encode_tensor(value: torch.Tensor, where: str) -> torch.Tensor:
    tensor = value.detach()
    kind = type(tensor)
    if kind not in _TENSORS and kind not in get_safe_globals():
        raise UsageError(
            f"{where} is a tensor of type {kind.__module__}.{kind.__qualname__}: a safe load could not read it back.",
            hint="Allow it by torch.serialization.add_safe_globals, here and in the program that loads, or convert it.",
        )
    if isinstance(tensor, DTensor) and is_wrapper(tensor):
        raise UsageError(
            f"{where} is sharded, and each shard a tensor of type {type(tensor.to_local()).__qualname__}: its pieces "
            "could not be put together.",
            hint="Convert it to plain tensors for the save.",
        )
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        raise UsageError(
            f"{where} is a DTensor whose ranks hold parts of a sum: its pieces could not be put together.",
            hint="Redistribute it first: tensor.redistribute(placements=[Replicate()]).",
        )
    if tensor.layout not in (torch.strided, torch.sparse_coo) or tensor.is_nested:
        layout = "nested" if tensor.layout == torch.strided else tensor.layout
        raise UsageError(f"{where} is a tensor of layout {layout}, which cannot be saved.", hint="Save it dense.")
    return tensor


def _key(key: Any, where: str) -> Any:
    kind = type(key)
    if kind is int and key.bit_length() > _INT_BITS:
        raise UsageError(f"{where} has a key of {key.bit_length()} bits, which a safe load could not read back.")
    if key == b"" and kind is bytes:
        raise UsageError(f"{where} has the key b'' (empty bytes), which a safe load could not read back.")
    if kind in _PLAIN and kind is not bytearray:
        return key
    if kind is tuple:
        try:
            Budget().check_keys([key])
        except UnsafePickle as error:
            raise UsageError(f"{where} has a key that a load would refuse: {error.message}") from error
        return tuple(_key(item, where) for item in key)
    if _is_numpy(key, "generic"):
        return _key(key.item(), where)
    raise UsageError(
        f"{where} has a key of type {kind.__qualname__}, which a safe load could not read back.",
        hint="Use a list, or a dict whose keys are names or numbers.",
    )


def _items(value: Mapping[Any, Any], where: str) -> list[Any]:
    return [[_key(key, where), encode(item, f"{where}.{key}")] for key, item in value.items()]


def _members(value: Any, where: str) -> list[Any]:
    return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]


def _encode_marked(value: Any, where: str) -> Any | None:
    kind = type(value)
    if kind is OrderedDict:
        metadata = _encode_metadata(value)
        return {MARK: "ordered", "items": _items(value, where), **({} if metadata is None else {"metadata": metadata})}
    if kind is Counter:
        return {MARK: "counter", "items": _items(value, where)}
    if kind is defaultdict:
        for name, factory in _FACTORIES.items():
            if value.default_factory is factory:
                return {MARK: "defaultdict", "factory": name, "items": _items(value, where)}
        return None
    if kind is deque:
        return {MARK: "deque", "items": _members(value, where), "maxlen": value.maxlen}
    if kind is set or kind is frozenset:
        if has_shards(items := _members(value, where)):
            raise UsageError(
                f"{where} is a {kind.__name__} that holds a DTensor, whose pieces a load could not find there.",
                hint="Keep it in a dict or a list, or give the object state_dict() and load_state_dict().",
            )
        return {MARK: kind.__name__, "items": items}
    if kind is torch.Size:
        return {MARK: "size", "items": list(value)}
    if (written := text_of(value, where)) is not None:
        return {MARK: "written", **written}
    if kind is SavedMember:
        return {MARK: "enum", "enum": value.enum, "name": value.name, "value": encode(value.value, where)}
    if kind is SavedGenerator:
        return {MARK: "generator", "kind": value.kind, "state": encode(value.state, where)}
    if _is_numpy(value, "generic") and value.dtype.kind in "US":
        return {MARK: "text", "value": encode(value.item(), "")}
    if _is_numpy(value, "generic") and value.dtype.kind in "biufcmM":
        return {MARK: "scalar", "dtype": value.dtype.str, "data": value.tobytes()}
    if _is_numpy(value, "ndarray"):
        return _encode_array(value, where)
    return None


def _encode_metadata(value: OrderedDict[Any, Any]) -> list[Any] | None:
    """Return what the ``state_dict()`` of a module carries, as far as it is numbers and text."""
    metadata = vars(value).get("_metadata")
    if not isinstance(metadata, Mapping):
        return None
    of_modules = [(name, of) for name, of in metadata.items() if type(name) is str and isinstance(of, Mapping)]
    return [[name, [list(item) for item in of.items() if is_plain(item)]] for name, of in of_modules]


def _decode_permuted(value: dict[str, Any]) -> torch.Tensor:
    """Return the tensor with its axes back in place: it was saved in memory order, and ``order`` lists the axes."""
    data: torch.Tensor = value["data"]
    return data.permute([value["order"].index(axis) for axis in range(data.dim())])


def _decode_ordered(value: dict[str, Any]) -> OrderedDict[Any, Any]:
    metadata = {name: dict(of) for name, of in value["metadata"]} if "metadata" in value else None
    return attached(OrderedDict(_pairs(value["items"])), None if metadata is None else checked(metadata, "the save"))


def _pairs(items: Any) -> list[tuple[Any, Any]]:
    pairs = [(key, item) for key, item in items]
    _hashable([key for key, _ in pairs])
    return pairs


def _hashable(items: Any) -> list[Any]:
    """Return members of a set or keys of a dict, after a look at what they cost."""
    found = list(items)
    Budget().check_keys(found)
    return found


def _decode_scalar(value: dict[str, Any]) -> Any:
    import numpy

    dtype = numpy.dtype(value["dtype"])
    if dtype.kind not in "biufcmM":
        raise ValueError(f"a number of type {dtype}")
    (number,) = numpy.frombuffer(value["data"], dtype)
    return number


def _decode_text(value: dict[str, Any]) -> Any:
    import numpy

    text = value["value"]
    if not isinstance(text, (str, bytes)):
        raise TypeError(f"a text of type {type(text).__name__}")
    return numpy.str_(text) if isinstance(text, str) else numpy.bytes_(text)


def _encode_array(value: Any, where: str) -> dict[str, Any] | None:
    import numpy

    if type(value) is not numpy.ndarray:
        raise UsageError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}: it would come back as a plain array.",
            hint="Save numpy.asarray(...) of it, and what else it holds (a mask) as an array beside it.",
        )
    if value.dtype.kind not in "biufc":
        return None
    own = numpy.array(value, order="C", copy=True)
    data = torch.from_numpy(own.reshape(-1).view(numpy.uint8))
    return {MARK: "array", "dtype": own.dtype.str, "shape": list(value.shape), "data": data}


def _decode_array(value: dict[str, Any]) -> Any:
    import numpy

    dtype = numpy.dtype(value["dtype"])
    if dtype.kind not in "biufc":
        raise ValueError(f"an array of type {dtype}")
    data = value["data"]
    if not isinstance(data, torch.Tensor) or data.dtype != torch.uint8 or not data.is_contiguous():
        raise ValueError("an array without bytes of its own")
    if data.is_meta:  # a save looks whether it could be read
        return numpy.broadcast_to(numpy.zeros((), dtype), value["shape"])
    return data.numpy().view(dtype).reshape(value["shape"])


def _decode_member(value: dict[str, Any]) -> SavedMember:
    member = SavedMember(value["enum"], value["name"], value["value"])
    if type(member.enum) is not str or type(member.name) is not str or type(member.value) is not int:
        raise TypeError("a member without a name")
    return member


def _decode_generator(value: dict[str, Any]) -> SavedGenerator:
    if type(value["kind"]) is not str or type(value["state"]) is not dict:
        raise TypeError("a generator without a state")
    return SavedGenerator(value["kind"], value["state"])


def _is_numpy(value: Any, name: str) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, getattr(numpy, name))


def _loads_back(value: Any) -> bool:
    """Whether the safe loader reads ``value`` back as the same type (the user may have allowed it)."""
    try:
        stream = io.BytesIO()
        torch.save(value, stream)
        if f"c{DTensor.__module__}\n{DTensor.__qualname__}\n".encode() in stream.getbuffer().tobytes():
            return False  # how the pickle names it; the ranks' pieces in an object of the user's cannot be found
        return type(load_bytes(stream.getvalue(), "it")) is type(value)
    except Exception:  # noqa: BLE001 - any failure, of any pickling hook, means the same: it does not load back
        return False


_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dict": lambda v: dict(_pairs(v["items"])),
    "ordered": _decode_ordered,
    "counter": lambda v: Counter(dict(_pairs(v["items"]))),
    "defaultdict": lambda v: defaultdict(_FACTORIES[v["factory"]], _pairs(v["items"])),
    "deque": lambda v: deque(v["items"], v["maxlen"]),
    "set": lambda v: set(_hashable(v["items"])),
    "frozenset": lambda v: frozenset(_hashable(v["items"])),
    "object": lambda v: v["items"][0],
    "tuple": lambda v: tuple(v["items"]),
    "size": lambda v: torch.Size(v["items"]),
    "permuted": _decode_permuted,
    "bytes": lambda _: b"",
    "int": lambda v: int(v["hex"], 16),
    "scalar": _decode_scalar,
    "text": _decode_text,
    "array": _decode_array,
    "written": value_of,
    "enum": _decode_member,
    "generator": _decode_generator,
}
