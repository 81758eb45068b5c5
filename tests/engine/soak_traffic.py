"""Random behaviour of clients: requests of every kind, cancellations, bursts and lulls."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from engine.core import EngineCore
from engine.messages import ReplicaInfo, SamplingParams, Submit, pack_tokens
from tests.prompts import prompt_of

FORBIDDEN = -math.inf
"""A logit bias that bans a token."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The properties of the engine that limit the requests that the soak test may draw."""

    vocab: int
    rows: int
    max_num_batched_tokens: int
    max_model_len: int
    longest_prompt: int
    ranks: int = 1

    @property
    def poison(self) -> int:
        """The last token of the first shard of the vocabulary, which is on rank 0. Random prompts contain
        only smaller token ids, so they never contain this token by chance."""
        return self.vocab // self.ranks - 1

    @classmethod
    def of(cls, info: ReplicaInfo) -> Limits:
        """Return the limits of an engine. A prompt may take several steps to compute, but must leave space
        for some output tokens."""
        longest = min(info.max_model_len - 40, 5 * info.max_num_batched_tokens // 2)
        return cls(
            info.vocab_size,
            info.max_num_seqs,
            info.max_num_batched_tokens,
            info.max_model_len,
            longest,
            info.tensor_parallel_size,
        )


def draw_submit(
    draw: random.Random, handle: int, limits: Limits, poison: int | None = None
) -> tuple[Submit, str]:
    """Return a request and its defect: "" (none), "refused" (an invalid field) or "banned" (no token is
    allowed). `poison` is a token that is added to some prompts."""
    submit = _sound(draw, handle, limits)
    chance = draw.random()
    if poison is not None and chance > 0.9:
        prompt = prompt_of(submit)
        prompt[draw.randrange(len(prompt))] = poison
        submit = msgspec.structs.replace(submit, prompt=pack_tokens(prompt))
    if chance < 0.02:
        return _refused(draw, submit, limits), "refused"
    # Biases for all tokens of a real vocabulary would take megabytes.
    if chance < 0.03 and limits.vocab < 1000:
        bans = dict.fromkeys(range(limits.vocab), FORBIDDEN)
        sampling = SamplingParams(max_tokens=5, logit_bias=bans)
        return Submit(**(_fields(submit) | {"sampling": sampling, "output_token_ids": []})), "banned"
    return submit, ""


def _sound(draw: random.Random, handle: int, limits: Limits) -> Submit:
    sampling = _sampling(draw, limits)
    n = draw.choice([1, 1, 1, 1, 2, 3, 5, limits.rows + 2]) if draw.random() < 0.5 else 1
    resumed = draw.choice([1, 5, 64]) if n == 1 and draw.random() < 0.1 else 0
    resumed = min(resumed, sampling.max_tokens)
    allowed = [token for token in range(3, 60) if token not in sampling.stop_token_ids]
    return Submit(
        handle=handle,
        request_id=f"request-{handle}",
        prompt=pack_tokens(_prompt(draw, limits)),
        output_token_ids=[draw.choice(allowed) for _ in range(resumed)],
        n=n,
        first_sample=draw.choice([0, 0, 3]),
        sampling=sampling,
        cache_salt=draw.choice(["", "", "", "a", f"own-{handle}"]),
        priority=draw.choice([0, 1, 1, 1, 2, 3]),
    )


def _prompt(draw: random.Random, limits: Limits) -> list[int]:
    """Return a prompt that has between one token and several times a step's token budget. Half of the prompts
    start with the shared tokens of their family."""
    lengths = [1, 2, 63, 64, 65, 127, 128, 129, draw.randint(1, 200), limits.max_num_batched_tokens + 1]
    length = draw.choice(lengths) if draw.random() < 0.9 else limits.longest_prompt
    length = min(length, limits.longest_prompt)
    shared = min(length, draw.choice([0, 0, 64, 100, 128, length]))
    family = random.Random(f"family-{draw.randrange(6)}")
    head = [family.randrange(3, limits.poison) for _ in range(shared)]
    return head + [draw.randrange(3, limits.poison) for _ in range(length - shared)]


def _sampling(draw: random.Random, limits: Limits) -> SamplingParams:
    few = min(60, limits.vocab)
    drawn = draw.random() < 0.6
    narrowed = drawn and draw.random() < 0.5
    penalised = draw.random() < 0.25
    stops = tuple(draw.sample(range(3, few), draw.choice([1, 3]))) if draw.random() < 0.4 else ()
    bias = None
    if draw.random() < 0.15:
        bias = {draw.randrange(few): draw.choice([FORBIDDEN, -5.0, 2.0]) for _ in range(draw.choice([1, 8]))}
    if stops and draw.random() < 0.2:
        bias = {stops[0]: 50.0}  # the sequence ends at the first position where min_tokens permits it
    words: tuple[tuple[int, ...], ...] = ()
    if draw.random() < 0.15:
        words = tuple(
            tuple(draw.randrange(few) for _ in range(draw.choice([1, 1, 2, 2, 3]))) for _ in range(40)
        )
    most = draw.choice([1, 2, 5, 20, 64, 100, 200])
    return SamplingParams(
        max_tokens=0 if draw.random() < 0.02 else most,
        temperature=draw.choice([0.3, 0.8, 1.0, 2.0]) if drawn else 0.0,
        top_k=draw.choice([0, 1, 5, 40, 100]) if narrowed else 0,
        top_p=draw.choice([1.0, 0.95, 0.5]) if narrowed else 1.0,
        min_p=draw.choice([0.0, 0.0, 0.1]) if narrowed else 0.0,
        presence_penalty=draw.choice([0.0, 0.5]) if penalised else 0.0,
        frequency_penalty=draw.choice([0.0, 0.3]) if penalised else 0.0,
        repetition_penalty=draw.choice([1.0, 1.2]) if penalised else 1.0,
        logit_bias=bias,
        # This allows the token ids 0 to 63. The bias and the bad words ban some of these tokens, but never
        # all of them.
        allowed_tokens=b"\xff" * 8 if draw.random() < 0.1 else b"",
        bad_words=words,
        seed=draw.randrange(1 << 40),
        min_tokens=draw.choice([0, 3, 10]),
        stop_token_ids=stops,
        ignore_eos=draw.random() < 0.2,
        logprobs=draw.choice([0, 1, 5, 20]) if draw.random() < 0.2 else None,
        prompt_logprobs=draw.choice([0, 2]) if draw.random() < 0.1 else None,
    )


def _refused(draw: random.Random, submit: Submit, limits: Limits) -> Submit:
    """Return the submission with one field made invalid, as a faulty front might send it."""
    sampling = {name: getattr(submit.sampling, name) for name in submit.sampling.__struct_fields__}
    bad_sampling = [
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_k": -1},
        {"logit_bias": {limits.vocab: 1.0}},
    ]
    wrong: list[dict[str, object]] = [
        {"prompt": b""},
        {"prompt": b"12345"},
        {"prompt": pack_tokens([3, limits.vocab])},
        {"prompt": pack_tokens([3] * (limits.max_model_len + 1))},
        {"n": 0},
        {"priority": 4},
        *({"sampling": SamplingParams(**(sampling | bad))} for bad in bad_sampling),
    ]
    return Submit(**(_fields(submit) | {"output_token_ids": []} | draw.choice(wrong)))  # type: ignore[arg-type]


def _fields(submit: Submit) -> dict[str, object]:
    return {name: getattr(submit, name) for name in submit.__struct_fields__}


@dataclass(slots=True)
class Rhythm:
    """Yields the number of requests that arrive before each step. Traffic alternates between bursts, trickles
    and lulls."""

    draw: random.Random
    rows: int
    kind: str = "lull"
    steps_left: int = 0

    def arrivals(self) -> int:
        if not self.steps_left:
            self.kind = self.draw.choice(["burst", "trickle", "trickle", "lull"])
            self.steps_left = self.draw.randint(10, 120)
            if self.kind == "burst":
                return self.draw.randint(self.rows, 3 * self.rows)
        self.steps_left -= 1
        return int(self.kind == "trickle" and self.draw.random() < 0.4)


@dataclass(slots=True)
class Cancelled:
    """Counts cancelled sequences by state."""

    where: Counter[str] = field(default_factory=Counter)
    """Number of cancelled sequences for each state in which they were cancelled: queued, in prefill or
    decoding."""

    def note(self, core: EngineCore, origin: str, handle: int, sample: int | None) -> None:
        """Record the states of the sequences that are about to be cancelled."""
        submission = core.scheduler.accounting.find(origin, handle)
        for sequence in submission.sequences if submission is not None else ():
            if sequence.finish_reason or sample not in (None, sequence.sample):
                continue
            if sequence.slot < 0:
                self.where["queued"] += 1
            elif sequence.output_tokens > len(sequence.submission.submit.output_token_ids):
                self.where["decoding"] += 1
            else:
                self.where["prefilling"] += 1
