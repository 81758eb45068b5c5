"""Runs the kernels of `kernels.triton.all_reduce`, `all_reduce_norm` and `all_gather` for a group of ranks on
the CPU, over simulated peer memory that delivers words late.

The kernels' Python code runs on numpy arrays, with one thread for each program of each rank. Only one thread
runs at a time, selected by a seed. Words that a rank stores in a peer's arena stay in flight until they are
delivered, at times and in an order that the seed determines. Ranks run ahead of each other as far as the
kernel allows. The simulation does not model the inline assembly or the threads inside a program.
"""

from __future__ import annotations

import inspect
import random
import textwrap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.runtime.jit import JITFunction

from kernels.draws import BAD_TOKEN
from kernels.triton import all_gather, all_reduce, all_reduce_norm, peer_arena

_BASE = 40
"""The arena of rank r begins at address (r + 1) << _BASE."""


class Fault(Exception):
    """An error of the protocol: a word was overwritten before it was read, or no program can continue."""


class _Stopped(BaseException):
    """Raised to stop a program because another program has failed."""


class Register(np.ndarray):
    """The values of a kernel variable: a numpy array that supports the operators of a Triton tensor."""

    def to(self, dtype: Any, bitcast: bool = False) -> Register:
        return self.view(dtype) if bitcast else self.astype(dtype)

    def __iadd__(self, other: Any) -> Register:  # type: ignore[misc, override]
        """Return a new register. Registers are immutable, so an in-place operation on one variable does not
        change another variable with the same value."""
        return self + other


def _register(value: Any, dtype: Any = None) -> Register:
    return np.asarray(value, dtype).view(Register)


@dataclass(frozen=True)
class _Pointer:
    memory: np.ndarray
    offset: Any = 0

    def __add__(self, offset: Any) -> _Pointer:
        return _Pointer(self.memory, self.offset + offset)


@dataclass(eq=False)
class Call:
    """The arguments and results of an all-reduce on every rank. The first dimensions of all arrays are
    [world, rows]. The kernel writes `residual` and the results."""

    x: np.ndarray
    residual: np.ndarray
    gain: np.ndarray
    two_shot: bool
    add: bool = True

    def __post_init__(self) -> None:
        self.world, self.rows, hidden = self.x.shape
        self.words = hidden // 2
        block = all_reduce.block_words(self.words)
        assert block is not None
        self.block, self.parts = block, self.words // block
        self.scaled = np.full_like(self.x, np.nan)
        self.squares = np.full((self.world, self.parts, self.rows), np.nan, np.float32)

    kernel = "_all_reduce_add"

    @property
    def programs(self) -> int:
        return self.rows * self.parts

    @property
    def sizes(self) -> list[int]:
        return [self.rows]

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "WORDS": self.words,
            "BLOCK": self.block,
            "FLOAT": np.float16,
            "ADD": self.add,
            "NORM": True,
            "TWO_SHOT": self.two_shot,
        }

    def arguments(self, rank: int) -> list[Any]:
        halves = [each.reshape(-1).view(np.int32) for each in (self.x[rank], self.residual[rank], self.gain)]
        results = [self.scaled[rank].reshape(-1).view(np.int32), self.squares[rank].reshape(-1)]
        return [_Pointer(each) for each in (*halves, *results)]


@dataclass(eq=False)
class Gather:
    """The arguments and result of an all-gather of `x [world, count]` int32, in rows of `width` words. The
    kernel writes `result [world, rows, world, width]`."""

    x: np.ndarray
    width: int
    block: int = 128

    kernel = "_all_gather"

    def __post_init__(self) -> None:
        self.world, self.count = self.x.shape
        shape = (self.world, self.count // self.width, self.world, self.width)
        self.result = np.full(shape, -77, np.int32)

    @property
    def programs(self) -> int:
        return -(-self.count // self.block)

    @property
    def sizes(self) -> list[int]:
        return [self.count, self.width]

    @property
    def constants(self) -> dict[str, Any]:
        return {"BLOCK": self.block, "FENCE": False}

    def arguments(self, rank: int) -> list[Any]:
        return [_Pointer(self.x[rank]), _Pointer(self.result[rank].reshape(-1))]


@dataclass(eq=False)
class Best:
    """The arguments and the result of choosing, for each row, the rank with the largest of `values [world,
    rows]` float32 and returning the rank's entry of `ids`. The kernel writes `result [world, rows]`."""

    values: np.ndarray
    ids: np.ndarray

    kernel = "_best_of_ranks"

    def __post_init__(self) -> None:
        self.world, self.rows = self.values.shape
        self.result = np.full((self.world, self.rows), -77, np.int64)

    @property
    def programs(self) -> int:
        return -(-self.rows // 128)

    @property
    def sizes(self) -> list[int]:
        return [self.rows]

    @property
    def constants(self) -> dict[str, Any]:
        return {"BLOCK": 128, "BAD": BAD_TOKEN}

    def arguments(self, rank: int) -> list[Any]:
        return [_Pointer(self.values[rank]), _Pointer(self.ids[rank]), _Pointer(self.result[rank])]


@dataclass(eq=False)
class NormCall:
    """The arguments and results of an all-reduce with a quantised norm on every rank. The first dimensions of
    all arrays are [world, rows]. The kernel writes `residual` and the results. It scales values, but does not
    round them to e4m3."""

    x: np.ndarray
    residual: np.ndarray
    gain: np.ndarray
    eps: float

    kernel = "_all_reduce_norm"

    def __post_init__(self) -> None:
        self.world, self.rows, hidden = self.x.shape
        self.words = hidden // 2
        self.values = np.full(self.x.shape, np.nan, np.float32)
        self.scales = np.full(self.x.shape[:2], np.nan, np.float32)

    @property
    def programs(self) -> int:
        return self.rows

    @property
    def sizes(self) -> list[Any]:
        return [np.float32(self.eps)]

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "WORDS": self.words,
            "BLOCK": all_reduce_norm.block_words(self.words),
            "FLOAT": np.float16,
            "QUANTISED": np.float32,
        }

    def arguments(self, rank: int) -> list[Any]:
        halves = [each.reshape(-1).view(np.int32) for each in (self.x[rank], self.residual[rank], self.gain)]
        return [_Pointer(each) for each in (*halves, self.values[rank].reshape(-1), self.scales[rank])]


AnyCall = Call | Gather | Best | NormCall


class PeerMachine:
    """A group of ranks with one arena each. `replacements` maps passages of the kernels' source to their
    replacements, with which tests break the protocol to check that the simulation detects it."""

    def __init__(
        self, world: int, programs: int, items: int, seed: int, replacements: dict[str, str] | None = None
    ) -> None:
        self.world, self.programs, self.items = world, programs, items
        words = programs * 2 * world * items * peer_arena.REGION_BLOCK
        self.arenas = np.full((world, words), peer_arena.EMPTY_WORD, np.int32)
        self._calls = np.zeros((world, programs), np.int32)
        self._bases = np.array([(peer + 1) << _BASE for peer in range(world)], np.int64)
        self._random = random.Random(seed)
        self._flying: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._place = threading.local()
        self._kernels = self._interpret(replacements or {})

    def run(self, calls: Sequence[AnyCall]) -> None:
        """Make every call on every rank, in order. Raises Fault."""
        self._waiting: dict[threading.Semaphore, Callable[[], bool]] = {}
        self._left = {
            (rank, number): self._grid(call)
            for number, call in enumerate(calls)
            for rank in range(self.world)
        }
        self._fault: BaseException | None = None
        self._done = threading.Semaphore(0)
        threads = [
            threading.Thread(target=self._program, args=(rank, program, calls))
            for rank in range(self.world)
            for program in range(self.programs)
        ]
        self._running = len(threads)
        for thread in threads:
            self._add(thread)
        self._next()
        self._done.acquire()
        for thread in threads:
            thread.join()
        if self._fault is not None:
            raise self._fault

    def _grid(self, call: AnyCall) -> int:
        return min(call.programs, self.programs)

    # ── one program of one rank ──

    def _program(self, rank: int, program: int, calls: Sequence[AnyCall]) -> None:
        try:
            for number, call in enumerate(calls):
                self._pause(lambda before=(rank, number - 1): not self._left.get(before, 0))
                if program < self._grid(call):
                    self._place.rank, self._place.program, self._place.grid = rank, program, self._grid(call)
                    self._launch(call, rank)
                    self._left[rank, number] -= 1
        except _Stopped:
            pass
        except BaseException as fault:
            self._fault = self._fault or fault
        self._running -= 1
        self._next()

    def _launch(self, call: AnyCall, rank: int) -> None:
        self._kernels[call.kernel](
            *call.arguments(rank),
            _Pointer(self._bases),
            _Pointer(self._calls[rank]),
            _register(0, np.int64),
            *call.sizes,
            _register(self.items, np.int32),
            RANK=rank,
            WORLD=self.world,
            REGION_BLOCK=peer_arena.REGION_BLOCK,
            WARPS=4,
            PDL=True,
            **call.constants,
        )

    # ── scheduling of the threads ──

    def _add(self, thread: threading.Thread) -> None:
        """Start a thread. It runs only when it is selected."""
        go = threading.Semaphore(0)
        self._waiting[go] = lambda: True
        target = thread.run

        def run() -> None:
            go.acquire()
            target()

        thread.run = run  # type: ignore[method-assign]
        thread.start()

    def _pause(self, ready: Callable[[], bool]) -> None:
        """Let other programs run. Returns when `ready` is true and this program is selected."""
        go = threading.Semaphore(0)
        self._waiting[go] = ready
        self._next()
        go.acquire()
        if self._fault is not None:
            raise _Stopped

    def _next(self) -> None:
        """Deliver some of the words in flight and select the next program."""
        if not self._running:
            self._done.release()
            return
        while True:
            ready = [go for go, can in self._waiting.items() if self._fault is not None or can()]
            if self._flying and (not ready or self._random.random() < 0.3):
                self._deliver()
            elif ready:
                go = self._random.choice(ready)
                del self._waiting[go]
                go.release()
                return
            else:
                self._fault = Fault("every program waits, and no word is in flight")

    def _deliver(self) -> None:
        """Deliver some or all words of a random message in flight. Record a Fault if this overwrites an
        unread word."""
        at = self._random.randrange(len(self._flying))
        rank, places, words = self._flying.pop(at)
        some = self._random.choice((1, len(places) // 2, len(places)))
        now, later = slice(0, some), slice(some, None)
        if (self.arenas[rank][places[now]] != peer_arena.EMPTY_WORD).any():
            self._fault = self._fault or Fault(f"a word for rank {rank} overwrites an unread word")
        self.arenas[rank][places[now]] = words[now]
        if len(places) > some:
            self._flying.append((rank, places[later], words[later]))

    # One delivery contains some or all of the words of a message in flight.

    def _send(self, address: np.ndarray, words: np.ndarray) -> None:
        rank = int(address[0] >> _BASE) - 1
        places = np.asarray((address & ((1 << _BASE) - 1)) // 4)
        if rank == self._place.rank:
            self.arenas[rank][places] = words
            return
        words, places = np.array(words), np.array(places)
        order = (
            np.array(self._random.sample(range(len(words)), len(words))) if len(words) < 64 else slice(None)
        )
        self._flying.append((rank, places[order], words[order]))

    def _poll(self, address: np.ndarray, stop: np.ndarray) -> Register:
        arena = self.arenas[self._place.rank]
        places = np.asarray((address & ((1 << _BASE) - 1)) // 4)
        self._pause(lambda: not (arena[places] == peer_arena.EMPTY_WORD).any())
        return _register(arena[places])

    def _interpret(self, replacements: dict[str, str]) -> dict[str, Callable[..., None]]:
        """Return the kernels and their helper functions as plain functions that use a numpy version of
        `gl`."""
        language = SimpleNamespace(
            constexpr=object,
            static_range=range,
            BlockedLayout=lambda *_: None,
            program_id=lambda axis: _register(self._place.program, np.int32),
            num_programs=lambda axis: self._place.grid,
            arange=lambda first, end, layout: _register(np.arange(first, end, dtype=np.int32)),
            load=_load,
            store=_store,
            where=lambda condition, one, other: _register(
                np.where(condition, one, other), np.asarray(other).dtype
            ),
            sum=lambda value, axis: np.sum(value, axis=axis, dtype=value.dtype),
            max=np.max,
            maximum=np.maximum,
            abs=np.abs,
            rsqrt=lambda value: np.float32(1) / np.sqrt(value),
            div_rn=lambda value, divisor: np.float32(value) / np.float32(divisor),
            join=lambda one, other: np.stack((one, other), axis=-1),
            reshape=np.reshape,
            convert_layout=lambda value, layout: _register(value),
            **{name: getattr(np, name) for name in ("int16", "int32", "int64", "float32", "float16")},
        )
        names: dict[str, Any] = {"gl": language, "EMPTY": np.int32(peer_arena.EMPTY_WORD)}
        edited = set()
        parts = {**vars(peer_arena), **vars(all_reduce), **vars(all_gather), **vars(all_reduce_norm)}
        for name, part in parts.items():
            if isinstance(part, JITFunction):
                source = textwrap.dedent(inspect.getsource(part.fn))
                source = source[source.index("def ") :]
                for old, new in replacements.items():
                    if old in source:
                        source, edited = source.replace(old, new), edited | {old}
                exec(compile("from __future__ import annotations\n" + source, name, "exec"), names)
        assert edited == set(replacements), "the kernel's source has changed: adapt the edits"
        names |= {"send": self._send, "poll": self._poll, "signal": lambda text: None}
        return names


def _load(pointer: _Pointer, mask: Any = True, other: Any = 0) -> Register:
    places = np.where(mask, pointer.offset, 0)
    return _register(np.where(mask, pointer.memory[places], other), pointer.memory.dtype)


def _store(pointer: _Pointer, value: Any, mask: Any = None) -> None:
    if mask is None:
        pointer.memory[pointer.offset] = value
    else:
        pointer.memory[np.asarray(pointer.offset)[mask]] = np.asarray(value)[mask]
