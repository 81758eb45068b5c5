"""A Chrome trace of torch's profiler, as a time line of calls."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_CPU = "cpu_op"


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel, copy or fill on a GPU; one operation on a CPU."""

    name: str
    """As `short_name`."""
    us: float
    """What it adds to the time line. On a GPU a kernel may begin while the one in front of it ends (PDL):
    only what comes after that end counts. On a CPU: without the operations that it calls."""
    gap_us: float
    """In which nothing ran before it. 0 on a CPU."""


@dataclass(frozen=True, slots=True)
class Timeline:
    calls: list[Call]
    """In the order of their start."""
    on_gpu: bool
    us: float
    """From the start of the first to the end of the last."""


def read_timeline(path: Path) -> Timeline:
    """Of the GPU, if the trace has anything of one; else of the CPU. Raises ValueError for a trace that has
    neither."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    on_gpu = sorted((e for e in events if e.get("cat") in _ON_GPU), key=lambda e: e["ts"])
    if on_gpu:
        return _of_gpu(on_gpu)
    on_cpu = sorted((e for e in events if e.get("cat") == _ON_CPU), key=lambda e: (e["ts"], -e["dur"]))
    if not on_cpu:
        raise ValueError(f"{path}: has no kernel and no operation; were any steps recorded?")
    return _of_cpu(on_cpu)


def _of_gpu(events: list[dict[str, Any]]) -> Timeline:
    calls = []
    begin = end = float(events[0]["ts"])
    for event in events:
        start = float(event["ts"])
        stop = start + float(event["dur"])
        calls.append(Call(short_name(event["name"]), max(0.0, stop - max(start, end)), max(0.0, start - end)))
        end = max(end, stop)
    return Timeline(calls, True, end - begin)


def _of_cpu(events: list[dict[str, Any]]) -> Timeline:
    own = [float(event["dur"]) for event in events]
    around: dict[int, list[int]] = {}
    for index, event in enumerate(events):
        callers = around.setdefault(event["tid"], [])
        while callers and _end(events[callers[-1]]) <= event["ts"]:
            callers.pop()
        if callers:
            own[callers[-1]] -= float(event["dur"])
        callers.append(index)
    calls = [Call(event["name"], max(0.0, us), 0.0) for event, us in zip(events, own, strict=True)]
    return Timeline(calls, False, max(map(_end, events)) - float(events[0]["ts"]))


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def short_name(name: str) -> str:
    """A kernel's name without template arguments, parameters and namespaces (but for CUTLASS, whose kernels
    are all called the same): a Triton kernel's as it is; torch's elementwise ones with the functor that says
    what they do."""
    symbol, _, arguments = name.removeprefix("void ").partition("<")
    *spaces, bare = symbol.partition("(")[0].strip().split("::")
    functor = re.search(r"(\w+?)(?:_kernel_cuda|Functor|_kernel_impl)\b", arguments)
    if functor and bare.endswith("elementwise_kernel"):
        return f"{bare} {functor[1]}"
    return f"cutlass {bare}" if "cutlass" in spaces else bare
