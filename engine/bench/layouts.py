"""`python -m engine.bench.layouts`: compare the two ways to distribute experts over several ranks.

    python -m engine.bench.layouts --shape qwen3-30b-a3b --fp8 --tensor-parallel-size 4 b1_decode prefill

All arguments are passed to `python -m engine.bench`, which runs twice: once with a slice of every expert on
each rank ("split"), and once with a subset of whole experts on each rank (`--expert-parallel`). The table
shows each workload's results in both layouts, and their ratio. If the ratio is above 1, whole experts are
better.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine.bench.workloads import WORKLOADS

_LAYOUTS = {"split": [], "whole": ["--expert-parallel"]}
"""Additional benchmark arguments for each layout."""


def main() -> int:
    """Run the benchmark with each layout and print the comparison. Returns 1 if a run fails."""
    arguments = sys.argv[1:]
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    if wrong := {"--expert-parallel", "--json"} & set(arguments):
        print(f"{min(wrong)} is set by this command; leave it out", file=sys.stderr)
        return 1
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="engine-bench-layouts-") as scratch:
        for layout, more in _LAYOUTS.items():
            path = Path(scratch) / f"{layout}.json"
            command = [sys.executable, "-m", "engine.bench", *arguments, *more, "--json", str(path)]
            print(f"{layout} experts:", flush=True)
            done = subprocess.run(command, check=False)
            if done.returncode:
                print(f"{' '.join(command)} exited with code {done.returncode}", file=sys.stderr)
                return 1
            results[layout] = json.loads(path.read_text())["workloads"]
    print("\n".join(comparison(results["split"], results["whole"])))
    return 0


def comparison(split: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    """Return the lines of a table comparing the two layouts. Each argument is the `workloads` object from one
    run's --json file."""
    lines = [f"{'workload':14} {'split':>10} {'whole':>10} {'unit':>8} {'ratio':>6}"]
    for name, one in split.items():
        results = one["result"], whole[name]["result"]
        ratio = results[1] / results[0]
        if WORKLOADS[name].lower_is_better:
            ratio = 1 / ratio
        lines.append(f"{name:14} {results[0]:10.1f} {results[1]:10.1f} {one['unit']:>8} {ratio:6.2f}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
