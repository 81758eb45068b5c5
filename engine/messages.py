"""The structs on the engine's wires: core to ranks, front to replica, rank 0 to the other ranks.

Everything here is plain data, encoded as msgpack by `engine.wire`. Token counts are tokens, times are
milliseconds unless the name says otherwise. No torch: cores and fronts import this module.
"""

from __future__ import annotations

import msgspec

BLOCK_TOKENS = 64
"""Tokens in one block of KV cache. Fixed: the pool layout, the prefix hashes and the kernels rely on it."""

MAX_BAD_WORD_TOKENS = 32
"""Longest entry of `SamplingParams.bad_words`: the device keeps one token less of every sequence's output."""
MAX_BAD_WORDS = 512
"""Most entries of `SamplingParams.bad_words`: each is compared in every step."""


# ── what a replica is ────────────────────────────────────────────────────────────────────────────


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a rank needs to know to become part of a replica."""

    replica: str
    """Name of the replica, unique on the box, e.g. "demo-0"."""
    model_path: str
    """Folder of a Hugging Face checkpoint (`config.json`, safetensors)."""
    load_format: str = "safetensors"
    """"safetensors", or "dummy" for random weights made on the device."""
    device: str = "auto"
    """"auto" (CUDA where there is one, else CPU), "cuda" or "cpu"."""
    dtype: str = "auto"
    """"auto" (the checkpoint's on CUDA, float32 on CPU), "float32", "bfloat16" or "float16"."""
    weights: str = "auto"
    """Of the layers' matrices: "auto" (as the checkpoint has them) or "fp8" (quantised while they load, with
    a scale for each output)."""
    kv_dtype: str = "auto"
    """"auto" (the model's) or "fp8" (e4m3, with a scale for each token and head)."""
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    """Longest sequence, prompt and output together; None: the checkpoint's."""
    max_rows: int = 64
    """Sequences that can run at once."""
    step_tokens: int = 2048
    """Token budget of one step."""
    mixed_tokens: int | None = None
    """Token budget of a step in which sequences decode: each waits for all of it until its next token. None:
    half of `step_tokens`, at most 4096."""
    kv_blocks: int | None = None
    """Blocks in the pool; None: sized from memory after a profiling step."""
    memory_fraction: float = 0.95
    """Part of the device's memory (on CPU: of the free memory, at most 2 GiB for KV) that may be used."""
    prefix_cache: bool = True
    overlap: bool = True
    """Launch step N+1 before the tokens of step N are read."""
    seed: int = 0
    """Seeds dummy weights only; requests bring their own."""
    rendezvous: str = ""
    """Path of a file that does not exist yet, where the ranks of a group meet; empty for one rank."""
    threads: int | None = None
    """CPU threads of torch per rank; None: cores divided by ranks."""


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica turned out to be; part of `Ready`."""

    replica: str
    model_type: str
    parameters: int
    weight_bytes: int
    kv_bytes: int
    kv_blocks: int
    block_tokens: int
    max_rows: int
    step_tokens: int
    max_model_len: int
    vocab_size: int
    dtype: str
    weights: str
    """The dtype of the layers' matrices; "fp8" where they are quantised."""
    kv_dtype: str
    """As `weights`, of the cache."""
    backend: str
    """"cpu" or "cuda"."""
    devices: list[str]
    """One name a rank, e.g. "cpu" or "cuda:0 NVIDIA H200"."""
    tensor_parallel_size: int
    load_seconds: float
    predicted_bytes: int
    """What `engine.sizing` predicted for weights, KV and working memory."""
    used_bytes: int
    """What was measured."""
    torch_version: str


# ── a request, from a front ──────────────────────────────────────────────────────────────────────


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen. Defaults choose greedily and without limits other than `max_tokens`."""

    max_tokens: int
    """Most tokens to generate, counting those already in `Submit.output_token_ids`."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids."""
    allowed_tokens: bytes = b""
    """Bit map of the token ids that may be sampled: token i is bit i % 8 of byte i // 8. Empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of token ids that the output must not contain: the last token of a run cannot be sampled where the
    output ends with the others. Prompt tokens do not count."""
    seed: int = 0
    """Keys the noise together with the sample's index, the position and the token id (64 bits)."""
    min_tokens: int = 0
    """Stop tokens cannot be chosen before this many were generated."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence: the checkpoint's end tokens (resolved by the front) and the request's."""
    ignore_eos: bool = False
    """Do not stop at (and do not suppress) `stop_token_ids`."""
    logprobs: int | None = None
    """None: none; k: the chosen token's log probability and the k best."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first."""

    @property
    def penalised(self) -> bool:
        """Whether tokens that occurred are less (or more) likely: their counts are needed."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


class Submit(msgspec.Struct, tag="submit", frozen=True, kw_only=True, omit_defaults=True):
    """Front to replica: generate `n` samples after one prompt."""

    handle: int
    """Names this submission on this channel; chosen by the front, never reused on it."""
    request_id: str
    index: int = 0
    """Which prompt of the request."""
    prompt_token_ids: list[int]
    output_token_ids: list[int] = []
    """Tokens already emitted before a replica was lost; only with n = 1. They count as output."""
    n: int = 1
    first_sample: int = 0
    """Index of the first sample: sample i of this submission has index first_sample + i."""
    sampling: SamplingParams
    cache_salt: str = ""
    """Opaque: prefixes are shared only between equal salts."""
    priority: int = 1
    """Class 0 (real-time) to 3 (background): the lowest class, youngest first, is preempted."""
    urgent: bool = False
    """Before the others of its class, and before prompts of its class or a lower one that are under way."""

    @property
    def credit_tokens(self) -> int:
        """Token credit this submission spends, and gets back as it is computed or dropped."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Front to replica: nobody waits for this submission (`sample` None) or this sample of it any more."""

    handle: int
    sample: int | None = None


# ── tokens, to a front ───────────────────────────────────────────────────────────────────────────


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """Log probability (natural) of a chosen or prompt token under the model's own distribution, before
    temperature, penalties and biases, and of the best alternatives, most likely first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class Output(msgspec.Struct, array_like=True):
    """New tokens of one sample. The last one of a sample carries `finish`; nothing follows it.

    finish is "" (goes on), "stop" (a stop token, which is the last of token_ids), "length" (max_tokens or
    the model's length), "cancelled" or "error" (then `error` says why).
    """

    handle: int
    sample: int
    token_ids: list[int]
    finish: str = ""
    logprobs: list[TokenLogprob] | None = None
    """One for each of token_ids when asked for."""
    cached_tokens: int | None = None
    """Set on a sample's first output: prompt tokens found in the prefix cache."""
    batch_size: int | None = None
    """Set on a sample's first output: sequences in the step that started it."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """On sample `first_sample`'s first output, when asked for: one a prompt token, None for the first."""
    error: str | None = None


class StepFrame(msgspec.Struct, tag="step", array_like=True):
    """Replica to front: everything one step has for this front."""

    step: int
    outputs: list[Output]


# ── control, between the core and the ranks ─────────────────────────────────────────────────────


class Start(msgspec.Struct, tag="start", frozen=True):
    """Core to each rank, first: become rank `rank`. With it travel file descriptors: to rank 0 one channel
    for each other rank in order; to each other rank one channel to rank 0."""

    spec: ReplicaSpec
    rank: int


class Attach(msgspec.Struct, tag="attach", frozen=True):
    """Core to rank 0: a front's data channel (one file descriptor travels with it)."""

    front: str


class CancelRequest(msgspec.Struct, tag="cancel_request", frozen=True):
    """Core to rank 0: end every sequence of a request (operator, deadline)."""

    request_id: str


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Core to rank 0: end now, cancelling what runs."""


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """Rank to core while it starts: what it is doing and how far (0 to 1)."""

    stage: str
    fraction: float


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Rank 0 to core: submissions are welcome."""

    info: ReplicaInfo


class Fatal(msgspec.Struct, tag="fatal", frozen=True):
    """Rank to core, last: why it ends. `kind` is "checkpoint" (bad files, or a spec that cannot be run:
    retried slowly), "memory", "device" or "internal"."""

    kind: str
    message: str


class Finished(msgspec.Struct, array_like=True, frozen=True):
    """One submission's final count: the ledger. Exactly one for each `Submit`."""

    request_id: str
    index: int
    first_sample: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    """Over all samples, without those that came in with `Submit.output_token_ids`."""
    preemptions: int
    batch_size: int
    finish: list[str]
    """One for each sample."""
    credit_tokens: int
    """What `Submit.credit_tokens` was: granted back by now."""


class Report(msgspec.Struct, tag="report", frozen=True, kw_only=True):
    """Rank 0 to core: after each step that changed something, every 100 ms while it computes, and at
    least every half second: the heartbeat. A `LongStep` announces a longer pause.

    Credits are totals granted since the start, so that no message can be counted twice: available is granted
    minus spent. Rows: `max_rows` at first, one for each sample that ended. Tokens: at first the budget of two
    steps with decodes, or of one without if that is more; then each submission's `credit_tokens` as they are
    computed, found in the cache or dropped.
    """

    step: int
    credit_rows: int
    credit_tokens: int
    finished: list[Finished] = []
    fronts_gone: list[str] = []
    """Fronts whose channel closed; every submission that came from them is in `finished` by now."""
    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    """Of prompts; what is recomputed after a preemption counts again."""
    generated_tokens: int = 0
    decode_steps: int = 0
    """Steps since the last report that only decoded."""
    step_ms: float = 0.0
    """Mean of these; 0 where there were none."""
    idle_us: float = 0.0
    """Mean gap before them, in which the device waited for the host."""
    mixed_steps: int = 0
    """The same of the steps that computed prompts."""
    mixed_step_ms: float = 0.0
    mixed_idle_us: float = 0.0
    log_dropped_lines: int = 0
    """Lines of rank 0's log that were dropped since its start because nobody read standard error."""


class LongStep(msgspec.Struct, tag="long_step", frozen=True):
    """Rank 0 to core: it now waits for a step, and sends nothing before the step ends."""

    expected_s: float
    """Predicted from the step's size and the measured speed of earlier steps (`engine.step_forecast`)."""


RankInbound = Start | Attach | CancelRequest | Stop
"""What the core sends to ranks."""
RankOutbound = Progress | Ready | Report | LongStep | Fatal
"""What ranks send to the core."""
DataInbound = Submit | Cancel
"""What a front sends to a replica."""


# ── a step's plan, from rank 0 to every rank ────────────────────────────────────────────────────


class RowSetup(msgspec.Struct, array_like=True, frozen=True):
    """A sequence, and siblings that start with it, take rows of the device tables; what the rows held before
    is void."""

    row: int
    sampling: SamplingParams
    sample: int
    """The sample's index in its request: part of the noise key."""
    prompt_tokens: int
    history: list[int]
    """Prompt and output tokens known so far, only where penalties need their counts; else empty."""
    forks: list[tuple[int, int]] = []
    """(row, sample) of the siblings: they are told once what all of them are told."""
    recent: list[int] = []
    """The last output tokens known so far (at most MAX_BAD_WORD_TOKENS - 1), only where bad words need them;
    else empty."""

    @property
    def members(self) -> list[tuple[int, int]]:
        """(row, sample) of each sequence."""
        return [(self.row, self.sample), *self.forks]


class Chunk(msgspec.Struct, array_like=True, frozen=True):
    """A slice of a prompt (or of a sequence that is recomputed), given by its tokens."""

    row: int
    start: int
    """Position of the first token of the slice."""
    token_ids: list[int]
    sample_rows: list[int]
    """Rows that sample from the last token's logits: none inside a prompt, the row itself at its end, all
    rows of a group with n > 1 (which share the prompt's blocks)."""
    prompt_logprobs: int | None = None
    """k: return log probabilities for the tokens that follow those of the slice, inside the prompt."""
    next_token: int | None = None
    """With prompt_logprobs: the prompt token after the slice, if there is one."""


class StepPlan(msgspec.Struct, array_like=True, frozen=True):
    """One step, complete: every rank that replays the plans in order holds equal tables.

    Order of effect: `setups`, `blocks`, `clears`, `copies`, then the forward pass over `decodes` and
    `chunks`, then sampling for `decodes` followed by each chunk's `sample_rows`. A decode feeds the row's
    last sampled token at the row's next position; both live in the device tables and are advanced by the step
    itself.
    """

    step: int
    setups: list[RowSetup]
    """No row is in two of them."""
    blocks: list[tuple[int, int, int]]
    """(row, index in the row's block table, block id): new entries of block tables."""
    copies: list[tuple[int, int]]
    """(source, destination) blocks: copy-on-write, before anything else is written."""
    decodes: list[int]
    """Rows."""
    chunks: list[Chunk]
    clears: list[int] = []
    """Blocks to fill with zeros: their former owner's numbers were not finite, and zero times those is not
    zero."""


LOWEST_LOGPROB = -9999.0
"""Reported where a log probability is less, or is no number, so that all are finite."""

BAD_TOKEN = -1
"""In place of a sampled token: the row's logits had no finite maximum (broken weights, or an overflow)."""


class StepTokens(msgspec.Struct, array_like=True):
    """What a step sampled: one entry for each sampling row of its plan, the decodes and then the chunks' own,
    in the plan's order."""

    token_ids: list[int]
    """BAD_TOKEN where there is none."""
    logprobs: list[TokenLogprob | None] | None
    """None when no row asked for them."""
    prompt_logprobs: dict[int, list[TokenLogprob]]
    """By row: log probabilities of the tokens that follow a chunk's tokens."""
    broken: list[int] = []
    """Rows of chunks without sample rows whose numbers are not finite: no token says so."""
