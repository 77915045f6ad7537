"""Makes tensors of what a pickle of ``torch.save`` describes, after comparing every number with the file.

Rules:
* Only the forms on the list below are made, by code of this module: nothing is called by its name.
* A storage has a record of exactly its bytes; a tensor ends inside its storage. Tensors that show the same bytes more
  than once, as expanded ones do, have a budget that grows with the file.
* What the user allowed (``torch.serialization.add_safe_globals``) is called as torch calls it, with values that were
  made here. Sharded tensors (DTensor, DeviceMesh) are never made: loading one would start to talk to other ranks.
* A value that is in two places is one object afterwards too, as torch has it.
"""

from __future__ import annotations

import enum
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.serialization import get_safe_globals
from torch.storage import _dtype_to_storage_type_map

from ckptmirror.core.errors import IntegrityError, UnsafePickle
from ckptmirror.untrusted.pickles import Made, Name, shown
from ckptmirror.untrusted.read_limits import Budget

__all__ = ["DTYPES", "is_known", "make"]

Storage = Callable[[str, int], torch.UntypedStorage]

_MAX_DIMENSIONS = 64  # of torch
_END = 1 << 63
_TENSOR_BYTES = 1_000  # of its objects in Python and in C++
_NUMBER_BYTES = 16  # of a torch.Size
_ATTRIBUTE_BYTES = 150
_FREE_EXPANSION_BYTES = 64 << 20  # that expanded tensors may show beyond what the file holds
_EXPANSION = 4  # times the bytes of the file
_BLOCKED = frozenset({"sys", "os", "posix", "nt"})  # as in torch, whoever allows them
_DEVICE = re.compile(r"[a-z]{1,16}(:[0-9]{1,4})?", re.ASCII)


def make(described: Any, storage: Storage, sizes_bytes: Mapping[str, int], budget: Budget) -> Any:
    """Return the values that ``described`` (of ``read_pickle``) stands for.

    Args:
        described: What the pickle holds; its containers are filled in place.
        storage: Returns the memory of a record, by key and bytes.
        sizes_bytes: The size of each record that a storage may be.
        budget: What is left of what the pickle may cost.

    Raises:
        UnsafePickle: It describes what is not on the list, or far more than its bytes.
        IntegrityError: A tensor does not fit its storage, or is described wrongly.
    """
    maker = _Maker(storage, sizes_bytes, budget)
    try:
        return maker.value(described)
    except (IntegrityError, MemoryError):
        raise
    except TypeError as error:
        raise IntegrityError("It describes a value without what belongs to it.") from error
    except (ValueError, RuntimeError, AttributeError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise IntegrityError(f"It describes a broken value: {first_line[:200]}") from error


def is_known(name: str) -> bool:
    """Whether a pickle of torch's may name ``name``."""
    return name in _NAMES or name in _allowed()


class _Maker:
    def __init__(self, storage: Storage, sizes_bytes: Mapping[str, int], budget: Budget) -> None:
        self._storage = storage
        self._sizes_bytes = sizes_bytes
        self._budget = budget
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._made: dict[int, tuple[Any, Any]] = {}  # what was described, which lives on, and what was made of it
        self._expansion_left = _FREE_EXPANSION_BYTES + _EXPANSION * sum(sizes_bytes.values())

    def value(self, value: Any) -> Any:
        """Return the finished value; the depth was checked before."""
        kind = type(value)
        if kind in _LEAVES:
            return value
        if id(value) in self._made:
            return self._made[id(value)][1]
        result: Any
        if kind is Made:
            result = self._object(value)
        elif kind is Name:
            result = self._constant(value)
        elif kind is list:
            result = value
            for index, item in enumerate(value):
                if type(item) not in _LEAVES:
                    value[index] = self.value(item)
        elif kind is tuple:
            items = tuple([item if type(item) in _LEAVES else self.value(item) for item in value])
            result = value if all(a is b for a, b in zip(items, value, strict=True)) else items
        elif kind is set:
            result = value
            if any(type(item) not in _LEAVES for item in value):
                members = self._keys(value)
                value.clear()
                value.update(members)
        elif kind in (dict, OrderedDict, Counter):
            result = self._dict(value)
        else:
            raise IntegrityError(f"It holds a {kind.__name__}.")
        self._made[id(value)] = (value, result)
        return result

    def _dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        if any(type(key) not in _LEAVES for key in value):
            items = dict(zip(self._keys(value), value.values(), strict=True))
            value.clear()
            dict.update(value, items)  # a Counter's own would count them
        for key, item in value.items():
            if type(item) not in _LEAVES:
                value[key] = self.value(item)
        if type(value) is OrderedDict and vars(value):
            vars(value)["_metadata"] = self.value(vars(value)["_metadata"])
        return value

    def _keys(self, described: Any) -> list[Any]:
        """Make keys; until now each was told apart by its identity, and is by its value from now on."""
        keys = [self.value(key) for key in described]
        self._budget.check_keys(tuple(key) if type(key) is torch.Size else key for key in keys)
        return keys

    def _constant(self, name: Name) -> Any:
        if name in DTYPES:
            return DTYPES[name]
        if name in (allowed := _allowed()):
            return allowed[name]
        raise UnsafePickle(f"It holds {name} as a value.")

    def _object(self, made: Made) -> Any:
        maker = _MAKERS.get(made.name)
        if maker is not None:
            if made.state is not None:
                raise UnsafePickle(f"It gives a state to what {made.name} makes.")
            return maker(self, *made.arguments)
        allowed = _allowed().get(made.name)
        if allowed is None:
            raise UnsafePickle(f"It makes a {made.name} by itself.")
        return self._of_the_user(allowed, made)

    def _of_the_user(self, allowed: Any, made: Made) -> Any:
        arguments = self.value(made.arguments)
        result = allowed.__new__(allowed, *arguments) if made.is_object else allowed(*arguments)
        state = self.value(made.state)
        if state is None:
            return result
        if isinstance(result, (type, enum.Enum)):
            raise UnsafePickle(f"It gives a state to {made.name}, which is one for the whole process.")
        if hasattr(result, "__setstate__"):
            result.__setstate__(state)
            return result
        state, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        vars(result).update(state or {})
        for key, item in (slots or {}).items():
            setattr(result, key, item)
        return result

    # -- tensors --------------------------------------------------------------------------------------------

    def _memory(self, identifier: Any) -> tuple[torch.UntypedStorage, torch.dtype | None]:
        parts = identifier.arguments[0] if type(identifier) is Made and identifier.name == "persistent" else None
        if type(parts) is not tuple or len(parts) != 5 or parts[0] != "storage" or parts[1] not in _STORAGES:
            raise IntegrityError("It makes a tensor over something that is not a storage.")
        _, kind, key, _, count = parts
        dtype = _STORAGES[kind]
        size_bytes = self._sizes_bytes.get(key) if type(key) is str else None
        if size_bytes is None:
            raise IntegrityError(f"It names a storage {shown(key)} that the archive does not hold.")
        if type(count) is not int or count * (1 if dtype is None else dtype.itemsize) != size_bytes:
            raise IntegrityError(f"It says that storage {shown(key)} of {size_bytes} bytes has {shown(count)} values.")
        if key not in self._storages:
            self._storages[key] = self._storage(key, size_bytes)
        return self._storages[key], dtype

    def _view(self, identifier: Any, dtype: Any, offset: Any, size: Any, stride: Any) -> torch.Tensor:
        memory, own = self._memory(identifier)
        self._budget.spend(_TENSOR_BYTES)
        dtype = own if dtype is None else self.value(dtype)
        if not isinstance(dtype, torch.dtype):
            raise IntegrityError("It makes a tensor without a dtype.")
        size, stride = _shape(size), _shape(stride)
        if len(size) != len(stride) or type(offset) is not int or not 0 <= offset < _END:
            raise IntegrityError("It makes a tensor with an invalid shape.")
        if 0 not in size:
            end = offset + 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
            if end * dtype.itemsize > memory.nbytes():
                raise IntegrityError(
                    f"It makes a tensor that ends at value {end - 1} of a storage of {memory.nbytes()} bytes."
                )
            self._expand(math.prod(size) * dtype.itemsize - memory.nbytes())
        return torch.empty(0, dtype=dtype, device=memory.device).set_(memory, offset, size, stride)

    def _expand(self, extra_bytes: int) -> None:
        self._expansion_left -= max(0, extra_bytes)
        if self._expansion_left < 0:
            raise UnsafePickle(
                "Its tensors show far more values than it has bytes (an expanded tensor, or one on the meta device?).",
                hint="If the file is yours, save tensor.contiguous() instead.",
            )

    def tensor(self, storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> torch.Tensor:
        return _finished(self._view(storage, None, offset, size, stride), *rest)

    def tensor_v3(
        self, storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, bits: Any = None
    ) -> torch.Tensor:
        return _finished(self._view(storage, dtype, offset, size, stride), grad, hooks, bits)

    def parameter(self, data: Any, requires_grad: Any, hooks: Any, state: Any = None) -> torch.nn.Parameter:
        _no_hooks(hooks)
        result = torch.nn.Parameter(_tensor(self.value(data)), requires_grad is True)
        self._set_attributes(result, self.value(state))
        return result

    def _set_attributes(self, tensor: torch.Tensor, state: Any) -> None:
        attributes = state[0] if type(state) is tuple and len(state) == 2 and not state[1] else state
        if type(attributes) not in (dict, type(None)):
            raise IntegrityError("It gives a tensor a state that is no dict.")
        self._budget.spend(_ATTRIBUTE_BYTES * len(attributes or ()))
        for name, value in (attributes or {}).items():
            if type(name) is not str or hasattr(torch.Tensor, name):
                raise UnsafePickle(f"It replaces {shown(name)} of a tensor.")
            vars(tensor)[name] = value

    def sparse(self, layout: Any, data: Any) -> torch.Tensor:
        layout, parts = self.value(layout), self.value(data)
        if layout == torch.sparse_coo and len(parts) in (3, 4):
            indices, values, size = _tensor(parts[0]), _tensor(parts[1]), torch.Size(_shape(parts[2]))
            is_coalesced = len(parts) == 4 and parts[3] is True
            return torch.sparse_coo_tensor(indices, values, size, check_invariants=True, is_coalesced=is_coalesced)
        raise IntegrityError(f"It makes a sparse tensor of layout {layout}.")

    def on_meta(self, dtype: Any, size: Any, stride: Any, requires_grad: Any) -> torch.Tensor:
        size, stride = _shape(size), _shape(stride)
        dtype = self.value(dtype)
        self._budget.spend(_TENSOR_BYTES)
        self._expand(math.prod(size) * dtype.itemsize)
        return torch.empty_strided(size, stride, dtype=dtype, device="meta", requires_grad=requires_grad is True)

    def of_another_device(self, data: Any, dtype: Any, device: Any, requires_grad: Any) -> torch.Tensor:
        del device
        tensor = _tensor(self.value(data))
        if tensor.dtype != self.value(dtype):
            raise IntegrityError("It makes a tensor of another dtype than its data.")
        return tensor.requires_grad_(requires_grad is True)

    def of_type(self, function: Any, kind: Any, arguments: Any, state: Any) -> torch.Tensor:
        if type(function) is not Name or type(kind) is not Name or type(arguments) is not tuple:
            raise IntegrityError("It makes a tensor of nothing.")
        if kind in _TENSOR_TYPES and function in _MAKERS and function != _OF_TYPE:
            result = _tensor(_MAKERS[function](self, *arguments))
            self._set_attributes(result, self.value(state))
            return result
        allowed = _allowed().get(kind)
        if allowed is None or (function not in _MAKERS and function != _OF_PARTS) or function == _OF_TYPE:
            raise UnsafePickle(f"It makes a tensor of type {kind} by {function}, which is not on the allow-list.")
        rebuild: Any = torch._tensor._rebuild_from_type_v2
        if function == _OF_PARTS:
            return _tensor(rebuild(_of_parts, allowed, self.value(arguments), self.value(state)))
        plain = _tensor(_MAKERS[function](self, *arguments))
        return _tensor(rebuild(lambda: plain, allowed, (), self.value(state)))

    def size(self, numbers: Any = ()) -> torch.Size:
        if type(numbers) not in (tuple, list) or any(type(number) is not int for number in numbers):
            raise IntegrityError("It makes a torch.Size of something else than numbers.")
        self._budget.spend(_ATTRIBUTE_BYTES + _NUMBER_BYTES * len(numbers))
        return torch.Size(numbers)

    def device(self, name: Any, index: Any = None) -> torch.device:
        if type(name) is not str or not _DEVICE.fullmatch(name) or (index is not None and type(index) is not int):
            raise IntegrityError(f"It names a device {shown(name)}.")
        return torch.device(name) if index is None else torch.device(name, index)

    def layout(self, name: Any) -> torch.layout:
        if type(name) is not str or name not in _LAYOUTS:
            raise UnsafePickle(f"It names a layout {shown(name)}.")
        return _LAYOUTS[name]


def _finished(view: torch.Tensor, requires_grad: Any = False, hooks: Any = None, bits: Any = None) -> torch.Tensor:
    _no_hooks(hooks)
    for name, is_set in (bits or {}).items():
        if name not in ("conj", "neg") or is_set is not True:
            raise IntegrityError(f"It makes a tensor with {shown(name)} {shown(is_set)}.")
    if bits:
        view = torch._neg_view(view) if bits.get("neg") else view
        view = view.conj() if bits.get("conj") else view
    return view.requires_grad_(requires_grad is True)


def _shape(value: Any) -> tuple[int, ...]:
    if type(value) is Made and value.name == "torch.Size" and value.arguments:
        value = value.arguments[0]
    if (
        type(value) not in (tuple, list, torch.Size)
        or len(value) > _MAX_DIMENSIONS
        or any(type(number) is not int or not 0 <= number < _END for number in value)
    ):
        raise IntegrityError("It makes a tensor with an invalid shape.")
    return tuple(value)


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise IntegrityError(f"It makes a tensor of a {type(value).__name__}.")
    return value


def _no_hooks(hooks: Any) -> None:
    if hooks is not None and (type(hooks) is not OrderedDict or hooks):
        raise UnsafePickle("It makes a tensor with hooks.")


def _allowed() -> dict[str, Any]:
    """What the user allowed, by name."""
    found = {}
    for one in get_safe_globals():
        value, name = one if isinstance(one, tuple) else (one, f"{one.__module__}.{one.__qualname__}")
        module = name.rpartition(".")[0]
        if module not in _BLOCKED and not name.startswith("torch.distributed."):
            found[name] = value
    return found


_LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
_LAYOUTS = {str(one): one for one in (torch.strided, torch.sparse_coo)}  # which a save takes
DTYPES = {
    str(value): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith("torch.q")  # quantised: they need scales too
}
_NUMBERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_STORAGES: dict[str, torch.dtype | None] = {
    **{f"torch.{_dtype_to_storage_type_map()[dtype]}": dtype for dtype in (*_NUMBERS, *_INTEGERS)},
    "torch.storage.UntypedStorage": None,
}
_TENSOR_TYPES = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter"})
_OF_PARTS = "torch._utils._rebuild_wrapper_subclass"  # a tensor that keeps its values in others
_of_parts = torch._utils._rebuild_wrapper_subclass  # torch has no public name for it
_OF_TYPE = "torch._tensor._rebuild_from_type_v2"
_MAKERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _Maker.tensor,
    "torch._utils._rebuild_tensor_v2": _Maker.tensor,
    "torch._utils._rebuild_tensor_v3": _Maker.tensor_v3,
    "torch._utils._rebuild_parameter": _Maker.parameter,
    "torch._utils._rebuild_parameter_with_state": _Maker.parameter,
    "torch._utils._rebuild_sparse_tensor": _Maker.sparse,
    "torch._utils._rebuild_meta_tensor_no_storage": _Maker.on_meta,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _Maker.of_another_device,
    _OF_TYPE: _Maker.of_type,
    "torch.Size": _Maker.size,
    "torch.device": _Maker.device,
    "torch.serialization._get_layout": _Maker.layout,
}
_NAMES = frozenset({*_MAKERS, *_STORAGES, *DTYPES, *_TENSOR_TYPES, _OF_PARTS})
