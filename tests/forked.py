"""Starts `python -m module` as a fork of a process that has already imported torch and the service, which
saves one to three seconds of CPU time for each process.

`ForkedPopen` replaces `subprocess.Popen` for such commands. The process is a child of the caller, with the
command line, descriptors, environment and session of the arguments. It differs from a new interpreter in what
is already imported and in interpreter options. A service that is started in this way also forks its fronts
and ranks. Tests that do not use this module start processes as the product does.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

from engine import launch

ROOT = Path(__file__).resolve().parents[1]
_PR_SET_CHILD_SUBREAPER = 36
_MAX_REQUEST_BYTES = 1 << 20
_MAX_DESCRIPTORS = 64
_MAX_COMMAND_LINE_BYTES = 4000
_SERVICES = ("appliance.cli", "tests.core.service")
"""The modules whose fronts and ranks are forked too."""


class _Request(NamedTuple):
    """What the forked process needs, apart from its descriptors."""

    command: list[str]
    """The command line, without the interpreter's path."""
    environment: dict[str, str]
    folder: str
    session: bool
    """Whether the process starts a new session."""
    descriptors: list[int]
    """Numbers that the descriptors must have in the process."""


# ── in the tests ──


class ForkedPopen(subprocess.Popen[Any]):
    """A process that runs `[sys.executable, (-P,) -m, module, …]`."""

    def _execute_child(self, *arguments: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments  # type: ignore[misc]
        words = [str(word) for word in given["args"] if word != "-P"]
        assert words[:2] == [sys.executable, "-m"], f"only Python modules can be forked, not {words}"
        environment = os.environ if given["env"] is None else given["env"]
        pipes = [given[end] for end in ("p2cread", "c2pwrite", "errwrite")]
        targets = {number: number if end == -1 else end for number, end in enumerate(pipes)}
        targets |= {descriptor: descriptor for descriptor in given["pass_fds"]}
        request = _Request(
            command=[str(word) for word in given["args"]],
            environment={str(name): str(value) for name, value in environment.items()},
            folder=str(given["cwd"] or Path.cwd()),
            session=bool(given["start_new_session"]),
            descriptors=list(targets),
        )
        self.pid = _server().fork(request, list(targets.values()))
        self._child_created = True
        pipe_ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*[given[end] for end in pipe_ends])  # type: ignore[attr-defined]


class _Server:
    """The channel to the process that is forked."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def fork(self, request: _Request, descriptors: list[int]) -> int:
        """Start a process with these descriptors and return its id."""
        with _adopting_orphans():
            socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)
            answer = self._channel.recv(64)
        assert answer, "the process to fork has exited; see its output"
        return int(answer)


_running: list[_Server] = []


def _server() -> _Server:
    """Return the server of this process. Start it if necessary."""
    if not _running:
        ours, theirs = _channel()
        # Triton decides on import whether it interprets or compiles kernels.
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        # The last argument reserves memory for the command lines of the forked processes.
        command = [sys.executable, "-m", "tests.forked", str(theirs.fileno()), " " * _MAX_COMMAND_LINE_BYTES]
        subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        _running.append(_Server(ours))
    return _running[0]


def _channel() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a channel to a server."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        ours.setsockopt(socket.SOL_SOCKET, option, _MAX_REQUEST_BYTES)
    return ours, theirs


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Become the parent of every descendant whose parent exits during the block."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_FORKING = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedPopen})
"""Replaces the module `subprocess`."""


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """Fork the ranks that `engine.launch` starts during the block."""
    with patch.object(launch, "subprocess", _FORKING):
        yield


# ── in the process that is forked ──


def _await_request(channel: socket.socket) -> _Request:
    """Fork for each request. Returns in the forked process."""
    while True:
        body, descriptors, _, _ = socket.recv_fds(channel, _MAX_REQUEST_BYTES, _MAX_DESCRIPTORS)
        if not body:
            os._exit(0)
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            # The new process is forked here, so that the tests become its parent when this process exits.
            between = os.getpid()
            pid = os.fork()
            if pid:
                os.write(writing, str(pid).encode())
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            for end in (channel.detach(), reading, writing):
                os.close(end)
            request = _Request(*json.loads(body))
            _set_descriptors(dict(zip(request.descriptors, descriptors, strict=True)))
            return request
        os.waitpid(between, 0)
        channel.send(os.read(reading, 64))
        for descriptor in (reading, writing, *descriptors):
            os.close(descriptor)


def _set_descriptors(wanted: dict[int, int]) -> None:
    """Give each descriptor the wanted number, and close all others."""
    above = max(*wanted, *wanted.values()) + 1
    copies = {number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for number, descriptor in wanted.items()}
    os.closerange(0, above)
    for number, copy in copies.items():
        os.dup2(copy, number)
        os.close(copy)


def _set_command_line(words: list[str]) -> None:
    """Change the command line that `/proc/PID/cmdline` contains."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(stat[45]), int(stat[46])
    line = b"\0".join(word.encode() for word in words)
    # A line without a final null byte is read as one string.
    line = line[: end - begin - 1].ljust(end - begin, b"\0")
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(begin)
        memory.write(line)


def _fork_children() -> None:
    """Start a server for the fronts and ranks of the service that this process is about to run."""
    import appliance.front_pool.front_child
    from tests import forked

    ours, theirs = _channel()
    if os.fork() == 0:
        ours.close()
        os.setsid()
        _run(_await_request(theirs))
        sys.exit()
    theirs.close()
    forked._running.append(forked._Server(ours))
    for module in (launch, appliance.front_pool.front_child):
        module.subprocess = forked._FORKING  # type: ignore[attr-defined]


def _run(request: _Request) -> None:
    """Run the requested module in this process."""
    os.chdir(request.folder)
    if request.session:
        os.setsid()
    os.environ.clear()
    os.environ.update(request.environment)
    sys.path[:0] = request.environment.get("PYTHONPATH", "").split(os.pathsep)
    words = [word for word in request.command if word != "-P"]
    module = words[2]
    if module in _SERVICES:
        _fork_children()
    _set_command_line(request.command)
    sys.argv = words[2:]
    with warnings.catch_warnings():
        # Python warns that the module has already been imported.
        warnings.simplefilter("ignore", RuntimeWarning)
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _serve(channel: socket.socket) -> None:
    import torch._dynamo  # noqa: F401
    import triton  # noqa: F401

    import appliance.cli.app
    import appliance.cli.service_commands
    import appliance.core.process
    import appliance.front.__main__
    import appliance.front.process  # noqa: F401
    import engine.assembly
    import engine.launch_enumeration
    import engine.replica
    import engine.runner  # noqa: F401

    gc.freeze()
    _run(_await_request(channel))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
