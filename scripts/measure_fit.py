"""Compares the memory predicted by `appliance models fit` with what a replica actually uses. Also attempts
the loads that the command refuses.

    python scripts/measure_fit.py
    python scripts/measure_fit.py --shapes llama-3.1-8b mixtral-8x7b --json out.json

Loads a model of each public shape on the first GPU, with random weights. Each model is loaded twice: in
bfloat16, and with FP8 weights and an FP8 KV cache. The script then runs enough requests to fill all sequence
slots. The KV cache is limited to --kv-blocks blocks. Otherwise, it would fill the GPU, and the prediction
would always be the size of the GPU's memory. The measured memory is the highest increase that NVML reports
for the GPU. While one shape is being loaded, the kernels for the next shape are compiled.

A shape that `models fit` refuses is loaded anyway, and the load must fail. With --edge, a replica may use the
GPU's whole memory. Two sizes of KV cache are tried. One needs 3 % less than the remaining memory and must
load. The other needs 3 % more; `models fit` must refuse it, and the load must fail.

Exits with 1 if a prediction is off by more than --limit percent or if a load has an unexpected result.
Requires torch, triton, msgspec, psutil and nvidia-ml-py, and about five minutes on an H200 that no other
process uses.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from appliance.models.fit import MemoryFit, fit, read_memory  # noqa: E402
from appliance.settings.fields import ModelSettings  # noqa: E402
from engine.bench.shapes import SHAPES  # noqa: E402

MORE_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-32b": SHAPES["qwen3-8b"]
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "tiny": SHAPES["llama-3.2-1b"]
    | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
CHOSEN = (
    "llama-3.2-1b",
    "llama-3.1-8b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "qwen3-32b",
    "mixtral-8x7b",
    "llama-3.1-70b",
    "qwen3-235b-a22b",
)
FORMATS = {"bf16": {}, "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"}}
EDGES = {"3 % less": 0.97, "3 % more": 1.03}
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 16
WITHIN_S = 240.0
FREE_WITHIN_S, FREE_WITHIN_BYTES = 30.0, 64 << 20
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A model and its settings."""

    name: str
    settings: ModelSettings
    predicted: MemoryFit

    @property
    def refused(self) -> bool:
        """Whether `models fit` predicts that the model will not fit."""
        return self.predicted.needed_bytes > self.predicted.usable_bytes


@dataclass(frozen=True)
class MeasuredFit:
    """The result of a load, with sizes in bytes."""

    used_bytes: int = 0
    ready_s: float = 0.0
    error: str = ""


def main() -> int:
    """Load all cases and print the tables."""
    arguments = _arguments()
    if arguments.load is not None:
        return load(msgspec.json.decode(arguments.load, type=ModelSettings))
    with tempfile.TemporaryDirectory() as scratch:
        cases = list(_cases(arguments, Path(scratch)))
        builds = _build(cases) if arguments.device == "cuda" else {}
        results: list[dict[str, Any]] = []
        wrong, unused_bytes = 0, _gpu_bytes()
        for refused in (False, True):
            print(_heading(refused), flush=True)
            for case in (one for one in cases if one.refused == refused):
                if case.name in builds:
                    builds[case.name].result()
                found = measure(case, unused_bytes)
                wrong += not is_expected(case, found, arguments.limit)
                print(_line(case, found), flush=True)
                results.append({"case": case.name, "refused": refused, **_stats(case), **asdict(found)})
                if arguments.json:
                    arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{len(cases)} cases, {wrong} not as predicted (limit {arguments.limit:g} %)")
    return min(wrong, 1)


def is_expected(case: Case, found: MeasuredFit, limit_percent: float) -> bool:
    """Return True if the result is as expected. A load that `models fit` refuses must fail. Any other load
    must succeed, with a prediction error within the limit."""
    if case.refused:
        return bool(found.error)
    return not found.error and abs(error_of(case, found)) <= limit_percent / 100


def error_of(case: Case, found: MeasuredFit) -> float:
    """Return the prediction's relative error, which is positive if the prediction is too high."""
    return case.predicted.needed_bytes / found.used_bytes - 1


def measure(case: Case, unused_bytes: int | None) -> MeasuredFit:
    """Load the case in another process and read the GPU's memory use twice: when the replica is ready and
    after it has run the requests. `unused_bytes` is the GPU memory already in use when no replica is running,
    or None without a GPU."""
    _wait_until_free(unused_bytes)
    began = time.monotonic()
    command = [sys.executable, __file__, "--load", msgspec.json.encode(case.settings).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        timer = threading.Timer(WITHIN_S, child.kill)
        timer.start()
        used, ready_s, error = 0, 0.0, ""
        for line in child.stdout:
            event = json.loads(line)
            error = error or event.get("error", "")
            ready_s = ready_s or time.monotonic() - began
            reported = event.get("used_bytes", 0)
            used = max(used, reported if unused_bytes is None else (_gpu_bytes() or 0) - unused_bytes)
            child.stdin.write("\n")
            child.stdin.flush()
        code = child.wait()
        timer.cancel()
    if code and not error:
        error = f"the process exited with code {code}"
    return MeasuredFit(used, ready_s, error)


def load(settings: ModelSettings) -> int:
    """Load the model, then run requests. Report after each step, and wait for a line on standard input, so
    that the parent process can read the GPU's memory use."""
    from engine.bench.start import FAILURES, leave
    from engine.generate import LocalEngine
    from engine.messages import SamplingParams

    try:
        engine = LocalEngine(settings.spec("measured"))
        _report(used_bytes=engine.info.used_bytes)
        if engine.info.backend == "cuda":
            blocks = engine.info.kv_blocks // -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // 64)
            count = max(1, min(settings.max_num_seqs, blocks))
            prompts = [
                [(7 * place + one) % 1000 + 3 for place in range(PROMPT_TOKENS)] for one in range(count)
            ]
            sampling = SamplingParams(
                max_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0.8, top_p=0.9, presence_penalty=0.5
            )
            engine.generate(prompts, sampling)
            _report()
    except FAILURES as error:
        _report(error=str(error))
    leave(0)


def _report(**event: Any) -> None:
    print(json.dumps(event), flush=True)
    sys.stdin.readline()


def _cases(arguments: argparse.Namespace, scratch: Path) -> Any:
    memory = read_memory()
    for shape in arguments.shapes:
        folder = scratch / shape
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps((SHAPES | MORE_SHAPES)[shape]))
        for name, fields in FORMATS.items():
            settings = ModelSettings(
                folder=str(folder),
                device=arguments.device,
                load_format="dummy",
                kv_blocks=arguments.kv_blocks,
                **fields,
            )
            yield Case(f"{shape} {name}", settings, fit(settings, memory))
            if shape != arguments.edge:
                continue
            whole = msgspec.structs.replace(settings, gpu_memory_utilization=1.0)
            found = fit(whole, memory)
            space = found.usable_bytes - found.weight_bytes - found.workspace_bytes
            for edge, share in EDGES.items():
                edged = msgspec.structs.replace(whole, kv_blocks=int(share * space / found.block_bytes))
                yield Case(f"{shape} {name}, {edge}", edged, fit(edged, memory))


def _build(cases: list[Case]) -> dict[str, Future[None]]:
    """Compile the cases' kernels in the background, in order."""
    [gpu] = read_memory().gpus[:1]
    builds = {case.name: Future[None]() for case in cases}

    def build_all() -> None:
        for case in sorted(cases, key=lambda one: one.refused):
            command = [sys.executable, "-m", "engine.build", "--config", case.settings.folder]
            command += ["--gpu", gpu.name, "--capability", gpu.compute_capability.replace(".", "")]
            command += ["--max-num-seqs", str(case.settings.max_num_seqs)]
            command += ["--max-num-batched-tokens", str(case.settings.max_num_batched_tokens)]
            command += ["--fp8", "--kv-fp8"] if case.settings.quantization == "fp8" else []
            if not case.refused:  # a load refused by `models fit` fails before it needs any kernels
                subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
            builds[case.name].set_result(None)

    threading.Thread(target=build_all, daemon=True).start()
    return builds


def _gpu_bytes() -> int | None:
    """Return the memory in use on the first GPU in bytes, or None without a GPU."""
    gpus = read_memory().gpus
    return gpus[0].used_bytes if gpus else None


def _wait_until_free(unused_bytes: int | None) -> None:
    """Wait until the previous replica's memory has been freed."""
    deadline = time.monotonic() + FREE_WITHIN_S
    while unused_bytes is not None and (_gpu_bytes() or 0) > unused_bytes + FREE_WITHIN_BYTES:
        if time.monotonic() > deadline:
            raise SystemExit("another process uses the GPU: run the measurement on an idle GPU")
        time.sleep(0.1)


def _heading(refused: bool) -> str:
    if refused:
        return f"\n{'refused':32}{'needed':>10}{'usable':>10}  result of the forced load (sizes in GiB)"
    columns = "".join(
        f"{name:>10}" for name in ("weights", "working", "KV", "predicted", "measured", "error")
    )
    return f"{'fits':32}{columns}{'ready':>9}  (sizes in GiB)"


def _line(case: Case, found: MeasuredFit) -> str:
    sizes = case.predicted
    if case.refused:
        result = f"failed: {found.error.splitlines()[0]}" if found.error else "LOADED"
        return f"{case.name:32}{sizes.needed_bytes / GIB:10.1f}{sizes.usable_bytes / GIB:10.1f}  {result}"
    columns = (
        sizes.weight_bytes,
        sizes.workspace_bytes,
        sizes.kv_bytes,
        sizes.needed_bytes,
        found.used_bytes,
    )
    shown = "".join(f"{size / GIB:10.2f}" for size in columns)
    result = f"{error_of(case, found):+10.1%}{found.ready_s:7.1f} s" if found.used_bytes else ""
    return f"{case.name:32}{shown}{result}{f'  FAILED: {found.error}' if found.error else ''}"


def _stats(case: Case) -> dict[str, int]:
    sizes = case.predicted
    return {
        "kv_blocks": sizes.kv_blocks,
        "weight_bytes": sizes.weight_bytes,
        "workspace_bytes": sizes.workspace_bytes,
        "kv_bytes": sizes.kv_bytes,
        "needed_bytes": sizes.needed_bytes,
        "usable_bytes": sizes.usable_bytes,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = sorted(SHAPES | MORE_SHAPES)
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=CHOSEN, metavar="SHAPE")
    parser.add_argument("--edge", choices=shapes, default="llama-3.1-8b", metavar="SHAPE")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--kv-blocks", type=int, default=2048, help="number of KV cache blocks (default: %(default)s)"
    )
    parser.add_argument(
        "--limit", type=float, default=3.0, help="allowed error in percent (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
