"""Sampling from rows of logits without a sort: greedy, plain (a temperature) and full, and edits before them.

The operations of `kernels.draws.SamplingOps`; `kernels.sampling` is the twin. Noise is within 4e-6 of it, a
probability mass within 2e-6 of the whole: draws differ only where two scores, or a token and the border of
the nucleus, are closer than that. A NaN gives infinity.

Every launcher takes `pdl`, programmatic dependent launch; None: where the device has it.

How
---
*scan*: each chunk of a row gives its best score, that token's id and logit, its largest logit, its sum of exp
and its second best score. Greedy and plain rows need no more: *pick* takes the best chunk's.

A full row's winner before narrowing (the Gumbel-max draw from the whole distribution) is its winner after
it if it survives top-k, top-p and min-p, which for top-p it does with probability top_p or more; else the
next best may. *combine* finds both, *above* reads the row once more: how many tokens, with how much mass,
are more likely than each; *decide* takes the one that is kept. So nearly all rows are done after two reads.
The rest (*settle*) search for the border of what is kept, with several thresholds tried at each read, and
draw again among the tokens that are not excluded yet, until the winner is known to be kept. The noise is a
function of the token, so this is the very draw that sorting would have given. (Rejection with a shrinking
set of candidates is FlashInfer's, Ye et al. 2025; there with fresh noise each round.)

A small top-k is settled by *decide* alone: *scan* leaves the largest logit of each group of 128 tokens, whose
k-th largest says which few groups, and then tokens, to compare with each other.

A row's result does not depend on the rows beside it, nor on their number: chunks are of fixed size and their
sums are added in the order of the chunks.
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
"""Columns that one program of *scan* and *above* holds, and its warps. Both decide the order of sums."""
_DECIDE_WARPS = 8
_SETTLE_TILE = 2048
_SETTLE_WARPS = 16
_SETTLE_STAGES = 4
_FEW = 64
"""Largest top-k that is settled by groups of tokens, most groups that then are read, and half the most tokens
that then are compared."""
_GROUP = 128
"""Columns of a group."""
_THRESHOLDS = 2
"""Tried at each read of *settle*. More cost registers and instructions, fewer cost reads."""


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
    # FEW groups and twice as many tokens.
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
    """The arguments and options by which kernels read logits."""
    if logits.values.stride(1) != 1:
        raise ValueError(f"logits have strides {logits.values.stride()}; columns must be side by side")
    if logits.columns > logits.values.shape[1]:
        raise ValueError(f"logits have {logits.values.shape[1]} columns; {logits.columns} were asked for")
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
    """[6, rows, chunks] float32: best score, its token id (int32 bits), its logit; largest logit; sum of exp;
    second best score."""
    chunks = triton.cdiv(logits.columns, _CHUNK)
    partials = torch.empty((6, rows, chunks), dtype=torch.float32, device=logits.values.device)
    if rows == 0:
        return partials
    if draws is not None and logits.hashes is None:
        raise ValueError("logits have no hashes; noise needs kernels.sampling.token_hashes of their columns")
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
