"""Records which functions of the product run in a process, and when.

Python imports this module when it starts if the module's folder is in `PYTHONPATH`. `APPLIANCE_TRACE` names a
folder with a one-byte file named `phase`. While that byte is not 0, each process records the first call of
each function in each phase: it appends the phase, the time (from a clock that all processes share), the file
and the function to its own file in the folder.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any

ROOT = os.path.abspath(f"{__file__}/../../../..") + os.sep
PACKAGES = tuple(f"{ROOT}{package}{os.sep}" for package in ("appliance", "engine", "kernels", "store"))


def install(folder: str) -> None:
    with open(f"{folder}/phase", "rb") as opened:
        phases = mmap.mmap(opened.fileno(), 1, prot=mmap.PROT_READ)
    lines = os.open(f"{folder}/{os.getpid()}.trace", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    recorded: set[tuple[int, CodeType]] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        phase, code = phases[0], frame.f_code
        if phase and event == "call" and (phase, code) not in recorded:
            recorded.add((phase, code))
            if code.co_filename.startswith(PACKAGES):
                name = code.co_filename.removeprefix(ROOT)
                os.write(lines, f"{phase} {time.monotonic_ns()} {name} {code.co_qualname}\n".encode())

    threading.setprofile(profile)
    sys.setprofile(profile)


if "APPLIANCE_TRACE" in os.environ:
    install(os.environ["APPLIANCE_TRACE"])
