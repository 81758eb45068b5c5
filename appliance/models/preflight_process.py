"""Runs the checks of `appliance.models.preflight` in a separate process while the core serves requests. In
the core itself, reading a large tokenizer would block the event loop for about a second, and a damaged file
could crash the process.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from appliance.models.fit import read_memory
from appliance.models.preflight import ModelFinding, check_model, problem_of
from appliance.models.readable import this_process
from appliance.settings import ModelSettings
from engine.client import run_module

_TIMEOUT_S = 120.0
"""Time limit for checking all models."""

Findings = dict[str, list[ModelFinding]]
"""The findings of the model checks, by model name."""


Check = Callable[[Mapping[str, ModelSettings]], Findings]


def check_files_here(models: Mapping[str, ModelSettings]) -> Findings:
    """Check the models in-process, without loading tokenizers or compiling templates. This takes tens of
    milliseconds per model."""
    memory, reader = read_memory(), this_process()
    return {name: check_model(model, memory, reader, compile_text=False) for name, model in models.items()}


def check_apart(models: Mapping[str, ModelSettings]) -> Findings:
    """Run all checks of the models in a separate process and wait for the result. If the process does not
    finish in time or returns no result, report a problem for every model."""
    if not models:
        return {}
    try:
        found = run_module("appliance.models.preflight_process", msgspec.json.encode(models), _TIMEOUT_S)
        return msgspec.json.decode(found, type=Findings)
    except subprocess.TimeoutExpired:
        description = f"the model's files could not be checked within {_TIMEOUT_S:g} s"
        remedy = "check that the model's disk responds"
    except (OSError, subprocess.CalledProcessError, msgspec.MsgspecError) as error:
        description, remedy = f"could not check the model's files: {error}", "see the log for the cause"
    return {name: [ModelFinding(level="problem", text=description, remedy=remedy)] for name in models}


class ModelChecks(NamedTuple):
    """The checks of models that the core runs. All of them block, so they must not run on the event loop
    thread."""

    files: Check = check_files_here
    """Quick checks, run before the service starts and before a failed replica is restarted."""
    everything: Check = check_apart
    """All checks, run before a running service's settings change."""

    def problem(self, name: str, model: ModelSettings) -> str:
        """Return the problem found by the quick checks, with its remedy, or an empty string if there is
        none."""
        found = problem_of(self.files({name: model})[name])
        return str(found) if found is not None else ""


MODEL_CHECKS = ModelChecks()


def main() -> None:
    """Check the models read from standard input and print the findings as JSON."""
    models = msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, ModelSettings])
    memory, reader = read_memory(), this_process()
    findings = {name: check_model(model, memory, reader) for name, model in models.items()}
    sys.stdout.buffer.write(msgspec.json.encode(findings))


if __name__ == "__main__":
    main()
