"""Makes Triton's interpreter faster without changing its results.

The interpreter spends most of its time on work that does not affect results. Before each call of a device
function, it searches `triton.language` for functions to replace. After each addition of integers, it computes
the sum again in 64 bits, for an assertion that it then omits. It checks and wraps the shape of each result,
and copies operands that have to be broadcast. Each operation passes through two wrappers.
`tests/kernels/test_quick_interpreter.py` compares the results of both interpreters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_original_dtype_equal = tl.dtype.__eq__
_original_block_type = tl.block_type.__init__
_original_np_dtype = interpreter._get_np_dtype
_original_patch_lang = interpreter._patch_lang
_original_check = TritonSemantic.binary_op_type_checking_impl

_NO_SHAPE = core.tuple([])
_ONE = tl.constexpr(1)


class _Shape:
    """The attributes that all tensors and block types of one shape share. They are never changed."""

    def __init__(self, block_type: tl.block_type) -> None:
        self.sizes = tuple(block_type.shape)
        self.dimensions = block_type.shape
        self.numel = block_type.numel
        self.text = str(block_type.shape)
        self.constants = core.tuple([tl.constexpr(size) for size in block_type.shape])
        self.constant_numel = tl.constexpr(block_type.numel)


_shapes: dict[tuple[int, ...], _Shape] = {}
_common_sizes: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}
_np_dtypes: dict[str, np.dtype[Any]] = {}


def _dtype_equal(self: tl.dtype, other: object) -> bool:
    return self is other or _original_dtype_equal(self, other)


def _make_block_type(self: Any, element_ty: tl.dtype, shape: Any) -> None:
    sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    known = _shapes.get(sizes)
    if known is None:
        _original_block_type(self, element_ty, shape)
        known = _shapes[sizes] = _Shape(self)
    _set_block_type(self, element_ty, known)


def _with_element_type(self: Any, scalar_ty: tl.dtype) -> tl.block_type:
    made = tl.block_type.__new__(tl.block_type)
    _set_block_type(made, scalar_ty, self.known_shape)
    return made


def _set_block_type(self: Any, element_ty: tl.dtype, known: _Shape) -> None:
    self.element_ty = element_ty
    self.shape = known.dimensions
    self.numel = known.numel
    self.name = f"<{known.text}, {element_ty}>"
    self.known_shape = known


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    if type.is_block():
        self.dtype = type.element_ty
        self.shape = type.known_shape.constants
        self.numel = type.known_shape.constant_numel
    else:
        self.dtype = type.scalar
        self.shape, self.numel = _NO_SHAPE, _ONE


def _np_dtype(dtype: tl.dtype) -> np.dtype[Any]:
    name = dtype.scalar.name
    found = _np_dtypes.get(name)
    if found is None:
        found = _np_dtypes[name] = _original_np_dtype(dtype)
    return found


def _check_binary(
    self: TritonSemantic,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> Any:
    left, right = isinstance(lhs, tl.tensor), isinstance(rhs, tl.tensor)
    if not div_or_mod:
        if left and right:
            # Numbers of the same type, and the distances of pointers, need no conversion.
            offsets = allow_lhs_ptr and lhs.dtype.is_ptr() and rhs.dtype.is_int()
            if offsets or (lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr()):
                return _broadcast(self, lhs, rhs)
        elif left and _keeps_type(lhs.dtype, rhs):
            return lhs, _constant(rhs, lhs)
        elif right and _keeps_type(rhs.dtype, lhs):
            return _constant(lhs, rhs), rhs
    return _original_check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _keeps_type(dtype: tl.dtype, number: object) -> bool:
    """Return whether an operation on a tensor of this type and the Python number has a result of this type.
    Only frequent types are recognised."""
    if type(number) is int:
        return dtype is tl.float32 or (dtype is tl.int32 and -(2**31) <= number < 2**31)
    return type(number) is float and dtype is tl.float32


def _constant(number: float, like: Any) -> tl.tensor:
    """Return a tensor with the shape and type of another tensor, all of whose elements are `number`."""
    # The interpreter, too, replaces -0.0 with 0.0.
    data = np.full(_sizes(like) or 1, number or 0, dtype=_np_dtype(like.dtype))
    return tl.tensor(interpreter.TensorHandle(data, like.dtype), like.type)


def _broadcast(self: TritonSemantic, lhs: Any, rhs: Any) -> tuple[tl.tensor, tl.tensor]:
    if lhs.shape is rhs.shape:
        return lhs, rhs
    left, right = _sizes(lhs), _sizes(rhs)
    sizes = _common_sizes.get((left, right))
    if sizes is None:
        sizes = _common_sizes[left, right] = np.broadcast_shapes(left, right)
    return (
        lhs if left == sizes else _broadcast_to(lhs, sizes),
        rhs if right == sizes else _broadcast_to(rhs, sizes),
    )


def _sizes(x: Any) -> tuple[int, ...]:
    return x.type.known_shape.sizes if x.type.is_block() else ()


def _broadcast_to(x: Any, sizes: tuple[int, ...]) -> tl.tensor:
    if x.type.is_block():
        data = np.broadcast_to(x.handle.data, sizes)
    else:
        # For a single element, this takes a fifth of the time of `np.broadcast_to`.
        data = np.ndarray(sizes, x.handle.data.dtype, x.handle.data, strides=(0,) * len(sizes))
    handle = interpreter.TensorHandle(data, x.handle.dtype.scalar)
    return tl.tensor(handle, tl.block_type(x.type.scalar, list(sizes)))


def _unwrapped(replacement: Any) -> Any:
    """Return a function that replaces a builtin of `triton.language` like `replacement`, but without wrappers
    that only check arguments."""
    builtin = (getattr(replacement, "__kwdefaults__", None) or {}).get("member")
    if builtin is None:
        return replacement
    function = getattr(builtin, "__wrapped__", builtin)

    def call(*args: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **options)

    return call


class _Patches:
    """Replaces functions of `triton.language` while a kernel runs, like `_patch_lang`, but searches for them
    only once."""

    def __init__(self) -> None:
        self._found: list[tuple[object, str, object]] = []
        self._active = False

    def __call__(self, fn: Callable[..., object]) -> Any:
        scope = interpreter._LangPatchScope()
        if self._active:
            return scope
        if not self._found:
            both: Any = type("", (), {"__globals__": {"tl": tl, "core": tl.core}})
            found = _original_patch_lang(both)
            self._found = [(each, name, _unwrapped(getattr(each, name))) for each, name, _ in found._changes]
            found.restore()
        for each, name, value in self._found:
            scope.set_attr(each, name, value)
        self._active = True
        restore = scope.restore

        def end() -> None:
            self._active = False
            restore()

        scope.restore = end
        return scope


_CHANGES: tuple[tuple[Any, str, Any], ...] = (
    (tl.dtype, "__eq__", _dtype_equal),
    (tl.block_type, "__init__", _make_block_type),
    (tl.block_type, "with_element_ty", _with_element_type),
    (tl.tensor, "__init__", _make_tensor),
    (interpreter.TensorHandle, "__post_init__", lambda self: None),
    (interpreter, "_get_np_dtype", _np_dtype),
    (interpreter, "_patch_lang", _Patches()),
    (TritonSemantic, "binary_op_type_checking_impl", _check_binary),
    (TritonSemantic, "broadcast_impl_value", _broadcast),
    (
        interpreter.interpreter_builder,
        "options",
        replace(interpreter.interpreter_builder.options, sanitize_overflow=False),
    ),
)
_ORIGINALS = tuple((each, name, getattr(each, name)) for each, name, _ in _CHANGES)


def _set(attributes: tuple[tuple[Any, str, Any], ...]) -> None:
    for each, name, value in attributes:
        setattr(each, name, value)


def install() -> None:
    """Replace slow functions of Triton's interpreter in this process."""
    _set(_CHANGES)


@contextlib.contextmanager
def original_interpreter() -> Iterator[None]:
    """Use the original interpreter until the block ends."""
    _set(_ORIGINALS)
    try:
        yield
    finally:
        _set(_CHANGES)
