"""Runs the demo for `scripts/demo`: starts the service, asks one question, and shows the answer and the
request's row in the request log. On a terminal, it then opens the console while it asks more questions."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import openai

QUESTIONS = (
    "What does textwrap.dedent do?",
    "What does len do?",
    "What does os.path.join do?",
    "What does json.dumps do?",
    "What does random.shuffle do?",
    "What does shutil.copyfile do?",
)
START_TIMEOUT_S = 180
CLIENTS = 2
"""Number of questions asked concurrently while the console is open."""
PAUSE_S = 0.5
"""Seconds that each client waits between an answer and its next question."""


def main() -> int:
    """Run the demo. Returns 0 if the question was answered and the service stopped cleanly."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument(
        "--chat", action="store_true", help="on a terminal, start a chat instead of the console"
    )
    flags = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # exiting also stops the service
    appliance = str(Path(sys.executable).with_name("appliance"))
    folder = Path(tempfile.mkdtemp(prefix="appliance-demo-"))
    run_dir, state_dir = folder / "run", folder / "state"
    log = folder / "service.log"
    command = [appliance, "serve", "--run-dir", str(run_dir), "--state-dir", str(state_dir)]
    print(f"$ {' '.join(command)}    (log: {log})", flush=True)
    with log.open("w") as output:
        service = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_until_ready(service, run_dir / "api.sock", log)
        print(f"\n> {QUESTIONS[0]}", flush=True)
        for text in answer(client_of(run_dir / "api.sock"), QUESTIONS[0]):
            print(text, end="", flush=True)
        print("\n", flush=True)
        show_row(appliance, run_dir)
        is_interactive = all(one.isatty() for one in (sys.stdin, sys.stdout, sys.stderr))
        if is_interactive and flags.chat:
            print("\nThe service runs until you exit this chat with Ctrl-D.\n", flush=True)
            run_in_foreground([appliance, "chat", "--run-dir", str(run_dir)])
        elif is_interactive:
            print("\nThe service runs until you quit the console with q.\n", flush=True)
            with Clients(run_dir / "api.sock"):
                run_in_foreground([appliance, "console", "--run-dir", str(run_dir)])
    finally:
        code = stop(service)
    if code == 0:
        shutil.rmtree(folder)
        print("The service stopped cleanly.")
    else:
        print(f"The service exited with code {code}; see {log}", file=sys.stderr)
    return code


def wait_until_ready(service: subprocess.Popen[bytes], socket: Path, log: Path) -> None:
    """Print the service's log until `/health/ready` reports that the service is ready."""
    import httpx2

    started = time.monotonic()
    shown = 0
    while time.monotonic() - started < START_TIMEOUT_S:
        for line in log.read_text().splitlines()[shown:]:
            print(f"  | {line}", flush=True)
            shown += 1
        if service.poll() is not None:
            raise SystemExit(f"the service exited with code {service.returncode}; its log is {log}")
        try:
            with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(socket)), timeout=5) as client:
                if client.get("http://appliance/health/ready").status_code == 200:
                    print(f"ready after {time.monotonic() - started:.1f} s", flush=True)
                    return
        except httpx2.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"the service was not ready after {START_TIMEOUT_S} s; its log is {log}")


def client_of(socket: Path) -> openai.OpenAI:
    """Return an `openai` client that uses the Unix socket."""
    import httpx2
    import openai

    transport = httpx2.HTTPTransport(uds=str(socket))
    return openai.OpenAI(
        base_url="http://appliance/v1",
        api_key="placeholder",  # the service identifies the peer of a Unix socket by its uid
        http_client=openai.DefaultHttpx2Client(transport=transport),
    )


def answer(client: openai.OpenAI, question: str) -> Iterator[str]:
    """Ask a question and yield the answer's parts as they arrive."""
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            yield chunk.choices[0].delta.content or ""


class Clients:
    """Asks questions in background threads until the end of the `with` block."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        """Ask the questions in turn, starting at position `number`."""
        import openai

        client = client_of(self._socket)
        for question in itertools.islice(itertools.cycle(QUESTIONS), number, None):
            try:
                for _ in answer(client, question):
                    if self._ended.is_set():
                        return
            except openai.OpenAIError:
                pass  # ignore the error, because the console shows problems with the service
            if self._ended.wait(PAUSE_S):
                return


def show_row(appliance: str, run_dir: Path) -> None:
    """Print the request's row in the request log, which the service writes within a second of the answer."""
    for _ in range(50):
        rows = json.loads(
            subprocess.run(
                [appliance, "requests", "--run-dir", str(run_dir), "--json"],
                check=True,
                capture_output=True,
            ).stdout
        )
        if rows and rows[-1].get("finish_reason"):
            break
        time.sleep(0.1)
    print("This request's row in the request log:")
    for name, value in rows[-1].items():
        print(f"  {name:20} {value}")


def run_in_foreground(command: list[str]) -> None:
    """Run an interactive command until the user exits it."""
    # Only the command should react to Ctrl-C. A child process inherits ignored signals, so install a handler
    # that does nothing instead of ignoring the signal.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    process = subprocess.Popen(command)
    try:
        process.wait()
    finally:
        if process.poll() is None:  # this process is ending: let the command restore the terminal
            process.terminate()
            process.wait()
        signal.signal(signal.SIGINT, before)


def stop(service: subprocess.Popen[bytes]) -> int:
    """Stop the service as systemd does and return its exit code."""
    if service.poll() is None:
        os.kill(service.pid, signal.SIGTERM)
    try:
        return service.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(service.pid, signal.SIGKILL)
        return service.wait()


if __name__ == "__main__":
    sys.exit(main())
