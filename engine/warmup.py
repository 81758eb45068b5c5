"""Warms up a replica: launches every kernel used for serving before the replica reports ready.

The driver loads a kernel at its first launch, after waiting for the device to become idle. In a step with
prompts, this would delay every decoding sequence by a tenth of a second. cuBLAS and the attention operations
select different kernels for different row counts, so passes with prompts are padded to token counts that have
been warmed up (`engine.device_tables.Padding`), and decode-only steps replay captured graphs.
`engine.launch_enumeration` runs this code on meta tensors to find the kernels to compile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.device_tables import Padding
from engine.forward import ForwardInput
from engine.launched import StepResults
from engine.messages import BLOCK_TOKENS
from engine.progress import ProgressCallback, no_progress
from engine.rank_messages import Progress
from engine.sampler import LOGPROB_ROWS
from engine.sizing import gemm_sizes
from engine.steps import StepExecutor
from engine.warmup_steps import every_kind
from kernels import AttentionInput, ChunkSpan

_FEW = (1, 2, 4)
"""Row counts below the smallest of `gemm_sizes`. They are warmed up too, because different kernels are
selected for small row counts."""


def warm_up(
    steps: StepExecutor,
    apart: StepExecutor,
    max_model_len: int,
    sizes: Padding,
    collect: Callable[[StepResults], object] = lambda results: None,
    progress: ProgressCallback = no_progress,
) -> None:
    """Launch every kernel used by steps that are not replayed from a graph. All ranks must call this
    function. `steps` runs padded passes of every size in `sizes`; its KV cache does not change. `apart` runs
    one step of every kind; its tables are invalid afterwards. `collect` is called with each step's results,
    to load the kernels used for reading results.
    """
    run_padded_passes(steps, sizes, progress)
    for plan in every_kind(max_model_len, sizes.results[-1], sizes.tokens[-1]):
        collect(apart.run(plan))


def run_padded_passes(steps: StepExecutor, sizes: Padding, progress: ProgressCallback = no_progress) -> None:
    """Run passes that contain only padding: passes with prompts, decode-only passes, and passes that compute
    logits for every row count. They use a few layers that together launch every kernel
    (`ModelConfig.representative_layers`). Does not wait for the device.
    """
    passes = _PaddedPasses(steps)
    largest = sizes.results[-1]
    rows = sorted({*(few for few in _FEW if few <= largest), *sizes.results}, reverse=True)
    # Run the largest pass first: torch's allocator then retains enough memory for all others. In ascending
    # order, each pass would allocate more memory, several gigabytes in total.
    tokens = sizes.tokens[::-1]
    count = max(len(tokens), len(rows))
    for index in range(count):
        progress(Progress("warm up", index, count, "passes", "passes of every size"))
        passes.run_prompts(tokens[min(index, len(tokens) - 1)], results=rows[min(index, len(rows) - 1)])
    for count in rows:
        passes.run_decodes(count)
    passes.run_long_prompts()
    # Log probabilities of prompt tokens are computed for LOGPROB_ROWS tokens at a time.
    scored = gemm_sizes(LOGPROB_ROWS) if largest < LOGPROB_ROWS else []
    for count in sorted({*rows, *scored}, reverse=True):
        passes.run_logits(count)


class _PaddedPasses:
    """Runs passes that contain only padding, so that nothing is written to the KV cache."""

    def __init__(self, steps: StepExecutor) -> None:
        self._decoder, self._kv = steps.decoder.representative(steps.kv)
        self._table = steps.tables.block_table
        self._rows, self._columns = self._table.shape

    def run_prompts(self, tokens: int, results: int, context: int = 0) -> None:
        """Run a pass with prompts, each preceded by `context` cached tokens. The last layer computes
        `results` rows."""
        longest = self._columns * BLOCK_TOKENS - context
        starts = range(0, tokens, longest)[: self._rows]
        chunks = [
            ChunkSpan(start, min(longest, tokens - start), context, row) for row, start in enumerate(starts)
        ]
        empty = self._zeros(0)
        attention = AttentionInput(self._table, empty, empty, 0, chunks)
        self._run(tokens, attention, self._decodes(results, queries=self._zeros(results)))

    def run_decodes(self, rows: int) -> None:
        """Run a decode-only pass of `rows` tokens."""
        self._run(rows, self._decodes(rows), None)

    def run_long_prompts(self) -> None:
        """Run a chunk far from the beginning of its prompt, if the maximum sequence length allows it. Hopper
        GPUs have a separate attention kernel for such chunks, which other warm-up steps might not launch."""
        # Imported here because Triton is not used on a CPU.
        from kernels.triton.attention_prefill import EXPAND_FROM, HOPPER_ABOVE

        # A chunk of EXPAND_FROM tokens is long enough for an FP8 cache to be expanded.
        if self._columns * BLOCK_TOKENS >= HOPPER_ABOVE + EXPAND_FROM:
            self.run_prompts(EXPAND_FROM, results=1, context=HOPPER_ABOVE)

    def run_logits(self, rows: int) -> None:
        """Compute logits for `rows` rows."""
        decoder = self._decoder
        shape = (rows, decoder.config.hidden_size)
        decoder.logits(torch.zeros(shape, dtype=decoder.dtype, device=decoder.device))

    def _run(self, tokens: int, attention: AttentionInput, logits_attention: AttentionInput | None) -> None:
        zeros = self._zeros(tokens)
        self._decoder.forward(ForwardInput(zeros, zeros, zeros - 1, attention, logits_attention), self._kv)

    def _decodes(self, rows: int, queries: torch.Tensor | None = None) -> AttentionInput:
        zeros = self._zeros(rows)
        return AttentionInput(self._table, zeros, zeros, self._columns, [], queries=queries)

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self._decoder.device)
