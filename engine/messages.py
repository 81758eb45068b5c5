"""The messages of the engine: between core and ranks, and between fronts and replicas.

All structs are plain data, encoded as msgpack by `engine.wire`. Plans between ranks are in `engine.plan`.
Core and fronts import this module, so it does not load torch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

BLOCK_TOKENS = 64
"""Tokens per KV block. The pool layout, the prefix hashes and the kernels depend on this value."""

MAX_BAD_WORD_TOKENS = 32
"""Maximum length of an entry of `SamplingParams.bad_words`. The device keeps one token less than this of
every output."""
MAX_BAD_WORDS = 512
"""Maximum number of entries of `SamplingParams.bad_words`, since each is compared in every step."""

CLASSES = 4
"""Number of classes: `Submit.priority` is 0 to 3."""
URGENCIES = 3
"""Number of urgencies inside a class: `Submit.urgency` is 0 to 2."""
LEVELS = CLASSES * URGENCIES
"""Number of levels, one for each class and urgency: `Submit.level` is 0 to 11."""

Device = Literal["auto", "cuda", "cpu"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["auto", "fp8"]
LoadFormat = Literal["safetensors", "dummy"]
FinishReason = Literal["", "stop", "length", "cancelled", "error"]
"""Why a sample ended: "" (it has not ended), "stop" (a stop token, which is its last token), "length"
(`max_tokens` or the model's maximum length), "cancelled" or "error"."""


# ── replicas ────────────────────────────────────────────────────────────────────────────


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a replica, sent to each of its ranks."""

    replica: str
    """Name of the replica, unique on the server, e.g. "demo-0"."""
    model_path: str
    """Folder of a Hugging Face checkpoint (`config.json` and safetensors files)."""
    load_format: LoadFormat = "safetensors"
    """"safetensors", or "dummy" for random weights generated on the device."""
    device: Device = "auto"
    """"auto" is CUDA if available, otherwise the CPU."""
    dtype: DType = "auto"
    """"auto" is the checkpoint's dtype on CUDA, float32 on the CPU."""
    quantization: Quantization = "auto"
    """How the layers' matrices are stored: "auto" (as in the checkpoint) or "fp8" (quantised while loading,
    with one scale per output)."""
    kv_cache_dtype: Quantization = "auto"
    """The KV cache's dtype: "auto" (the model's) or "fp8" (e4m3, with one scale per token and head)."""
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    """Maximum length of a sequence, prompt and output together; None: the checkpoint's maximum."""
    max_num_seqs: int = 64
    """Maximum number of sequences that run at the same time."""
    max_num_batched_tokens: int = 2048
    """Token budget of a step."""
    max_mixed_tokens: int | None = None
    """Token budget of a step in which sequences decode. The whole step delays each one's next token. None:
    half of `max_num_batched_tokens`, at most 4096."""
    kv_blocks: int | None = None
    """Number of KV blocks; None: as many as fit into the memory left after a profiling step."""
    gpu_memory_utilization: float = 0.95
    """Fraction of the device's memory to use (on CPU: of the free memory, with at most 2 GiB for the KV
    cache)."""
    prefix_cache: bool = True
    overlap: bool = True
    """Launch step N+1 before the tokens of step N are read."""
    rendezvous: str = ""
    """Path of a file, not yet existing, through which the ranks find each other; empty for a single rank."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs, in order of ranks; empty: the first visible ones."""
    threads: int | None = None
    """Number of torch CPU threads per rank; None: cores divided by ranks."""


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a loaded replica; part of `Ready`. Byte counts are sums over the ranks."""

    replica: str
    model_type: str
    parameters: int
    weight_bytes: int
    kv_bytes: int
    kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    dtype: str
    weights: str
    """The dtype of the layers' matrices; "fp8" if they are quantised."""
    kv_cache_dtype: str
    """The dtype of the KV cache, or "fp8"."""
    backend: str
    """The type of the device: "cpu" or "cuda"."""
    devices: list[str]
    """One name per rank, e.g. "cpu" or "cuda:0 NVIDIA H200"."""
    tensor_parallel_size: int
    collectives: str = ""
    """The library that exchanges data between the ranks, e.g. "gloo" or "NCCL"; empty for a single rank."""
    load_seconds: float
    predicted_bytes: int
    """Memory for weights, KV cache and activations as `engine.sizing` predicted it."""
    used_bytes: int
    """Memory use measured after loading."""
    torch_version: str
    least_step_s: float = 0.0
    """Lower bound of the time of a decode step, from the bytes that it reads and the device's peak rates; 0
    if these are not known."""
    least_prompt_token_s: float = 0.0
    """Lower bound of the time that a prompt token takes; 0 if not known."""


# ── requests, from a front ──────────────────────────────────────────────────────────────────────


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are sampled. The defaults sample greedily, with `max_tokens` as the only limit."""

    max_tokens: int
    """Maximum number of output tokens, including those in `Submit.output_token_ids`."""
    temperature: float = 0.0
    """The temperature; 0 means greedy decoding."""
    top_k: int = 0
    """0 means off."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    """Values to add to the logits of these token ids."""
    allowed_tokens: bytes = b""
    """Bit map of the token ids that may be sampled: token i is bit i % 8 of byte i // 8. Empty: all
    tokens."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that the output must not contain: the last token of an entry is banned if the
    output ends with the entry's other tokens. Prompt tokens do not count."""
    seed: int = 0
    """Seed of the sampling noise, 64 bits. The noise depends on seed, sample index, position and token id."""
    min_tokens: int = 0
    """Stop tokens are suppressed until this many tokens have been generated."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence: the checkpoint's end-of-sequence tokens, added by the front, and the
    request's."""
    ignore_eos: bool = False
    """Neither stop at `stop_token_ids` nor suppress them."""
    logprobs: int | None = None
    """k: return the log probabilities of the sampled token and of the k most likely tokens. None: return
    none."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, but for every prompt token except the first."""

    @property
    def penalised(self) -> bool:
        """Whether sampling needs the counts of the tokens that occurred so far."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


class Submit(msgspec.Struct, tag="submit", frozen=True, kw_only=True, omit_defaults=True):
    """Front to replica: generate `n` samples for one prompt."""

    handle: int
    """Identifies the submission on its channel. The front chooses it and never reuses it."""
    request_id: str
    index: int = 0
    """Index of the prompt in its request."""
    prompt_token_ids: list[int]
    output_token_ids: list[int] = []
    """Tokens that another replica generated before it died; they count as output. Requires n = 1."""
    n: int = 1
    first_sample: int = 0
    """Index of the first sample; sample i of the submission has index first_sample + i."""
    sampling: SamplingParams
    cache_salt: str = ""
    """Opaque string: the prefix cache shares blocks only between requests with equal salts."""
    priority: int = 1
    """Class, from 0 (real-time) to 3 (background). Preemption takes the highest number first."""
    urgency: int = 0
    """Order inside the class. 2: urgent, and all prompts of the request fit into one step; 1: urgent, with
    longer prompts; 0: not urgent."""
    spare_slots: int = 0
    """Number of slots that must stay free when a sample of this submission starts. They are reserved for
    submissions of better levels."""

    @property
    def level(self) -> int:
        """Order of service over all classes, best first: submissions of a better level are admitted and
        computed first, and credit is counted by level."""
        return level_of(self.priority, self.urgency)

    @property
    def credit_tokens(self) -> int:
        """Token credit that the submission spends. It is granted back as tokens are computed or dropped."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Front to replica: end a submission, or only one `sample` of it."""

    handle: int
    sample: int | None = None


def level_of(priority: int, urgency: int) -> int:
    """Return the level of a class and an urgency, from 0 (the first to be served) to LEVELS - 1."""
    return URGENCIES * priority + URGENCIES - 1 - urgency


# ── outputs, to a front ───────────────────────────────────────────────────────────────────────────


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """Natural log probability of a sampled or prompt token and of the most likely alternatives, best first.
    The distribution is the model's own, before temperature, penalties and biases."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class Output(msgspec.Struct, array_like=True):
    """New tokens of one sample. The last output of a sample has a non-empty `finish_reason`."""

    handle: int
    sample: int
    token_ids: list[int]
    finish_reason: FinishReason = ""
    logprobs: list[TokenLogprob] | None = None
    """One entry per token in `token_ids`, if requested."""
    cached_tokens: int | None = None
    """Number of prompt tokens found in the prefix cache; set in a sample's first output only."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One entry per prompt token, None for the first token. Only in the first output of sample
    `first_sample`, and only if requested."""
    error: str | None = None
    """The reason, if `finish_reason` is "error"."""
    refused: bool = False
    """Whether the submission was refused as invalid. Any other error is a failure of the engine."""


class StepFrame(msgspec.Struct, tag="step", array_like=True):
    """Replica to front: all outputs of one step for this front."""

    step: int
    outputs: list[Output]


# ── control, between core and ranks ─────────────────────────────────────────────────────


class Start(msgspec.Struct, tag="start", frozen=True):
    """Core to each rank, as the first message: start as rank `rank`. Rank 0 receives one file descriptor per
    other rank, in order of ranks: the plan channels. Each other rank receives its end of its plan channel."""

    spec: ReplicaSpec
    rank: int


class Attach(msgspec.Struct, tag="attach", frozen=True):
    """Core to rank 0: serve a front. The message carries the descriptor of the front's data channel."""

    front: str


class CancelSequences(msgspec.Struct, tag="cancel_request", frozen=True):
    """Core to rank 0: end all sequences of a request, by an operator's action or at its deadline."""

    request_id: str


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Core to rank: exit now; running sequences are lost."""


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """Rank to core during the start: the current stage and its progress, 0 to 1."""

    stage: str
    fraction: float


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Rank 0 to core: the replica accepts submissions."""

    info: ReplicaInfo


class Fatal(msgspec.Struct, tag="fatal", frozen=True):
    """Rank to core, as the last message: why the rank exits. "checkpoint" means invalid files or a spec that
    cannot be run; the core retries those slowly."""

    kind: Literal["checkpoint", "memory", "device", "internal"]
    message: str


class Finished(msgspec.Struct, array_like=True, frozen=True):
    """The final counts of a submission. Exactly one is sent for each `Submit`."""

    request_id: str
    index: int
    first_sample: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    """Sum over all samples, without the tokens in `Submit.output_token_ids`."""
    preemptions: int
    batch_size: int
    """Number of sequences in the step that started the submission."""
    finish_reason: list[FinishReason]
    """One entry per sample."""
    credit_tokens: int
    """The submission's token credit, all of which has been granted back."""


class EngineGauges(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a replica's engine. Token and preemption counts are totals since the start."""

    step: int
    """The last step whose tokens were read."""
    credit_seqs: int
    credit_tokens: int
    returned_seqs: tuple[int, ...] = (0,) * LEVELS
    """`credit_seqs` by level, without the initial credit: number of samples that ended."""
    returned_tokens: tuple[int, ...] = (0,) * LEVELS
    """`credit_tokens` by level, without the initial credit: prompt tokens that were computed or dropped."""
    running: int = 0
    waiting: int = 0
    waiting_seqs: tuple[int, ...] = (0,) * LEVELS
    """Number of waiting sequences by level."""
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of started submissions, counted once per submission."""
    cached_tokens: int = 0
    """How many of `prompt_tokens` were found in the prefix cache."""
    computed_tokens: int = 0
    """Computed prompt tokens; tokens recomputed after a preemption count again."""
    generated_tokens: int = 0


class ReplicaStats(EngineGauges, frozen=True, kw_only=True):
    """The engine's state, and statistics of the steps since the last report."""

    decode_steps: int = 0
    """Number of decode-only steps."""
    step_ms: float = 0.0
    """Mean duration of a decode-only step; 0 if there was none."""
    idle_us: float = 0.0
    """Mean time for which the device waited for the host before a decode-only step."""
    mixed_steps: int = 0
    """Number of steps with prefill. The next two fields have the mean duration of these steps and the mean
    idle time before them."""
    mixed_step_ms: float = 0.0
    mixed_idle_us: float = 0.0
    log_dropped_lines: int = 0
    """Number of lines of rank 0's log that were dropped since the start, because standard error was
    blocked."""


class Report(ReplicaStats, tag="report", frozen=True, kw_only=True):
    """Rank 0 to core: the state of the replica. Sent after each step that ended a submission or granted
    credit, every 100 ms while steps run, and every 500 ms otherwise, as a heartbeat. A `LongStep` announces a
    longer pause.

    Credits are totals granted since the start: available credit is granted credit minus spent credit.
    `credit_seqs` starts at `max_num_seqs` and grows by one for each sample that ends. `credit_tokens` starts
    with the token budget of two steps with decodes or of one step without decodes, whichever is larger. It
    grows by each submission's `credit_tokens` as these are computed, found in the prefix cache or dropped.
    `returned_seqs` and `returned_tokens` say for which levels credit has been granted back.
    """

    finished: list[Finished] = []
    fronts_gone: list[str] = []
    """Fronts whose channel closed. All of their submissions have been reported in `finished`."""


class LongStep(msgspec.Struct, tag="long_step", frozen=True):
    """Rank 0 to core: rank 0 is waiting for a step and sends no message before the step ends."""

    expected_s: float
    """Predicted duration, from the step's size and the measured speed of earlier steps
    (`engine.step_forecast`)."""


RankInbound = Start | Attach | CancelSequences | Stop
"""Messages from the core to ranks."""
RankOutbound = Progress | Ready | Report | LongStep | Fatal
"""Messages from ranks to the core."""
DataInbound = Submit | Cancel
"""Messages from a front to a replica."""
