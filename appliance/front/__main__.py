"""Runs a front process as `python -m appliance.front --channel FD`. The core starts the process and passes it
one end of a channel."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import socket
import sys

from engine.garbage import permanent_objects
from engine.parent_death import die_with_parent

NICENESS = 5
"""Nice value of front processes. A value above 0 gives the core and replicas priority, even when clients keep
every CPU busy."""


def main() -> int:
    """Run a front process until it stops and return its exit status."""
    # If the core has already exited, the closed channel reveals that.
    die_with_parent(os.getppid())
    parser = argparse.ArgumentParser(prog="python -m appliance.front", description=__doc__)
    parser.add_argument(
        "--channel", type=int, required=True, help="file descriptor of the channel to the core"
    )
    parser.add_argument("--name", default="front", help="name of this process in the log (default: front)")
    parser.add_argument(
        "--log-level",
        default="info",
        help="minimum level of log messages: debug, info, warning or error (default: info)",
    )
    arguments = parser.parse_args()
    # The core stops a front by sending StopFront or closing the channel. Ignore signals sent to the process
    # group (Ctrl-C, systemd's SIGTERM): they would cut off streams that the core lets finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICENESS)
    # A front encodes text in two threads of its own (appliance.text.fair_queue). Keep the tokenizers library
    # from starting more threads, one per CPU core.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    with permanent_objects():
        import msgspec
        import uvloop

        from appliance.front.process import run_front
        from appliance.host.logs import configure_logging
        from appliance.protocol import LogLevel
        from engine.client import return_freed_memory, return_memory_periodically

    return_freed_memory()
    return_memory_periodically()
    configure_logging(msgspec.convert(arguments.log_level, LogLevel), arguments.name)
    # Processing a token creates no reference cycles, so run the garbage collector less often than the default
    # of once per 700 new objects.
    gc.set_threshold(50_000, 20, 100)
    uvloop.run(run_front(socket.socket(fileno=arguments.channel)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
