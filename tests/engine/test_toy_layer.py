"""Tests that a new kind of layer needs only one class and, where necessary, one operation. Building, loading
and tuning must then find the new layer's kernels."""

from __future__ import annotations

import json
from pathlib import Path

from tests.engine.test_build import folder_of
from tests.kernels.test_compiling import compiled


def test_a_new_kind_of_layer_is_compiled_loaded_and_tuned_without_further_edits(tmp_path: Path) -> None:
    done = compiled("tests.engine.toy_layer", folder_of(tmp_path, "llama", attention_bias=False))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    with_toy, without = found["with"], found["without"]
    for group, added in (
        ("built", {"_toy_gate"}),
        ("loaded", {"_toy_gate"}),
        ("tuned", {"bfloat16 256x256"}),
    ):
        assert set(with_toy[group]) - set(without[group]) == added
        assert set(without[group]) <= set(with_toy[group])
