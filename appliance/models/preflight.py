"""Checks whether a model can be served, before anything is loaded or changed.

`appliance config check`, `config reload`, `serve`, `doctor` and the commands that add models all run these
checks. The checks read files, but no weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec

from appliance.models.checkpoint_files import FolderFault, check_files
from appliance.models.fit import MachineMemory, MemoryFit, UnfitError, fit
from appliance.models.readable import FileReader, unreadable_reason
from appliance.protocol import FindingLevel, precision
from appliance.quantities import of_bytes
from appliance.settings import ModelSettings

_MIN_TOKENS = 1


class ModelFinding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check of a model. A model with a problem cannot be served."""

    level: FindingLevel
    text: str
    """The result of the check, with the measured values."""
    remedy: str = ""
    """The remedy for the problem; empty if there is none."""

    def __str__(self) -> str:
        return f"{self.text}: {self.remedy}" if self.remedy else self.text


def check_model(
    model: ModelSettings,
    memory: MachineMemory,
    reader: FileReader,
    *,
    compile_text: bool = True,
) -> list[ModelFinding]:
    """Check a model's folder and settings, stopping at the first problem, because later checks depend on
    earlier ones.

    - `memory`: this machine's memory. Needing more than the total memory is a problem; needing more than is
      currently free is a warning.
    - `reader`: the user that runs the service.
    - `compile_text`: whether to load the tokenizer and compile the templates. This takes about a second for a
      large vocabulary, and must not be done on the event loop thread.
    """
    return list(_check(model, memory, reader, compile_text))


def problem_of(findings: list[ModelFinding]) -> ModelFinding | None:
    """Return the first problem among the findings, or None if the model can be served."""
    return next((finding for finding in findings if finding.level == "problem"), None)


def _check(
    model: ModelSettings,
    memory: MachineMemory,
    reader: FileReader,
    compile_text: bool,
) -> Iterator[ModelFinding]:
    folder = Path(model.folder)
    try:
        check_files(folder, reader, weights=model.load_format != "dummy")
    except FolderFault as error:
        yield _problem(str(error), error.remedy)
        return
    except OSError as error:
        yield _problem(
            f"{error.filename or folder} cannot be read: {error.strerror or error}",
            "check the disk and the permissions, or copy the model again",
        )
        return
    falls_back = model.cpu_fallback and model.device != "cpu"
    try:
        in_whole_machine = fit(model, memory.idle())
        now = fit(model, memory)
        shortage = shortage_of(model, in_whole_machine) if falls_back and in_whole_machine.gpus else None
    except UnfitError as error:
        shortage = _problem(str(error), error.remedy)
        if not falls_back:
            yield shortage
            return
    if shortage is not None:
        text = f"the model will run on the CPU: {shortage.text}"
        yield ModelFinding(level="warning", text=text, remedy=shortage.remedy)
        on_cpu = msgspec.structs.replace(model, device="cpu")
        yield from _check(on_cpu, memory, reader, compile_text)
        return
    yield from _check_text(model, reader, compile_text)
    yield from _check_memory(model, in_whole_machine, now)


def _check_text(model: ModelSettings, reader: FileReader, compile_text: bool) -> Iterator[ModelFinding]:
    """Check the tokenizer and the chat template."""
    folder = Path(model.folder)
    if model.chat_template and (unreadable := unreadable_reason(Path(model.chat_template), reader)):
        yield _problem(unreadable.description, unreadable.remedy)
        return
    # Import the tokenizer library only when a model is checked.
    from appliance.text.template_files import read_template_sources
    from appliance.text.tokenizer_files import TokenizerFilesError, read_tokenizer_files

    try:
        special_tokens = read_tokenizer_files(folder).named
        sources = read_template_sources(folder, model.chat_template)
        if compile_text:
            _compile_text(folder, sources, special_tokens)
    except TokenizerFilesError as error:
        yield _problem(error.cause, error.remedy)
        return
    except Exception as error:
        text = str(error).encode(errors="backslashreplace").decode()
        yield _problem(
            f"the model's files in {folder} cannot be read ({type(error).__name__}: {text:.500})",
            "copy the tokenizer files from the original model again",
        )
        return
    if "default" not in sources:
        yield ModelFinding(
            level="warning",
            text=f"{folder} has no chat template, so chat requests will be refused with status 400",
            remedy="add chat_template.jinja to the folder, set chat_template to a file with a "
            "template, or use the model only with /v1/completions",
        )


def _compile_text(folder: Path, sources: dict[str, str], special_tokens: dict[str, str]) -> None:
    """Load the tokenizer and compile the templates as a front does. Raises TokenizerFilesError if the files
    cannot be used."""
    from appliance.text.template_process import TemplateProcess
    from appliance.text.tokenizer import Tokenizer

    async def compile_templates() -> None:
        template = TemplateProcess(sources, special_tokens)
        try:
            await template.compile()
        finally:
            template.close()

    Tokenizer.load(folder)
    asyncio.run(compile_templates())


def _check_memory(model: ModelSettings, machine: MemoryFit, now: MemoryFit) -> Iterator[ModelFinding]:
    """Compare the model's predicted memory with the machine's total and free memory."""
    if shortage := shortage_of(model, machine):
        yield shortage
    elif shortage := shortage_of(model, now):
        yield ModelFinding(
            level="warning",
            text=f"not enough memory is currently free: {shortage.text}",
            remedy=shortage.remedy,
        )
    else:
        yield limited_length(model, now) or ModelFinding(level="ok", text=describe(now))


def shortage_of(model: ModelSettings, found: MemoryFit) -> ModelFinding | None:
    """If the model does not fit into memory, return the problem, including the memory calculation."""
    if found.needed_bytes > found.usable_bytes:
        return _problem(
            f"the model does not fit into memory: {describe(found)}",
            "lower kv_blocks or max_num_seqs, use more ranks, or free memory",
        )
    wanted = model.max_model_len if model.max_model_len is not None else _MIN_TOKENS
    if found.kv_tokens < wanted:
        lower = f"lower max_model_len to {found.kv_tokens}, " if found.kv_tokens else ""
        return _problem(
            f"the KV cache holds {found.kv_tokens:,} tokens, fewer than one sequence of "
            f"{found.max_model_len:,} tokens: {describe(found)}",
            f"{lower}raise kv_blocks, use more ranks, or free memory",
        )
    return None


def limited_length(model: ModelSettings, found: MemoryFit) -> ModelFinding | None:
    """Return a warning if the KV cache cannot hold the longest sequence that the checkpoint allows."""
    if found.kv_tokens >= found.max_model_len or model.max_model_len is not None:
        return None
    return ModelFinding(
        level="warning",
        text=f"the KV cache limits sequences to {found.kv_tokens:,} tokens, but the checkpoint allows "
        f"{found.max_model_len:,}: {describe(found)}",
        remedy=f"set max_model_len = {found.kv_tokens}, raise kv_blocks, use more ranks, or free memory",
    )


def describe(found: MemoryFit) -> str:
    """Return the model's type and memory calculation in one line."""
    used = f", of which other processes use {of_bytes(found.used_bytes)}" if found.used_bytes else ""
    return (
        f"{found.model_type}, {found.parameters / 1e6:,.1f} M parameters in "
        f"{precision(found.dtype, found.weights, found.kv_cache_dtype)}: "
        f"weights {of_bytes(found.weight_bytes)}, working memory {of_bytes(found.workspace_bytes)}, "
        f"{found.kv_blocks:,} KV blocks {of_bytes(found.kv_bytes)}; {of_bytes(found.usable_bytes)} usable of "
        f"{of_bytes(found.total_bytes)}{used}{f' on each of {found.ranks} ranks' if found.ranks > 1 else ''}"
    )


def _problem(text: str, remedy: str) -> ModelFinding:
    return ModelFinding(level="problem", text=text, remedy=remedy)
