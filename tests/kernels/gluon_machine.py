"""A model of one GPU program's execution order: partitions of warps, barriers, asynchronous copies and
products.

Each partition is a Python thread, and so is the copy engine. Only one thread runs at a time, and a seed
selects the next thread at every asynchronous operation. Races are found even if the executed order does not
expose them. For this purpose, every copy and product is an event, and each partition tracks the set of events
that happened before its current point. Arrivals and waits at barriers pass these sets on (happens-before,
Lamport 1978). Two kinds of access are faults: a read that is not ordered after the write of its data, and a
write that is not ordered after earlier reads of the same memory.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

GRANULE = 512
"""Number of shared-memory elements in the unit in which reads and writes are tracked. For 16-bit elements,
the unit has the size of eight rows, after which a swizzle repeats."""


class Fault(Exception):
    """An error that would occur, or could occur, on a GPU."""


class Deadlock(Fault):
    """Every partition is waiting, so the program can never finish."""


class _Stopped(BaseException):
    """Raised in a partition after a fault in another partition."""


@dataclass(eq=False)
class Partition:
    """A group of warps. Each set of events is a bit mask with one bit per event."""

    name: str
    warps: int
    known: int = 0
    """Events that happened before the current point of all warps of the partition."""
    unsettled: int = 0
    """Events that each warp has waited for separately. They are added to `known` at the next barrier between
    the warps."""
    products: list[UnfinishedProduct] = field(default_factory=list)
    ready: Callable[[], bool] = lambda: True
    waits_for: Callable[[], str] = str
    done: bool = False
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


@dataclass(eq=False)
class UnfinishedProduct:
    """The result of an asynchronous product. It becomes a tensor only after a wait."""

    value: torch.Tensor
    event: int
    retired: bool = False


class Barrier:
    """An mbarrier. It tracks the arrivals and bytes that its current phase still lacks, and the events known
    to the threads that have arrived."""

    def __init__(self) -> None:
        self.name = ""
        self.count = self.missing = self.bytes = self.phase = 0
        self.gathering = self.completed = 0

    def init(self, count: int) -> None:
        if self.count:
            raise Fault(f"{self} is initialised twice")
        self.count = self.missing = count

    def arrive(self, count: int, known: int) -> None:
        if count > self.missing:
            raise Fault(f"{count} arrivals exceed the count of {self}")
        self.missing -= count
        self.gathering |= known
        self._complete()

    def receive(self, size: int, known: int) -> None:
        self.bytes -= size
        self.gathering |= known
        self._complete()

    def _complete(self) -> None:
        if self.missing == self.bytes == 0:
            self.phase += 1
            self.missing, self.completed = self.count, self.gathering

    def __str__(self) -> str:
        state = f"lacks {self.missing} of {self.count} arrivals and {self.bytes} bytes"
        return f"{self.name or 'a barrier'}, whose phase {self.phase} {state}"


class Barriers:
    def __init__(self, count: int) -> None:
        self.each = [Barrier() for _ in range(count)]

    def index(self, place: int) -> Barrier:
        return self.each[_inside(place, len(self.each))]


class Memory:
    """The memory of one allocation. Elements that have not been written are NaN."""

    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        self.name, self.data = "", torch.full((elements,), float("nan"), dtype=dtype)
        granules = -(-elements // GRANULE)
        self.writer, self.readers = [0] * granules, [0] * granules


class Shared:
    """A view of shared memory. It maps each position to an element of the allocation."""

    def __init__(
        self, memory: Memory, places: torch.Tensor, layout: Any, granules: list[int] | None = None
    ) -> None:
        self.memory, self.places, self.layout = memory, places, layout
        self._granules = granules or torch.unique(places // GRANULE).tolist()
        self._parts: dict[int, Shared] = {}

    @classmethod
    def allocate(cls, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        return cls(Memory(prod(shape), dtype), _places(shape, layout), layout)

    def index(self, place: int) -> Shared:
        place = _inside(place, len(self.places))
        if place not in self._parts:
            self._parts[place] = Shared(self.memory, self.places[place], self.layout)
        return self._parts[place]

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.memory, self.places.reshape(*shape), None, self._granules)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.memory, self.places.permute(*order), None, self._granules)

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        if dtype != self.memory.data.dtype or prod(shape) != len(self.memory.data):
            raise NotImplementedError(
                f"shared memory cannot be reinterpreted as {dtype} {list(shape)}: dtype or size differs"
            )
        return Shared(self.memory, _places(shape, layout), layout)

    def store(self, value: torch.Tensor) -> None:
        """Store registers. The compiler inserts barriers between plain accesses."""
        self.memory.data[self.places] = value

    def load(self, layout: Any) -> torch.Tensor:
        return self.memory.data[self.places]

    def read(self, event: int, by: Partition) -> torch.Tensor:
        for granule in self._granules:
            if self.memory.writer[granule] & ~by.known:
                raise Fault(f"{by.name} reads {self.memory.name} before waiting for the copy into it")
            self.memory.readers[granule] |= event
        return self.memory.data[self.places]

    def claim(self, event: int, by: Partition) -> None:
        """Record a write that is about to happen. Raises Fault unless all earlier reads and writes of the
        same memory are known to be complete."""
        memory = self.memory
        for granule in self._granules:
            if memory.readers[granule] & ~by.known:
                raise Fault(f"{by.name} overwrites {memory.name}, which a product may still read")
            if memory.writer[granule] & ~by.known:
                raise Fault(f"{by.name} overwrites {memory.name}, to which a copy may still be in flight")
            memory.writer[granule], memory.readers[granule] = event, 0


def _places(shape: Sequence[int], layout: Any) -> torch.Tensor:
    """Return the memory layout of a tile. The tile is stored as panels, which have all rows and are as wide
    as the swizzle. If the shape has more dimensions than the layout, the leading dimensions count tiles."""
    if isinstance(layout, gl.SwizzledSharedLayout):  # plain accesses do not depend on the swizzle
        return torch.arange(prod(shape)).view(*shape)
    columns, rows = shape[-1], prod(shape[-layout.rank : -1])
    width = min(columns, layout.swizzle_byte_width * 8 // layout.element_bitwidth or columns)
    panels = torch.arange(prod(shape)).view(-1, columns // width, rows, width)
    return panels.transpose(1, 2).reshape(*shape)


def _inside(place: int, count: int) -> int:
    if not 0 <= place < count:
        raise Fault(f"index {int(place)} is out of range of {count}")
    return int(place)


@dataclass(eq=False)
class Copy:
    """An asynchronous copy of a box into shared memory. Elements outside the tensor are read as zero."""

    source: TensorDescriptor
    at: list[int]
    barrier: Barrier
    to: Shared
    known: int

    @property
    def bytes(self) -> int:
        return self.to.places.numel() * self.source.base.itemsize

    def land(self) -> None:
        block, place, inside = self.source.block_shape, torch.tensor(0), torch.tensor(True)
        for axis, (start, count) in enumerate(zip(self.at, block, strict=True)):
            index = (start + torch.arange(count)).view([-1 if n == axis else 1 for n in range(len(block))])
            inside = inside & (index >= 0) & (index < self.source.shape[axis])
            place = place + index * self.source.strides[axis]
        values = flat(self.source.base)[torch.where(inside, place, 0)]
        self.to.memory.data[self.to.places] = torch.where(inside, values, 0)
        self.barrier.receive(self.bytes, self.known)


def flat(base: torch.Tensor) -> torch.Tensor:
    """Return all memory from a tensor's first to its last element, including gaps."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(base.shape, base.stride(), strict=True))
    return base.as_strided((span,), (1,))


class Program:
    """A running GPU program: its partitions, the partition that is currently running, and the copies in
    flight."""

    def __init__(self, number: int, warps: int, random_: random.Random) -> None:
        self.number = number
        self.barriers: list[Barrier] = []
        self.current = Partition("the kernel", warps)
        self._partitions = [self.current]
        self._random = random_
        self._copies: list[Copy] = []
        self._copied = self._events = 0
        self._threads: list[threading.Thread] = []
        self._fault: BaseException | None = None

    def run(self, kernel: Callable[[], None]) -> None:
        """Run the program to completion. Raises any exception from a partition, or Fault if the program has
        an error."""
        try:
            kernel()
            self._check_rest()
        except _Stopped:
            pass
        except BaseException as fault:
            self._stop(fault)
        for thread in self._threads:
            thread.join()
        if self._fault:
            raise self._fault

    def specialize(self, parts: list[tuple[Callable[[], None], str, int]]) -> None:
        """Run functions concurrently, one per partition. Each item contains a function, its name and its
        number of warps."""
        parent = self.current
        children = [
            Partition(f"partition {n} ({name})", warps, parent.known)
            for n, (_, name, warps) in enumerate(parts)
        ]
        self._partitions += children
        for child, (function, _, _) in zip(children, parts, strict=True):
            self._threads.append(threading.Thread(target=self._run, args=(child, function)))
            self._threads[-1].start()
        self.pause(lambda: all(child.done for child in children))
        for child in children:
            parent.known |= child.known

    def pause(self, ready: Callable[[], bool] = lambda: True, waits_for: Callable[[], str] = str) -> None:
        """Let another partition or the copy engine run. Return when this partition is ready and selected
        again."""
        self.current.ready, self.current.waits_for = ready, waits_for
        self._pass_on(self.current)

    def copy(self, source: TensorDescriptor, at: list[int], barrier: Barrier, to: Shared) -> None:
        """Start a copy. The copy engine may complete it at any later time."""
        if list(to.places.shape) != list(source.block_shape) or to.layout != source.layout:
            raise Fault(
                f"a block of {source.block_shape} cannot be copied to {list(to.places.shape)} of {to.layout}"
            )
        me, event = self.current, self._event()
        self._copied |= event
        to.claim(event, me)
        self._copies.append(Copy(source, at, barrier, to, me.known | event))
        if sum(each.bytes for each in self._copies if each.barrier is barrier) > barrier.bytes:
            raise Fault(f"{me.name} copies more bytes to {to.memory.name} than {barrier} expects")

    def multiply(self, a: torch.Tensor | Shared, b: Shared) -> UnfinishedProduct:
        me, event = self.current, self._event()
        left = a.read(event, me) if isinstance(a, Shared) else a
        me.products.append(UnfinishedProduct(left.float() @ b.read(event, me).float(), event))
        return me.products[-1]

    def retire(self, outstanding: int) -> None:
        """Wait for the oldest products until at most `outstanding` of them are unfinished. Each warp waits
        only for its own part of a product."""
        me = self.current
        while len(me.products) > outstanding:
            product = me.products.pop(0)
            product.retired = True
            me.unsettled |= product.event
        if me.warps == 1:
            self.settle()

    def settle(self) -> None:
        """Synchronise the warps of the partition."""
        self.current.known |= self.current.unsettled
        self.current.unsettled = 0

    def _event(self) -> int:
        self._events += 1
        return 1 << self._events

    def _pass_on(self, me: Partition) -> None:
        chosen: Any = None
        while not isinstance(chosen, Partition):
            able = [each for each in self._partitions if not each.done and each.ready()]
            if not able and not self._copies:
                waiting = [(each.name, each.waits_for()) for each in self._partitions if not each.done]
                raise Deadlock(
                    "; ".join(f"{name} waits for {awaited}" for name, awaited in waiting if awaited)
                )
            chosen = self._random.choice([*able, *self._copies])
            if isinstance(chosen, Copy):
                self._copies.remove(chosen)
                chosen.land()
        if chosen is not me:
            self.current = chosen
            chosen.go.release()
            if not me.done:
                me.go.acquire()
        if self._fault:
            raise _Stopped

    def _run(self, me: Partition, function: Callable[[], None]) -> None:
        me.go.acquire()
        try:
            if not self._fault:
                function()
                self._check_products(me)
                me.done = True
                self._pass_on(me)
        except _Stopped:
            pass
        except BaseException as fault:
            self._stop(fault)

    def _stop(self, fault: BaseException) -> None:
        self._fault = fault
        for each in self._partitions:
            each.go.release()

    def _check_products(self, me: Partition) -> None:
        if me.products:
            raise Fault(f"{me.name} ends before one of its products")

    def _check_rest(self) -> None:
        self._check_products(self.current)
        if self._copied & ~self.current.known:
            raise Fault("the program ends without waiting for a copy")
        for barrier in self.barriers:
            if barrier.missing != barrier.count or barrier.bytes:
                raise Fault(f"the program ends with an unfinished phase of {barrier}")
