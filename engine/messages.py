"""A replica's configuration, and the messages between front processes and replicas. All structs contain only
plain data, which `engine.wire` encodes as msgpack. Control messages between the core and the ranks are
defined in `engine.rank_messages`. This module does not load torch, because the core and the fronts import it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from engine.levels import level_of

BLOCK_TOKENS = 64
"""Number of tokens per KV block. The pool's layout, the prefix hashes and the kernels depend on it."""

MAX_BAD_WORD_TOKENS = 32
"""Maximum length, in tokens, of an entry in `SamplingParams.bad_words`. The device stores the last
`MAX_BAD_WORD_TOKENS` - 1 tokens of every output."""
MAX_BAD_WORDS = 512
"""Maximum number of entries in `SamplingParams.bad_words`. The number is limited because every step compares
each entry with the output."""

Device = Literal["auto", "cuda", "cpu"]
ModelDType = Literal["float32", "bfloat16", "float16"]
"""Dtype of computations, and of matrices and KV caches that are not quantised."""
DType = Literal["auto", ModelDType]
WeightsDType = Literal[ModelDType, "fp8", "fp8-block"]
"""Dtype of the layers' matrices. "fp8" has one scale per output, and "fp8-block" one scale per block."""
KvDType = Literal[ModelDType, "fp8"]
Quantization = Literal["auto", "fp8"]
LoadFormat = Literal["safetensors", "dummy"]
FinishReason = Literal["", "stop", "length", "cancelled", "error"]
"""Why a sample ended: "stop" (the last token is a stop token), "length" (`max_tokens` or the model's maximum
length was reached), "cancelled" or "error". Empty while the sample has not ended."""


# ── replicas ────────────────────────────────────────────────────────────────────────────


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's configuration, which is sent to each of its ranks."""

    replica: str
    """The replica's name, e.g. "demo-0", which is unique on the server."""
    model_path: str
    """Folder of a Hugging Face checkpoint, with `config.json` and safetensors files."""
    load_format: LoadFormat = "safetensors"
    """Source of the weights: "safetensors" (the checkpoint's files) or "dummy" (random weights generated on
    the device)."""
    device: Device = "auto"
    """Device type. "auto" selects CUDA if available, otherwise the CPU."""
    dtype: DType = "auto"
    """Model dtype. "auto" selects the checkpoint's dtype on CUDA, and float32 on the CPU."""
    quantization: Quantization = "auto"
    """Storage format of the layers' matrices: "auto" (as in the checkpoint) or "fp8" (quantised on loading,
    with one scale per output)."""
    kv_cache_dtype: Quantization = "auto"
    """Dtype of the KV cache: "auto" (the model's dtype) or "fp8" (e4m3, with one scale per token and
    head)."""
    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    """Whether each rank holds a subset of whole experts, instead of a slice of every expert."""
    max_model_len: int | None = None
    """Maximum sequence length, including the prompt. None selects the checkpoint's maximum."""
    max_num_seqs: int = 64
    """Maximum number of sequences that run at the same time."""
    max_num_batched_tokens: int = 2048
    """Token budget: the maximum number of tokens computed in a step."""
    max_mixed_tokens: int | None = None
    """Token budget of a step with both decodes and prompts. It limits the time by which prompts can delay the
    next tokens of decoding sequences. None selects half of `max_num_batched_tokens`, but at most 4096."""
    kv_blocks: int | None = None
    """Number of KV blocks. None selects as many as fit into the memory left after a profiling step."""
    gpu_memory_utilization: float = 0.95
    """Fraction of device memory to use. On a CPU, it is a fraction of the free memory, and the KV cache uses
    at most 2 GiB."""
    prefix_cache: bool = True
    overlap: bool = True
    """Whether each step is launched before the previous step's tokens are read."""
    rendezvous: str = ""
    """Path of the file that the ranks use to find each other, or empty for a single rank. The file must not
    exist yet."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs, in rank order. If empty, the first visible GPUs are used."""
    threads: int | None = None
    """Number of torch CPU threads per rank. None divides the CPU cores evenly among the ranks."""
    cpus: tuple[int, ...] = ()
    """Ids of the CPUs that the ranks may use. If empty, they inherit the CPU affinity of the process that
    starts them."""
    share_reads: bool = False
    """Whether other replicas may read the same weights at the same time. If so, the files are read through
    the page cache, so that each file is read from disk only once."""

    def process_name(self, rank: int) -> str:
        """Return the name of a rank's process in the log: the replica's name, followed by the rank if there
        are several."""
        return f"{self.replica} rank {rank}" if self.tensor_parallel_size > 1 else self.replica


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a loaded replica, sent in `Ready`. Byte counts are sums over all ranks."""

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
    dtype: ModelDType
    weights: WeightsDType
    """Dtype of the layers' matrices, or "fp8" if they are quantised."""
    kv_cache_dtype: KvDType
    """Dtype of the KV cache, or "fp8" if it is quantised."""
    backend: str
    """Device type: "cpu" or "cuda"."""
    devices: list[str]
    """Each rank's device name, e.g. "cpu" or "cuda:0 NVIDIA H200"."""
    tensor_parallel_size: int
    collectives: str = ""
    """The ranks' communication backend, e.g. "gloo" or "NCCL". Empty for a single rank."""
    load_seconds: float
    predicted_bytes: int
    """Predicted memory, in bytes, for weights, KV cache and activations (`engine.sizing`)."""
    used_bytes: int
    """Memory use in bytes, measured after loading."""
    min_step_s: float = 0.0
    """Lower bound, in seconds, on the duration of a decode step, derived from the bytes it reads and the
    device's peak rates, or 0 if the rates are unknown."""
    min_prompt_token_s: float = 0.0
    """Lower bound, in seconds, on the time per prompt token, or 0 if the device's peak rates are unknown."""


# ── requests from a front process ───────────────────────────────────────────────────────────────


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request's sampling parameters. By default, tokens are sampled greedily until `max_tokens` is
    reached."""

    max_tokens: int
    """Maximum number of output tokens, including those in `Submit.output_token_ids`."""
    temperature: float = 0.0
    """Sampling temperature. 0 selects greedy decoding."""
    top_k: int = 0
    """Number of most likely tokens to sample from. 0 disables the limit."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    """Values added to the logits, keyed by token id."""
    allowed_tokens: bytes = b""
    """Bitmap of the tokens that may be sampled: bit i % 8 of byte i // 8 represents token i. An empty bitmap
    allows all tokens."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that must not occur in the output. An entry's last token is banned whenever the
    output ends with the rest of the entry. Prompt tokens are not considered."""
    seed: int = 0
    """Seed of the sampling noise (64 bits). The noise depends on the seed, the sample index, the position and
    the token id."""
    min_tokens: int = 0
    """Minimum number of output tokens. Stop tokens cannot be sampled until this number is reached."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence: the request's stop tokens, and the checkpoint's end-of-sequence tokens,
    which the front process adds."""
    ignore_eos: bool = False
    """Whether to ignore `stop_token_ids`. If so, stop tokens do not end the sequence and may be sampled
    before `min_tokens` is reached."""
    logprobs: int | None = None
    """Number of most likely tokens whose log probabilities are returned in addition to the sampled token's.
    None disables log probabilities."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens whose log probabilities are returned for every prompt token except the
    first, in addition to that token's own. None disables prompt log probabilities."""

    @property
    def penalised(self) -> bool:
        """Whether sampling depends on how often each token has occurred."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


_TOKEN_TYPE: Final = "i"
"""Type code of a packed token id for the `array` and `struct` modules: a signed 32-bit integer in native byte
order, because all processes run on the same machine."""
TOKEN_BYTES = array(_TOKEN_TYPE).itemsize


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Return token ids as packed 32-bit integers. Prompts are sent in this form, because decoding them is
    much faster than decoding a list of up to 131,072 integers. Raises OverflowError if an id does not fit
    into 32 bits.
    """
    return array(_TOKEN_TYPE, token_ids).tobytes()


def view_tokens(packed: bytes) -> memoryview[int]:
    """Return packed token ids as a sequence of integers, without copying them. The size of `packed` in bytes
    must be a multiple of TOKEN_BYTES."""
    return memoryview(packed).cast(_TOKEN_TYPE)


class Submit(msgspec.Struct, tag="submit", frozen=True, kw_only=True, omit_defaults=True):
    """Sent by a front process to a replica to generate `n` samples for one prompt."""

    handle: int
    """Submission id, chosen by the front process. Unique on its channel and never reused."""
    request_id: str
    index: int = 0
    """The prompt's index within its request."""
    prompt: bytes
    """The prompt's token ids, packed by `pack_tokens`."""
    output_token_ids: list[int] = []
    """Output tokens generated by another replica before it failed. If there are any, n must be 1."""
    n: int = 1
    first_sample: int = 0
    """Index of the submission's first sample within its request: sample i of the submission is sample
    first_sample + i of the request."""
    sampling: SamplingParams
    cache_salt: str = ""
    """An arbitrary string. Only requests with the same salt share prefix cache blocks."""
    priority: int = 1
    """Priority class, from 0 (real-time) to 3 (background). The class with the highest number is preempted
    first."""
    urgency: int = 0
    """Urgency within priority classes 0 and 1: 0 if the submission is not urgent, otherwise the result of
    `urgency_of`, which is higher for shorter prompts."""
    reserved_slots: int = 0
    """Number of slots reserved for urgent submissions. The value in the latest submission applies to all
    submissions."""

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt) // TOKEN_BYTES

    @property
    def level(self) -> int:
        """Scheduling level from 0 (highest priority) to LEVELS - 1. Levels with lower numbers are admitted
        and computed first. Credit is counted per level."""
        return level_of(self.priority, self.urgency)

    @property
    def credit_tokens(self) -> int:
        """Token credit that the submission uses. It is returned as the tokens are computed or dropped."""
        return self.prompt_tokens + len(self.output_token_ids)


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Sent by a front process to a replica to cancel a submission or, if `sample` is given, only that
    sample."""

    handle: int
    sample: int | None = None


# ── outputs to a front process ────────────────────────────────────────────────────────────────────


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """Natural log probabilities of a sampled or prompt token, and of the most likely alternatives in
    descending order. They are computed from the model's distribution before temperature, penalties and
    biases."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class Output(msgspec.Struct, array_like=True):
    """New tokens of one sample. `finish_reason` is empty except in the sample's last output."""

    handle: int
    sample: int
    token_ids: list[int]
    finish_reason: FinishReason = ""
    logprobs: list[TokenLogprob] | None = None
    """One entry per token in `token_ids`, or None if log probabilities were not requested."""
    cached_tokens: int | None = None
    """Number of prompt tokens found in the prefix cache. Set only in a sample's first output."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One entry per prompt token, None for the first. Set only in the first output of sample `first_sample`,
    and only if requested."""
    error: str | None = None
    """Error message, if `finish_reason` is "error"."""
    refused: bool = False
    """Whether the submission was rejected as invalid. Otherwise, `error` describes an engine failure."""


class StepFrame(msgspec.Struct, tag="step", array_like=True):
    """Sent by a replica to a front process. Contains all of that process's outputs from one step."""

    step: int
    outputs: list[Output]


DataInbound = Submit | Cancel
"""Messages from a front process to a replica."""
