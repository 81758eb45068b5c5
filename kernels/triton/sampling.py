"""Samples tokens on a GPU without sorting. Contains the greedy, plain (temperature) and full variants, and
the logits processors that run before them.

This module implements `kernels.draws.SamplingOps`; `kernels.sampling` is the reference implementation. Noise
matches the reference to within 4e-6, and probability mass to within 2e-6 of the total. A draw therefore
differs from the reference only if two scores, or a token and the boundary of the nucleus, are closer to each
other than these tolerances. A NaN logit is treated as infinity. Every operation has a parameter `pdl`
(programmatic dependent launch). If it is None, PDL is used on devices that support it.

Algorithm

For each chunk of a row, the *scan* kernel computes the best score, its token id and logit, the largest logit,
the sum of exp, and the second best score. For greedy and plain rows, *pick* then selects the best chunk.

For a full row, the first candidate is the Gumbel-max draw from the whole distribution. If top-k, top-p and
min-p keep this token, it is the row's result. Top-p keeps this token with a probability of at least top_p.
The token with the second best score is the second candidate. *combine* finds both candidates. *above* reads
the row again. For each candidate, it computes the number and the total mass of the tokens that are more
likely. *decide* selects the first candidate that is kept. Nearly all rows are finished after these two reads.

For the remaining rows, *settle* searches for the boundary between kept and excluded tokens, with several
thresholds per read. It draws again among the tokens that are not yet excluded, until the drawn token is known
to be kept. All draws use the same noise for a token, so the result is the same as with a sort. (FlashInfer,
Ye et al. 2025, also rejects candidates from a shrinking set, but it uses new noise in each round.)

For a row with a small top-k, *above* is not needed. *scan* stores the largest logit of each group of 128
tokens. Only tokens that reach the k-th largest of these values can be in the top k. *decide* therefore
collects these few tokens and compares them with each other.

A row's result does not depend on the other rows or on their number. Chunks have a fixed size, and their sums
are added in chunk order.
"""

from __future__ import annotations

import torch
import triton

from kernels import PDL_FROM
from kernels.draws import Bans, Biases, Draws, Logits
from kernels.triton.sampling_full import above_kernel, combine_kernel, decide_kernel
from kernels.triton.sampling_kernels import edit_kernel, pick_kernel, scan_kernel, scatter_kernel
from kernels.triton.sampling_search import settle_kernel

_CHUNK = 4096
_CHUNK_WARPS = 8
"""Columns and warps per program of *scan* and *above*. Both affect the order in which values are summed."""
_DECIDE_WARPS = 8
_SETTLE_TILE = 2048
_SETTLE_WARPS = 16
_SETTLE_STAGES = 4
_FEW = 64
"""Maximum top-k for which *decide* selects a row's token from a few groups instead of scanning the whole row.
*decide* then reads at most this many groups and compares at most twice as many tokens."""
_GROUP = 128
"""Logits per group. *scan* stores each group's largest logit."""
_THRESHOLDS = 2
"""Number of thresholds that *settle* tests per read. More thresholds need more registers and instructions;
fewer need more reads."""


def greedy(logits: Logits, *, pdl: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    pdl = _pdl(logits, pdl)
    rows = len(logits.values) if logits.index is None else len(logits.index)
    partials = _scan_rows(logits, None, rows, 0, pdl)
    return _pick_rows(partials, None, rows, pdl)


def plain(logits: Logits, draws: Draws, *, pdl: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    pdl = _pdl(logits, pdl)
    rows = len(draws.slots)
    partials = _scan_rows(logits, draws, rows, 1, pdl)
    return _pick_rows(partials, draws, rows, pdl)


def full(logits: Logits, draws: Draws, *, pdl: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    pdl = _pdl(logits, pdl)
    rows = len(draws.slots)
    device = logits.values.device
    values, ids = _results(rows, device)
    chunks = triton.cdiv(logits.columns, _CHUNK)
    chunk, group = _chunk(logits.columns), _group(logits.columns)
    row_groups = chunks * (chunk // group)
    groups = torch.empty((rows, row_groups), dtype=torch.float32, device=device)
    partials = _scan_rows(logits, draws, rows, 2, pdl, groups)
    if rows == 0:
        return values, ids
    source, options = _source(logits)
    options |= {"PDL": pdl, "launch_pdl": pdl}
    padded_chunks = triton.next_power_of_2(chunks)
    summaries = torch.empty((rows, 8), dtype=torch.float32, device=device)
    states = torch.empty(rows, dtype=torch.int32, device=device)
    above = torch.empty((4, rows, chunks), dtype=torch.float32, device=device)
    # Each row's list has space for _FEW groups and twice as many tokens.
    group_lists = torch.empty((rows, 3 * _FEW), dtype=torch.int32, device=device)
    parameters = (draws.slots, draws.floats, draws.floats.stride(0), draws.top_k)
    combine_kernel[(rows,)](
        logits.columns,
        *parameters,
        partials,
        summaries,
        states,
        values,
        ids,
        rows,
        chunks,
        FEW=_FEW,
        CHUNKS=padded_chunks,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    above_kernel[(chunks, rows)](
        *source[:6],
        *parameters,
        summaries,
        states,
        above,
        rows,
        chunks,
        CHUNK=chunk,
        INDEXED=options["INDEXED"],
        EDITED=options["EDITED"],
        PDL=pdl,
        num_warps=_CHUNK_WARPS,
        launch_pdl=pdl,
    )
    decide_kernel[(rows,)](
        *source,
        *_tables(draws),
        summaries,
        states,
        above,
        groups,
        group_lists,
        values,
        ids,
        rows,
        chunks,
        row_groups,
        CHUNKS=padded_chunks,
        GROUPS=triton.next_power_of_2(row_groups),
        GROUP=group,
        FEW=_FEW,
        num_warps=_DECIDE_WARPS,
        **options,
    )
    settle_kernel[(rows,)](
        *source,
        *_tables(draws),
        summaries,
        states,
        values,
        ids,
        TILE=min(_SETTLE_TILE, triton.next_power_of_2(logits.columns)),
        THRESHOLDS=_THRESHOLDS,
        STAGES=_SETTLE_STAGES,
        num_warps=_SETTLE_WARPS,
        **options,
    )
    return values, ids


def edit(
    logits: Logits,
    draws: Draws,
    index: torch.Tensor,
    counts: torch.Tensor | None = None,
    count_slots: torch.Tensor | None = None,
    bias: Biases | None = None,
    banned: Bans | None = None,
    *,
    pdl: bool | None = None,
) -> torch.Tensor:
    pdl = _pdl(logits, pdl)
    device = logits.values.device
    edited = torch.empty((len(index), logits.columns), dtype=torch.float32, device=device)
    if len(index) == 0:
        return edited
    edit_kernel[(triton.cdiv(logits.columns, _CHUNK), len(index))](
        logits.values,
        logits.values.stride(0),
        logits.index,
        logits.columns,
        draws.slots,
        draws.floats,
        draws.floats.stride(0),
        index,
        counts,
        count_slots,
        edited,
        INDEXED=logits.index is not None,
        PENALISED=counts is not None and count_slots is not None,
        PDL=pdl,
        CHUNK=_chunk(logits.columns),
        num_warps=_CHUNK_WARPS,
        launch_pdl=pdl,
    )
    for rows, ids, values in ((*bias,) if bias else (None, None, None), (*(banned or (None, None)), None)):
        if rows is None or ids is None or len(rows) == 0:
            continue
        scatter_kernel[(triton.cdiv(len(rows), 128),)](
            edited, logits.columns, rows, ids, values, len(rows), BAN=values is None, PDL=pdl, launch_pdl=pdl
        )
    return edited


def _pdl(logits: Logits, pdl: bool | None) -> bool:
    if pdl is not None:
        return pdl
    return _nvidia(logits) and triton.runtime.driver.active.get_current_target().arch >= PDL_FROM


def _nvidia(logits: Logits) -> bool:
    return logits.values.device.type != "cpu" and torch.version.hip is None


def _source(logits: Logits) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the kernel arguments and launch options that describe the logits."""
    if logits.values.stride(1) != 1:
        raise ValueError(
            f"logits have strides {logits.values.stride()}; the columns of a row must be contiguous"
        )
    if logits.columns > logits.values.shape[1]:
        raise ValueError(f"logits have {logits.values.shape[1]} columns; expected at least {logits.columns}")
    arguments = (
        logits.values,
        logits.values.stride(0),
        logits.index,
        logits.edited,
        logits.edited_index,
        logits.columns,
        logits.first,
        logits.hashes,
    )
    given = {"INDEXED": logits.index is not None, "EDITED": logits.edited is not None}
    return arguments, {**given, "NVIDIA": _nvidia(logits)}


def _tables(draws: Draws) -> tuple[object, ...]:
    floats = draws.floats
    return draws.slots, draws.positions, draws.noise_base, floats, floats.stride(0), draws.top_k


def _chunk(columns: int) -> int:
    return int(min(_CHUNK, triton.next_power_of_2(columns)))


def _group(columns: int) -> int:
    return min(_GROUP, _chunk(columns))


def _scan_rows(
    logits: Logits,
    draws: Draws | None,
    rows: int,
    draw: int,
    pdl: bool,
    groups: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch *scan* and return six results per chunk, [6, rows, chunks] float32: the best score, its token id
    (int32 bits), its logit, the largest logit, the sum of exp, and the second best score."""
    chunks = triton.cdiv(logits.columns, _CHUNK)
    partials = torch.empty((6, rows, chunks), dtype=torch.float32, device=logits.values.device)
    if rows == 0:
        return partials
    if draws is not None and logits.hashes is None:
        raise ValueError("logits have no hashes; set them with kernels.sampling.token_hashes")
    source, options = _source(logits)
    tables = (None, None, None, None, 0, None) if draws is None else _tables(draws)
    scan_kernel[(chunks, rows)](
        *source,
        *tables,
        partials,
        groups,
        rows,
        chunks,
        DRAW=draw,
        CHUNK=_chunk(logits.columns),
        GROUP=_group(logits.columns),
        FEW=_FEW,
        PDL=pdl,
        num_warps=_CHUNK_WARPS,
        launch_pdl=pdl,
        **options,
    )
    return partials


def _pick_rows(
    partials: torch.Tensor, draws: Draws | None, rows: int, pdl: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = _results(rows, partials.device)
    if rows:
        chunks = partials.shape[2]
        pick_kernel[(rows,)](
            partials,
            None if draws is None else draws.slots,
            values,
            ids,
            rows,
            chunks,
            DRAWN=draws is not None,
            PDL=pdl,
            CHUNKS=triton.next_power_of_2(chunks),
            num_warps=1,
            launch_pdl=pdl,
        )
    return values, ids


def _results(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
    )
