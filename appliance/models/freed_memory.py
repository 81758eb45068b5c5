"""Verifies that the memory of a replica was returned when the replica ended: its processes no longer exist,
and the used memory of its GPUs has fallen. All functions read from the kernel or call NVML, so they must not
run on the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from appliance.models.gpus import find_gpus
from appliance.quantities import of_bytes

RETURNED_WITHIN_S = 10.0
"""Time limit for the memory to be returned after the processes have exited or were killed."""
_POLL_S = 0.1
_SHARE = 0.9
"""Share of the weights and the KV cache by which a GPU's used memory must fall. It is less than 1 because
other processes may allocate memory at the same time."""


def _used_bytes() -> Mapping[int, int]:
    return {gpu.number: gpu.used_bytes for gpu in find_gpus().gpus}


class HeldMemory(NamedTuple):
    """The memory that a running replica holds."""

    pids: Sequence[int]
    """The replica's ranks. Each rank leads a session, which also contains the processes that it starts."""
    limits: Mapping[int, int]
    """The used memory in bytes that each of the replica's GPUs may have after the replica has ended, by the
    GPU's number."""


def held_memory(
    pids: Sequence[int],
    gpus: Sequence[int],
    rank_bytes: int,
    used_bytes: Callable[[], Mapping[int, int]] = _used_bytes,
) -> HeldMemory:
    """Return the memory of a running replica. `rank_bytes` is the memory of each rank's weights and KV cache.
    `used_bytes` returns the used memory of each GPU."""
    used = used_bytes() if gpus and rank_bytes else {}
    limits = {number: used[number] - int(_SHARE * rank_bytes) for number in gpus if number in used}
    return HeldMemory(pids, limits)


def why_held(
    held: HeldMemory,
    within_s: float = RETURNED_WITHIN_S,
    used_bytes: Callable[[], Mapping[int, int]] = _used_bytes,
) -> str:
    """Wait until the memory of a replica that has ended was returned, for at most `within_s`. Return what is
    still held, with a remedy, or an empty string if everything was returned."""
    deadline = time.monotonic() + within_s
    while problem := _held(held, used_bytes):
        if time.monotonic() >= deadline:
            return problem
        time.sleep(_POLL_S)
    return ""


def _held(held: HeldMemory, used_bytes: Callable[[], Mapping[int, int]]) -> str:
    if remaining := _members(held.pids):
        processes = ", ".join(f"{pid} (state {state})" for pid, state in remaining.items())
        return (
            f"its memory is not free, because these processes still exist although they were killed: "
            f"{processes}: a process in state D waits for a device or a disk, so check those in the kernel's "
            "log (dmesg); if it never ends, restart the machine"
        )
    used = used_bytes() if held.limits else {}
    for number, limit in held.limits.items():
        if (now := used.get(number, 0)) > limit:
            return (
                f"the memory of GPU {number} was not returned: {of_bytes(now)} are in use after the replica "
                f"has ended, and at most {of_bytes(limit)} were expected: find the process that uses the "
                "memory with nvidia-smi"
            )
    return ""


def _members(sessions: Sequence[int]) -> dict[int, str]:
    """Return the state of each process in these sessions, by process id. Zombies are not included, because
    they hold no memory."""
    found = {}
    for entry in Path("/proc").iterdir() if sessions else ():
        if not entry.name.isdecimal():
            continue
        try:
            # The command's name is in parentheses and may contain spaces (proc_pid_stat(5)).
            state, _, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):  # the process has ended
            continue
        if int(session) in sessions and state not in "ZX":
            found[int(entry.name)] = state
    return found
