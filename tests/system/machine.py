"""A separate machine with a real systemd: systemd-nspawn over an overlay of this machine's root file system.

All files that it writes, and all its mounts, are in memory. They disappear when it stops, even if the tests
are killed. Its only network interface is loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("systemd-nspawn", "unshare", "setpriv", "nsenter")
_BOOT_S = 300
_HIERARCHIES = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup/unified")]
_ALWAYS_NEW = ("tmp", "run", "dev", "proc", "sys")
"""Top-level directories that nspawn mounts itself. Host files below them are visible only if they are
bind-mounted."""

_FILES = {
    "/etc/systemd/journald.conf.d/test.conf": "[Journal]\nStorage=volatile\nRateLimitIntervalSec=0\n",
    # Disable the cleanup at boot, because directories that are bind-mounted below /tmp do not belong to the
    # machine.
    "/etc/tmpfiles.d/tmp.conf": "",
}

_MACHINE = """
set -e
for cgroup in $CGROUPS; do mkdir "$cgroup"; echo $$ >"$cgroup/cgroup.procs"; done
mount -t tmpfs -o mode=755,size=2g tmpfs "$FOLDER"
mkdir "$FOLDER"/{changed,work,root}
mount -t overlay -o "lowerdir=/,upperdir=$FOLDER/changed,workdir=$FOLDER/work" overlay "$FOLDER/root"
cd "$FOLDER/root"
while IFS= read -r directory; do chmod o+x "$directory"; done <<<"$REACHABLE"
# Nothing of this machine's own: no mounts, no settings, no state.
: >etc/fstab
rm -rf var/log/journal etc/appliance var/lib/appliance opt/appliance
cp -R "$STAGE"/. .
exec setpriv --pdeathsig KILL systemd-nspawn --quiet --register=no --link-journal=no --private-network \
  --console=pipe --directory=. "$@" --boot systemd.unit=sysinit.target
"""


class BootError(Exception):
    """Raised if a machine did not boot. The message contains the machine's console output."""


def refusal() -> str:
    """Return the reason why a machine cannot be booted here, or "" if it can."""
    if os.geteuid():
        return "only root may mount an overlay and boot a machine"
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        return f"{' and '.join(missing)} not found (Debian: apt-get install systemd-container)"
    if not os.path.exists("/usr/lib/systemd/systemd") and not os.path.exists("/lib/systemd/systemd"):
        return "there is no systemd to boot"
    probe = (
        "mount -t tmpfs tmpfs /mnt && mkdir /mnt/a /mnt/b /mnt/c && "
        "mount -t overlay -o lowerdir=/,upperdir=/mnt/a,workdir=/mnt/b overlay /mnt/c"
    )
    done = subprocess.run(["unshare", "--mount", "sh", "-c", probe], capture_output=True, text=True)
    return f"no overlay can be mounted: {done.stderr.strip()}" if done.returncode else ""


class Machine:
    """A booted machine."""

    def __init__(self, process: subprocess.Popen[bytes], init: int, log: Path) -> None:
        self.process = process
        self.init = init
        """Process id, on the host, of the machine's init process."""
        self.log = log
        self.root = Path(f"/proc/{init}/root")

    def run(
        self, *command: str, check: bool = True, timeout_s: float = 600
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as root in the machine."""
        done = subprocess.run(
            ["nsenter", f"--target={self.init}", "--all", *command],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if check and done.returncode:
            raise AssertionError(f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def systemctl(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("systemctl", *words, check=check)

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Return the properties of a unit."""
        lines = self.systemctl("show", unit, "--property", ",".join(names)).stdout.splitlines()
        return dict(line.partition("=")[::2] for line in lines)

    def journal(self, *words: str) -> str:
        return self.run("journalctl", "--no-pager", "--output=cat", *words).stdout

    def appliance(self, *words: str) -> Any:
        """Return the JSON that a command of the product prints."""
        return json.loads(self.run("/opt/appliance/bin/appliance", *words, "--json").stdout)

    def processes(self, user: str) -> list[psutil.Process]:
        """Return all processes of a user in the machine."""
        uid = int(self.run("id", "--user", user).stdout)
        found = []
        for process in psutil.Process(self.init).children(recursive=True):
            try:
                if process.uids().real == uid:
                    found.append(process)
            except psutil.NoSuchProcess:
                pass
        return found

    def wait_until(self, true: Callable[[], Any], timeout_s: float, description: str) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (value := true()):
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"timed out after {timeout_s:g} s waiting for {description}; the "
                    f"journal:\n{self.journal()}"
                )
            time.sleep(0.05)
        return value


@contextmanager
def machine(folder: Path, files: dict[str, str]) -> Iterator[Machine]:
    """Boot a machine with these files, keyed by absolute path. Inside it, the product's environment is in
    /opt/appliance.

    Raises BootError.
    """
    stage, log = folder / "stage", folder / "machine.log"
    for name, text in {**_FILES, **files}.items():
        path = stage / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (stage / "opt").mkdir(parents=True, exist_ok=True)
    (stage / "opt/appliance").symlink_to(sys.prefix)
    shown = [Path(path).resolve() for path in (ROOT, sys.prefix, sys.base_prefix)]
    bound = [path for path in shown if _hidden(path)]
    reachable = {
        str(parent).lstrip("/") or "."
        for path in shown
        if path not in bound
        for parent in (path, *path.parents)
    }
    (folder / "root").mkdir()
    command = ["unshare", "--mount", "--propagation", "private", "bash", "-c", _MACHINE, "machine"]
    cgroups: list[Path] = []
    if not os.path.isdir("/run/systemd/system"):
        # Without systemd on this host, nothing creates a scope for the machine. Create a cgroup per machine:
        # machines that share a cgroup kill each other's services.
        command.append("--keep-unit")
        name = f"appliance-test-{os.getpid()}-{time.monotonic_ns()}"
        cgroups = [parent / name for parent in _HIERARCHIES if (parent / "cgroup.procs").exists()]
    environment = {
        **os.environ,
        "FOLDER": str(folder / "root"),
        "STAGE": str(stage),
        "REACHABLE": "\n".join(sorted(reachable)),
        "CGROUPS": " ".join(map(str, cgroups)),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *(f"--bind-ro={path}" for path in bound)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield _booted(process, log)
    finally:
        process.terminate()  # this powers the machine off
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for cgroup in cgroups:
            for path, _, _ in os.walk(cgroup, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(path)


def _hidden(path: Path) -> bool:
    """Return whether this path is invisible in the machine, because it is not on the root file system under
    the overlay."""
    return path.parts[1] in _ALWAYS_NEW or path.stat().st_dev != os.stat("/").st_dev


def _booted(process: subprocess.Popen[bytes], log: Path) -> Machine:
    deadline = time.monotonic() + _BOOT_S
    while time.monotonic() < deadline and process.poll() is None:
        for child in psutil.Process(process.pid).children():
            found = Machine(process, child.pid, log)
            asked = ("systemctl", "is-system-running", "--wait")
            if found.run(*asked, check=False).stdout.strip() in ("running", "degraded"):
                return found
        time.sleep(0.05)
    raise BootError(f"the machine did not boot:\n{log.read_text(errors='replace')}")
