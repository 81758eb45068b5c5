"""The process of one rank: `python -m engine.replica --channel FD`.

Rank 0 plans the steps and communicates with the fronts and the core. The other ranks execute its plans. A
rank exits immediately if the core or another rank exits, or a step fails, so a replica never continues with
only some of its ranks.
"""

from __future__ import annotations

import argparse
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Literal, Protocol

from engine.core import LaunchedStep, StepRunner
from engine.garbage import permanent_objects, settle_garbage
from engine.logs import UtcFormatter, log_to_stderr
from engine.messages import ReplicaSpec
from engine.parent_death import die_with_parent
from engine.peer_watch import PeerWatch
from engine.plan import MemoryPlan
from engine.plan_channel import plan_channel
from engine.process_memory import bound_kernel_caches, return_memory_periodically
from engine.progress import ProgressCallback
from engine.rank_messages import Fatal, Progress, RankInbound, Ready, Start, Stop
from engine.sleeping import MemoryRunner, SleepControl
from engine.step_forecast import StepForecast
from engine.wire import Channel

if TYPE_CHECKING:
    from engine.parallel import Ranks
    from engine.runner import ModelRunner

log = logging.getLogger(__name__)

RANKS_TIMEOUT_S = 600.0
"""Maximum time, in seconds, that ranks wait for each other. It is long because one rank may read its weights
from a slower disk. If a rank has exited, the wait is shorter, because the core detects the exit."""
FAILURE_CHECK_S = 0.05
"""Interval, in seconds, at which ranks other than rank 0 check for a failed step when no plans arrive."""
FATAL_TIMEOUT_S = 1.0
"""Maximum time, in seconds, that a failing rank waits for the core to read the reason."""
LOSS_GRACE_S = 0.3
"""Time limit, in seconds, for a rank to exit after losing a peer. After a slightly longer time, the launcher
kills ranks that have not exited."""


def main() -> None:
    """Run as the rank given in the core's `Start` message, until the core sends Stop or closes the
    channel."""
    log_to_stderr(UtcFormatter("replica"))
    parser = argparse.ArgumentParser(prog="python -m engine.replica", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--channel", type=int, required=True, help="file descriptor of the channel to the core"
    )
    arguments = parser.parse_args()
    bound_kernel_caches()
    # If the core has already exited, the closed channel reveals that.
    die_with_parent(os.getppid())
    # Only the core stops a rank, by sending Stop or closing the channel. A signal to the whole process group,
    # from Ctrl-C or systemd, must not interrupt requests that the core lets finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control: Channel[RankInbound] = Channel(socket.socket(fileno=arguments.channel), RankInbound)
    start = _await_start(control)
    if start.spec.cpus:
        # Set the CPU affinity before starting other threads, so that all threads run on these CPUs and
        # allocate memory near them.
        os.sched_setaffinity(0, start.spec.cpus)
    ranks = start.spec.tensor_parallel_size
    log_to_stderr(UtcFormatter(start.spec.process_name(start.rank).replace("%", "%%")))
    code = 0
    try:
        runner = build_runner(start.spec, start.rank, control.send)
        count = ranks - 1 if start.rank == 0 else min(1, ranks - 1)
        peers = [socket.socket(fileno=control.take_fd()) for _ in range(count)]
        _watch_peers(start.rank, peers, runner.ranks)
        if runner.device.type == "cpu":
            # A rank on a GPU does not return freed memory to the operating system, because this could delay
            # the thread that launches its kernels.
            return_memory_periodically()
        code = _serve(start, control, peers, runner)
    except Exception as error:
        kind = _kind_of(error)
        if kind == "internal":
            # Other kinds of error need no traceback: the core logs the message, which includes the remedy.
            log.exception("the engine failed")
        control.send(Fatal(kind, f"{type(error).__name__}: {error}"))
        control.drain(FATAL_TIMEOUT_S)
        code = 1
    # Exit without waiting for other threads: those of torch.distributed or the GPU libraries can block a
    # normal exit.
    sys.stdout.flush()
    logging.shutdown()
    os._exit(code)


def _serve(
    start: Start, control: Channel[RankInbound], peers: list[socket.socket], runner: ModelRunner
) -> int:
    """Serve as a rank until the core sends Stop or closes the channel. Returns the exit code. `peers` are
    this rank's ends of the plan channels."""
    from engine.parallel import RankFailureError

    try:
        if start.rank == 0:
            _lead(start, control, peers, runner)
        else:
            settle_garbage()
            follow(control, plan_channel(peers[0].detach()), runner)
    except RankFailureError as error:
        # Send no Fatal message, because the core already knows the cause: the lost rank's exit.
        log.error("%s", error)
        return 1
    return 0


def _watch_peers(rank: int, peers: list[socket.socket], ranks: Ranks) -> None:
    """Exit this process when a peer's process exits. Rank 0 watches all other ranks, and each of them watches
    rank 0."""

    def leave(name: str) -> None:
        ranks.abandon(f"{name} has exited")
        # Normally, the main thread now raises RankFailureError or returns. If it is idle or blocked in a
        # collective, it does neither, so this thread ends the process.
        time.sleep(LOSS_GRACE_S)
        log.error("%s has exited; this rank exits too", name)
        logging.shutdown()
        os._exit(1)

    if peers:
        first = 1 if rank == 0 else 0
        PeerWatch({f"rank {first + i}": peer.fileno() for i, peer in enumerate(peers)}, leave)


def _lead(
    start: Start, control: Channel[RankInbound], peers: list[socket.socket], runner: ModelRunner
) -> None:
    """Serve as rank 0. `peers` are rank 0's ends of the plan channels to the other ranks."""
    from engine.assembly import build_core
    from engine.leader import LeaderLoop

    info = runner.info()
    engine = build_core(start.spec, info, runner, peers, runner.ranks.abandon)
    config = runner.config
    forecast = StepForecast(
        parameters=info.parameters,
        attention_width=config.layers * config.heads * config.head_dim,
        on_gpu=runner.device.type == "cuda",
    )
    settle_garbage()
    control.send(Ready(info))
    LeaderLoop(engine, control, forecast, SleepControl(engine, runner)).run()


class FollowingRunner(StepRunner, MemoryRunner, Protocol):
    """Executes rank 0's plans on another rank."""


def follow(control: Channel[RankInbound], plans: Channel[Any], runner: FollowingRunner) -> None:
    """Execute rank 0's plans until rank 0 or the core closes its channel. If a step or an operation fails,
    raises its exception."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(plans, selectors.EVENT_READ)
    unread: deque[LaunchedStep] = deque()
    while not (control.closed or plans.closed):
        selector.select(FAILURE_CHECK_S if unread else None)
        if any(isinstance(message, Stop) for message in control.read()):
            return
        for plan in plans.read():
            if isinstance(plan, MemoryPlan):
                while unread:
                    unread.popleft().wait()
                runner.change_memory(plan.asleep).result()
            else:
                unread.append(runner.launch(plan))
        # Check for failures even if no plan arrives: after a failed step, rank 0 may send none because it is
        # blocked in one of that step's collectives.
        while unread and unread[0].ready():
            unread.popleft().wait()


def build_runner(spec: ReplicaSpec, rank: int, progress: ProgressCallback) -> ModelRunner:
    """Load one rank of a replica, connect it to the others, and return its runner. Raises the same exceptions
    as `engine.runner.ModelRunner`, and RankFailureError if the other ranks do not join in time.
    """
    with permanent_objects():
        from engine import parallel
        from engine.device import select_device
        from engine.runner import ModelRunner

    progress(Progress("start"))
    size = spec.tensor_parallel_size
    device = select_device(spec.device, rank, size)
    backend = "nccl" if device.type == "cuda" else "gloo"
    ranks = parallel.join(size, rank, spec.rendezvous, backend, timeout_seconds=RANKS_TIMEOUT_S)
    return ModelRunner(spec, ranks, progress)


def _await_start(control: Channel[RankInbound]) -> Start:
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        selector.select()
        messages = control.read()
        # Check the channel again, in case the core has exited since sending Start. If the core exits later,
        # the operating system kills this process (`die_with_parent`).
        messages += control.read()
        if control.violation:
            log.error("the core sent an invalid message: %s", control.violation)
            sys.exit(1)
        if control.closed or any(isinstance(message, Stop) for message in messages):
            os._exit(0)
        for message in messages:
            if isinstance(message, Start):
                return message


def _kind_of(error: Exception) -> Literal["checkpoint", "memory", "device", "internal"]:
    import torch

    from engine.config import CheckpointError, UnsupportedError
    from engine.device import DeviceError

    if isinstance(error, CheckpointError | UnsupportedError):
        return "checkpoint"
    # torch raises a plain RuntimeError when a host memory allocation fails.
    out_of_memory = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    if out_of_memory or isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "memory"
    if isinstance(error, DeviceError | torch.AcceleratorError):
        return "device"
    return "internal"


if __name__ == "__main__":
    main()
