"""Checks whether the models can run: their folders, and their memory use as predicted by `engine.sizing`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from appliance.models.fit import UnfitError, fit
from appliance.models.gpus import DetectedGpu
from appliance.monitoring.findings import Finding, Level
from appliance.protocol import ModelStatus, precision
from appliance.quantities import of_bytes
from appliance.settings import ModelSettings
from engine.messages import BLOCK_TOKENS

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def configured_models(
    models: Mapping[str, ModelSettings], gpus: list[DetectedGpu], available_bytes: int
) -> Iterator[Finding]:
    """Check whether the models could run if the service were started with `available_bytes` of host
    memory."""
    for name, model in models.items():
        try:
            files = list(_files(model))
        except OSError as error:
            files = [f"{model.folder} cannot be read: {error.strerror or error}"]
        for complaint in files:
            yield _finding(
                name, "problem", complaint, "copy the checkpoint folder again, or set another folder"
            )
        if not files:
            yield _fit(name, model, gpus, available_bytes)


def running_models(models: list[ModelStatus]) -> Iterator[Finding]:
    """Check the models of a running service, based on its status."""
    for model in models:
        for replica in model.replicas:
            if replica.state != "ready":
                continue
            difference = replica.used_bytes / max(1, replica.predicted_bytes) - 1
            where = ", ".join(dict.fromkeys(replica.devices))
            held = precision(replica.dtype, replica.weights, replica.kv_cache_dtype)
            yield _finding(
                model.name,
                "ok",
                f"{replica.name} is running on {where} in {held}: {of_bytes(replica.used_bytes)} used, "
                f"{of_bytes(replica.predicted_bytes)} predicted ({difference:+.0%})",
            )
        if _is_removed(Path(model.folder)):
            yield _finding(
                model.name,
                "problem",
                f"{model.folder} was removed: running replicas continue, but no replica can be started",
                "restore the folder",
            )


def _is_removed(folder: Path) -> bool:
    """Return whether the folder was removed. The check uses this user's permissions. The service's user may
    be able to read more."""
    try:
        return not folder.is_dir()
    except PermissionError:
        return False


def _files(model: ModelSettings) -> Iterator[str]:
    """Yield a description of each missing or unusable file in the folder."""
    try:
        yield from _missing(model)
    except PermissionError as error:
        yield f"{error.filename} cannot be read by uid {os.getuid()}: run the doctor as the service's user"


def _missing(model: ModelSettings) -> Iterator[str]:
    folder = Path(model.folder)
    if not folder.is_dir():
        yield f"{folder} is not a folder"
        return
    if not (folder / "tokenizer.json").is_file():
        yield f"{folder / 'tokenizer.json'} does not exist"
    if model.load_format == "dummy" or (folder / _SINGLE).is_file():
        return
    if not (folder / _INDEX).is_file():
        yield f"{folder} has neither {_SINGLE} nor {_INDEX}"
        return
    try:
        shards = set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"{folder / _INDEX} is not a valid index of weight shards ({error!r})"
        return
    for shard in sorted(map(str, shards)):
        if not (folder / shard).is_file():
            yield f"{folder / shard} does not exist, but is listed in {_INDEX}"


def _fit(name: str, model: ModelSettings, gpus: list[DetectedGpu], available_bytes: int) -> Finding:
    try:
        found = fit(model, gpus, available_bytes)
    except UnfitError as error:
        return _finding(name, "problem", str(error), error.remedy)
    ranks, longest = model.tensor_parallel_size, found.longest
    text = (
        f"{found.model_type}, {found.parameters / 1e6:,.1f} M parameters in "
        f"{precision(found.dtype, found.weights, found.kv_cache_dtype)}: "
        f"weights {of_bytes(found.weight_bytes)}, "
        f"working memory {of_bytes(found.fixed_bytes - found.weight_bytes)}, {found.blocks:,} KV blocks "
        f"{of_bytes(found.kv_bytes)}; {of_bytes(found.usable_bytes)} usable"
        f"{f' on each of {ranks} ranks' if ranks > 1 else ''}"
    )
    if found.needed_bytes > found.usable_bytes:
        return _finding(
            name,
            "problem",
            f"the model does not fit into memory: {text}",
            "lower kv_blocks or max_num_seqs, use more ranks, or free memory",
        )
    fitting = found.blocks * BLOCK_TOKENS
    if fitting >= longest:
        return _finding(name, "ok", text)
    if fitting and model.max_model_len is None:
        return _finding(
            name,
            "warning",
            f"the KV cache limits sequences to {fitting:,} tokens, but the checkpoint allows "
            f"{longest:,}: {text}",
            f"set max_model_len = {fitting}, raise kv_blocks, use more ranks, or free memory",
        )
    return _finding(
        name,
        "problem",
        f"the KV cache holds {fitting:,} tokens, fewer than one sequence of {longest:,} tokens: {text}",
        f"{f'lower max_model_len to {fitting}, ' if fitting else ''}raise kv_blocks, use more ranks, or free "
        f"memory",
    )


def _finding(name: str, level: Level, text: str, remedy: str = "") -> Finding:
    return Finding(area="models", subject=name, level=level, text=text, remedy=remedy)
