"""Tests that a rank detects the exit of a peer's process through its channel, and mistakes no other event for
an exit."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys

from engine.peer_watch import PeerWatch
from engine.wire import socketpair


def test_a_killed_peer_is_reported_once_even_with_unread_data() -> None:
    ours, theirs = socketpair()
    disconnected: queue.Queue[str] = queue.Queue()
    code = f"import os, time; os.write({theirs.fileno()}, b'data'); print(flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=(theirs.fileno(),), stdout=subprocess.PIPE
    )
    theirs.close()
    others = socketpair()
    watch = PeerWatch({"rank 1": ours.fileno(), "rank 2": others[0].fileno()}, disconnected.put)
    assert process.stdout is not None
    process.stdout.readline()
    assert disconnected.empty()
    os.kill(process.pid, signal.SIGKILL)
    assert disconnected.get(timeout=600) == "rank 1"
    process.wait()
    process.stdout.close()
    assert ours.recv(10) == b"data"
    watch.close()
    assert disconnected.empty()


def test_a_watch_that_is_closed_reports_nothing() -> None:
    ours, theirs = socketpair()
    disconnected: queue.Queue[str] = queue.Queue()
    before = len(os.listdir("/proc/self/fd"))
    watch = PeerWatch({"rank 1": ours.fileno()}, disconnected.put)
    watch.close()
    theirs.close()
    assert disconnected.empty()
    assert len(os.listdir("/proc/self/fd")) == before - 1
