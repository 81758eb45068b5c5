"""The processes of ranks 1 to N-1 of a replica whose rank 0 runs in the calling process.

A benchmark runs rank 0 itself. The core, which supervises the ranks of a served replica, is replaced by
`OtherRanks`: it starts the same rank processes and notices when one of them ends.
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
from engine.messages import Fatal, RankOutbound, ReplicaSpec, Start, Stop
from engine.wire import Channel, socketpair

STOP_GRACE_S = 10.0
"""How long the ranks may take to exit after `Stop` before they are killed."""
LOSS_GRACE_S = 2.0
"""How long rank 0 may take to report the loss of a rank by itself. After that this process ends, because rank
0 may wait in a collective that never returns, for example while it loads the model."""


class OtherRanks:
    """Runs ranks 1 to N-1, each as `python -m engine.replica`, until `stop`.

    If a rank exits before `stop`, the callback of `on_lost` is called and the other ranks are killed. Rank 0
    raises RankLost then, and should call `explain` and `stop`. If it does not call `stop` in time, the reason
    is printed and the process ends with exit code 1.
    """

    def __init__(self, spec: ReplicaSpec) -> None:
        """Start the processes. Must be called on a thread that outlives them. Raises OSError if one cannot be
        started."""
        self.spec = msgspec.structs.replace(spec, rendezvous=new_rendezvous())
        """The configuration of all ranks, with the path of the file through which they find each other."""
        self.plans: list[socket.socket] = []
        """Rank 0's ends of the plan channels, in order of ranks."""
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._channels: dict[int, Channel[RankOutbound]] = {}
        self._stopping, self._lost = threading.Event(), threading.Event()
        self._reason = ""
        self._on_lost: Callable[[str], None] = lambda reason: None
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

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback(reason)`, on any thread and at least once, when a rank exits before `stop`, or now
        if one has exited already."""
        self._on_lost = callback
        if self._lost.is_set():
            callback(self._reason)

    def explain(self, error: Exception) -> str:
        """Return why a rank was lost, for an exception of rank 0 that may be a consequence of the loss."""
        self._lost.wait(LOSS_GRACE_S)
        return f"{self._reason} ({error})" if self._reason else str(error)

    def stop(self) -> None:
        """Ask the ranks to exit, kill those that do not exit in time, and return when all are reaped."""
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
        """Reap the processes. Runs on the watcher's thread."""
        ranks = {os.pidfd_open(process.pid): rank for rank, process in self._processes.items()}
        poll = select.poll()
        for pidfd in ranks:
            poll.register(pidfd, select.POLLIN)
        while ranks:
            for pidfd, _ in poll.poll():
                poll.unregister(pidfd)
                os.close(pidfd)
                self._exited(ranks.pop(pidfd))

    def _exited(self, rank: int) -> None:
        process = self._processes[rank]
        returncode = process.wait()
        if self._stopping.is_set() or self._reason:
            return
        # The rank's last message may still be unread in the channel.
        fatal = [message for message in self._channels[rank].read() if isinstance(message, Fatal)]
        cause = f": {fatal[0].message}" if fatal else ""
        self._reason = f"rank {rank} (pid {process.pid}) {describe_exit(returncode)}{cause}"
        self._lost.set()
        self._on_lost(f"rank {rank} has ended")
        self._kill()
        if not self._stopping.wait(LOSS_GRACE_S):
            print(self._reason, file=sys.stderr, flush=True)
            os._exit(1)

    def _kill(self) -> None:
        for process in self._processes.values():
            # The watcher may have reaped the process already; `send_signal` checks that.
            process.send_signal(signal.SIGKILL)
