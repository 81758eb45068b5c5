"""Tests that commands send and show no data if the service's directory in /tmp, or the process behind a
socket, belongs to another user; and that mistakes on the command line change nothing in a running service.

In the tests of ownership, the commands run as one unprivileged user and the attacker runs as another. Only
root can start both.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.actions.parameters import CancelRequest, DrainService, ResumeService
from appliance.client import AdminClient, AdminError
from appliance.protocol import DrainStatus
from store.requests import RequestLog, RequestRow
from store.schemas import HISTORY
from store.writer import Writer
from tests.system.attacks.conftest import Target
from tests.system.commands import run_as
from tests.system.service import APPLIANCE, CALL_TIMEOUT_S, Service
from tests.system.test_deaths import Stream

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to run as several users"),
]

CALLER = 20_000 + os.getpid() % 20_000
ATTACKER = CALLER + 20_000
"""Users who differ from those of a concurrent test run, because the commands look for the service in a
directory that is named after the caller."""
SECRET = "ak-secret-of-the-caller"
TALKING = (
    ("status",),
    ("drain", "--yes", "--no-wait"),
    ("resume",),
    ("config", "show"),
    ("config", "reload"),
    ("tenants", "list"),
    ("tenants", "create", "t"),
    ("keys", "create", "--name", "k"),
    ("keys", "revoke", "key_1", "--yes"),
    ("peers", "list"),
    ("requests", "cancel", "req-1", "--yes"),
    ("requests", "show", "req-1"),
    ("models", "list"),
    ("models", "load", "m"),
    ("models", "prune", "--yes"),
    ("alerts", "list"),
    ("alerts", "ack", "alert-1"),
    ("usage",),
    ("logs",),
    ("top",),
    ("chat", "a secret prompt"),
    ("bench", "--requests", "1", "--prompt-tokens", "1", "--output-tokens", "1", "--workers", "1"),
    ("backup", "backup"),
    ("doctor",),
)
READING = (("requests",), ("requests", "--id", "req-forged"), ("audit", "list"), ("audit", "verify"))

_LISTENER = """
import os, socket, sys
os.setgroups([])
os.setresgid(UID, UID, UID)
os.setresuid(UID, UID, UID)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o666)
listener.listen(64)
print(flush=True)
while True:
    client, _ = listener.accept()
    sys.stdout.buffer.write(client.recv(65536))
    sys.stdout.buffer.flush()
    client.close()
"""


def run(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command as `CALLER` with the folder as its home directory."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    homes = {name: str(folder) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")}
    fixed = {"APPLIANCE_ADMIN_KEY": SECRET, "HF_HUB_OFFLINE": "1"}
    return run_as(CALLER, kept | homes | fixed | environ, *words)


class Listener:
    """An attacker's process that listens on a Unix socket and records what it receives."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LISTENER.replace("UID", str(ATTACKER)), str(path)],
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"\n"

    def stop(self) -> bytes:
        """Stop the process and return the data that it received."""
        self._process.send_signal(signal.SIGKILL)
        received, _ = self._process.communicate()
        return received


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder in /tmp that every user can access."""
    path = Path(tempfile.mkdtemp(prefix="attack-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def trap() -> Iterator[Path]:
    """As the attacker, create the run directory in /tmp where the caller's commands look for the service. Its
    lock file names a forged request log."""
    path = Path(f"/tmp/appliance-{CALLER}")
    shutil.rmtree(path, ignore_errors=True)  # the directory may be left over from a test run that was killed
    path.mkdir()
    try:
        forge_run_dir(path, path / "state")
        yield path
    finally:
        shutil.rmtree(path)


def forge_run_dir(path: Path, state: Path) -> None:
    """As the attacker, create `path` with a lock file that names a state directory with a request log."""
    state.mkdir()
    writer = Writer(state / "history.db", HISTORY, synchronous="NORMAL")
    writer.start()
    RequestLog(writer).end(
        RequestRow(
            request_id="req-forged",
            created_at=time.time(),
            finished_at=time.time(),
            tenant="forged",
            endpoint="/v1/x",
            status=200,
        )
    )
    writer.close()
    (path / "service.lock").write_text(json.dumps({"pid": 1, "state_dir": str(state)}))
    for name in (path, state, *state.iterdir(), path / "service.lock"):
        os.chown(name, ATTACKER, ATTACKER)
        name.chmod(0o755 if name.is_dir() else 0o644)


@pytest.mark.parametrize("explicit", [False, True], ids=["by default", "by --run-dir"])
def test_nothing_is_sent_to_another_users_directory(folder: Path, trap: Path, explicit: bool) -> None:
    os.chown(folder, CALLER, CALLER)
    named = ("--run-dir", str(trap)) if explicit else ()
    listeners = [Listener(trap / name) for name in ("admin.sock", "api.sock")]
    for words in (*TALKING, *READING):
        done = run(folder, *words, *named)
        said = done.stdout + done.stderr
        assert done.returncode == 1, (words, said)
        assert f"uid {ATTACKER}" in said and "APPLIANCE_SERVICE_USER" in said, (words, said)
        assert "forged" not in done.stdout, words
    assert [listener.stop() for listener in listeners] == [b"", b""]


def test_the_owner_of_a_directory_is_trusted_if_it_is_named_as_the_service_user(
    folder: Path, trap: Path
) -> None:
    listener = Listener(trap / "admin.sock")
    done = run(folder, "status", APPLIANCE_SERVICE_USER=str(ATTACKER))
    assert done.returncode == 1 and "did not respond" in done.stderr
    assert SECRET.encode() in listener.stop()


def test_another_users_process_that_listens_on_our_socket_gets_no_data(folder: Path) -> None:
    """Another user's process can listen on the caller's socket if the socket was passed on to that process,
    or if a user who once had write access to the directory moved the socket there."""
    run_dir, elsewhere = folder / "run", folder / "elsewhere"
    for path, uid in ((run_dir, CALLER), (elsewhere, ATTACKER)):
        path.mkdir()
        os.chown(path, uid, uid)
    listeners = []
    for name in ("admin.sock", "api.sock"):
        listeners.append(Listener(elsewhere / name))
        (elsewhere / name).rename(run_dir / name)
    for words in TALKING:
        done = run(folder, *words, "--run-dir", str(run_dir))
        said = done.stdout + done.stderr
        assert done.returncode == 1 and f"runs as uid {ATTACKER}" in said, (words, said)
    assert [listener.stop() for listener in listeners] == [b"", b""]


@pytest.mark.parametrize("how", ["link", "group", "others"])
def test_a_directory_that_others_can_change_is_refused(folder: Path, how: str) -> None:
    run_dir = folder / "run"
    run_dir.mkdir()
    os.chown(run_dir, CALLER, CALLER)
    if how == "link":
        (folder / "link").symlink_to(run_dir)
        os.lchown(folder / "link", ATTACKER, ATTACKER)
        run_dir = folder / "link"
    else:
        run_dir.chmod(0o775 if how == "group" else 0o757)
    expected = "is a symbolic link" if how == "link" else "is writable by other users"
    for words in (("status",), ("chat", "a secret prompt"), ("requests",)):
        done = run(folder, *words, "--run-dir", str(run_dir))
        assert done.returncode == 1 and expected in done.stderr + done.stdout


def test_a_database_of_another_user_is_not_read(folder: Path, trap: Path) -> None:
    state = folder / "state"
    shutil.copytree(trap / "state", state)
    os.chown(state, CALLER, CALLER)
    os.chown(state / "history.db", ATTACKER, ATTACKER)
    refused = run(folder, "requests", "--state-dir", str(state))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"history.db belongs to uid {ATTACKER}" in refused.stderr
    os.chown(state / "history.db", CALLER, CALLER)
    assert "req-forged" in run(folder, "requests", "--state-dir", str(state)).stdout


def test_a_directory_that_root_gave_to_the_services_user_is_trusted(folder: Path) -> None:
    """Under systemd, /run/appliance does not belong to the operator, because the service runs as a separate
    user."""
    place = Path(tempfile.mkdtemp(prefix="appl-", dir="/run"))
    place.chmod(0o755)
    run_dir = place / "run"
    run_dir.mkdir()
    try:
        forge_run_dir(run_dir, place / "state")
        listener = Listener(run_dir / "admin.sock")
        status, requests = (run(folder, name, "--run-dir", str(run_dir)) for name in ("status", "requests"))
        assert SECRET.encode() in listener.stop()
        assert "did not respond" in status.stderr, status
        assert requests.returncode == 0 and "req-forged" in requests.stdout, requests
    finally:
        shutil.rmtree(place)


_AS_INSTALLED = """
set -e
mount -t tmpfs -o mode=755 none /run
mkdir -p /run/systemd/system /run/appliance
cp "$2" /run/forged.lock
test -z "$1" || mount --bind "$1" /run/appliance
mount -t tmpfs -o mode=1777 none /tmp
mkdir /tmp/appliance-0
cp /run/forged.lock /tmp/appliance-0/service.lock
chown -R "$3" /tmp/appliance-0
mount -t tmpfs -o mode=755 none /etc/systemd/system
touch /etc/systemd/system/appliance.service
exec "$4" status --json
"""
"""Runs `appliance status` as root in a mount namespace in which the service's unit is installed in systemd's
directory, and in which another user has created root's default directory in /tmp. If $1 is not empty, it is a
run directory that is mounted at /run/appliance."""


def status_as_installed(running: Service, run_dir: str) -> subprocess.CompletedProcess[str]:
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _AS_INSTALLED, "sh"]
    arguments = [run_dir, str(running.run_dir / "service.lock"), str(ATTACKER), APPLIANCE]
    return subprocess.run(
        [*command, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
    )


def test_systemds_service_precedes_a_directory_in_tmp_and_is_not_replaced(attacked: Target) -> None:
    running = attacked.running
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to create a mount namespace")
    found = status_as_installed(running, str(running.run_dir))
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["pid"] == running.process.pid
    stopped = status_as_installed(running, "")
    assert stopped.returncode == 1
    assert stopped.stderr.endswith("start the service with: systemctl start appliance\n"), stopped.stderr


def test_without_a_terminal_a_dangerous_action_needs_the_yes_option_and_otherwise_changes_nothing(
    attacked: Target,
) -> None:
    running = attacked.running
    (key,) = (one for one in running.command("keys", "list") if one["tenant"] == "acme")
    # The stream must still run when its row is read, so it is long.
    stream = Stream(running, max_tokens=1900, n=32, user="long")
    assert stream.begun.wait(120)
    request_id = running.wait_until(
        lambda: [row["request_id"] for row in running.rows(state="open") if row["user"] == "long"],
        60,
        "its row",
    )[0]
    for words in (
        ("drain",),
        ("keys", "revoke", key["id"]),
        ("tenants", "delete", "acme"),
        ("requests", "cancel", request_id),
    ):
        refused = running.run(*words)
        assert refused.returncode == 2 and "--yes" in refused.stderr, (words, refused.stderr)
    assert running.status()["drains"] == []
    running.wait_until(lambda: running.status()["state"] == "ready", 60, "the service to be ready")
    assert running.command("keys", "list", "--tenant", "acme") == [key]
    (row,) = running.rows(request_id=request_id)
    assert row["status"] in (None, 200)
    with contextlib.suppress(AdminError):  # the request may have ended already
        running.act(CancelRequest(request_id=request_id))
    stream.join(180)


@pytest.mark.parametrize(
    "words",
    [
        ("requests", "-n", "99999999999999999999"),
        ("requests", "--since", "99999999999d"),
        ("audit", "list", "--since", "99999999999d"),
        ("logs", "-n", "99999999999999999999"),
    ],
    ids=" ".join,
)
def test_absurd_values_are_refused_with_the_range(attacked: Target, words: tuple[str, ...]) -> None:
    refused = attacked.running.run(*words)
    assert refused.returncode == 2 and refused.stdout == ""
    assert words[-2] in refused.stderr and "Traceback" not in refused.stderr


def test_a_drain_predicts_no_end_earlier_than_its_requests_can_finish(attacked: Target) -> None:
    running = attacked.running
    # The streams must still run during the drain, so they are long.
    samples = 8
    streams = [Stream(running, max_tokens=1900, n=samples) for _ in range(5)]
    assert all(stream.begun.wait(120) for stream in streams)
    seen = []
    try:
        with AdminClient(running.run_dir, CALL_TIMEOUT_S) as admin:

            def look() -> DrainStatus:
                drain = admin.status().drains[0]
                if drain.running >= 5:
                    seen.append(drain)
                return drain

            admin.drain(DrainService(grace_s=600.0))
            running.wait_until(lambda: look() and len(seen) >= 50, 60, "the running requests")
            admin.drain(DrainService(grace_s=0.1))
            running.wait_until(lambda: look().state == "drained", 60, "the end of the drain")
            assert look().ended >= 5
        for one in seen:
            # No CPU replica generates 2,000 tokens a second for one sample.
            assert one.eta_s is None or one.eta_s > one.tokens_left / (one.running * samples) / 2000.0, one
            assert one.tokens_left > 0
    finally:
        running.act(ResumeService())
        for stream in streams:
            stream.join(180)
