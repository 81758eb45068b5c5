"""Telemetry samples. A sample is a tree of structs, lists and values, stored in two parts: a row of numbers,
which change with every sample, and a layout with everything else (names, texts and the numbers' positions).
Layouts rarely change, so each is stored only once, and samples refer to it. A metric is one of the numbers.
Its name is its path in the tree, such as `queue.waiting` or `gpus[0].power_w`. Brackets contain the name or
number of a list entry.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

Tree = dict[str, Any]

_IDENTITY = ("id", "replica", "number", "name", "limit", "where", "model", "kind", "pid")
"""Fields that identify a list entry. The first one with a value is used."""
_CONSTANT = "="
"""Key of the JSON object that stands for a number in a layout. The only numbers in a layout are those that
identify list entries."""
_DOUBLE_BYTES = 8
_SINGLE_BITS = 23
"""Number of mantissa bits in a single-precision number."""
_LARGE = 1 << 24
"""Single precision represents all whole numbers up to this one."""
_LEVEL = 1
"""Compression level for zlib. On samples with 8 GPUs and 20 tenants, level 6 saves 4% of the space but takes
three times as long."""


class _Constant(NamedTuple):
    """A number that identifies a list entry."""

    number: int


class TelemetryLayout:
    """A tree with its numbers replaced by placeholders: 0 for whole numbers, 0.0 for all others."""

    def __init__(self, document: bytes) -> None:
        """`document` is JSON."""
        self.document = document

    def packed(self) -> bytes:
        """Return the compressed document."""
        return zlib.compress(self.document, 6)

    @classmethod
    def unpacked(cls, packed: bytes) -> TelemetryLayout:
        """Create a layout from its compressed document. Raises ValueError if the document is damaged."""
        try:
            layout = cls(zlib.decompress(packed))
        except zlib.error as error:
            raise ValueError(f"a telemetry layout is damaged: {error}") from error
        _ = layout.length  # Raises DecodeError, which is a ValueError, if the document is not JSON.
        return layout

    @cached_property
    def _leaves(self) -> list[tuple[str, Any]]:
        return list(leaves(msgspec.json.decode(self.document)))

    @cached_property
    def length(self) -> int:
        """The number of metrics, which is the length of a row of numbers."""
        return sum(type(value) in (int, float) for _, value in self._leaves)

    @cached_property
    def metrics(self) -> dict[str, int]:
        """Each metric's index in the row of numbers, keyed by metric name."""
        names = [name for name, value in self._leaves if type(value) in (int, float)]
        return {name: position for position, name in enumerate(names)}

    @cached_property
    def texts(self) -> dict[str, str]:
        """All string values in the layout, keyed by name."""
        return {name: value for name, value in self._leaves if type(value) is str}

    def tree(self, numbers: Sequence[float]) -> Tree:
        """Return the layout's tree with `numbers` filled in. NaN becomes None."""
        found: Tree = _fill(msgspec.json.decode(self.document), iter(numbers))
        return found


class TelemetrySample(msgspec.Struct, frozen=True):
    """The metric values at one moment. `numbers` has one entry per metric in the layout. NaN means that a
    value is unknown."""

    at: float
    layout: TelemetryLayout
    numbers: array[float]

    def value(self, metric: str) -> float | None:
        """Return a metric's value, or None if it is unknown."""
        position = self.layout.metrics.get(metric)
        if position is None or math.isnan(value := self.numbers[position]):
            return None
        return value

    def tree(self) -> Tree:
        """Return the sample as a tree."""
        return self.layout.tree(self.numbers)


class Splitter:
    """Splits trees into samples. Once a metric has had a value, it stays in the layout even while its value
    is None. Otherwise, every change between a number and None would create a new layout."""

    def __init__(self) -> None:
        self._kinds: dict[str, int | float] = {}
        """Placeholder (0 or 0.0) for each metric that has had a value."""
        self._layout = TelemetryLayout(b"{}")

    def split(self, at: float, tree: Mapping[str, Any]) -> TelemetrySample:
        """Convert a tree of JSON values, read at time `at` (unix seconds), to a sample."""
        numbers: array[float] = array("d")
        skeleton = self._split(tree, "", numbers)
        document = msgspec.json.encode(skeleton)
        if document != self._layout.document:
            self._layout = TelemetryLayout(document)
            self._kinds = {name: self._kinds[name] for name in self._layout.metrics}
        return TelemetrySample(at, self._layout, numbers)

    def _split(self, value: Any, path: str, numbers: array[float]) -> Any:
        kind = type(value)
        if kind is float or kind is int:
            numbers.append(value)
            kinds = self._kinds
            if kind is float:
                kinds[path] = 0.0
                return 0.0
            return kinds.setdefault(path, 0)
        if value is None:
            if (known := self._kinds.get(path)) is not None:
                numbers.append(math.nan)
            return known
        if kind is dict:
            prefix = f"{path}." if path else ""
            return {name: self._split(item, prefix + name, numbers) for name, item in value.items()}
        if kind is list or kind is tuple:
            entries = []
            for key, field, item in _keyed(value):
                if field and type(item[field]) is int:
                    item = {**item, field: _Constant(item[field])}
                entries.append(self._split(item, f"{path}[{key}]", numbers))
            return entries
        if kind is _Constant:
            return {_CONSTANT: value.number}
        return value


def rounded(numbers: array[float], mantissa_bits: int = 23) -> array[float]:
    """Round numbers to fewer significant bits so that they compress better. With 23 bits, the relative error
    is below 1e-7 and whole numbers are exact. Numbers of 2²⁴ or more, such as times and byte counts, are
    not rounded at all with 23 bits; with fewer bits, they are rounded to whole numbers."""
    single = array("I")
    single.frombytes(array("f", numbers).tobytes())
    if mantissa_bits < _SINGLE_BITS:
        unused = _SINGLE_BITS - mantissa_bits
        half, mask = 1 << (unused - 1), 0xFFFFFFFF << unused & 0xFFFFFFFF
        single = array(
            "I", [(bits + half) & mask if bits & 0x7F800000 != 0x7F800000 else bits for bits in single]
        )
    halves = array("f")
    halves.frombytes(single.tobytes())
    found = array("d", halves)
    for position, number in enumerate(numbers):
        if number >= _LARGE or number <= -_LARGE:
            found[position] = number if mantissa_bits == _SINGLE_BITS or math.isinf(number) else round(number)
    return found


def pack(rows: Sequence[array[float]]) -> bytes:
    """Compress rows of numbers. Bytes of equal significance are stored together, because that compresses
    better."""
    raw = b"".join(row.tobytes() for row in rows)
    return zlib.compress(b"".join(raw[byte::_DOUBLE_BYTES] for byte in range(_DOUBLE_BYTES)), _LEVEL)


def unpack(packed: bytes, rows: int) -> list[array[float]]:
    """Unpack rows of numbers packed by `pack`. Raises ValueError if the bytes are damaged."""
    shuffled = _decompressed(packed, rows)
    count = len(shuffled) // _DOUBLE_BYTES
    raw = bytearray(len(shuffled))
    for byte in range(_DOUBLE_BYTES):
        raw[byte::_DOUBLE_BYTES] = shuffled[byte * count : (byte + 1) * count]
    numbers: array[float] = array("d")
    numbers.frombytes(bytes(raw))
    length = count // rows
    return [numbers[row * length : (row + 1) * length] for row in range(rows)]


def _decompressed(packed: bytes, rows: int) -> bytes:
    try:
        shuffled = zlib.decompress(packed)
    except zlib.error as error:
        raise ValueError(f"a telemetry sample is damaged: {error}") from error
    count, rest = divmod(len(shuffled), _DOUBLE_BYTES)
    if rest or count % rows:
        raise ValueError(
            f"a telemetry sample has {len(shuffled)} bytes, which does not fit {rows} rows of numbers"
        )
    return shuffled


def _keyed(items: Sequence[Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield each item with its key and the name of the field that supplied the key. The key comes from the
    first identifying field that has a value; if there is none, the key is the item's position."""
    used: set[str] = set()
    for position, item in enumerate(items):
        key, field = str(position), ""
        if type(item) is dict:
            for name in _IDENTITY:
                found = item.get(name)
                if found is not None and found != "":
                    key, field = str(found[_CONSTANT] if type(found) is dict else found), name
                    break
            if key in used:
                key = f"{key}#{position}"
            used.add(key)
        yield key, field, item


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is neither a struct nor a list, with its name, in the order of
    `Splitter.split`."""
    if type(value) is dict:
        if _CONSTANT in value:
            return
        prefix = f"{path}." if path else ""
        for name, item in value.items():
            yield from leaves(item, prefix + name)
    elif type(value) is list or type(value) is tuple:
        for key, _, item in _keyed(value):
            yield from leaves(item, f"{path}[{key}]")
    else:
        yield path, value


def _fill(value: Any, numbers: Iterator[float]) -> Any:
    kind = type(value)
    if kind is float or kind is int:
        number = next(numbers)
        if math.isnan(number):
            return None
        return round(number) if kind is int else number
    if kind is dict:
        if _CONSTANT in value:
            return value[_CONSTANT]
        return {name: _fill(item, numbers) for name, item in value.items()}
    if kind is list:
        return [_fill(item, numbers) for item in value]
    return value
