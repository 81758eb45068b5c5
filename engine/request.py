"""A submission and its sequences: what the scheduler knows of a request.

Plain state, changed by `engine.scheduler` alone, and the checks that a submission passes before it is queued.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field

from engine.blocks import PrefixChain
from engine.messages import (
    BLOCK_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    Finished,
    RowSetup,
    Submit,
    TokenLogprob,
)

MOST_SAMPLES = 1024
"""Largest `Submit.n`."""
CLASSES = 4
"""`Submit.priority` is 0 to 3."""
REAL_TIME, BACKGROUND = 0, CLASSES - 1
"""The first may push the last aside."""
_MOST = 1 << 31
"""Of counts: sums of two stay far inside the 64 bits of wires and tables."""
_LARGE = 1e30
"""Of factors, and what is added to logits: their products stay finite in float32."""

_NEVER = 1 << 62

Order = tuple[int, bool, int, int]
QueueEntry = tuple[Order, int, "Sequence"]


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of one sample, and where it stands.

    It is *waiting* (no row), *running* (a row, and blocks but for a sibling before its fork) or *ended*
    (`finish` is set). Positions count from 0; `position` runs ahead of the tokens known by what is in flight.
    """

    submission: Submission
    sample: int
    tokens: list[int]
    """Prompt and known output."""
    limit: int
    """Length (prompt and output) at which it ends."""
    stops: frozenset[int]
    chain: PrefixChain
    prompt_logprobs: list[TokenLogprob | None] | None
    """Grows from [None] to one for each prompt token; None when not asked for."""

    row: int = -1
    table: list[int] = field(default_factory=list)
    sent_blocks: int = 0
    """Entries of `table` that are in the device's block table of `row`."""
    position: int = 0
    """Tokens whose keys and values are written by steps launched so far: the next position to feed."""
    pause: int = _NEVER
    """Position at which a decode needs attention: its block is full or shared, or its last token launched."""
    watch: int = _NEVER
    """Length at which a new token needs attention: a block is full, or `limit` is reached."""
    registered: int = 0
    """Blocks at the head of `table` that were offered to the prefix cache."""
    finite: int = 0
    """Positions at its head whose keys and values are known to be finite: a later number is, and one that is
    not finite spoils all after it."""
    in_flight: int = 0
    """Launched chunks and samplings whose results were not collected."""
    forks: list[Sequence] = field(default_factory=list)
    """Siblings with a row that sample from the end of this sequence's prefill."""
    leader: Sequence | None = None
    """The sibling whose `forks` this is in."""
    entry: QueueEntry | None = None
    """Its place in the waiting queue."""

    started: bool = False
    """It was admitted once: `cached_tokens` and `batch_size` stand."""
    announced: bool = False
    """Its first output is out."""
    cached_tokens: int = 0
    batch_size: int = 0
    finish: str = ""

    @property
    def order(self) -> Order:
        """Order of service: class, the urgent before others, arrival, sample. The largest is preempted
        first."""
        submit = self.submission.submit
        return (submit.priority, not submit.urgent, self.submission.arrival, self.sample)

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - len(self.submission.submit.prompt_token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        prompt = self.submission.submit.prompt_token_ids
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(prompt)

    @property
    def samples(self) -> bool:
        """Whether there is a token to generate at all (there is none when only a prompt is scored)."""
        return self.limit > len(self.tokens)

    @property
    def prefill_end(self) -> int:
        """Tokens to compute before it decodes; read while nothing of it is in flight."""
        return len(self.tokens) if self.samples else len(self.submission.submit.prompt_token_ids)


@dataclass(slots=True, eq=False)
class Submission:
    """The samples of one `Submit`, and its ledger."""

    origin: Hashable
    """Which channel it came from."""
    submit: Submit
    arrival: int
    sequences: list[Sequence] = field(default_factory=list)
    live: int = 0
    """Sequences that have not ended."""
    started: bool = False
    cached_tokens: int = 0
    batch_size: int = 0
    preemptions: int = 0
    credited_tokens: int = 0
    """Of `submit.credit_tokens`, what was granted back."""

    def ledger(self) -> Finished:
        """The final count; every sequence has ended."""
        submit = self.submit
        known = len(submit.output_token_ids)
        return Finished(
            request_id=submit.request_id,
            index=submit.index,
            first_sample=submit.first_sample,
            prompt_tokens=len(submit.prompt_token_ids),
            cached_tokens=self.cached_tokens,
            generated_tokens=sum(sequence.output_tokens - known for sequence in self.sequences),
            preemptions=self.preemptions,
            batch_size=self.batch_size,
            finish=[sequence.finish for sequence in self.sequences] or ["error"],
            credit_tokens=submit.credit_tokens,
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a sequence must fit into."""

    max_model_len: int
    vocab_size: int
    blocks: int


def new_submission(origin: Hashable, submit: Submit, arrival: int, limits: Limits) -> Submission:
    """A submission with its sequences, all waiting; `submit` passed `refusal`."""
    submission = Submission(origin, submit, arrival)
    sampling = submit.sampling
    stops = frozenset() if sampling.ignore_eos else frozenset(sampling.stop_token_ids)
    chain = PrefixChain(submit.cache_salt)
    for sample in range(submit.first_sample, submit.first_sample + submit.n):
        scores_prompt = sampling.prompt_logprobs is not None and sample == submit.first_sample
        submission.sequences.append(
            Sequence(
                submission=submission,
                sample=sample,
                tokens=submit.prompt_token_ids + submit.output_token_ids,
                limit=_limit(submit, limits),
                stops=stops,
                chain=chain.fork(),
                prompt_logprobs=[None] if scores_prompt else None,
            )
        )
    submission.live = submit.n
    return submission


def already_finished(sequence: Sequence) -> str:
    """The finish of a sequence that has nothing to compute: "", "stop" or "length"."""
    sampling = sequence.submission.submit.sampling
    if sequence.wants_prompt_logprobs:
        return ""
    if sequence.output_tokens > sampling.min_tokens and sequence.tokens[-1] in sequence.stops:
        return "stop"
    return "" if sequence.samples else "length"


def blocks_for(tokens: int) -> int:
    """Blocks that hold the keys and values of `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


def setup_of(sequence: Sequence) -> RowSetup:
    """Of a sequence with a row, and of its forks, which know the same tokens: none has sampled yet."""
    submit = sequence.submission.submit
    prompt_tokens = len(submit.prompt_token_ids)
    history = sequence.tokens.copy() if submit.sampling.penalised else []
    forks = [(fork.row, fork.sample) for fork in sequence.forks]
    recent: list[int] = []
    if submit.sampling.bad_words:
        recent = sequence.tokens[max(prompt_tokens, len(sequence.tokens) - MAX_BAD_WORD_TOKENS + 1) :]
    return RowSetup(sequence.row, submit.sampling, sequence.sample, prompt_tokens, history, forks, recent)


def setup_numbers(sequence: Sequence) -> int:
    """Token ids, and what is as long, in a sequence's setup."""
    sampling = sequence.submission.submit.sampling
    history = len(sequence.tokens) if sampling.penalised else 0
    # A bias is an id and a float of 9 bytes.
    words = sum(map(len, sampling.bad_words)) + MAX_BAD_WORD_TOKENS * bool(sampling.bad_words)
    allowed = len(sampling.allowed_tokens) // 5  # bytes; a token id takes about five
    return history + 3 * len(sampling.logit_bias or ()) + len(sampling.stop_token_ids) + words + allowed


def _limit(submit: Submit, limits: Limits) -> int:
    """Length at which a sequence ends: max_tokens or the model's length, whichever is first."""
    wanted = len(submit.prompt_token_ids) + submit.sampling.max_tokens
    return max(min(wanted, limits.max_model_len), submit.credit_tokens)


def refusal(submit: Submit, limits: Limits) -> str | None:
    """Why a submission cannot be computed: names the field, its value and the bound; None if it can."""
    sampling = submit.sampling
    prompt = len(submit.prompt_token_ids)
    if not 1 <= submit.n <= MOST_SAMPLES:
        return f"n is {submit.n}, must be 1 to {MOST_SAMPLES}"
    if not 0 <= submit.first_sample <= _MOST:
        return f"first_sample is {submit.first_sample}, must be 0 to {_MOST}"
    if not 0 <= submit.priority < CLASSES:
        return f"priority is {submit.priority}, must be 0 to {CLASSES - 1}"
    if submit.output_token_ids and submit.n != 1:
        return f"output_token_ids go with one sample, n is {submit.n}"
    if not prompt:
        return "prompt_token_ids is empty, at least one token is needed"
    if sampling.max_tokens < 0:
        return f"max_tokens is {sampling.max_tokens}, must not be negative"
    longest_prompt = limits.max_model_len - (1 if sampling.max_tokens else 0)
    if prompt > longest_prompt:
        return (
            f"the prompt has {prompt} tokens, with max_tokens {sampling.max_tokens} "
            f"the model's length of {limits.max_model_len} leaves room for {longest_prompt}"
        )
    token_fields: dict[str, Collection[int]] = {
        "prompt_token_ids": submit.prompt_token_ids,
        "output_token_ids": submit.output_token_ids,
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": sampling.logit_bias or (),
        "bad_words": [token for word in sampling.bad_words for token in word],
    }
    for name, ids in token_fields.items():
        if ids and (min(ids) < 0 or max(ids) >= limits.vocab_size):
            wrong = next(token for token in ids if not 0 <= token < limits.vocab_size)
            return f"{name} contains {wrong}, the vocabulary has ids 0 to {limits.vocab_size - 1}"
    needed = blocks_for(max(_limit(submit, limits) - 1, prompt))
    if needed > limits.blocks:
        return (
            f"a sequence of {prompt} prompt tokens and {sampling.max_tokens} to generate needs "
            f"{needed} KV blocks, the pool has {limits.blocks}: shorten it, or raise kv_blocks"
        )
    return _sampling_refusal(submit, limits)


def _sampling_refusal(submit: Submit, limits: Limits) -> str | None:
    sampling = submit.sampling
    for name, value, low, high in (
        ("temperature", sampling.temperature, 0.0, math.inf),
        ("top_p", sampling.top_p, 0.0, 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("presence_penalty", sampling.presence_penalty, -_LARGE, _LARGE),
        ("frequency_penalty", sampling.frequency_penalty, -_LARGE, _LARGE),
        ("repetition_penalty", sampling.repetition_penalty, 1 / _LARGE, _LARGE),
    ):
        if not (math.isfinite(value) and low <= value <= high):
            return f"{name} is {value}, must be a finite number from {low:g} to {high:g}"
    if sampling.top_p == 0.0:
        return "top_p is 0.0, must be above 0"
    if sampling.allowed_tokens and not _allows_any(sampling.allowed_tokens, limits.vocab_size):
        return f"allowed_tokens has no token id of the vocabulary, which has ids 0 to {limits.vocab_size - 1}"
    if len(sampling.bad_words) > MAX_BAD_WORDS:
        return f"bad_words has {len(sampling.bad_words)} entries, must be at most {MAX_BAD_WORDS}"
    for word in sampling.bad_words:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            return f"bad_words has an entry of {len(word)} tokens, must be 1 to {MAX_BAD_WORD_TOKENS}"
    for token, bias in (sampling.logit_bias or {}).items():
        if not (bias == -math.inf or abs(bias) <= _LARGE):
            return f"logit_bias of token {token} is {bias}, must be -inf or from {-_LARGE:g} to {_LARGE:g}"
    for name, count in (
        ("top_k", sampling.top_k),
        ("min_tokens", sampling.min_tokens),
        ("logprobs", sampling.logprobs or 0),
        ("prompt_logprobs", sampling.prompt_logprobs or 0),
    ):
        if not 0 <= count <= _MOST:
            return f"{name} is {count}, must be 0 to {_MOST}"
    for name, count in (
        ("logprobs", sampling.logprobs or 0),
        ("prompt_logprobs", sampling.prompt_logprobs or 0),
    ):
        if count > limits.vocab_size:
            return f"{name} is {count}, the vocabulary has {limits.vocab_size} tokens"
    return None


def _allows_any(allowed_tokens: bytes, vocab_size: int) -> bool:
    """Whether the bit map has a token id below `vocab_size`."""
    whole, rest = divmod(vocab_size, 8)
    if any(allowed_tokens[:whole]):
        return True
    return bool(rest and len(allowed_tokens) > whole and allowed_tokens[whole] & ((1 << rest) - 1))


class WaitingQueue:
    """Sequences in their order of service.

    So who was preempted goes before new ones of its class, urgent ones excepted: it arrived before them, or
    it had not run yet.
    A binary heap; entries of sequences that left are dropped when they surface, or all at once when they
    are the greater part.
    """

    def __init__(self) -> None:
        self._heap: list[QueueEntry] = []
        self._live = 0
        self._pushed = 0
        self.real_time = 0
        """How many of those that wait are real-time."""

    def __len__(self) -> int:
        return self._live

    def __iter__(self) -> Iterator[Sequence]:
        """The waiting sequences, in no order."""
        return (entry[-1] for entry in self._heap if entry[-1].entry is entry)

    def push(self, sequence: Sequence) -> None:
        # The serial keeps sequences from being compared: an entry that was left behind may have an equal key.
        self._pushed += 1
        sequence.entry = (sequence.order, self._pushed, sequence)
        heapq.heappush(self._heap, sequence.entry)
        self._live += 1
        self.real_time += sequence.order[0] == REAL_TIME

    def peek(self) -> Sequence | None:
        """Who is next; None when nobody waits."""
        heap = self._heap
        while heap:
            entry = heap[0]
            if entry[-1].entry is entry:
                return entry[-1]
            heapq.heappop(heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting sequence out, wherever it stands."""
        sequence.entry = None
        self._live -= 1
        self.real_time -= sequence.order[0] == REAL_TIME
        if len(self._heap) > 2 * self._live + 64:
            self._heap = [entry for entry in self._heap if entry[-1].entry is entry]
            heapq.heapify(self._heap)
