"""Checks that a generated page in `docs/` is up to date."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def check_page(script: str) -> None:
    """Run a page generator from `scripts/` with `--check`. Raises AssertionError if the page differs."""
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, str(root / "scripts" / script), "--check"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
