"""Verifies that a stopped replica has freed its memory: its processes no longer exist, and the driver
attributes no GPU memory to them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from appliance.background import in_own_thread
from appliance.models.gpus import gpu_processes

log = logging.getLogger(__name__)

_RETURNED_WITHIN_S = 10.0
"""How long a stopped replica's memory may take to be freed after the replica's processes have exited."""
_CHECKED_WITHIN_S = 15.0
"""Time limit for checking whether a replica's memory was freed, including NVML calls that may hang."""
_POLL_S = 0.1

GpuProcesses = Callable[[], Mapping[int, Collection[int]]]
"""Returns the ids of the processes using each GPU's memory, by GPU number."""


async def find_held(pids: Collection[int], processes_on_gpus: GpuProcesses = gpu_processes) -> str:
    """Call `held_reason` in a thread and return its result. If the check fails or hangs, return a message
    saying so."""
    try:
        return await in_own_thread(
            lambda: held_reason(pids, processes_on_gpus=processes_on_gpus), _CHECKED_WITHIN_S
        )
    except TimeoutError:
        return (
            f"its processes were stopped, but the GPU driver did not respond within {_CHECKED_WITHIN_S:g} s, "
            "so it is not known whether their memory was freed: check the GPUs with nvidia-smi"
        )
    except Exception as error:
        log.exception("could not check whether the GPU memory was freed")
        return f"its processes were stopped, but it is not known whether their memory was freed: {error}"


def held_reason(
    pids: Collection[int],
    within_s: float = _RETURNED_WITHIN_S,
    processes_on_gpus: GpuProcesses = gpu_processes,
) -> str:
    """Wait at most `within_s` seconds for a stopped replica's memory to be freed. Return a description of the
    memory still held, with a remedy, or an empty string if all of it was freed. This function blocks, so it
    must not run on the event loop.

    `pids` holds the process ids of the replica's ranks. Each rank leads a session that also contains the
    processes it starts. In a container, NVML may list no processes or use the host's process ids. In both
    cases, only the processes are checked: the kernel frees a process's GPU memory when the process ends.
    """
    deadline = time.monotonic() + within_s
    while problem := _held(pids, processes_on_gpus):
        if time.monotonic() >= deadline:
            return problem
        time.sleep(_POLL_S)
    return ""


def _held(pids: Collection[int], processes_on_gpus: GpuProcesses) -> str:
    if remaining := _members(pids):
        processes = ", ".join(f"{pid} (state {state})" for pid, state in remaining.items())
        return (
            f"its memory was not freed, because these processes were killed but still exist: {processes}. "
            "A process in state D is waiting for a device or disk, so check the kernel log (dmesg) for "
            "device and disk errors. If a process never exits, restart the machine"
        )
    for number, listed in processes_on_gpus().items() if pids else ():
        if held := sorted(set(pids) & set(listed)):
            return (
                f"the memory of GPU {number} was not freed: the driver still lists process {held[0]}, "
                "although it has ended. Check the GPU with nvidia-smi, and check the kernel log (dmesg). If "
                "the process stays in the list, restart the machine"
            )
    return ""


def _members(sessions: Collection[int]) -> dict[int, str]:
    """Return the state of each process in these sessions, by process id. Zombies hold no memory, so they are
    omitted unless some of their threads are still running."""
    found = {}
    for entry in Path("/proc").iterdir() if sessions else ():
        if not entry.name.isdecimal():
            continue
        try:
            # The command's name is in parentheses and may contain spaces (proc_pid_stat(5)).
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        state, session, threads = fields[0], int(fields[3]), int(fields[17])
        if session in sessions and (state not in "ZX" or (state == "Z" and threads > 1)):
            found[int(entry.name)] = state
    return found
