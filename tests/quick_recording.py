"""Makes `kernels.compiling.record` faster without changing its results.

Before each launch of a kernel that is not compiled, Triton describes the kernel's specialisation in detail.
Recorded kernels are never compiled, and passes launch the same kernels many times. With this module, Triton
describes each specialisation once. `tests.engine.launches_before_hopper` compares the results with the
original ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton import knobs
from triton.runtime.jit import JITFunction

_original_call_hook = JITFunction._call_hook


class _RecordedKernel:
    """Takes the place of a compiled kernel in Triton's cache. Each launch is passed to the current hook."""

    function = packed_metadata = None

    def __init__(self, description: dict[str, Any]) -> None:
        self._description = description

    def launch_metadata(self, *_: object) -> None:
        return

    def run(self, *_: object) -> None:
        knobs.runtime.jit_cache_hook(**self._description)


def _call_hook(
    self: Any,
    hook: Callable[..., bool] | None,
    key: Any,
    signature: Any,
    target: Any,
    device: int,
    *others: Any,
) -> bool | None:
    if hook is None:
        return None

    def note(**description: Any) -> bool:
        self.device_caches[device][0][key] = _RecordedKernel(description)
        return hook(**description)

    found: bool | None = _original_call_hook(self, note, key, signature, target, device, *others)
    return found


def install() -> None:
    """Make recording faster in this process, which must not launch kernels itself."""
    JITFunction._call_hook = _call_hook
