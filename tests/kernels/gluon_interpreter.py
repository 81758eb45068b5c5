"""Runs the Python source of a Gluon kernel on the CPU, and reports errors that would cause a race or a
deadlock on a GPU.

Triton's interpreter does not support Gluon. Here, torch operations on a `gluon_machine.Program` replace `gl`,
`mbarrier`, `tma` and the warpgroup products. The following are not modelled:

- register layouts, which the compiler checks,
- the lifetime of registers that a product reads,
- fences between plain and asynchronous accesses,
- clusters,
- the width of scalar integers, which is unbounded in Python,
- `//` and `%` of negative integers, which Python rounds down.

Unsupported features raise an error that names them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from tests.kernels.gluon_machine import Barrier, Barriers, Fault, Program, Shared, UnfinishedProduct, flat

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")
"""Launch options that are not arguments of the kernel."""


class Interpreted:
    """A Gluon kernel to interpret, launched like the kernel itself:
    `Interpreted(kernel, seed)[(programs,)](…)`.

    Programs run one after another, in an order that depends on the seed. Raises Fault, or its subclass
    Deadlock.
    """

    def __init__(self, kernel: JITFunction, seed: int) -> None:
        self._random = random.Random(seed)
        self._language = _Language()
        modules = (gl, tl, hopper.mbarrier, hopper.tma)
        self._stand_ins: dict[int, Any] = {id(each): self._language for each in modules}
        for name in ("warpgroup_mma", "warpgroup_mma_wait"):
            self._stand_ins[id(getattr(hopper, name))] = getattr(self._language, name)
        self._kernel = self._stand_in(kernel)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        (programs,) = grid

        def launch(*arguments: Any, **named: Any) -> None:
            given = [_given(each) for each in arguments]
            constants = {name: value for name, value in named.items() if name not in _OPTIONS}
            self._language.programs, self._language.stored = programs, {}
            for number in self._random.sample(range(programs), programs):
                program = Program(number, named["num_warps"], self._random)
                self._language.program = program
                program.run(partial(self._kernel, *given, **constants))

        return launch

    def _stand_in(self, value: Any) -> Any:
        """Return the replacement for a global variable of the kernel's module. A kernel is replaced by its
        Python function, and that function's globals are replaced too."""
        if isinstance(value, gl.constexpr):
            return value.value
        if id(value) in self._stand_ins or not isinstance(value, JITFunction):
            return self._stand_ins.get(id(value), value)
        code, names = value.fn.__code__, value.fn.__globals__
        own: dict[str, Any] = {"__builtins__": __builtins__}
        self._stand_ins[id(value)] = FunctionType(code, own, value.fn.__name__, value.fn.__defaults__)
        own.update({name: self._stand_in(names[name]) for name in code.co_names if name in names})
        return self._stand_ins[id(value)]


@dataclass(frozen=True, eq=False)
class _Pointer:
    base: torch.Tensor
    own: torch.Tensor
    """Mask that selects the tensor's elements within the memory that the tensor spans."""
    offset: Any = 0

    @classmethod
    def to(cls, base: torch.Tensor) -> _Pointer:
        own = torch.zeros(len(flat(base)), dtype=torch.bool)
        own.as_strided(base.shape, base.stride())[:] = True
        return cls(base, own)

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.base.dtype)

    def __add__(self, offset: Any) -> _Pointer:
        return replace(self, offset=self.offset + offset)

    def places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the addresses of the accessed elements, and their mask. Raises Fault for an element outside
        the tensor."""
        everywhere = torch.as_tensor(True if mask is None else mask)
        place, mask = torch.broadcast_tensors(torch.as_tensor(self.offset).long(), everywhere)
        there = torch.where(mask, place, 0)
        outside = (there < 0) | (there >= len(self.own))
        outside |= ~self.own[torch.where(outside, 0, there)]
        if outside.any():
            raise Fault(
                f"element {int(there[outside][0])} is outside a tensor of shape {list(self.base.shape)}"
            )
        return there, mask


@dataclass(frozen=True)
class _Dtype:
    """The dtype of a descriptor's elements."""

    dtype: torch.dtype

    @property
    def primitive_bitwidth(self) -> int:
        return 8 * self.dtype.itemsize


class _Tiles(TensorDescriptor):
    """A descriptor as the kernel sees it."""

    @property
    def dtype(self) -> _Dtype:
        return _Dtype(self.base.dtype)

    @property
    def block_type(self) -> SimpleNamespace:
        return SimpleNamespace(shape=list(self.block_shape))


def _given(value: Any) -> Any:
    """Return the argument that a kernel receives for `value`."""
    if isinstance(value, TensorDescriptor):
        return _Tiles(**vars(value))
    return _Pointer.to(value) if isinstance(value, torch.Tensor) else value


class _Language:
    """Replacements for `gl`, `tl`, `mbarrier`, `tma` and the products, bound to the running program."""

    float16, bfloat16, float32 = torch.float16, torch.bfloat16, torch.float32
    int32, int64 = torch.int32, torch.int64
    MBarrierLayout = hopper.mbarrier.MBarrierLayout
    static_range = staticmethod(range)
    exp, exp2 = staticmethod(torch.exp), staticmethod(torch.exp2)
    reshape, permute = staticmethod(torch.reshape), staticmethod(torch.permute)

    def __init__(self) -> None:
        self.program: Program
        self.programs = 0
        self.stored: dict[int, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return getattr(gl, name)
        raise NotImplementedError(f"the interpreter does not support {name}")

    def program_id(self, axis: int) -> int:
        return self.program.number

    def num_programs(self, axis: int) -> int:
        return self.programs

    def inline_asm_elementwise(self, text: str, *_: Any) -> None:
        if not text.startswith("griddepcontrol."):
            raise NotImplementedError(f"the interpreter does not support {text}")

    # ── registers ──

    def arange(self, start: int, end: int, layout: Any = None) -> torch.Tensor:
        return torch.arange(start, end, dtype=torch.int32)

    def full(self, shape: list[int], value: float, dtype: torch.dtype, layout: Any = None) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype)

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: Any = None) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def convert_layout(self, value: torch.Tensor, layout: Any) -> torch.Tensor:
        return value

    def split(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return value.unbind(-1)

    def where(self, condition: Any, one: Any, other: Any) -> torch.Tensor:
        return torch.where(torch.as_tensor(condition), one, other)

    def minimum(self, one: Any, other: Any) -> torch.Tensor:
        return torch.minimum(torch.as_tensor(one), torch.as_tensor(other))

    def maximum(self, one: Any, other: Any) -> torch.Tensor:
        return torch.maximum(torch.as_tensor(one), torch.as_tensor(other))

    def max(self, value: torch.Tensor, axis: int) -> torch.Tensor:
        return value.amax(axis)

    def sum(self, value: torch.Tensor, axis: int) -> torch.Tensor:
        return value.sum(axis, dtype=value.dtype)

    # ── global memory ──

    def load(self, pointer: _Pointer, mask: Any = None, other: Any = float("nan"), **_: Any) -> torch.Tensor:
        place, mask = pointer.places(mask)
        values = flat(pointer.base)[place]
        return values if mask.all() else torch.where(mask, values, other)

    def atomic_add(self, pointer: _Pointer, value: int, **_: Any) -> torch.Tensor:
        place, _ = pointer.places(None)
        before = flat(pointer.base)[place].clone()
        flat(pointer.base)[place] += value
        return before

    def store(self, pointer: _Pointer, value: torch.Tensor, mask: Any = None) -> None:
        """Store elements. Each element may be stored at most once per launch, because the stores of two
        programs have no defined order."""
        place, mask = pointer.places(mask)
        to = place[mask]
        times = self.stored.setdefault(id(pointer.base), torch.zeros(len(pointer.own), dtype=torch.int32))
        times.index_add_(0, to, torch.ones(len(to), dtype=torch.int32))
        if (times[to] > 1).any():
            raise Fault(f"element {int(to[times[to] > 1][0])} is stored twice")
        flat(pointer.base)[to] = torch.as_tensor(value).to(pointer.base.dtype).expand(place.shape)[mask]

    # ── shared memory, barriers and asynchronous operations ──

    def allocate_shared_memory(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
        if not isinstance(layout, self.MBarrierLayout):
            dtype = dtype.dtype if isinstance(dtype, _Dtype) else dtype
            return Shared.allocate(dtype, shape, layout)
        made = Barriers(prod(shape))
        self.program.barriers += made.each
        return made if len(shape) > 1 else made.index(0)

    def warp_specialize(self, parts: list, warps: list[int], registers: list[int]) -> None:
        for name, value in sys._getframe(1).f_locals.items():
            _call(value, name)
        counts = [self.program.current.warps, *warps]
        self.program.specialize(
            [
                (partial(function, *arguments), function.__name__, count)
                for (function, arguments), count in zip(parts, counts, strict=True)
            ]
        )

    def debug_barrier(self) -> None:
        self.program.settle()

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.init(count)

    def arrive(self, barrier: Barrier, *, count: int = 1, pred: Any = True) -> None:
        """Arrive at a barrier from one thread. The thread can vouch for events of other warps only if an
        earlier barrier ordered these events before the arrival."""
        if pred:
            self.program.pause()
            barrier.arrive(count, self.program.current.known)

    def expect(self, barrier: Barrier, bytes_per_cta: int, pred: Any = True) -> None:
        if pred:
            self.program.pause()
            barrier.bytes += bytes_per_cta
            barrier.arrive(1, self.program.current.known)

    def wait(self, barrier: Barrier, phase: Any, pred: Any = True) -> None:
        """Wait until the phase with the given parity has ended. As in hardware, the phase before the first
        one counts as ended."""
        if not pred:
            return
        if not barrier.count:
            raise Fault(f"waits for {barrier} before its initialisation")
        parity = int(phase)
        self.program.pause(lambda: barrier.phase % 2 != parity, lambda: f"parity {parity} of {barrier}")
        self.program.current.known |= barrier.completed

    def async_copy_global_to_shared(
        self, source: TensorDescriptor, at: list[Any], barrier: Barrier, to: Shared, pred: Any = True
    ) -> None:
        if pred:
            self.program.pause()
            self.program.copy(source, [int(each) for each in at], barrier, to)

    def warpgroup_mma(
        self, a: Any, b: Shared, acc: Any, *, use_acc: Any = True, is_async: bool = False
    ) -> UnfinishedProduct:
        self.program.pause()
        product = self.program.multiply(a, b)
        if use_acc:
            product.value += acc.value if isinstance(acc, UnfinishedProduct) else acc
        if is_async:
            return product
        self.program.retire(0)
        self.program.settle()  # the compiler inserts a barrier before the operands are overwritten
        return product.value

    def warpgroup_mma_wait(self, num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
        self.program.pause()
        self.program.retire(num_outstanding)
        results = tuple(self._finished(each) for each in deps)
        return results[0] if len(results) == 1 else results

    def _finished(self, value: Any) -> Any:
        if not isinstance(value, UnfinishedProduct):
            return value
        if not value.retired:
            raise Fault(f"{self.program.current.name} uses a product before waiting for it")
        return value.value


def _call(value: Any, name: str) -> None:
    """Name barriers and memories after the kernel's variables that refer to them. Error messages use these
    names."""
    if isinstance(value, Shared):
        value.memory.name = value.memory.name or name
    elif isinstance(value, Barrier):
        value.name = name
    elif isinstance(value, Barriers):
        for place, barrier in enumerate(value.each):
            barrier.name = f"{name}[{place}]"
