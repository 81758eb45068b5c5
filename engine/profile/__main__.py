"""`python -m engine.profile`: show how long each kernel takes in recorded steps.

    python -m engine.profile --shape llama-3.1-8b --workload b8_decode --trace trace.json
    python -m engine.profile --shape llama-3.1-8b --fp8 --kv-fp8 --workload n1024 --kind mixed
    python -m engine.profile --shape llama-3.1-70b --tensor-parallel-size 4 --workload b1_decode

The profiler runs one of `engine.bench`'s workloads and prints a table. The model is the checkpoint given by
--model, or a public model shape with random weights. --trace also writes the Chrome trace, for
chrome://tracing or ui.perfetto.dev. On a CPU, the table shows torch operations. With several ranks, this
process is rank 0 of a replica, and the table shows rank 0's device. The profiler requires the same packages
as `engine.bench`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from engine.bench.start import FAILURES, add_options, devices_text, leave, started
from engine.bench.workloads import WORKLOADS, run
from engine.ceilings import ceilings
from engine.profile.report import idle_gaps, kernel_rows, lines
from engine.profile.steps import Kind, MissingStepsError, record
from engine.profile.trace import read_timeline
from engine.profile.work import label_kernels, work_by_kernel
from kernels.writable import UnwritableError, check_writable


def main() -> int:
    """Profile decode-only or mixed steps of a workload. Returns 1 if the workload has no such steps, the
    engine cannot start, or the trace cannot be written."""
    arguments = _arguments()
    workload = WORKLOADS[arguments.workload]
    kind: Kind = arguments.kind or ("decode" if workload.output_tokens > 1 else "mixed")
    with tempfile.TemporaryDirectory(prefix="engine-profile-") as scratch:
        trace = arguments.trace or Path(scratch) / "trace.json"
        try:
            check_writable("--trace", arguments.trace)
            with started(arguments, Path(scratch), {arguments.workload: workload}) as engine:
                info, config = engine.info, engine.runner.config
                model_name = arguments.model or arguments.shape
                dtypes = f"weights {info.weights}, KV {info.kv_cache_dtype}"
                on = devices_text(info)
                print(f"{model_name}: {arguments.workload}, {kind} steps; {dtypes} on {on}", flush=True)
                # Warm up the workload before recording it.
                run(engine, replace(workload, output_tokens=min(workload.output_tokens, 4)), seed=-1)
                shapes = record(engine, workload, kind, arguments.steps, arguments.skip, trace)
        except (UnwritableError, MissingStepsError, *FAILURES) as error:
            print(error, file=sys.stderr)
            return 1
        timeline = read_timeline(trace)
    device = ceilings(info.devices[0])
    names = [call.name for call in timeline.calls]
    works = {}
    if timeline.on_gpu:
        norms = names.count("_norm") / len(shapes)
        works = work_by_kernel(config, info, shapes, device, norms, set(names))
        names = label_kernels(names, config, shapes)
    rows = kernel_rows(names, timeline, works, len(shapes))
    tokens = sum(shape.tokens for shape in shapes) / len(shapes)
    decodes = sum(len(shape.contexts) for shape in shapes) / len(shapes)
    if len(shapes) < arguments.steps:
        recorded = f"{len(shapes)} step{'s' * (len(shapes) > 1)}"
        print(
            f"recorded {recorded} instead of {arguments.steps}: the workload has no more consecutive steps "
            "of this kind"
        )
    print(f"{tokens:,.0f} tokens per step, {decodes:,.0f} of them decodes")
    print("\n".join(lines(rows, idle_gaps(names, timeline, len(shapes)), timeline, len(shapes), device)))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine.profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument(
        "--workload", choices=list(WORKLOADS), default="b8_decode", help="workload to run (%(default)s)"
    )
    parser.add_argument(
        "--kind",
        choices=["decode", "mixed"],
        help="kind of step (default: decode, or mixed if only one token is generated)",
    )
    parser.add_argument(
        "--steps", type=int, default=8, help="maximum number of consecutive steps to record (%(default)s)"
    )
    parser.add_argument(
        "--skip", type=int, help="number of steps to skip first (default: 3 for decode, 0 for mixed)"
    )
    parser.add_argument("--trace", type=Path, help="write the Chrome trace to this file")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps is {arguments.steps}; it must be at least 1")
    if arguments.skip is not None and arguments.skip < 0:
        parser.error(f"--skip is {arguments.skip}; it must be at least 0")
    return arguments


if __name__ == "__main__":
    leave(main())
