"""Channels between processes. A channel transfers length-prefixed msgpack frames and file descriptors over a
Unix stream socketpair. A step loop polls a `Channel` with `read`; on an event loop, `listen` registers
callbacks. Only `drain` blocks. End of file means that the peer has exited or closed its end. A frame consists
of its length (4 bytes, little-endian) and one struct in msgpack. File descriptors are sent with the first
byte of their frame (`SCM_RIGHTS`), so they arrive in frame order.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

log = logging.getLogger(__name__)

Inbound = TypeVar("Inbound")

_HEADER = 4
_DROPPED = -1
"""Placeholder for a file descriptor that the kernel dropped instead of delivering it."""
_READ_BYTES = 1 << 16
"""Size of the buffer for one read. A larger buffer would be mapped anew for each read if malloc is configured
to return large blocks to the operating system (`engine.process_memory`)."""
_MAX_READS = 16
_MAX_FDS = 64

MAX_FRAME_BYTES = 64 << 20
"""Default maximum frame size in bytes. A longer frame is a protocol violation, so
the channel is closed."""
MAX_BACKLOG_BYTES = 256 << 20
"""Maximum number of unsent bytes. If the peer reads too slowly and more bytes are queued, the channel is
closed to limit memory use."""


def socketpair() -> tuple[socket.socket, socket.socket]:
    """Return two connected Unix stream sockets with large buffers. The sockets are non-blocking and
    close-on-exec."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in pair:
        end.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
    return pair


def encode_frame(encoder: msgspec.msgpack.Encoder, message: Any) -> bytes:
    """Return a message's frame: its length and its msgpack encoding."""
    payload = encoder.encode(message)
    return len(payload).to_bytes(_HEADER, "little") + payload


class Channel(Generic[Inbound]):
    """One end of a channel. `inbound` is the union of the structs that this end accepts, in frames of at most
    `max_frame_bytes` bytes.

    Channels are not thread-safe: only one thread or event loop may use one.
    """

    def __init__(self, sock: socket.socket, inbound: Any, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._most_frame_bytes = max_frame_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(inbound)
        self._received = bytearray()
        self._received_fds: deque[int] = deque()
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._out_bytes = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writing = False
        self._on_message: Callable[[Inbound], None] = lambda message: None
        self._on_close: Callable[[], None] | None = None
        self.closed = False
        """Whether the channel was closed: by the peer, by a protocol violation, or by `close`."""
        self.violation = ""
        """Why the peer's last frame was invalid, or empty if it was valid."""

    def fileno(self) -> int:
        """Return the socket's file descriptor for use in selectors, or -1 if the channel is closed."""
        return self._sock.fileno()

    @property
    def backlog_bytes(self) -> int:
        """Number of queued bytes that the socket has not accepted yet."""
        return self._out_bytes

    # ── sending ──

    def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Queue `message` and write as many bytes as the socket accepts. File descriptors are duplicated; the
        caller must still close its own copies. If the channel is closed, the message is silently dropped,
        because the reader detects the end of file. Raises OSError, and sends nothing, if the descriptors
        cannot be duplicated because too many files are open.
        """
        if self.closed:
            return
        frame = encode_frame(self._encoder, message)
        self._out.append((memoryview(frame), _duplicate_all(fds)))
        self._out_bytes += len(frame)
        if not self._writing:
            self.flush()
        if self._out_bytes > MAX_BACKLOG_BYTES:
            self._end()

    def flush(self) -> bool:
        """Write as many queued bytes as the socket accepts. Returns whether the queue is empty."""
        while self._out and not self.closed:
            view, fds = self._out[0]
            try:
                if fds:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                    sent = self._sock.sendmsg([view], [rights])
                else:
                    sent = self._sock.send(view)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                # The peer has closed its end. Its earlier messages can still be read; `read` then reports the
                # end of file.
                self._drop_output()
                return True
            _close_all(fds)
            fds.clear()
            self._out_bytes -= sent
            if sent == len(view):
                self._out.popleft()
            else:
                self._out[0] = (view[sent:], fds)
        self._watch_writable(bool(self._out))
        return not self._out

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until all queued bytes are written or the channel closes. Returns False if this takes longer
        than `timeout_s` seconds."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.flush():
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            writable = select.poll()
            writable.register(self._sock, select.POLLOUT)
            writable.poll(None if left_s is None else 1e3 * left_s)
        return True

    # ── receiving ──

    def read(self) -> list[Inbound]:
        """Return the complete messages that have arrived. Sets `closed` at the end of file or after an
        invalid frame. A call reads a limited number of bytes, so that the caller's loop remains responsive.
        File descriptors that arrived with the messages are returned by `take_fd`, in order.
        """
        messages: list[Inbound] = []
        for _ in range(_MAX_READS):
            if self.closed:
                break
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(_READ_BYTES, socket.CMSG_SPACE(4 * _MAX_FDS))
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data, ancillary, flags = b"", [], 0
            for level, kind, rights in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
                    self._received_fds.extend(fds)
            if flags & socket.MSG_CTRUNC:
                # The kernel dropped a descriptor because this process has too many open files. The
                # placeholder preserves the order, so that later messages get the correct descriptors.
                self._received_fds.append(_DROPPED)
            self._received += data
            if not self._parse(messages) or not data:
                self._close_socket()
                break
            if len(data) < _READ_BYTES and not ancillary:
                break
        return messages

    def take_fd(self) -> int:
        """Return the next received file descriptor, which the caller must close. Raises LookupError if there
        is none, or if the kernel dropped it because this process has too many open files.
        """
        fd = self._received_fds.popleft() if self._received_fds else _DROPPED
        if fd == _DROPPED:
            raise LookupError("no file descriptor was received with this message")
        return fd

    def _parse(self, messages: list[Inbound]) -> bool:
        buffer, offset = self._received, 0
        while len(buffer) - offset >= _HEADER:
            length = int.from_bytes(buffer[offset : offset + _HEADER], "little")
            if length > self._most_frame_bytes:
                self.violation = (
                    f"a frame has {length} bytes, but at most {self._most_frame_bytes} are allowed"
                )
                return False
            if len(buffer) - offset - _HEADER < length:
                break
            start = offset + _HEADER
            try:
                messages.append(self._decoder.decode(buffer[start : start + length]))
            except msgspec.DecodeError as error:
                self.violation = str(error)
                return False
            offset = start + length
        if offset:
            del buffer[:offset]
        return True

    # ── on an event loop ──

    def listen(self, on_message: Callable[[Inbound], None], on_close: Callable[[], None]) -> None:
        """Register callbacks on the running event loop. `on_message` is called for each message in order, and
        `on_close` once when the channel is closed."""
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_close = on_message, on_close
        self._loop.add_reader(self._sock.fileno(), self._readable)
        self._watch_writable(bool(self._out))

    def deliver(self) -> None:
        """Pass the complete messages that have arrived to `on_message`. An error that it raises for a message
        is logged, and the messages that follow are delivered, because they may belong to other requests."""
        for message in self.read():
            try:
                self._on_message(message)
            except Exception:
                log.exception("failed to process a message of type %s", type(message).__name__)

    def _readable(self) -> None:
        self.deliver()
        if self.closed:
            self._notify_close()

    def _watch_writable(self, wanted: bool) -> None:
        if self._loop is None or wanted == self._writing or self.closed:
            return
        self._writing = wanted
        if wanted:
            self._loop.add_writer(self._sock.fileno(), self.flush)
        else:
            self._loop.remove_writer(self._sock.fileno())

    # ── closing ──

    def close(self) -> None:
        """Close this end without calling `on_close`. The peer can still read the messages already written,
        followed by the end of file."""
        self._on_close = None
        self._close_socket()

    def _end(self) -> None:
        self._close_socket()
        self._notify_close()

    def _notify_close(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def _drop_output(self) -> None:
        for _, fds in self._out:
            _close_all(fds)
        self._out.clear()
        self._out_bytes = 0
        self._watch_writable(False)

    def _close_socket(self) -> None:
        if self.closed:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._sock.fileno())
        self._drop_output()
        self.closed = True
        # Descriptors of decoded messages stay open until `take_fd` or `release_fds` is called.
        self._sock.close()

    def release_fds(self) -> None:
        """Close all received file descriptors that `take_fd` has not returned."""
        _close_all(list(self._received_fds))
        self._received_fds.clear()


def _duplicate_all(fds: tuple[int, ...]) -> list[int]:
    duplicates: list[int] = []
    try:
        for fd in fds:
            duplicates.append(os.dup(fd))
    except OSError:
        _close_all(duplicates)
        raise
    return duplicates


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
