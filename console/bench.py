"""`python -m console.bench`: measures the console's resource usage. The console runs on a pseudo-terminal of
120×40 characters and shows 500 requests, 16,384 blocks, 8 GPUs and 20 tenants at 2 Hz. It decodes snapshots
recorded from the demo; no service is involved. The following are printed beside their limits: the time to the
first frame with measured values and, for each screen, the console's CPU usage, the bytes per second sent to
the terminal, and the time from a key press to the first byte of output. The exit code is 1 if a limit is
exceeded."""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import select
import signal
import statistics
import struct
import sys
import termios
import time
from pathlib import Path
from typing import NamedTuple

from console.keys import SCREENS
from console.themes import ThemeName

_COLUMNS, _ROWS = 120, 40
_SETTLE_S = 3.0
_START_S = 120.0
"""Timeout for the first frame, long enough for a busy machine."""
_TABLES = ("requests", "gpus", "models", "tenants", "audit", "logs")
"""Screens that show tables with more than one row."""
_ROW_KEYS, _PAUSE_KEYS = "jk", "pp"
"""Keys that always change the screen. After a key that changes nothing, the measurement would wait for the
next snapshot's output."""
_LIMITS = {"cpu": 0.05, "bytes_per_s": 15_000.0, "echo_p95_ms": 50.0}
_START_LIMITS_S = {"total": 1.2, "after imports": 0.5}
_IMPORTED = re.compile(rb"imports ended")
"""The child process prints this once its imports are done."""
_MEASURED = re.compile(rb"waiting \xc2\xb7 [1-9][0-9,]* running")
"""Matches a measured value on the Overview screen: the number of running requests. Frames drawn before the
first snapshot do not contain it."""


_MAX_TEXT_BYTES = 100
"""Length, in bytes, of the longest text that `Terminal.wait_for` can find."""


class ScreenCosts(NamedTuple):
    """The console's measured resource usage while it shows one screen."""

    screen: str
    cpu: float
    """The console's CPU usage, in CPU seconds per second."""
    bytes_per_s: float
    echo_p95_ms: float


class Terminal:
    """A console on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        """Run a Python module with its arguments."""
        self._pid, self._descriptor = pty.fork()
        if self._pid == 0:
            os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
            os.execv(sys.executable, [sys.executable, "-m", *arguments])
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))

    def read_for(self, seconds: float) -> int:
        """Read all output for the given time and return its size in bytes."""
        end, count = time.monotonic() + seconds, 0
        while (left := end - time.monotonic()) > 0:
            if select.select([self._descriptor], [], [], left)[0]:
                try:
                    count += len(os.read(self._descriptor, 1 << 16))
                except OSError:  # The console has exited.
                    break
        return count

    def wait_for(self, text: re.Pattern[bytes]) -> None:
        """Read until the output matches `text`. Raises OSError if the console exits, and TimeoutError after
        `_START_S` seconds."""
        end, read = time.monotonic() + _START_S, b""
        while text.search(read) is None:
            if not select.select([self._descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"the console did not show {text.pattern!r} within {_START_S:.0f} s")
            read = read[-_MAX_TEXT_BYTES:] + os.read(self._descriptor, 1 << 16)

    def cpu_s(self) -> float:
        """Return the CPU time of the process."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def press(self, key: str) -> float:
        """Press a key and return the time until the console sends output, in milliseconds."""
        while select.select([self._descriptor], [], [], 0.02)[0]:
            os.read(self._descriptor, 1 << 16)
        start = time.monotonic()
        os.write(self._descriptor, key.encode())
        select.select([self._descriptor], [], [], 5.0)
        return (time.monotonic() - start) * 1000

    def close(self) -> None:
        """Stop the console."""
        os.kill(self._pid, signal.SIGTERM)
        end = time.monotonic() + 5.0
        while time.monotonic() < end and os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            self.read_for(0.05)
        os.close(self._descriptor)


def measure(screens: dict[str, str], theme: str, seconds: float, presses: int) -> list[ScreenCosts]:
    """Measure the console's resource usage on each screen. `screens` maps each screen's name to the key that
    opens the screen."""
    terminal = Terminal("console.bench", "--child", theme)
    terminal.wait_for(_MEASURED)
    results = []
    for name, key in screens.items():
        terminal.press(key)
        terminal.read_for(_SETTLE_S)
        cpu, start = terminal.cpu_s(), time.monotonic()
        count = terminal.read_for(seconds)
        span = time.monotonic() - start
        cpu = (terminal.cpu_s() - cpu) / span
        keys = _ROW_KEYS if name in _TABLES else _PAUSE_KEYS
        # An even number of presses of the pause key leaves updates running.
        echoes = [terminal.press(keys[number % 2]) for number in range(presses + presses % 2)]
        results.append(ScreenCosts(name, cpu, count / span, statistics.quantiles(echoes, n=20)[-1]))
    terminal.close()
    return results


def start_times(theme: str, starts: int) -> dict[str, float]:
    """Measure how long `appliance console --demo` takes to show its first measured value. Return two medians,
    in seconds: the time from the start of its process, and the time from the end of its imports."""
    found: dict[str, list[float]] = {name: [] for name in _START_LIMITS_S}
    for _ in range(starts):
        began = time.monotonic()
        terminal = Terminal("appliance.cli", "console", "--demo", "--theme", theme)
        terminal.wait_for(_MEASURED)
        found["total"].append(time.monotonic() - began)
        terminal.close()
        terminal = Terminal("console.bench", "--start", theme)
        terminal.wait_for(_IMPORTED)
        began = time.monotonic()
        terminal.wait_for(_MEASURED)
        found["after imports"].append(time.monotonic() - began)
        terminal.close()
    return {name: statistics.median(times) for name, times in found.items()}


def _start(theme: ThemeName) -> None:
    """Run `appliance console --demo` and print a line once its imports are done."""
    from console.fake import FakeSource
    from console.run import run

    os.write(1, _IMPORTED.pattern)
    run(FakeSource(), write=False, theme=theme, keys=None)


def _child(theme: ThemeName) -> None:
    """Run a console on prepared snapshots, so that only the console's own work is measured."""
    import asyncio
    from collections.abc import Sequence

    import msgspec

    from appliance.actions.parameters import ResumeTenant, SuspendTenant
    from appliance.snapshot import Snapshot
    from console.app import ConsoleApp
    from console.fake import FIXED_TIME, FakeSource
    from console.source import MAX_ROWS, ListName, Row

    fake = FakeSource(requests=500, blocks=16_384, gpus=8, tenants=20, now=FIXED_TIME)
    recorded = [msgspec.json.encode(fake.step()) for _ in range(60)]

    async def fill_the_lists() -> None:
        for _ in range(MAX_ROWS // 2):
            await fake.act(SuspendTenant(name="search"))
            await fake.act(ResumeTenant(name="search"))

    asyncio.run(fill_the_lists())

    class Recording(FakeSource):
        position = 0

        async def next(self) -> Snapshot:
            await asyncio.sleep(self.interval_s)
            snapshot = msgspec.json.decode(recorded[self.position % len(recorded)], type=Snapshot)
            self.position += 1
            snapshot.at = FIXED_TIME + self.position * self.interval_s
            for batch in snapshot.batches:
                msgspec.structs.force_setattr(batch, "at", snapshot.at)
            return snapshot

        async def rows(self, name: ListName) -> Sequence[Row]:
            return (await fake.rows(name))[:MAX_ROWS]

    source = Recording(requests=1, blocks=256, gpus=1, tenants=1, now=FIXED_TIME)
    ConsoleApp(source, theme=theme).run()


def main() -> int:
    """Print the measurements. Return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--theme", default="ansi")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each measurement")
    parser.add_argument("--presses", type=int, default=40, help="number of key presses to measure")
    parser.add_argument("--starts", type=int, default=5, help="number of starts to measure")
    parser.add_argument("--child", metavar="THEME", help=argparse.SUPPRESS)
    parser.add_argument("--start", metavar="THEME", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        _child(flags.child)
        return 0
    if flags.start:
        _start(flags.start)
        return 0
    exceeded = False

    def verdict(within: bool) -> str:
        nonlocal exceeded
        exceeded |= not within
        return "ok" if within else "EXCEEDED"

    for name, measured in start_times(flags.theme, flags.starts).items():
        limit = _START_LIMITS_S[name]
        print(f"first frame, {name}: {measured:.2f} s, limit {limit:.1f} s  {verdict(measured <= limit)}")
    screens = {name: key for key, name, _ in SCREENS}
    print(f"{'screen':<12}{'cpu':>8}{'bytes/s':>10}{'echo p95':>12}")
    for one in measure(screens, flags.theme, flags.seconds, flags.presses):
        within = all(getattr(one, name) <= limit for name, limit in _LIMITS.items())
        row = f"{one.screen:<12}{one.cpu:>8.1%}{one.bytes_per_s:>10,.0f}{one.echo_p95_ms:>9.0f} ms"
        print(f"{row}  {verdict(within)}")
    print(
        f"{'limit':<12}{_LIMITS['cpu']:>8.0%}{_LIMITS['bytes_per_s']:>10,.0f}"
        f"{_LIMITS['echo_p95_ms']:>9.0f} ms"
    )
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
