"""Implements `appliance models fit`, which predicts how much memory a model needs before it is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from appliance.cli.failure import Failure
from appliance.cli.models import REGISTRY
from appliance.cli.output import Column, of_count, paint, print_json, printable, table, terminal_width
from appliance.cli.service import admin_client
from appliance.models.checkpoint_files import FolderFault, check_files
from appliance.models.fit import MemoryFit, UnfitError, fit, read_memory
from appliance.models.preflight import limited_length, shortage_of
from appliance.models.readable import this_process
from appliance.protocol import precision
from appliance.quantities import of_bytes
from appliance.settings import ModelSettings, SettingsError
from appliance.settings.convert import Converter
from engine.messages import KvDType, ModelDType, WeightsDType


class FitGpu(msgspec.Struct, kw_only=True):
    """A GPU for which memory use is predicted."""

    number: int
    name: str
    memory_bytes: int
    used_bytes: int
    """GPU memory currently used by all processes together."""


class FitSequences(msgspec.Struct, kw_only=True):
    """How many sequences of a given length can run concurrently."""

    tokens: int
    sequences: int


class FitReport(msgspec.Struct, kw_only=True):
    """The JSON document printed by `models fit --json`. Byte counts are per rank."""

    folder: str
    fits: bool
    reason: str
    """Why the model does not fit into memory; if it fits, a warning or an empty string."""
    remedy: str
    model_type: str
    parameters: int
    dtype: ModelDType
    weights: WeightsDType
    kv_cache_dtype: KvDType
    device: Literal["cuda", "cpu"]
    ranks: int
    gpus: list[FitGpu]
    weight_bytes: int
    workspace_bytes: int
    kv_blocks: int
    block_bytes: int
    kv_bytes: int
    needed_bytes: int
    total_bytes: int
    used_bytes: int
    """GPU memory used by other processes."""
    usable_bytes: int
    max_model_len: int
    max_num_seqs: int
    kv_tokens: int
    """Number of tokens that fit in the KV cache."""
    sequences: list[FitSequences]


def show_fit(run_dir: str | None, target: str, settings: Mapping[str, Any], *, as_json: bool) -> int:
    """Predict and print how much memory a model needs. `target` is a folder, or a model (NAME[@VERSION]) in
    the registry of the service in `run_dir`. `settings` are keyed by their names in settings files, and
    override the version's settings. Returns exit code 1 if the model does not fit. Raises Failure if the
    model or the settings cannot be used."""
    folder = target
    if os.sep not in target and not os.path.exists(target):
        folder, registered = _registered(run_dir, target)
        settings = {**registered, **settings}
    model = _settings(folder, settings)
    try:
        check_files(Path(model.folder), this_process(), weights=False)
        found = fit(model, read_memory())
    except (FolderFault, UnfitError) as error:
        raise Failure(f"{error}: {error.remedy}") from error
    report = fit_report(model, found)
    if as_json:
        print_json(report)
    else:
        for line in fit_lines(report, terminal_width()):
            print(line)
    return 0 if report.fits else 1


def fit_report(model: ModelSettings, found: MemoryFit) -> FitReport:
    """Return a memory prediction as a JSON document."""
    shortage = shortage_of(model, found)
    note = shortage or limited_length(model, found)
    return FitReport(
        folder=model.folder,
        fits=shortage is None,
        reason=note.text if note is not None else "",
        remedy=note.remedy if note is not None else "",
        model_type=found.model_type,
        parameters=found.parameters,
        dtype=found.dtype,
        weights=found.weights,
        kv_cache_dtype=found.kv_cache_dtype,
        device="cuda" if found.gpus else "cpu",
        ranks=found.ranks,
        gpus=[
            FitGpu(number=gpu.number, name=gpu.name, memory_bytes=gpu.memory_bytes, used_bytes=gpu.used_bytes)
            for gpu in found.gpus
        ],
        weight_bytes=found.weight_bytes,
        workspace_bytes=found.workspace_bytes,
        kv_blocks=found.kv_blocks,
        block_bytes=found.block_bytes,
        kv_bytes=found.kv_bytes,
        needed_bytes=found.needed_bytes,
        total_bytes=found.total_bytes,
        used_bytes=found.used_bytes,
        usable_bytes=found.usable_bytes,
        max_model_len=found.max_model_len,
        max_num_seqs=found.max_num_seqs,
        kv_tokens=found.kv_tokens,
        sequences=[
            FitSequences(tokens=tokens, sequences=found.sequences(tokens))
            for tokens in (found.lengths() if shortage is None else [])
        ],
    )


def fit_lines(report: FitReport, width: int | None) -> Iterator[str]:
    """Yield a memory prediction as lines of at most `width` columns, or of any length if `width` is None."""
    held = precision(report.dtype, report.weights, report.kv_cache_dtype)
    millions = f"{report.parameters / 1e6:,.1f} M parameters"
    yield f"{printable(report.folder)}: {report.model_type}, {millions} in {held}"
    for gpu in report.gpus:
        yield (
            f"GPU {gpu.number}: {printable(gpu.name)}, {of_bytes(gpu.memory_bytes)} of memory, "
            f"{of_bytes(gpu.used_bytes)} in use"
        )
    if not report.gpus:
        yield "CPU: no GPU is used"
    yield ""
    columns = (Column(f"MEMORY PER {'GPU' if report.gpus else 'RANK'}"), Column("", right=True), Column(""))
    share = f"of {of_bytes(report.total_bytes)}{'' if report.gpus else ' that are available now'}"
    rows = [
        ("weights", of_bytes(report.weight_bytes), ""),
        ("working memory", of_bytes(report.workspace_bytes), ""),
        (
            "KV cache",
            of_bytes(report.kv_bytes),
            f"{of_count(report.kv_blocks)} blocks, {of_count(report.kv_tokens)} tokens",
        ),
        ("needed", of_bytes(report.needed_bytes), ""),
        ("usable", of_bytes(report.usable_bytes), share),
    ]
    yield from table(columns, rows, width=width)
    yield ""
    if report.sequences:
        lengths = [(of_count(one.tokens), of_count(one.sequences)) for one in report.sequences]
        headings = Column("SEQUENCE LENGTH", right=True), Column("RUNNING AT THE SAME TIME", right=True)
        yield from table(headings, lengths, width=width)
        yield ""
    yield paint("the model fits", "green") if report.fits else paint("the model does not fit", "red")
    if report.reason:
        yield printable(report.reason)
        yield f"→ {printable(report.remedy)}"


def _registered(run_dir: str | None, target: str) -> tuple[str, dict[str, Any]]:
    """Return the folder and settings of the version that `target` (NAME or NAME@VERSION) refers to. Raises
    Failure if there is no such version in the registry."""
    with admin_client(run_dir) as client:
        models = client.models()
    for model in models:
        for version in model.versions:
            names = [f"{model.name}@{version.version}"]
            if version.version == model.default:
                names.append(model.name)
            if target in names and model.source != REGISTRY:
                raise Failure(
                    f"model {model.name!r} and its settings are {model.source}: run `appliance config check` "
                    f"to check the settings, or give the folder: appliance models fit {version.folder}"
                )
            if target in names:
                return version.folder, version.settings
    raise Failure(
        f"{target!r} is neither a folder nor a model in the registry: give the folder of a checkpoint, or a "
        "name that 'appliance models list' shows"
    )


def _settings(folder: str, given: Mapping[str, Any]) -> ModelSettings:
    converter = Converter({}, "--set")
    path = os.path.abspath(os.path.expanduser(folder))
    converted = converter.settings({"models": {"model": {**given, "folder": path}}}).models.get("model")
    if converter.faults or converted is None:
        raise Failure(str(SettingsError(*converter.faults)).replace("models.model.", ""))
    return converted
