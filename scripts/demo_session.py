"""Runs the demo for `scripts/demo`: starts the service, asks one question, and shows the answer and the
request's row in the request log."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

QUESTION = "What does textwrap.dedent do?"
START_TIMEOUT_S = 180


def main() -> int:
    """Run the demo. Returns 0 if the question was answered and the service stopped cleanly."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # also stops the service
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
        ask(run_dir / "api.sock")
        show_row(appliance, run_dir)
        if sys.stdin.isatty() and sys.stdout.isatty():
            print("\nThe service runs until you exit this chat with Ctrl-D.\n", flush=True)
            chat(appliance, run_dir)
    finally:
        code = stop(service)
    if code == 0:
        shutil.rmtree(folder)
        print("The service stopped cleanly.")
    else:
        print(f"The service ended with exit code {code}; see {log}", file=sys.stderr)
    return code


def wait_until_ready(service: subprocess.Popen[bytes], socket: Path, log: Path) -> None:
    """Wait until `/health/ready` reports that the service is ready, and show its log."""
    import httpx2

    started = time.monotonic()
    shown = 0
    while time.monotonic() - started < START_TIMEOUT_S:
        for line in log.read_text().splitlines()[shown:]:
            print(f"  | {line}", flush=True)
            shown += 1
        if service.poll() is not None:
            raise SystemExit(f"the service ended with exit code {service.returncode}; its log is {log}")
        try:
            with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(socket)), timeout=5) as client:
                if client.get("http://appliance/health/ready").status_code == 200:
                    print(f"ready after {time.monotonic() - started:.1f} s", flush=True)
                    return
        except httpx2.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"the service was not ready after {START_TIMEOUT_S} s; its log is {log}")


def ask(socket: Path) -> None:
    """Ask the question through the `openai` client on the Unix socket and print the answer as it streams."""
    import httpx2
    import openai

    transport = httpx2.HTTPTransport(uds=str(socket))
    client = openai.OpenAI(
        base_url="http://appliance/v1",
        api_key="placeholder",  # the service identifies the peer of a Unix socket by its uid
        http_client=openai.DefaultHttpx2Client(transport=transport),
    )
    print(f"\n> {QUESTION}", flush=True)
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print("\n", flush=True)


def show_row(appliance: str, run_dir: Path) -> None:
    """Print the request's row in the request log. The service writes it within one second of the answer."""
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
    print("The row of this request in the request log:")
    for name, value in rows[-1].items():
        print(f"  {name:20} {value}")


def chat(appliance: str, run_dir: Path) -> None:
    """Run a chat until the user exits it."""
    # Only the chat reacts to Ctrl-C, by cancelling the current answer. If this process ignored the signal,
    # the chat would inherit that setting and ignore it too. This process therefore installs a handler
    # instead.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    subprocess.run([appliance, "chat", "--run-dir", str(run_dir)], check=False)
    signal.signal(signal.SIGINT, before)


def stop(service: subprocess.Popen[bytes]) -> int:
    """Stop the service as systemd does, and return its exit code."""
    if service.poll() is None:
        os.kill(service.pid, signal.SIGTERM)
    try:
        return service.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(service.pid, signal.SIGKILL)
        return service.wait()


if __name__ == "__main__":
    sys.exit(main())
