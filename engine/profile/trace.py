"""Converts a Chrome trace, as written by torch's profiler, into a timeline of calls."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_CPU = "cpu_op"


@dataclass(frozen=True, slots=True)
class TraceCall:
    """A kernel, copy or fill on a GPU, or a torch operation on a CPU."""

    name: str
    """The kernel's name, as returned by `short_name`."""
    us: float
    """Time, in microseconds, that the call adds to the timeline. On a GPU, a kernel may start before the
    previous one ends (programmatic dependent launch); only the time after the previous kernel's end counts.
    On a CPU, nested operations are excluded."""
    gap_us: float
    """Idle time before the call, in microseconds. Always 0 on a CPU."""


@dataclass(frozen=True, slots=True)
class TraceTimeline:
    """All GPU calls, or all CPU calls, in a trace."""

    calls: list[TraceCall]
    """The calls, ordered by start time."""
    on_gpu: bool
    us: float
    """Time, in microseconds, from the start of the first call to the end of the last."""


def read_timeline(path: Path) -> TraceTimeline:
    """Read a trace's GPU calls, or its CPU calls if it has no GPU calls. Raises ValueError if it contains no
    calls."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    on_gpu = sorted((e for e in events if e.get("cat") in _ON_GPU), key=lambda e: e["ts"])
    if on_gpu:
        return _of_gpu(on_gpu)
    on_cpu = sorted((e for e in events if e.get("cat") == _ON_CPU), key=lambda e: (e["ts"], -e["dur"]))
    if not on_cpu:
        raise ValueError(f"{path} contains neither kernels nor operations; record at least one step")
    return _of_cpu(on_cpu)


def _of_gpu(events: list[dict[str, Any]]) -> TraceTimeline:
    calls = []
    begin = end = float(events[0]["ts"])
    for event in events:
        start = float(event["ts"])
        stop = start + float(event["dur"])
        calls.append(
            TraceCall(short_name(event["name"]), max(0.0, stop - max(start, end)), max(0.0, start - end))
        )
        end = max(end, stop)
    return TraceTimeline(calls, True, end - begin)


def _of_cpu(events: list[dict[str, Any]]) -> TraceTimeline:
    own = [float(event["dur"]) for event in events]
    around: dict[int, list[int]] = {}
    for index, event in enumerate(events):
        callers = around.setdefault(event["tid"], [])
        while callers and _end(events[callers[-1]]) <= event["ts"]:
            callers.pop()
        if callers:
            own[callers[-1]] -= float(event["dur"])
        callers.append(index)
    calls = [TraceCall(event["name"], max(0.0, us), 0.0) for event, us in zip(events, own, strict=True)]
    return TraceTimeline(calls, False, max(map(_end, events)) - float(events[0]["ts"]))


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def short_name(name: str) -> str:
    """Return a kernel's name without template arguments, parameters or namespaces. Names of Triton kernels
    are left unchanged. CUTLASS kernels are prefixed with "cutlass", because many of them share one name.
    Names of torch's elementwise kernels include the functor.
    """
    symbol, _, arguments = name.removeprefix("void ").partition("<")
    *spaces, bare = symbol.partition("(")[0].strip().split("::")
    functor = re.search(r"(\w+?)(?:_kernel_cuda|Functor|_kernel_impl)\b", arguments)
    if functor and bare.endswith("elementwise_kernel"):
        return f"{bare} {functor[1]}"
    return f"cutlass {bare}" if "cutlass" in spaces else bare
