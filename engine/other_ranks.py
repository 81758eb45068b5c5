"""Runs ranks 1 to N-1 of an N-rank replica whose rank 0 runs in the calling process.

A benchmark has no core to supervise the ranks, so `OtherRanks` starts their processes as the core would, and
detects when a process exits.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec

from engine.launch import describe_exit, new_rendezvous, remove_rendezvous, spawn_rank
from engine.messages import ReplicaSpec
from engine.rank_messages import Fatal, RankOutbound, Start, Stop
from engine.wire import Channel, socketpair

STOP_GRACE_S = 10.0
"""Time limit, in seconds, for a rank to exit after `Stop`. A rank that exceeds this limit is killed."""
LOSS_GRACE_S = 2.0
"""Time limit, in seconds, for rank 0 to call `stop` after another rank was lost. After this time, rank 0's
process exits, because it may be blocked in a collective that never returns, e.g. while loading the model."""


class OtherRanks:
    """Runs ranks 1 to N-1, each as `python -m engine.replica`, until `stop` is called.

    If a rank exits before that, the `on_exit` callback is called and the other ranks are killed. Rank 0 then
    raises RankFailureError, and its caller must call `explain` and `stop`. If `stop` is not called within
    LOSS_GRACE_S seconds, this process prints the reason and exits with code 1.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        """Start the ranks' processes. The calling thread must outlive them. Raises OSError if a process
        cannot be started."""
        self.spec = msgspec.structs.replace(spec, rendezvous=new_rendezvous())
        """The ranks' configuration, including the path of their rendezvous file."""
        self.plans: list[socket.socket] = []
        """Rank 0's ends of the plan channels to the other ranks, in rank order."""
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._channels: dict[int, Channel[RankOutbound]] = {}
        self._stopping, self._exited = threading.Event(), threading.Event()
        self._reason = ""
        self._on_exit: Callable[[str], None] = lambda reason: None
        self._watcher = threading.Thread(target=self._watch, name="engine-ranks", daemon=True)
        try:
            for rank in range(1, spec.tensor_parallel_size):
                self._start(rank)
        except OSError:
            self._kill()
            remove_rendezvous(self.spec)
            raise
        self._watcher.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of ranks 1 to N-1."""
        return [process.pid for process in self._processes.values()]

    def on_exit(self, callback: Callable[[str], None]) -> None:
        """Register a callback for the loss of a rank. If a rank exits before `stop` is called,
        `callback(reason)` is called at least once, on any thread. If a rank has already exited, the callback
        is called immediately.
        """
        self._on_exit = callback
        if self._exited.is_set():
            callback(self._reason)

    def explain(self, error: Exception) -> str:
        """Return why a rank was lost. `error` is the exception that rank 0 raised as a result."""
        self._exited.wait(LOSS_GRACE_S)
        return f"{self._reason} ({error})" if self._reason else str(error)

    def stop(self) -> None:
        """Send `Stop` to the ranks and return once they have been reaped. Ranks that do not exit in time are
        killed."""
        self._stopping.set()
        for channel in self._channels.values():
            channel.send(Stop())
        self._watcher.join(STOP_GRACE_S)
        if self._watcher.is_alive():
            self._kill()
            self._watcher.join()
        for channel in self._channels.values():
            channel.close()
        for plans in self.plans:
            plans.close()
        remove_rendezvous(self.spec)

    def _start(self, rank: int) -> None:
        plans, peer_plans = socketpair()
        self.plans.append(plans)
        with peer_plans:
            self._processes[rank], channel = spawn_rank("engine.replica")
            self._channels[rank] = channel
            channel.send(Start(self.spec, rank), (peer_plans.fileno(),))

    def _watch(self) -> None:
        """Reap the rank processes. Runs on the watcher's thread."""
        ranks = {os.pidfd_open(process.pid): rank for rank, process in self._processes.items()}
        poll = select.poll()
        for pidfd in ranks:
            poll.register(pidfd, select.POLLIN)
        while ranks:
            for pidfd, _ in poll.poll():
                poll.unregister(pidfd)
                os.close(pidfd)
                self._rank_exited(ranks.pop(pidfd))

    def _rank_exited(self, rank: int) -> None:
        process = self._processes[rank]
        returncode = process.wait()
        if self._stopping.is_set() or self._reason:
            return
        # The rank's last message may still be unread in the channel.
        fatal = [message for message in self._channels[rank].read() if isinstance(message, Fatal)]
        cause = f": {fatal[0].message}" if fatal else ""
        self._reason = f"rank {rank} (pid {process.pid}) {describe_exit(returncode)}{cause}"
        self._exited.set()
        self._on_exit(f"rank {rank} has exited")
        self._kill()
        if not self._stopping.wait(LOSS_GRACE_S):
            print(self._reason, file=sys.stderr, flush=True)
            os._exit(1)

    def _kill(self) -> None:
        for process in self._processes.values():
            # `send_signal` does nothing if the watcher has already reaped the process.
            process.send_signal(signal.SIGKILL)
