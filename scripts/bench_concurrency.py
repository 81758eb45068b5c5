"""Sixteen requests at once through our HTTP API against `transformers` taking them one after another.

Both answer the same prompts (64 token ids each) with 64 greedy tokens from the shipped model on this
machine's CPU, in one run of this program:

    .venv/bin/python scripts/bench_concurrency.py

Needs the `test` extra (transformers). Prints the two times and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

MODEL = Path(__file__).resolve().parent.parent / "appliance" / "demo_model"


def main() -> None:
    """Run both sides and print the result, also as JSON with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3, help="runs of each side; the median counts")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    vocabulary = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    draw = random.Random(0)
    prompts = [
        [draw.randrange(300, vocabulary) for _ in range(arguments.prompt_tokens)]
        for _ in range(arguments.requests)
    ]
    ours = time_service(prompts, arguments.output_tokens, arguments.runs)
    theirs = time_transformers(prompts, arguments.output_tokens, arguments.runs)
    tokens = arguments.requests * arguments.output_tokens
    result = {
        "requests": arguments.requests,
        "prompt_tokens": arguments.prompt_tokens,
        "output_tokens": arguments.output_tokens,
        "cores": os.cpu_count(),
        "ours_s": round(ours, 3),
        "transformers_s": round(theirs, 3),
        "ratio": round(ours / theirs, 3),
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{arguments.requests} requests of {arguments.prompt_tokens} in, {arguments.output_tokens} out")
    print(f"  through HTTP, at once          {ours:7.2f} s   {tokens / ours:7.0f} tok/s")
    print(f"  transformers, one by one       {theirs:7.2f} s   {tokens / theirs:7.0f} tok/s")
    print(f"  ours / theirs                  {ours / theirs:7.2f}     (the bar is 0.33)")


def time_service(prompts: list[list[int]], output_tokens: int, runs: int) -> float:
    """Median seconds from the first request sent to the last answer read, over HTTP on the Unix socket."""
    with tempfile.TemporaryDirectory(prefix="appl-") as folder:
        run_dir = Path(folder, "run")
        command = [str(Path(sys.executable).with_name("appliance")), "serve", "--run-dir", str(run_dir)]
        with Path(folder, "log").open("w") as log:
            process = subprocess.Popen([*command, "--state-dir", f"{folder}/state"], stdout=log, stderr=log)
        try:
            transport = httpx.HTTPTransport(
                uds=str(run_dir / "api.sock"), limits=httpx.Limits(max_connections=99)
            )
            with httpx.Client(transport=transport, base_url="http://appliance", timeout=300) as client:
                _wait_until_ready(client, process)

                def ask(prompt: list[int]) -> int:
                    body = {
                        "model": "demo",
                        "prompt": prompt,
                        "max_tokens": output_tokens,
                        "temperature": 0,
                        "ignore_eos": True,
                    }
                    answer = client.post("/v1/completions", json=body)
                    answer.raise_for_status()
                    return answer.json()["usage"]["completion_tokens"]

                ask(prompts[0])
                times = []
                for _ in range(runs):
                    # Another prefix each time, so that no run finds its prompts in the cache.
                    fresh = [[*prompt[1:], prompt[0]] for prompt in prompts]
                    prompts = fresh
                    started = time.perf_counter()
                    with ThreadPoolExecutor(len(prompts)) as pool:
                        counts = list(pool.map(ask, prompts))
                    times.append(time.perf_counter() - started)
                    if counts != [output_tokens] * len(prompts):
                        raise SystemExit(f"expected {output_tokens} tokens each, got {counts}")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    return statistics.median(times)


def time_transformers(prompts: list[list[int]], output_tokens: int, runs: int) -> float:
    """Median seconds of `generate()` for the same requests one after another."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.eval()

    def ask(prompt: list[int]) -> None:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=output_tokens,
                min_new_tokens=output_tokens,
                pad_token_id=0,
            )
        if out.shape[1] != len(prompt) + output_tokens:
            raise SystemExit(f"transformers gave {out.shape[1] - len(prompt)} tokens, not {output_tokens}")

    ask(prompts[0])
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        for prompt in prompts:
            ask(prompt)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _wait_until_ready(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if client.get("/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit("the service did not become ready")


if __name__ == "__main__":
    main()
