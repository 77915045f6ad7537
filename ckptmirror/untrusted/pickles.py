"""The one reader of pickles: plain values, and descriptions of everything else.

A pickle is a program. This interpreter runs the few opcodes that torch's own files consist of, and it calls nothing by
name: a call, or an object with a state, becomes a :class:`Made`, and whoever asked for it (``tensor_files``,
``dcp_metadata``) turns it into a tensor or a record after comparing each number with the file. Nothing else reads the
bytes afterwards, so there is no second reader that could see something different.

Rules:
* Opcodes, names and types of keys are those on a list. What is not on it is :class:`UnsafePickle`; what no pickler
  writes is :class:`IntegrityError`.
* Names are mapped from Python 2 to Python 3 as torch maps them, before any rule looks at them.
* A state is given once, and only to what this pickle has made.
* No limit is one of size alone: what is held, copied or shared may grow with the bytes (``read_limits``).
* Time and memory are linear in the length of the pickle. What is walked afterwards is first checked as a whole.
"""

from __future__ import annotations

import _compat_pickle
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final, cast

from ckptmirror.core.errors import IntegrityError, UnsafePickle
from ckptmirror.untrusted.read_limits import BYTES_PER_BYTE, FREE_BYTES, Budget, TooDeep, max_depth

__all__ = ["Made", "Name", "check_whole", "read_pickle", "shown"]

_MAX_MARKS = 10_000  # at once: one or two for each level that a container is in another
_SHORT_BYTES = 80  # in memory: a list, a tuple, an empty dict, a description
_LONG_BYTES = 250  # a set, an ordered dict, a Counter
_ITEM_BYTES: dict[type, int] = {
    list: 8,
    tuple: 8,
    dict: 100,
    set: 70,
    OrderedDict: 150,
    Counter: 100,
}  # for each item or pair
_MAX_SHOWN = 80
_SHOWN = frozenset({str, bytes, int, float, bool, type(None)})


class Name(str):
    """What a pickle names: ``module.name``. Only whoever reads the result knows what it stands for."""

    __slots__ = ()


@dataclass(eq=False, slots=True)
class Made:
    """Something that the pickle asks for and nobody has made yet.

    Attributes:
        name: What was called, or the class of the object; ``persistent`` for a persistent id.
        arguments: Plain values and other descriptions.
        is_object: Whether it is a new object of the class ``name``, not the result of a call.
        state: What BUILD gave it, else None.
    """

    name: str
    arguments: tuple[Any, ...]
    is_object: bool = False
    state: Any = None


def read_pickle(
    data: bytes, is_known: Callable[[str], bool], *, persistent: bool = False, budget: Budget | None = None
) -> Any:
    """Return what a pickle holds, as plain values, :class:`Name` and :class:`Made`.

    Args:
        data: The pickle, up to and including STOP.
        is_known: Whether the pickle may name this, after the names of Python 2 were mapped.
        persistent: Whether it may ask for persistent objects.
        budget: What it may cost; by default what its length allows.

    Raises:
        UnsafePickle: It names or does what is not on a list, or would cost more than its bytes.
        IntegrityError: It is broken.
    """
    reader = _Reader(data, is_known, persistent, budget or Budget(len(data)))
    try:
        return reader.run()
    except (IndexError, KeyError, ValueError, TypeError, struct.error) as error:
        raise IntegrityError(f"The pickle is broken at byte {reader.at}.") from error


def shown(value: Any) -> str:
    """Return a value of a file for a message: never a container, which may be large, or hold itself."""
    return f"{value!a:.{_MAX_SHOWN}}" if type(value) in _SHOWN else f"a {_kind(value)}"


@dataclass(eq=False, slots=True)
class _Reader:
    data: bytes
    is_known: Callable[[str], bool]
    persistent_allowed: bool
    budget: Budget
    at: int = 0
    stack: list[Any] = field(default_factory=list)
    marks: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    names: dict[str, Name] = field(default_factory=dict)

    def run(self) -> Any:
        """Read up to STOP, which is the last byte, and return what is then alone on the stack."""
        data, opcodes = self.data, _OPCODES
        while True:  # up to the end of the data at most
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                break
            operation = opcodes.get(code)
            if operation is None:
                raise UnsafePickle(f"It has the opcode {code:#04x} at byte {self.at - 1}, which no checkpoint needs.")
            operation(self)
        if len(self.stack) != 1 or self.marks or self.at != len(data):
            raise IntegrityError(f"The pickle ends at byte {self.at} of {len(data)}, with more than one value.")
        return self.stack[0]

    # -- reading --------------------------------------------------------------------------------------------

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        begin, end = self.at, self.at + count
        if end > len(self.data):
            raise IntegrityError(f"The pickle says that {count} bytes follow byte {begin} of {len(self.data)}.")
        self.at = end
        return self.data[begin:end]

    def number(self, form: struct.Struct) -> Any:
        (found,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return found

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        found = self.data[self.at : end].decode()
        self.at = end + 1
        return found

    # -- containers -----------------------------------------------------------------------------------------

    def pop_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def tuple_of(self, count: int) -> None:
        items = self.stack[-count:]
        if len(items) < count:
            raise IndexError
        self.budget.spend(_SHORT_BYTES)
        self.stack[-count:] = [tuple(items)]

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise IntegrityError(f"The pickle adds an item to a {_kind(target)} at byte {self.at}.")
        target += items

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (dict, OrderedDict):
            raise IntegrityError(f"The pickle sets a key of a {_kind(target)} at byte {self.at}.")
        if len(items) % 2:
            raise IndexError
        self.budget.check_keys(items[::2], target)
        for index in range(0, len(items), 2):
            target[items[index]] = items[index + 1]

    # -- names, calls, states -------------------------------------------------------------------------------

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise IntegrityError(f"The pickle has a name that is no text at byte {self.at}.")
        full = f"{module}.{name}"
        known = self.names.get(full)
        if known is None:
            if full not in _PLAIN_CALLS and not self.is_known(full):
                raise UnsafePickle(f"It asks for {full[:200]!a}, which is not on the allow-list.")
            known = self.names[full] = Name(full)
        self.stack.append(known)

    def call(self, *, is_object: bool = False) -> None:
        """REDUCE and NEWOBJ: what is called is a name, and nothing runs but what makes plain values."""
        arguments = self.stack.pop()
        called = self.stack.pop()
        if type(arguments) is not tuple or type(called) is not Name:
            raise IntegrityError(f"The pickle calls a {_kind(called)} with a {_kind(arguments)} at byte {self.at}.")
        self.budget.spend(_SHORT_BYTES)
        plain = _PLAIN_CALLS.get(called)
        made = Made(str(called), arguments, is_object) if plain is None else plain(self, *arguments)
        self.stack.append(made)

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is OrderedDict and not vars(target) and type(state) is dict and list(state) == ["_metadata"]:
            vars(target).update(state)  # the versions of a model's modules
        elif type(target) is Made and target.state is None and state is not None:
            target.state = state
        else:
            raise UnsafePickle(f"It gives a state to a {_kind(target)} at byte {self.at}.")

    def persistent_object(self) -> None:
        if not self.persistent_allowed:
            raise UnsafePickle("It asks for a persistent object.")
        self.budget.spend(_SHORT_BYTES)
        self.stack.append(Made("persistent", (self.stack.pop(),)))


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value.name}" if type(value) is Made else type(value).__name__


# -- calls that make plain values ---------------------------------------------------------------------------


def _ordered(reader: _Reader, pairs: Any = ()) -> Any:
    for one in _items(reader, pairs):
        if type(one) not in (list, tuple) or len(one) != 2:
            raise IntegrityError(f"The pickle makes an ordered dict of a {_kind(one)} at byte {reader.at}.")
    return _filled(reader, OrderedDict(), pairs, [key for key, _ in pairs])


def _set(reader: _Reader, items: Any = ()) -> Any:
    return _filled(reader, set(), items, _items(reader, items))


def _counter(reader: _Reader, counts: Any = None) -> Any:
    if counts is None:
        return Counter()
    if type(counts) is not dict:
        raise IntegrityError(f"The pickle makes a Counter of a {_kind(counts)} at byte {reader.at}.")
    return _filled(reader, Counter(), counts, _items(reader, list(counts)))


def _filled(reader: _Reader, result: Any, items: Any, keys: list[Any]) -> Any:
    reader.budget.spend(_LONG_BYTES + _ITEM_BYTES[type(result)] * len(keys))
    reader.budget.check_keys(keys, result)
    result.update(items)
    return result


def _encoded(reader: _Reader, text: Any, encoding: Any) -> bytes:
    """How protocol 2 writes bytes."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise UnsafePickle(f"It encodes a {_kind(text)} as {shown(encoding)}.")
    reader.budget.spend(len(text))
    return text.encode("latin-1")


def _bytearray(reader: _Reader, data: Any = b"", encoding: Any = None) -> bytearray:
    if type(data) is str:
        data = _encoded(reader, data, encoding)
    elif encoding is not None or type(data) is not bytes:
        raise UnsafePickle(f"It makes a bytearray of a {_kind(data)}.")
    reader.budget.spend(len(data))
    return bytearray(data)


def _complex(reader: _Reader, real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise IntegrityError(f"The pickle makes a complex number of a {_kind(real)} at byte {reader.at}.")
    return complex(real, imaginary)


def _items(reader: _Reader, items: Any) -> list[Any]:
    if type(items) not in (list, tuple):
        raise IntegrityError(f"The pickle takes the items of a {_kind(items)} at byte {reader.at}.")
    return list(items)


_PLAIN_CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered,
    "collections.Counter": _counter,
    "builtins.set": _set,
    "builtins.bytearray": _bytearray,
    "builtins.complex": _complex,
    "_codecs.encode": _encoded,
}


# -- opcodes ------------------------------------------------------------------------------------------------

_U1, _U2, _U4, _U8 = (struct.Struct(f"<{letter}") for letter in "BHIQ")
_I4: Final = struct.Struct("<i")
_F8: Final = struct.Struct(">d")
_STOP: Final = pickle.STOP[0]


def _text(form: struct.Struct) -> Callable[[_Reader], None]:
    return lambda r: r.stack.append(r.take(r.number(form)).decode("utf-8", "surrogatepass"))


def _bytes(form: struct.Struct) -> Callable[[_Reader], None]:
    return lambda r: r.stack.append(r.take(r.number(form)))


def _fixed(form: struct.Struct) -> Callable[[_Reader], None]:
    return lambda r: r.stack.append(r.number(form))


def _value(value: Any) -> Callable[[_Reader], None]:
    return lambda r: r.stack.append(value)


def _empty(kind: type) -> Callable[[_Reader], None]:
    def make(reader: _Reader) -> None:
        reader.budget.spend(_SHORT_BYTES)
        reader.stack.append(kind())

    return make


def _mark(reader: _Reader) -> None:
    if len(reader.marks) >= _MAX_MARKS:
        raise UnsafePickle(f"It marks its stack more than {_MAX_MARKS} times at once.")
    reader.marks.append(reader.stack)
    reader.stack = []


def _tuple(reader: _Reader) -> None:
    items = reader.pop_mark()
    reader.budget.spend(_SHORT_BYTES)
    reader.stack.append(tuple(items))


def _global(reader: _Reader) -> None:
    module, name = reader.line(), reader.line()
    if (module, name) in _compat_pickle.NAME_MAPPING:
        module, name = _compat_pickle.NAME_MAPPING[module, name]
    reader.name(_compat_pickle.IMPORT_MAPPING.get(module, module), name)


def _stack_global(reader: _Reader) -> None:
    name, module = reader.stack.pop(), reader.stack.pop()
    reader.name(module, name)


def _proto(reader: _Reader) -> None:
    if not 2 <= reader.number(_U1) <= pickle.HIGHEST_PROTOCOL:
        raise IntegrityError("It is not a pickle of protocol 2 to 5.")


def _frame(reader: _Reader) -> None:
    length = reader.number(_U8)
    if length > len(reader.data) - reader.at:
        raise IntegrityError(f"The pickle has a frame of {length} bytes at byte {reader.at}.")


def _put(form: struct.Struct) -> Callable[[_Reader], None]:
    def put(reader: _Reader) -> None:
        reader.memo[reader.number(form)] = reader.stack[-1]

    return put


def _get(form: struct.Struct) -> Callable[[_Reader], None]:
    return lambda r: r.stack.append(r.memo[r.number(form)])


_OPCODES: dict[int, Callable[[_Reader], None]] = {
    code[0]: operation
    for code, operation in {
        pickle.PROTO: _proto,
        pickle.FRAME: _frame,
        pickle.NONE: _value(None),
        pickle.NEWTRUE: _value(True),
        pickle.NEWFALSE: _value(False),
        pickle.BININT: _fixed(_I4),
        pickle.BININT1: _fixed(_U1),
        pickle.BININT2: _fixed(_U2),
        pickle.LONG1: lambda r: r.stack.append(int.from_bytes(r.take(r.number(_U1)), "little", signed=True)),
        pickle.BINFLOAT: _fixed(_F8),
        pickle.BINUNICODE: _text(_U4),
        pickle.SHORT_BINUNICODE: _text(_U1),
        pickle.SHORT_BINSTRING: _text(_U1),
        pickle.SHORT_BINBYTES: _bytes(_U1),
        pickle.BINBYTES: _bytes(_U4),
        pickle.EMPTY_TUPLE: _value(()),
        pickle.EMPTY_LIST: _empty(list),
        pickle.EMPTY_DICT: _empty(dict),
        pickle.MARK: _mark,
        pickle.TUPLE: _tuple,
        pickle.TUPLE1: lambda r: r.tuple_of(1),
        pickle.TUPLE2: lambda r: r.tuple_of(2),
        pickle.TUPLE3: lambda r: r.tuple_of(3),
        pickle.APPEND: lambda r: r.extend([r.stack.pop()]),
        pickle.APPENDS: lambda r: r.extend(r.pop_mark()),
        pickle.SETITEM: lambda r: r.set_items([r.stack.pop(-2), r.stack.pop()]),
        pickle.SETITEMS: lambda r: r.set_items(r.pop_mark()),
        pickle.BINPUT: _put(_U1),
        pickle.LONG_BINPUT: _put(_U4),
        pickle.MEMOIZE: lambda r: r.memo.__setitem__(len(r.memo), r.stack[-1]),
        pickle.BINGET: _get(_U1),
        pickle.LONG_BINGET: _get(_U4),
        pickle.GLOBAL: _global,
        pickle.STACK_GLOBAL: _stack_global,
        pickle.REDUCE: _Reader.call,
        pickle.NEWOBJ: lambda r: r.call(is_object=True),
        pickle.BUILD: _Reader.build,
        pickle.BINPERSID: _Reader.persistent_object,
    }.items()
}


# -- the whole ----------------------------------------------------------------------------------------------


def check_whole(root: Any, size_bytes: int) -> None:
    """Check that a value of a pickle of ``size_bytes`` may be walked: children first, without recursion.

    Raises:
        UnsafePickle: It is too deep, holds itself, or unfolds to too much.
    """
    limit_bytes = FREE_BYTES + BYTES_PER_BYTE * size_bytes
    deepest = max_depth()
    known: dict[int, tuple[int, int]] = {}  # bytes, wherever it is copied, and depth of what is done
    under_way: set[int] = set()
    waiting = [root] if type(root) in _CONTAINERS else []
    while waiting:
        value = waiting[-1]
        if id(value) in known:
            waiting.pop()
            continue
        below = [item for item in _parts(value) if type(item) in _CONTAINERS]
        if unknown := [item for item in below if id(item) not in known]:
            if id(value) in under_way:  # all that was met since is inside it
                raise UnsafePickle("It holds something that holds itself.")
            under_way.add(id(value))
            waiting += unknown
            continue
        waiting.pop()
        # A description is one object, wherever it is, and nobody walks into it.
        total_bytes = _size_bytes(value) + sum(known[id(item)][0] for item in below if type(item) is not Made)
        depth = max((known[id(item)][1] for item in below), default=0)
        if total_bytes > limit_bytes:
            raise UnsafePickle("It holds the same values so often that they unfold to far more than its bytes.")
        if depth >= deepest:
            raise TooDeep(f"It is nested more than {deepest} deep.")
        known[id(value)] = (total_bytes, depth + 1)


def _parts(value: Any) -> Collection[Any]:
    kind = type(value)
    if kind is Made:
        return (*value.arguments, value.state)
    if kind in (dict, OrderedDict, Counter):
        own = vars(value).values() if kind is OrderedDict else ()
        return [*value, *value.values(), *own]
    return cast(Collection[Any], value)


def _size_bytes(value: Any) -> int:
    kind = type(value)
    if kind is Made:
        return _SHORT_BYTES + _ITEM_BYTES[tuple] * len(value.arguments)
    if value == ():
        return 0
    return (_SHORT_BYTES if kind in (list, tuple, dict) else _LONG_BYTES) + _ITEM_BYTES[kind] * len(value)


_CONTAINERS = frozenset({list, tuple, dict, set, OrderedDict, Counter, Made})
