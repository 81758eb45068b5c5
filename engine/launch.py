"""Starts and stops a replica's processes. The core imports this module, which therefore does not load torch.

Every rank is a new Python interpreter (`python -m engine.replica`), not a fork. The launcher monitors each
rank through a pidfd. If a rank exits, the others exit too or are killed by the launcher. Otherwise, they
would wait forever in a collective operation.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.child_log import ChildLog
from engine.memory_kills import count_memory_kills, memory_kill_note
from engine.messages import ReplicaSpec
from engine.rank_messages import AskBlocks, Attach, CancelSequences, RankOutbound, Sleep, Start, Stop, Wake
from engine.wire import Channel, socketpair

_EXIT_GRACE_S = 0.5
"""Time limit, in seconds, for a rank to exit after closing its channel or after another rank has exited. This
includes the time to abort GPU kernels that are waiting for the lost rank. A rank that exceeds this limit is
killed."""
_STOP_CHECK_S = 1.0
"""Interval, in seconds, between checks for stopped ranks (SIGSTOP). A rank that is stopped in two consecutive
checks is killed, because the other ranks are waiting for it."""

RANK_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    # NVLink multicast is off unless the service's environment turns it on.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""The ranks' default environment variables. Variables that are already set take precedence."""

OnMessage = Callable[[int, RankOutbound], None]
OnEnd = Callable[[str], None]


def module_command(module: str) -> list[str]:
    """Return the command that runs a module in a new interpreter. Use it with `module_environment`.

    The -P option prevents imports from the operator's working directory.
    """
    return [sys.executable, "-P", "-m", module]


def module_environment() -> dict[str, str]:
    """Return this process's environment, with PYTHONPATH set so that a child process imports the same
    modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def run_module(module: str, question: bytes, timeout_s: float) -> bytes:
    """Run a module in a new interpreter with `question` on standard input and return the module's standard
    output.

    Raises OSError if the process cannot be started, subprocess.TimeoutExpired after `timeout_s`, and
    subprocess.CalledProcessError if the process fails.
    """
    return subprocess.run(
        module_command(module),
        input=question,
        capture_output=True,
        timeout=timeout_s,
        env=module_environment(),
        check=True,
    ).stdout


def spawn_rank(
    module: str, gpus: tuple[str, ...] = (), log: ChildLog | None = None
) -> tuple[subprocess.Popen[bytes], Channel[RankOutbound]]:
    """Start `python -m module` as a rank's process and return the process and the channel to it. `gpus` lists
    the UUIDs of all ranks' GPUs. The process sees exactly these GPUs, because each rank accesses the memory
    of the other ranks' GPUs. If the list is empty, all GPUs stay visible. `log` receives a copy of the rank's
    log. The operating system kills the rank when the calling thread ends. Raises OSError if the process
    cannot be started.
    """
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    ours, theirs = socketpair()
    try:
        process = subprocess.Popen(
            [*module_command(module), "--channel", str(theirs.fileno())],
            pass_fds=(theirs.fileno(), *([log.descriptor] if log else [])),
            stdin=subprocess.DEVNULL,
            env={**RANK_ENVIRONMENT, **module_environment(), **visible, **(log.environment if log else {})},
            start_new_session=True,
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, Channel(ours, RankOutbound)


def new_rendezvous() -> str:
    """Create a folder for a rendezvous file and return the file's path. The ranks create the file and use it
    to find each other."""
    return os.path.join(tempfile.mkdtemp(prefix="appliance-ranks-"), "store")


def remove_rendezvous(spec: ReplicaSpec) -> None:
    """Remove a replica's rendezvous file, and its folder if it is empty."""
    if spec.rendezvous:
        path = Path(spec.rendezvous)
        with contextlib.suppress(OSError):
            path.unlink()
        with contextlib.suppress(OSError):
            path.parent.rmdir()


class _Rank:
    """A rank's process and the channel to it."""

    def __init__(
        self, rank: int, process: subprocess.Popen[bytes], channel: Channel[RankOutbound], log: ChildLog
    ) -> None:
        self.rank = rank
        self.log = log
        self.process = process
        self.channel = channel
        self.pidfd = os.pidfd_open(process.pid)
        self.returncode: int | None = None


class ReplicaGroup:
    """A replica's running processes. `on_message(rank, message)` is called on the event loop for each
    `Progress`, `Ready`, `Report`, `LongStep`, `MemoryChanged` and `Fatal` message. `on_end(reason)` is called
    once, after every rank has exited and been reaped.
    """

    def __init__(
        self, spec: ReplicaSpec, on_message: OnMessage, on_end: OnEnd, module: str = "engine.replica"
    ) -> None:
        self.spec = spec
        self._module = module
        self._on_message = on_message
        self._on_end = on_end
        self._ranks: list[_Rank] = []
        self._reason = ""
        self._first_exit = ""
        self._memory_kills = count_memory_kills()
        self._stopped: set[int] = set()
        """Ranks that the last check found stopped by a signal."""
        self._ended = asyncio.Event()

    @classmethod
    def launch(
        cls, spec: ReplicaSpec, on_message: OnMessage, on_end: OnEnd, module: str = "engine.replica"
    ) -> ReplicaGroup:
        """Start the ranks, each as `python -m module`. Raises OSError if a process cannot be started.

        Must be called on the event loop's thread, and that thread must not end: the operating system kills
        the ranks when the thread that started them ends.
        """
        group = cls(spec, on_message, on_end, module)
        group._start()
        return group

    @property
    def pids(self) -> list[int]:
        """Process ids, in rank order."""
        return [rank.process.pid for rank in self._ranks]

    def attach_front(self, front: str) -> int:
        """Create a data channel between a front process and rank 0. Returns the file descriptor of the
        front's end, which the caller must send to the front and then close.
        """
        ours, theirs = socketpair()
        self._ranks[0].channel.send(Attach(front), (theirs.fileno(),))
        theirs.close()
        return ours.detach()

    def cancel_request(self, request_id: str) -> None:
        """Cancel all sequences of a request."""
        self._ranks[0].channel.send(CancelSequences(request_id))

    def ask_blocks(self) -> None:
        """Ask for the state of the KV blocks. Rank 0 answers with `BlockUse`."""
        self._ranks[0].channel.send(AskBlocks())

    def change_memory(self, asleep: bool) -> None:
        """Put the replica to sleep if `asleep` is true, otherwise wake it. The replica answers with
        `MemoryChanged`."""
        self._ranks[0].channel.send(Sleep() if asleep else Wake())

    async def stop(self, grace_s: float = 5.0) -> None:
        """Send `Stop` to all ranks and return once they have been reaped. Ranks still running after `grace_s`
        seconds are killed."""
        self._reason = self._reason or "stopped"
        for rank in self._ranks:
            rank.channel.send(Stop())
        try:
            await asyncio.wait_for(self._ended.wait(), grace_s)
        except TimeoutError:
            self.kill(f"killed because it did not stop within {grace_s:g} s")
            await self._ended.wait()

    def kill(self, reason: str) -> None:
        """Kill every rank immediately. `on_end(reason)` is called once they have been reaped."""
        self._reason = self._reason or reason
        for rank in self._ranks:
            if rank.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)

    def _start(self) -> None:
        size = self.spec.tensor_parallel_size
        spec = self.spec
        if size > 1 and not spec.rendezvous:
            spec = self.spec = msgspec.structs.replace(spec, rendezvous=new_rendezvous())
        plan_pairs = [socketpair() for _ in range(size - 1)]
        try:
            for rank in range(size):
                self._ranks.append(self._spawn(rank))
        except OSError:
            self._on_end = lambda reason: None  # The caller learns of the end from the exception.
            self.kill("a rank could not be started")
            if not self._ranks:
                remove_rendezvous(spec)
            raise
        finally:
            for position, member in enumerate(self._ranks):
                plan_sockets = (
                    tuple(pair[0].fileno() for pair in plan_pairs)
                    if position == 0
                    else (plan_pairs[position - 1][1].fileno(),)
                )
                member.channel.send(Start(spec, position), plan_sockets)
            for pair in plan_pairs:
                for end in pair:
                    end.close()
        if size > 1:
            asyncio.get_running_loop().call_later(_STOP_CHECK_S, self._check_stopped)

    def _spawn(self, number: int) -> _Rank:
        log = ChildLog(self.spec.process_name(number))
        try:
            process, channel = spawn_rank(self._module, self.spec.gpus, log)
        except OSError:
            log.close()
            raise
        log.listen()
        rank = _Rank(number, process, channel, log)
        channel.listen(lambda message: self._on_message(number, message), lambda: self._closed(rank))
        asyncio.get_running_loop().add_reader(rank.pidfd, self._exited, rank)
        return rank

    def _closed(self, rank: _Rank) -> None:
        """Kill a rank that has closed its channel but does not exit within the grace period. The exit status
        explains the failure better than the closed channel does, so it is worth waiting for."""

        def give_up() -> None:
            if rank.returncode is None:
                self.kill(f"rank {rank.rank} (pid {rank.process.pid}) closed its channel")

        asyncio.get_running_loop().call_later(_EXIT_GRACE_S, give_up)

    def _exited(self, rank: _Rank) -> None:
        asyncio.get_running_loop().remove_reader(rank.pidfd)
        # The channel may still contain the rank's last message, a Fatal message.
        rank.channel.deliver()
        rank.returncode = rank.process.wait()
        os.close(rank.pidfd)
        rank.channel.close()
        rank.log.finish()
        reason = f"rank {rank.rank} (pid {rank.process.pid}) {describe_exit(rank.returncode)}"
        if not self._reason:
            reason += memory_kill_note(rank.returncode, self._memory_kills)
        self._first_exit = self._first_exit or reason
        # A rank that loses a peer also exits, and on a busy machine its exit may be detected first. Only a
        # rank that was killed by a signal is certain to be the cause of the failure.
        if rank.returncode < 0:
            self._reason = self._reason or reason
        asyncio.get_running_loop().call_later(_EXIT_GRACE_S, self.kill, self._first_exit)
        if all(other.returncode is not None for other in self._ranks) and not self._ended.is_set():
            self._ended.set()
            remove_rendezvous(self.spec)
            self._on_end(self._reason or self._first_exit)

    def _check_stopped(self) -> None:
        if self._ended.is_set():
            return
        asyncio.get_running_loop().call_later(_STOP_CHECK_S, self._check_stopped)
        before = self._stopped
        self._stopped = {rank.rank for rank in self._ranks if rank.returncode is None and _is_stopped(rank)}
        for number in self._stopped & before:
            rank = self._ranks[number]
            self._reason = self._reason or f"rank {number} (pid {rank.process.pid}) was stopped by a signal"
            # The other ranks detect this rank's exit, and then exit too.
            signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)


def _is_stopped(rank: _Rank) -> bool:
    """Return whether a rank's process is currently stopped by a signal."""
    try:
        stop = os.waitid(os.P_PID, rank.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the process has already been reaped
        return False
    return stop is not None


def describe_exit(returncode: int) -> str:
    """Describe how a process ended. The description follows the process's name in a message, e.g. "was killed
    by SIGKILL"."""
    if returncode < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-returncode, f'signal {-returncode}')}"
    return f"exited with code {returncode}"
