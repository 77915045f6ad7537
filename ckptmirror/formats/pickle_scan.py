"""Scans a pickle without building its objects, and refuses one that would cost more than its bytes to load.

An allow-list says what a pickle may name, but not how much that creates. Six bytes can ask the C unpickler for a memo
of gigabytes; hashing a tuple nested 100,000 deep crashes the process; hashing one that contains itself twice, 60 levels
deep, never ends; and every list allows ``bytearray(10**12)``.

Rules:
* Every opcode is read and none is run; only the shapes of the values on the stack are tracked. An opcode that honest
  picklers do not write is refused.
* No limit is on size alone: whatever an honest pickler writes passes, at any length.
* Lengths must be inside the file and memo numbers consecutive; calls that allocate by a number are refused.
* Hashed values must be small. The result must not be nested too deeply to walk, must not contain itself, and must not
  unfold to much more than its size.
* The scan is linear in the length of the pickle, in time and in memory.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any, Final

from ckptmirror.core.errors import IntegrityError, UnsafePickle
from ckptmirror.formats.pickle_values import Global, Made, check_whole

__all__ = ["PickleRules", "scan_pickle"]

_FREE_CONTAINERS = 1_000_000
_BYTES_PER_CONTAINER = 6  # beyond: torch writes no shorter ones, and one byte of a bomb would become 200
_MAX_MARKS = 10_000  # at once: one or two for each level that a container is in another
_MAX_MEMO_GAP = 1_000  # picklers number by ones; the C unpickler makes room up to the highest
_MAX_KEY_VALUES = 100_000  # of one key; a position of a game or a row of a table may be one
_MAX_KEY_DEPTH = 16  # hashing a tuple recurses in C, without a check
_FREE_WORK = 10_000_000  # about a second; beyond it one unit per byte
_NOTHING: Final = object()  # under a number that nobody gave; a list takes a tenth of what a dict takes
_SHOWN_BYTES = 1 << 16  # longer texts name nothing, and are skipped


class PickleRules:
    """What one kind of pickle may do; by default no persistent objects, and any call."""

    def check_call(self, called: Any, arguments: list[Any]) -> bool:  # noqa: ARG002 - for others to look at
        """Raise UnsafePickle for a call that is not allowed; return whether nobody walks into what it makes."""
        return False

    def persistent(self, identifier: Any) -> Made:
        """Return the object for a persistent id; raise UnsafePickle if there is none."""
        del identifier
        raise UnsafePickle("It asks for a persistent object.")


def scan_pickle(data: bytes | memoryview, rules: PickleRules) -> None:
    """Read a whole pickle, and return if loading it is bounded by its size.

    Raises:
        UnsafePickle: It exceeds the limits, or makes a call that the rules refuse.
        IntegrityError: It is broken.
    """
    scan = _Scan(bytes(data), rules)
    try:
        result = scan.run()
    except (IndexError, KeyError, ValueError, struct.error) as error:
        raise IntegrityError(f"The pickle is broken at byte {scan.at}.") from error
    if isinstance(result, Made):
        check_whole(result, scan.containers + scan.values)


class _Scan:
    def __init__(self, data: bytes, rules: PickleRules) -> None:
        self.data = data
        self.rules = rules
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: list[Any] = []
        self.remembered = 0
        self.containers = 0
        self.container_limit = _FREE_CONTAINERS + len(data) // _BYTES_PER_CONTAINER
        self.work_limit = _FREE_WORK + len(data)
        self.values = 0
        self.done = 0

    def run(self) -> Any:
        """Read up to STOP and return the top of the stack."""
        data, opcodes = self.data, _OPCODES
        while True:  # up to the end of the data at most
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                return self.stack.pop()
            read = opcodes.get(code)
            if read is None:
                raise UnsafePickle(f"Unsupported operand {code:#04x} at byte {self.at - 1}.")
            read(self)

    # -- reading --------------------------------------------------------------------------------------------

    def take(self, count: int) -> bytes:
        """Return the next bytes; of more than a name has, the first."""
        begin, end = self.at, self.at + count
        if end > len(self.data):
            raise IntegrityError(f"The pickle says that {count} bytes follow byte {begin} of {len(self.data)}.")
        self.at = end
        return self.data[begin : end if count <= _SHOWN_BYTES else begin]

    def number(self, form: struct.Struct) -> int:
        found: int = form.unpack_from(self.data, self.at)[0]
        self.at += form.size
        return found

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        found = self.data[self.at : end].decode()
        self.at = end + 1
        return found

    # -- values ---------------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self.values += 1
        self.stack.append(value)

    def make(self, kind: str, items: list[Any]) -> Made:
        self.containers += 1
        if self.containers > self.container_limit:
            raise UnsafePickle(f"Its {len(self.data)} bytes hold more than {self.container_limit} containers.")
        return Made(kind, items)

    def pop_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def top(self) -> Made:
        found = self.stack[-1]
        if not isinstance(found, Made) or found.kind == "tuple":
            raise IntegrityError(
                f"The pickle changes a {getattr(found, 'kind', type(found).__name__)} at byte {self.at}."
            )
        return found

    def remember(self, index: int) -> None:
        if index > self.remembered + _MAX_MEMO_GAP:
            raise UnsafePickle(f"It numbers what it remembers {index}, after {self.remembered}.")
        value = self.stack[-1]
        self.memo += [_NOTHING] * (index + 1 - len(self.memo))
        self.remembered += self.memo[index] is _NOTHING
        self.memo[index] = value

    # -- containers -----------------------------------------------------------------------------------------

    def tuple_of(self, count: int) -> None:
        items = self.stack[-count:]
        if len(items) < count:
            raise IndexError
        self.stack[-count:] = [self.make("tuple", items)]

    def extend(self, items: list[Any], *, hashed: bool = False) -> None:
        target = self.top()
        if hashed:
            for item in items:
                self.check_key(item)
        target.items += items
        target.count += len(items)

    def set_items(self, items: list[Any]) -> None:
        if len(items) % 2:
            raise IndexError
        for key in items[::2]:
            if isinstance(key, Made):
                self.check_key(key)
        self.extend(items)

    def check_key(self, key: Any) -> None:
        """Refuse a key that would take long, or deep recursion, to hash."""
        if not isinstance(key, Made):
            return
        waiting: list[tuple[Made, int]] = [(key, 1)]
        seen = 0
        while waiting:
            made, depth = waiting.pop()
            seen += 1 + len(made.items)
            if seen > _MAX_KEY_VALUES or depth > _MAX_KEY_DEPTH:
                raise UnsafePickle("It has a key that holds too much, or too deep.")
            waiting += [(item, depth + 1) for item in made.items if isinstance(item, Made)]
        self.work(seen)

    # -- calls ----------------------------------------------------------------------------------------------

    def call(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        if not isinstance(arguments, Made) or arguments.kind != "tuple":
            raise IntegrityError(f"The pickle calls something without a tuple at byte {self.at}.")
        if not isinstance(called, Global):
            raise UnsafePickle(f"It calls something that is not a global at byte {self.at}.")
        is_leaf = self.rules.check_call(called, arguments.items)
        made = self.make("object", [] if is_leaf else [called, arguments])
        for argument in arguments.items:
            if isinstance(argument, Made):
                made.count += argument.count
                self.check_elements(argument)
        self.work(made.count + len(arguments.items))
        self.stack.append(made)

    def check_elements(self, container: Made) -> None:
        """A set, a Counter, a dict may be made of what a call is given."""
        for item in container.items:
            if isinstance(item, Made):
                for one in item.items[:2] if item.kind == "list" else [item]:  # a list may be a pair of a dict's
                    if isinstance(one, Made) and one.kind == "tuple":
                        self.check_key(one)

    def build(self) -> None:
        state = self.stack.pop()
        target = self.top()
        target.items.append(state)
        if isinstance(state, Made):
            target.count += state.count
            self.work(state.count)

    def work(self, values: int) -> None:
        """Add to the count of values that are copied or hashed, and refuse too many for the pickle's length."""
        self.done += values
        if self.done > self.work_limit:
            raise UnsafePickle("It copies or hashes the same values too often.")

    def global_(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise IntegrityError(f"The pickle names a global without text at byte {self.at}.")
        self.push(Global(f"{module}.{name}"))

    def persistent(self) -> None:
        self.containers += 1
        self.stack.append(self.rules.persistent(self.stack.pop()))

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.global_(module, name)

    def memo_value(self, index: int) -> None:
        if (value := self.memo[index]) is _NOTHING:
            raise IndexError
        self.push(value)

    def integer(self) -> None:
        self.push(int.from_bytes(self.take(self.number(_U1)), "little", signed=True))

    def frame(self) -> None:
        length = self.number(_U8)
        if length > len(self.data) - self.at:
            raise IntegrityError(f"The pickle has a frame of {length} bytes at byte {self.at}.")


_U1, _U2, _U4, _U8 = (struct.Struct(f"<{letter}") for letter in "BHIQ")
_I4: Final = struct.Struct("<i")
_F8: Final = struct.Struct(">d")
_STOP: Final = pickle.STOP[0]


def _sized(form: struct.Struct, *, is_text: bool) -> Callable[[_Scan], None]:
    def read(scan: _Scan) -> None:
        data = scan.take(scan.number(form))
        scan.push(data.decode("utf-8", "surrogatepass") if is_text else data)

    return read


def _fixed(form: struct.Struct) -> Callable[[_Scan], None]:
    return lambda scan: scan.push(scan.number(form))


def _value(value: Any) -> Callable[[_Scan], None]:
    return lambda scan: scan.push(value)


def _empty(kind: str) -> Callable[[_Scan], None]:
    return lambda scan: scan.stack.append(scan.make(kind, []))


def _mark(scan: _Scan) -> None:
    if len(scan.marks) >= _MAX_MARKS:
        raise UnsafePickle(f"It marks its stack more than {_MAX_MARKS} times at once.")
    scan.marks.append(scan.stack)
    scan.stack = []


def _tuple(scan: _Scan) -> None:
    made = scan.make("tuple", scan.pop_mark())
    scan.stack.append(made)


def _append(scan: _Scan) -> None:
    scan.extend([scan.stack.pop()])


def _set_item(scan: _Scan) -> None:
    items = scan.stack[-2:]
    del scan.stack[-2:]
    scan.set_items(items)


def _frozenset(scan: _Scan) -> None:
    made = scan.make("set", [])
    items = scan.pop_mark()
    scan.stack.append(made)
    scan.extend(items, hashed=True)


def _proto(scan: _Scan) -> None:
    scan.at += 1


def _bytearray(scan: _Scan) -> None:
    data = scan.take(scan.number(_U8))
    scan.stack.append(scan.make("object", [data]))


_OPCODES: dict[int, Callable[[_Scan], None]] = {
    code[0]: read
    for code, read in {
        pickle.PROTO: _proto,
        pickle.FRAME: _Scan.frame,
        pickle.NONE: _value(None),
        pickle.NEWTRUE: _value(True),
        pickle.NEWFALSE: _value(False),
        pickle.BININT: _fixed(_I4),
        pickle.BININT1: _fixed(_U1),
        pickle.BININT2: _fixed(_U2),
        pickle.LONG1: _Scan.integer,
        pickle.BINFLOAT: _fixed(_F8),
        pickle.BINUNICODE: _sized(_U4, is_text=True),
        pickle.SHORT_BINUNICODE: _sized(_U1, is_text=True),
        pickle.BINUNICODE8: _sized(_U8, is_text=True),
        pickle.SHORT_BINSTRING: _sized(_U1, is_text=True),
        pickle.SHORT_BINBYTES: _sized(_U1, is_text=False),
        pickle.BINBYTES: _sized(_U4, is_text=False),
        pickle.BINBYTES8: _sized(_U8, is_text=False),
        pickle.BYTEARRAY8: _bytearray,
        pickle.EMPTY_TUPLE: _value(Made("tuple", [])),  # there is but one
        pickle.EMPTY_LIST: _empty("list"),
        pickle.EMPTY_DICT: _empty("dict"),
        pickle.EMPTY_SET: _empty("set"),
        pickle.MARK: _mark,
        pickle.TUPLE: _tuple,
        pickle.TUPLE1: lambda scan: scan.tuple_of(1),
        pickle.TUPLE2: lambda scan: scan.tuple_of(2),
        pickle.TUPLE3: lambda scan: scan.tuple_of(3),
        pickle.APPEND: _append,
        pickle.APPENDS: lambda scan: scan.extend(scan.pop_mark()),
        pickle.ADDITEMS: lambda scan: scan.extend(scan.pop_mark(), hashed=True),
        pickle.FROZENSET: _frozenset,
        pickle.SETITEM: _set_item,
        pickle.SETITEMS: lambda scan: scan.set_items(scan.pop_mark()),
        pickle.BINPUT: lambda scan: scan.remember(scan.number(_U1)),
        pickle.LONG_BINPUT: lambda scan: scan.remember(scan.number(_U4)),
        pickle.MEMOIZE: lambda scan: scan.remember(scan.remembered),
        pickle.BINGET: lambda scan: scan.memo_value(scan.number(_U1)),
        pickle.LONG_BINGET: lambda scan: scan.memo_value(scan.number(_U4)),
        pickle.GLOBAL: lambda scan: scan.global_(scan.line(), scan.line()),
        pickle.STACK_GLOBAL: _Scan.stack_global,
        pickle.REDUCE: _Scan.call,
        pickle.NEWOBJ: _Scan.call,
        pickle.BUILD: _Scan.build,
        pickle.BINPERSID: _Scan.persistent,
    }.items()
}
