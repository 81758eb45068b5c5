"""The scheduler's request state: submissions and their sequences."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from engine.messages import BLOCK_TOKENS, MAX_BAD_WORD_TOKENS, FinishReason, Submit, TokenLogprob, view_tokens
from engine.plan import SlotSetup
from engine.rank_messages import Finished
from engine.scheduling.block_pool import PrefixChain

_NEVER = 1 << 62

Order = tuple[int, int, int]
QueueEntry = tuple[Order, int, "Sequence"]


class Tokens:
    """A sequence's prompt and known output tokens. All samples of a submission share its prompt."""

    __slots__ = ("_output", "_prompt", "length")

    def __init__(self, prompt: memoryview[int], output: list[int]) -> None:
        self._prompt = prompt
        self._output = output
        self.length = len(prompt) + len(output)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: slice) -> list[int]:
        prompt = len(self._prompt)
        start, end, _ = key.indices(self.length)
        if end <= prompt:
            return self._prompt[start:end].tolist()
        return self._prompt[start:].tolist() + self._output[max(0, start - prompt) : end - prompt]

    @property
    def last(self) -> int:
        return self._output[-1] if self._output else self._prompt[-1]

    @property
    def output_length(self) -> int:
        """Number of known output tokens."""
        return len(self._output)

    def append(self, token: int) -> None:
        self._output.append(token)
        self.length += 1


@dataclass(slots=True, eq=False)
class SharedBlocks:
    """Leading blocks shared by several samples of a submission. The block pool counts a single reference per
    block for all of these samples, so the time to start or end a sample does not depend on the prompt
    length."""

    blocks: list[int]
    holders: int
    """Number of sequences that use the shared blocks."""
    registered: int
    """Number of leading blocks offered to the prefix cache so far."""


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of one sample, and the progress of their computation.

    A sequence is *waiting* (it has no slot), *running* (it has a slot) or *ended* (`finish_reason` is set). A
    running sequence also has blocks, unless it is a fork whose leader is still in its prefill. Positions
    count from 0. While steps are in flight, `position` is ahead of the known tokens.
    """

    submission: Submission
    sample: int
    tokens: Tokens
    """Prompt and known output tokens."""
    limit: int
    """Length in tokens, prompt included, at which the sequence ends."""
    stops: frozenset[int]
    chain: PrefixChain
    prompt_logprobs: list[TokenLogprob | None] | None
    """Prompt log probabilities, or None if they were not requested. Starts as [None] and grows to one entry
    per prompt token."""

    slot: int = -1
    """The sequence's slot in the device tables, or -1 if it has none."""
    shared: SharedBlocks | None = None
    """Leading blocks shared with other samples of the submission, or None if there are none."""
    table: list[int] = field(default_factory=list)
    """Ids of the KV blocks that follow the shared blocks."""
    sent_blocks: int = 0
    """Number of leading blocks already sent to the device's block table."""
    position: int = 0
    """Next position to compute. The steps launched so far compute the keys and values of this many tokens."""
    next_allocation: int = _NEVER
    """Next position at which the decode scheduler must act. Either the decode needs a new block there (the
    last one is full or shared), or the sequence stops decoding because the step that samples its last token
    has been launched."""
    next_check: int = _NEVER
    """Length in tokens at which the next check is due, because a new token fills a block or reaches
    `limit`."""
    registered: int = 0
    """Number of leading blocks offered to the prefix cache so far."""
    finite: int = 0
    """Number of leading positions whose keys and values are known to be finite. A non-finite value makes all
    later values of the sequence non-finite, so a finite value proves that all earlier values are finite."""
    in_flight: int = 0
    """Number of launched chunks and sampled tokens that have not been collected yet."""
    forks: list[Sequence] = field(default_factory=list)
    """Other samples of the submission, which wait for this sequence's prefill and then sample from its last
    token."""
    leader: Sequence | None = None
    """The sequence whose `forks` include this one."""
    entry: QueueEntry | None = None
    """The sequence's entry in the waiting queue."""

    started: bool = False
    """Whether the sequence has ever been admitted. After that, `cached_tokens` and `batch_size` do not
    change."""
    announced: bool = False
    """Whether the sequence's first output has been sent."""
    cached_tokens: int = 0
    batch_size: int = 0
    finish_reason: FinishReason = ""

    @property
    def order(self) -> Order:
        """Sort key for the service order: (level, arrival, sample). The sequence with the largest key is
        preempted first."""
        return (self.submission.level, self.submission.arrival, self.sample)

    @property
    def level(self) -> int:
        return self.submission.level

    @property
    def priority(self) -> int:
        return self.submission.submit.priority

    @property
    def shared_blocks(self) -> int:
        """Number of leading blocks shared with other samples."""
        return 0 if self.shared is None else len(self.shared.blocks)

    @property
    def block_count(self) -> int:
        """Number of KV blocks that the sequence uses, including shared blocks."""
        return self.shared_blocks + len(self.table)

    def block(self, index: int) -> int:
        """Return the id of the sequence's KV block at this index, counted from 0."""
        if self.shared is not None and index < len(self.shared.blocks):
            return self.shared.blocks[index]
        return self.table[index - self.shared_blocks]

    @property
    def output_tokens(self) -> int:
        return self.tokens.output_length

    @property
    def wants_prompt_logprobs(self) -> bool:
        prompt_tokens = self.submission.submit.prompt_tokens
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < prompt_tokens

    @property
    def samples(self) -> bool:
        """Whether the sequence generates tokens. False if only prompt log probabilities were requested."""
        return self.limit > len(self.tokens)

    @property
    def prefill_end(self) -> int:
        """Number of tokens to compute before the sequence starts decoding. Valid only with no steps in
        flight."""
        return len(self.tokens) if self.samples else self.submission.submit.prompt_tokens


@dataclass(slots=True, eq=False)
class Submission:
    """The samples of one `Submit`, and the counts to report once all samples have ended."""

    origin: Hashable
    """The channel on which the submission arrived."""
    submit: Submit
    arrival: int
    level: int
    """Scheduling level, derived from `submit.level`. It determines the order in which requests are served."""
    sequences: list[Sequence] = field(default_factory=list)
    unfinished: int = 0
    """Number of unfinished sequences."""
    started: bool = False
    cached_tokens: int = 0
    batch_size: int = 0
    preemptions: int = 0
    credited_tokens: int = 0
    """Number of tokens refunded from `submit.credit_tokens`."""

    def final_counts(self) -> Finished:
        """Return the submission's final counts. All of its sequences must have ended."""
        submit = self.submit
        known = len(submit.output_token_ids)
        return Finished(
            request_id=submit.request_id,
            index=submit.index,
            first_sample=submit.first_sample,
            prompt_tokens=submit.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=sum(sequence.output_tokens - known for sequence in self.sequences),
            preemptions=self.preemptions,
            batch_size=self.batch_size,
            finish_reason=[sequence.finish_reason for sequence in self.sequences] or ["error"],
            credit_tokens=submit.credit_tokens,
        )


def new_submission(origin: Hashable, submit: Submit, arrival: int, max_model_len: int) -> Submission:
    """Return a new submission with all of its sequences waiting. The caller must already have checked the
    `submit` message with `validation.refusal`."""
    submission = Submission(origin, submit, arrival, submit.level)
    sampling = submit.sampling
    stops = frozenset() if sampling.ignore_eos else frozenset(sampling.stop_token_ids)
    chain = PrefixChain(submit.cache_salt, submit.prompt)
    prompt = view_tokens(submit.prompt)
    limit = length_limit(submit, max_model_len)
    for sample in range(submit.first_sample, submit.first_sample + submit.n):
        scores_prompt = sampling.prompt_logprobs is not None and sample == submit.first_sample
        submission.sequences.append(
            Sequence(
                submission=submission,
                sample=sample,
                tokens=Tokens(prompt, list(submit.output_token_ids)),
                limit=limit,
                stops=stops,
                chain=chain.fork(),
                prompt_logprobs=[None] if scores_prompt else None,
            )
        )
    submission.unfinished = submit.n
    return submission


def length_limit(submit: Submit, max_model_len: int) -> int:
    """Return the length at which a sequence ends because of `max_tokens` or the model's maximum length."""
    wanted = submit.prompt_tokens + submit.sampling.max_tokens
    return max(min(wanted, max_model_len), submit.credit_tokens)


def finished_on_arrival(sequence: Sequence) -> FinishReason:
    """Return the finish reason of a sequence that needs no computation, otherwise ""."""
    sampling = sequence.submission.submit.sampling
    if sequence.wants_prompt_logprobs:
        return ""
    if sequence.output_tokens > sampling.min_tokens and sequence.tokens.last in sequence.stops:
        return "stop"
    return "" if sequence.samples else "length"


def blocks_for(tokens: int) -> int:
    """Return the number of blocks needed for the keys and values of `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


def setup_of(sequence: Sequence) -> SlotSetup:
    """Return the setup of a sequence and its forks for a plan. One setup covers all of them, because a
    sequence with forks has not sampled a token yet."""
    submit = sequence.submission.submit
    prompt_tokens = submit.prompt_tokens
    history = sequence.tokens[:] if submit.sampling.penalised else []
    recent: list[int] = []
    if submit.sampling.bad_words:
        recent = sequence.tokens[max(prompt_tokens, len(sequence.tokens) - MAX_BAD_WORD_TOKENS + 1) :]
    forks = [(fork.slot, fork.sample) for fork in sequence.forks]
    return SlotSetup(sequence.slot, submit.sampling, sequence.sample, prompt_tokens, history, forks, recent)


def setup_numbers(sequence: Sequence) -> int:
    """Return how much of a plan a sequence's setup takes up, in units of one token id."""
    sampling = sequence.submission.submit.sampling
    history = len(sequence.tokens) if sampling.penalised else 0
    # A bias is a token id and a 9-byte float; count it as three token ids.
    bias = 3 * len(sampling.logit_bias or ())
    words = sum(map(len, sampling.bad_words)) + MAX_BAD_WORD_TOKENS * bool(sampling.bad_words)
    allowed = len(sampling.allowed_tokens) // 5  # convert bytes to token ids of about five bytes each
    return history + bias + len(sampling.stop_token_ids) + words + allowed
