"""Channels: length-prefixed msgpack frames, with file descriptors, over Unix stream socketpairs.

Of a `Channel` only `drain` blocks. A step loop polls it (`read`), an event loop is told by it (`listen`).
End of file is the death notice of the other side. Frames are a 4-byte little-endian length and the msgpack
of one struct; descriptors travel with the first byte of their frame (`SCM_RIGHTS`), so they arrive in the
frames' order.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

Inbound = TypeVar("Inbound")

_HEADER = 4
_READ_BYTES = 1 << 18
_MOST_READS = 16
_MOST_FDS = 64
_DROPPED = -1

MOST_FRAME_BYTES = 64 << 20
"""A longer frame is a broken peer, unless more was agreed upon: the channel closes."""
MOST_BACKLOG_BYTES = 256 << 20
"""A peer that leaves more than this unread is taken for dead: bounded memory beats a patient writer."""


def socketpair() -> tuple[socket.socket, socket.socket]:
    """Two connected, non-blocking, close-on-exec Unix stream sockets with wide buffers."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in pair:
        end.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
    return pair


class Channel(Generic[Inbound]):
    """One end of a channel. `inbound` is the union of structs that may arrive, in frames of at most
    `most_frame_bytes`.

    Not thread-safe: one thread, or one event loop, owns it.
    """

    def __init__(self, sock: socket.socket, inbound: Any, most_frame_bytes: int = MOST_FRAME_BYTES) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._most_frame_bytes = most_frame_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(inbound)
        self._received = bytearray()
        self._received_fds: deque[int] = deque()
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._out_bytes = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writing = False
        self._on_message: Callable[[Inbound], None] | None = None
        self._on_close: Callable[[], None] | None = None
        self.closed = False
        """The peer is gone, or `close` was called."""

    def fileno(self) -> int:
        """The socket's descriptor, -1 once closed; for selectors."""
        return self._sock.fileno()

    @property
    def backlog_bytes(self) -> int:
        """Bytes that the peer has not taken yet."""
        return self._out_bytes

    # ── sending ──

    def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Queue `message` and write what fits now. Descriptors are duplicated, so the caller keeps (and
        closes) its own. On a closed channel nothing happens: the death notice is the reader's business."""
        if self.closed:
            return
        payload = self._encoder.encode(message)
        frame = len(payload).to_bytes(_HEADER, "little") + payload
        self._out.append((memoryview(frame), [os.dup(fd) for fd in fds]))
        self._out_bytes += len(frame)
        if not self._writing:
            self.flush()
        if self._out_bytes > MOST_BACKLOG_BYTES:
            self._end()

    def flush(self) -> bool:
        """Write what fits; True when nothing is left to write."""
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
                # The peer is gone. What it sent before is still to be read: reading meets the end of file.
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
        """Wait until the peer has taken everything, or is gone: True, or False once `timeout_s` are over."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.flush():
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            room = select.poll()
            room.register(self._sock, select.POLLOUT)
            room.poll(None if left_s is None else 1e3 * left_s)
        return True

    # ── receiving ──

    def read(self) -> list[Inbound]:
        """The whole messages that have arrived (a flood of them in parts, so that the reader gets to do other
        things); sets `closed` at the end of file or at a broken frame.

        Descriptors that came along wait for `take_fd`, in order.
        """
        messages: list[Inbound] = []
        for _ in range(_MOST_READS):
            if self.closed:
                break
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(_READ_BYTES, socket.CMSG_SPACE(4 * _MOST_FDS))
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
                # The kernel dropped a descriptor: this process has no number left for it. Its place stays
                # taken, so that no later message gets a descriptor that is not its own.
                self._received_fds.append(_DROPPED)
            self._received += data
            if not self._parse(messages) or not data:
                self._close_socket()
                break
            if len(data) < _READ_BYTES and not ancillary:
                break
        return messages

    def take_fd(self) -> int:
        """Return the next descriptor that arrived; the caller owns it. Raises LookupError when there is none,
        or when it was dropped because this process has too many files open."""
        fd = self._received_fds.popleft() if self._received_fds else _DROPPED
        if fd == _DROPPED:
            raise LookupError("no file descriptor came with this message")
        return fd

    def _parse(self, messages: list[Inbound]) -> bool:
        buffer, offset = self._received, 0
        while len(buffer) - offset >= _HEADER:
            length = int.from_bytes(buffer[offset : offset + _HEADER], "little")
            if length > self._most_frame_bytes:
                return False
            if len(buffer) - offset - _HEADER < length:
                break
            start = offset + _HEADER
            try:
                messages.append(self._decoder.decode(buffer[start : start + length]))
            except msgspec.DecodeError:
                return False
            offset = start + length
        if offset:
            del buffer[:offset]
        return True

    # ── on an event loop ──

    def listen(self, on_message: Callable[[Inbound], None], on_close: Callable[[], None]) -> None:
        """Have the running event loop call `on_message` for each message, in order, and `on_close` once."""
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_close = on_message, on_close
        self._loop.add_reader(self._sock.fileno(), self._readable)
        self._watch_writable(bool(self._out))

    def _readable(self) -> None:
        messages = self.read()
        if self._on_message is not None:
            for message in messages:
                self._on_message(message)
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

    # ── the end ──

    def close(self) -> None:
        """Close this end: the peer reads what was written, then the end of file. `on_close` is not called."""
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
        # Descriptors of messages that were parsed are still to be taken; the rest would leak.
        self._sock.close()

    def release_fds(self) -> None:
        """Close descriptors that nobody took."""
        _close_all(list(self._received_fds))
        self._received_fds.clear()


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
