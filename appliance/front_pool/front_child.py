"""Manages one front process from start to exit: spawns it, exchanges messages with it, and kills it if
necessary."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable

from appliance.channel.front_messages import FrontToCore
from appliance.protocol import LogLevel
from engine.client import Channel, ChildLog, module_command, module_environment, socketpair
from engine.memory_kills import count_memory_kills, memory_kill_note

_DYING_S = 0.5


class FrontChild:
    """A running front process."""

    def __init__(
        self,
        module: str,
        name: str,
        log_level: LogLevel,
        on_message: Callable[[FrontToCore], None],
        on_exit: Callable[[str], None],
    ) -> None:
        """Spawn the process. `on_message` is called with each message from the process, and `on_exit` with
        the reason for its exit. If OSError is raised, everything opened so far has been released."""
        self.kill_reason = ""
        """Why the process is being killed, or an empty string if it is not."""
        self._on_exit = on_exit
        self._memory_kills = count_memory_kills()
        with contextlib.ExitStack() as undo:
            ours, theirs = socketpair()
            undo.callback(ours.close)
            self._log = ChildLog(name)
            undo.callback(self._log.close)
            with theirs:
                self._process = subprocess.Popen(
                    [
                        *module_command(module),
                        *("--channel", str(theirs.fileno())),
                        *("--name", name),
                        *("--log-level", log_level),
                    ],
                    pass_fds=(theirs.fileno(), self._log.descriptor),
                    stdin=subprocess.DEVNULL,
                    env={**module_environment(), **self._log.environment},
                    start_new_session=True,
                )
            undo.callback(self._process.wait)
            undo.callback(self._process.kill)
            self._pidfd = os.pidfd_open(self._process.pid)
            undo.pop_all()
        self.pid = self._process.pid
        self._log.listen()
        self.channel: Channel[FrontToCore] = Channel(ours, FrontToCore)
        """The core's end of the process's control channel."""
        self.channel.listen(on_message, lambda: self.kill_soon("it closed its channel to the core"))
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    def kill(self, reason: str) -> None:
        """Kill the process immediately, unless it has exited."""
        if self._pidfd >= 0:
            self.kill_reason = self.kill_reason or reason
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def kill_soon(self, reason: str) -> None:
        """Kill the process unless it exits within half a second. The process is probably exiting already, and
        its exit status would say more about the cause than SIGKILL."""
        asyncio.get_running_loop().call_later(_DYING_S, self.kill, reason)

    def _exited(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        # The channel may still contain messages sent by the process before it exited.
        self.channel.deliver()
        self.channel.close()
        self.channel.release_fds()
        self._log.finish()
        returncode = self._process.wait()
        os.close(self._pidfd)
        self._pidfd = -1
        how = f"killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"exit code {returncode}"
        how += memory_kill_note(returncode, self._memory_kills)
        self._on_exit(self.kill_reason or how)
