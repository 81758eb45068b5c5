"""The control messages between the core and a replica's ranks.

All structs contain only plain data, which `engine.wire` encodes as msgpack. Plans, which rank 0 sends to the
other ranks, are defined in `engine.plan`. This module does not load torch, because the core imports it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.levels import LEVELS
from engine.messages import FinishReason, ReplicaInfo, ReplicaSpec

BLOCK_CELLS = 16_384
"""Maximum number of blocks described by `BlockUse`."""
NO_OWNER = 0xFFFF
"""Value in `BlockUse.owners` for blocks that no request uses."""


class Start(msgspec.Struct, tag="start", frozen=True):
    """First message from the core to each rank. It tells the process to start as rank number `rank`. For rank
    0, it carries the file descriptors of the plan channels to the other ranks, in rank order; for any other
    rank, the descriptor of that rank's plan channel."""

    spec: ReplicaSpec
    rank: int


class Attach(msgspec.Struct, tag="attach", frozen=True):
    """Sent by the core to rank 0 to connect a front. Carries the file descriptor of the front's data
    channel."""

    front: str


class CancelSequences(msgspec.Struct, tag="cancel_request", frozen=True):
    """Sent by the core to rank 0 to end all of a request's sequences, because an operator has cancelled the
    request or its deadline has passed."""

    request_id: str


class Sleep(msgspec.Struct, tag="sleep", frozen=True):
    """Sent by the core to rank 0 to release the device memory of the weights and the KV cache. The replica
    must have no unfinished sequences. The answer is `MemoryChanged`."""


class Wake(msgspec.Struct, tag="wake", frozen=True):
    """Sent by the core to rank 0 to restore the memory released by `Sleep`. The answer is `MemoryChanged`."""


class MemoryChanged(msgspec.Struct, tag="memory_changed", frozen=True):
    """Sent by rank 0 to the core after `Sleep` or `Wake`. Byte counts are sums over all ranks."""

    asleep: bool
    """Whether the replica is asleep now."""
    problem: str = ""
    """Why the operation failed, or empty if it succeeded. A failed operation changes nothing."""
    freed_bytes: int = 0
    """Number of bytes of memory released."""
    host_bytes: int = 0
    """Host memory, in bytes, that now holds copies of the weights."""
    seconds: float = 0.0
    """Duration of the operation in seconds."""


class AskBlocks(msgspec.Struct, tag="ask_blocks", frozen=True):
    """Sent by the core to rank 0 to ask for the state of the KV blocks. The answer is `BlockUse`. All
    `AskBlocks` messages that arrive before the answer is sent share that answer."""


class BlockOwner(msgspec.Struct, array_like=True, frozen=True):
    """An unfinished request and its KV blocks, as listed in `BlockUse`."""

    request_id: str
    blocks: int
    """Number of entries in the block tables of the request's samples. A block that several samples found in
    the prefix cache counts once per sample."""
    preemptions: int
    """Number of times the request's unfinished submissions have been preempted."""


class BlockUse(msgspec.Struct, tag="block_use", frozen=True):
    """Sent by rank 0 to the core with the state of the KV blocks, in pool order. It describes at most
    BLOCK_CELLS blocks: every `stride`-th one, if the pool is larger. A message therefore takes at most 64
    KiB, plus about 40 bytes per unfinished request. The data is collected over several steps. If a block's
    owner changes in the meantime, the message may name no owner for that block.
    """

    stride: int
    states: bytes
    """One byte per described block: 0 (free), 1 (cached), 2 (used) or 3 (used, with more than one
    reference)."""
    ages: bytes
    """One byte per described block: log2(1 + seconds since its last use), rounded down, if the block is
    cached, otherwise 0."""
    owners: bytes
    """Two bytes per described block, little-endian: an index into `requests`, or NO_OWNER. A block with
    several references is assigned to the first request that uses it."""
    requests: list[BlockOwner]
    """The unfinished requests, oldest first."""


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Sent by the core to a rank to make it exit immediately. Running sequences are lost."""


LoadStage = Literal["start", "read", "convert", "build", "warm up", "ready"]
"""The stages of a rank's startup, in order: starting the process, reading the weights, packing the weights
into the device's layout, compiling the kernels and sizing the KV pool, and running the warm-up steps."""


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """Sent by a starting rank to the core, with the current stage and its progress."""

    stage: LoadStage
    done: int = 0
    total: int = 0
    """Total amount of work, or 0 if unknown."""
    unit: str = ""
    """Unit of `done` and `total`, such as "bytes" or "layers"."""
    detail: str = ""
    """The item that the stage is working on, such as a file name."""
    note: str = ""
    """A message for the log, unrelated to progress."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Sent by rank 0 to the core when the replica is ready for submissions."""

    info: ReplicaInfo


FatalKind = Literal["checkpoint", "memory", "device", "internal"]
"""Why a rank exited. "checkpoint" means that the files or the configuration are invalid; the core then waits
longer before restarting the replica."""


class Fatal(msgspec.Struct, tag="fatal", frozen=True):
    """The last message from a rank to the core, with the reason for its exit."""

    kind: FatalKind
    message: str


class Finished(msgspec.Struct, array_like=True, frozen=True):
    """A submission's final counts. Exactly one `Finished` is sent for each `Submit`."""

    request_id: str
    index: int
    first_sample: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    """Number of tokens generated for all samples, not counting those in `Submit.output_token_ids`."""
    preemptions: int
    batch_size: int
    """Batch size, in sequences, of the step that started the submission."""
    finish_reason: list[FinishReason]
    """One finish reason per sample."""
    credit_tokens: int
    """The submission's total token credit, all of which has been returned to the core."""


class LayerExperts(msgspec.Struct, frozen=True):
    """Statistics of the experts chosen in one layer since the replica started."""

    layer: int
    experts: int
    """Number of experts."""
    choices: int
    """Total number of choices in this layer. A token counts once for each expert that it chooses."""
    busiest: int
    """The expert chosen most often."""
    busiest_choices: int
    unused: int
    """Number of experts that were never chosen."""

    @property
    def imbalance(self) -> float:
        """How often the busiest expert was chosen, divided by the mean over all experts, or 0 if none was
        chosen."""
        return self.busiest_choices * self.experts / max(1, self.choices)


class EngineGauges(msgspec.Struct, frozen=True, kw_only=True):
    """State of a replica's engine. Token, eviction and preemption counts are totals since the replica
    started."""

    step: int
    """Number of the last step whose tokens were read."""
    credit_seqs: int
    credit_tokens: int
    returned_seqs: tuple[int, ...] = (0,) * LEVELS
    """Number of finished samples per level. The sum over all levels is `credit_seqs` minus the initial
    credit."""
    returned_tokens: tuple[int, ...] = (0,) * LEVELS
    """Number of prompt tokens per level that were computed or dropped. The sum over all levels is
    `credit_tokens` minus the initial credit."""
    running: int = 0
    waiting: int = 0
    waiting_seqs: tuple[int, ...] = (0,) * LEVELS
    """Number of waiting sequences per level."""
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_shared: int = 0
    """Number of used blocks with more than one reference. All samples forked from one prompt count as a
    single reference."""
    evictions: int = 0
    """Number of cached blocks overwritten because no block was free."""
    preemptions: int = 0
    prompt_tokens: int = 0
    """Number of prompt tokens in all started submissions. A prompt counts once per submission."""
    cached_tokens: int = 0
    """Number of prompt tokens, in all started submissions, that were found in the prefix cache."""
    computed_tokens: int = 0
    """Number of tokens computed in prefills. Tokens recomputed after a preemption, including output tokens,
    are counted again."""
    generated_tokens: int = 0
    expert_layers: tuple[LayerExperts, ...] = ()
    """Statistics of the experts chosen, for each layer with experts. All steps are counted. The counts are up
    to one second old."""


class ReplicaStats(EngineGauges, frozen=True, kw_only=True):
    """State of a replica's engine, and statistics of its steps since the previous report."""

    decode_steps: int = 0
    """Number of decode-only steps."""
    step_ms: float = 0.0
    """Mean duration of a decode-only step in milliseconds, or 0 if there was none."""
    idle_us: float = 0.0
    """Mean time, in microseconds, that the device waited for the host before a decode-only step."""
    mixed_steps: int = 0
    """Number of steps with prefill. `mixed_step_ms` and `mixed_idle_us` are their mean duration and idle
    time."""
    mixed_step_ms: float = 0.0
    mixed_idle_us: float = 0.0
    log_dropped_lines: int = 0
    """Number of log lines that rank 0 has dropped because standard error was blocked."""


class LongestStep(msgspec.Struct, array_like=True, frozen=True):
    """A replica's longest step with decodes. Prefill in such a step delays the decoding sequences' next
    tokens."""

    ms: float
    """Duration in milliseconds."""
    decodes: int
    """Number of decoding sequences."""
    prompt_tokens: int
    """Number of prompt tokens computed in the step."""
    request_id: str = ""
    """Id of the request with the step's largest chunk, or an empty string if no prompt tokens were
    computed."""


class Report(ReplicaStats, tag="report", frozen=True, kw_only=True):
    """Sent by rank 0 to the core with the replica's state: after each step that ended a submission or granted
    credit, every 100 ms while steps run, and every 500 ms otherwise. A longer pause is announced by
    `LongStep`.

    Credits are totals granted since the replica started. The available credit, computed by the core, is the
    granted credit minus the used credit. `credit_seqs` starts at `max_num_seqs` and increases by one for each
    ended sample. `credit_tokens` starts at the token budget of two steps with decodes or of one step without
    decodes, whichever is larger. It increases by a submission's `credit_tokens` as these tokens are computed,
    found in the prefix cache, or dropped. `returned_seqs` and `returned_tokens` contain the credit returned
    for each level.
    """

    finished: list[Finished] = []
    longest_step: LongestStep | None = None
    """The longest step with decodes since the previous report, or None if there was none."""
    disconnected_fronts: list[str] = []
    """Fronts whose channels have closed. All of their submissions have been reported in `finished`."""


class LongStep(msgspec.Struct, tag="long_step", frozen=True):
    """Sent by rank 0 to the core before waiting for a long step. Rank 0 sends nothing else until the step
    ends."""

    expected_s: float
    """Predicted duration in seconds, based on the step's size and the measured speed of earlier steps
    (`engine.step_forecast`)."""


RankInbound = Start | Attach | CancelSequences | Sleep | Wake | AskBlocks | Stop
"""Messages from the core to ranks."""
RankOutbound = Progress | Ready | Report | LongStep | MemoryChanged | BlockUse | Fatal
"""Messages from ranks to the core."""
