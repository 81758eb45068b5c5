"""`python -m appliance.text.template_worker --channel FD`: renders one model's chat templates for a front
process.

A template is a program that comes with a checkpoint, so the kernel enforces its limits: RLIMIT_AS for memory
and, for CPU time, a timer whose signal no Python code handles. This process cannot write files or start other
processes. It exits when its channel is closed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import IO

import msgspec

from appliance.text.chat_template import ChatTemplate
from appliance.text.template_messages import (
    ChatTemplateError,
    Compile,
    Failed,
    FromWorker,
    Rendered,
    TemplateBoundError,
    ToWorker,
)

_HEADER = 4
_MAX_FILES = 16
"""Maximum number of open files, large enough for Python to import a module that a template needs, such as an
encoding."""
_DECODER = msgspec.msgpack.Decoder(ToWorker)


def main() -> int:
    """Reply to the front process's messages until the channel is closed."""
    parser = argparse.ArgumentParser(prog="python -m appliance.text.template_worker", description=__doc__)
    parser.add_argument(
        "--channel", type=int, required=True, help="file descriptor of the channel to the front process"
    )
    parser.add_argument("--memory", type=int, required=True, help="memory limit of the process in bytes")
    arguments = parser.parse_args()
    for end in (signal.SIGINT, signal.SIGTERM):
        # Ignore SIGINT and SIGTERM. The front process stops this process by closing the channel.
        signal.signal(end, signal.SIG_IGN)
    channel = socket.socket(fileno=arguments.channel)
    channel.setblocking(True)
    frames = channel.makefile("rb")
    _limit_resources(arguments.memory)
    templates: ChatTemplate | None = None
    while (frame := _receive(frames)) is not None:
        reply: FromWorker
        try:
            message = _DECODER.decode(frame)
            signal.setitimer(signal.ITIMER_PROF, message.max_cpu_s)
            if isinstance(message, Compile):
                templates = ChatTemplate(message.sources, message.special_tokens)
                reply = Rendered("")
            elif templates is None:
                return 1
            else:
                variables = json.loads(message.variables)
                text = templates.render(message.messages, message.add_generation_prompt, variables=variables)
                reply = Rendered(text)
            data = msgspec.msgpack.encode(reply)
        except Exception as error:
            # A hostile template can raise any exception, including MemoryError.
            data = msgspec.msgpack.encode(_failure(error))
        del frame
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            channel.sendall(len(data).to_bytes(_HEADER, "little") + data)
        except OSError:
            return 0
    return 0


def _limit_resources(memory: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = {
        resource.RLIMIT_AS: pages * os.sysconf("SC_PAGE_SIZE") + memory,
        resource.RLIMIT_NOFILE: _MAX_FILES,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def _receive(frames: IO[bytes]) -> bytes | None:
    """Return the next frame's payload, or None if the channel was closed."""
    try:
        header = frames.read(_HEADER)
        size = int.from_bytes(header, "little")
        payload = frames.read(size)
    except OSError:
        return None
    return payload if len(header) == _HEADER and len(payload) == size else None


def _failure(error: Exception) -> Failed:
    if isinstance(error, MemoryError):
        return Failed(
            "the chat template exceeds its memory limit for these messages; send shorter messages",
            is_bound=True,
        )
    if isinstance(error, ChatTemplateError):
        return Failed(str(error), isinstance(error, TemplateBoundError))
    return Failed(f"the chat template cannot render these messages: {type(error).__name__}")


if __name__ == "__main__":
    sys.exit(main())
