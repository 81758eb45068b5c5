"""Starts an engine and serves random traffic. Prints, as JSON, the names of the kernels that were launched
for the first time after the engine was ready: `python -m tests.gpu.late_kernels SHAPE [--fp8]`.

Runs in a separate process, because a kernel that one engine has loaded stays loaded for the next. Two layers
of a public model's shape are sufficient, because all layers launch the same kernels. Compiled variants of a
kernel have the same name, so they are not distinguished here. `tests.engine.launches_of_serving`
distinguishes them, without a GPU.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from engine.bench.shapes import SHAPES
from engine.generate import LocalEngine
from engine.messages import ReplicaSpec, SamplingParams, Submit, pack_tokens

STEPS = 400
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.8, "top_k": 40, "presence_penalty": 0.3},
    {"logprobs": 3},
    {"logit_bias": {7: 2.0}, "min_tokens": 3, "stop_token_ids": (5,)},
)


def main() -> None:
    shape, fp8 = sys.argv[1], "--fp8" in sys.argv[2:]
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(SHAPES[shape] | {"num_hidden_layers": 2}))
        spec = ReplicaSpec(
            replica="late-0",
            model_path=scratch,
            load_format="dummy",
            device="cuda",
            quantization="fp8" if fp8 else "auto",
            kv_cache_dtype="fp8" if fp8 else "auto",
            max_model_len=8192,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            kv_blocks=3000,
        )
        # A recording that begins before CUDA is initialised may miss later launches.
        torch.ones(1, device="cuda")
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as starting:
            engine = LocalEngine(spec)
            torch.cuda.synchronize()
    loaded = kernels(starting)
    with profile(activities=[ProfilerActivity.CUDA]) as serving:
        serve(engine)
        torch.cuda.synchronize()
    launched = kernels(serving)
    engine.close()
    result = {"loaded": len(loaded), "launched": len(launched), "late": sorted(launched - loaded)}
    print(json.dumps(result, indent=1))


def serve(engine: LocalEngine) -> None:
    """Send requests of all lengths and with all sampling variants at random times, so that steps have many
    different token counts."""
    draw = random.Random(0)
    handle = 0
    for step in range(STEPS):
        if draw.random() < 0.4:
            for _ in range(draw.choice((1, 1, 2, 5, 20))):
                handle += 1
                engine.scheduler.add("late", request(draw, handle, engine.info.vocab_size))
        if engine.core.has_work:
            engine.core.step()
        if step % 100 == 99:  # let the engine become idle, so that short passes without decodes occur again
            while engine.core.has_work:
                engine.core.step()
    assert handle > 200, "too few requests were sent"


def request(draw: random.Random, handle: int, vocabulary: int) -> Submit:
    """Return a request with one prompt. One in ten requests has several samples."""
    tokens = draw.choice((1, 3, 17, 64, 130, 512, 700, 1500, 4000))
    sampling = SamplingParams(max_tokens=draw.randrange(1, 30), ignore_eos=True, **draw.choice(WAYS))
    return Submit(
        handle=handle,
        request_id=f"late-{handle}",
        prompt=pack_tokens(draw.choices(range(vocabulary), k=tokens)),
        sampling=sampling,
        n=3 if draw.random() < 0.1 else 1,
    )


def kernels(recording: profile) -> set[str]:
    """Return the names of the kernels in a recording."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        recording.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "kernel"}


if __name__ == "__main__":
    main()
