"""Compiles Hopper's prefill attention. Prints, as JSON, the order of the kernel's computations and waits, and
how Triton dispatches work to the kernel's warps. Runs in a separate process, like `launches_of_serving`."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from functools import partial

import torch
from triton import knobs

from kernels import compiling
from kernels.triton import attention_prefill_hopper

GPU = compiling.GpuModel.of("NVIDIA H200", 90)
META = torch.device("meta")
EVENTS = {
    "HGMMA": "product",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0": "wait for all",
    "WARPGROUP.DEPBAR.LE gsb0, 0x1": "wait for all but the last",
    "MUFU.EX2": "weight",
    "STL": "spill",
    "LDL": "spill",
}
"""Instructions to report, given by the beginning of their disassembled text."""
ACCESS = r"(?:@\S+\s+)?(st|ld|atom|red|ldmatrix|stmatrix)\b(?!\S*\.(?:global|param|local|const)\b)"
"""Matches a thread's own access to shared memory in PTX. It does not match barriers, or the copies and
products that the hardware performs."""


def launch(group: int, dtype: torch.dtype, expanded: bool) -> None:
    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    q, pool = empty(100, 8 * group, 128), empty(64, 8, 64, 128)
    table = None if expanded else empty(4, 64, dtype=torch.int64)
    tiles = empty(9, 4, dtype=torch.int32)
    attention_prefill_hopper.prefill(q, pool, pool, table, tiles, 0.1, torch.empty_like(q), 132)


def disassembled(cubin: bytes) -> list[str]:
    """Return a kernel's disassembled instructions without their predicates."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@\S+\s+)?(.*?)\s*;", text, re.MULTILINE)


def dispatch(ptx: str) -> list[str]:
    """Return all pairs of accesses to shared memory that follow each other on any path through the kernel.
    `^` is the start, `$` the end, `w` a write, `r` a read, and `b` a barrier of all threads."""
    lines = [line.strip() for line in ptx[ptx.index("\n{\n") :].splitlines()]
    labels: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        if label := re.match(r"([\w$]+):", line):
            labels.setdefault(label[1], []).append(number)

    def place(label: str, jump: int) -> int:
        """Return the position of the nearest label with this name. The name alone is not enough, because
        several wait loops have labels with the same name."""
        return min(labels[label], key=lambda number: abs(number - jump))

    found, seen, following = set(), set(), [(0, "^")]
    while following:
        at = number, passed = following.pop()
        if at in seen:
            continue
        seen.add(at)
        line = lines[number]
        if line == "ret;":
            found.add(f"{passed}$")
            continue
        if access := re.match(ACCESS, line):
            kind = {"st": "w", "ld": "r"}.get(access[1], access[1])
            found.add(passed + kind)
            passed = kind
        elif re.match(r"barrier\.sync\s+1;", line):
            passed = f"{passed}b"[:9]
        jump = re.match(r"(@\S+\s+)?(bra|brx)\b.*?([\w$]+);", line)
        if jump is None or jump[1]:
            following.append((number + 1, passed))
        if jump is not None:
            first = place(jump[3], number)
            listed = (
                re.findall(r"\$\w+", "".join(lines[first + 1 : number])) if jump[2] == "brx" else [jump[3]]
            )
            following += [(place(label, number), passed) for label in listed]
    return sorted(found)


if __name__ == "__main__":
    found = {}
    for name, case in {
        "bf16": (4, torch.bfloat16, False),
        "f16 expanded": (64, torch.float16, True),
    }.items():
        (job,) = compiling.record(GPU.target, partial(launch, *case))
        with compiling._offline(GPU.target):
            kernel = job.function.preload(job.specialisation)
        instructions = disassembled(kernel.asm["cubin"])
        found[name] = {
            "events": [
                event for one in instructions for begin, event in EVENTS.items() if one.startswith(begin)
            ],
            "dispatch": dispatch(kernel.asm["ptx"]),
            "shared": kernel.metadata.shared,
        }
    print(json.dumps(found))
