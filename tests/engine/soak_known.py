"""Requests with known outputs. Each request first runs alone in an empty engine, and then repeatedly among
other traffic.

The last bits of sums depend on the shapes of tensors, so an output may diverge from its reference at a
near-tie. The divergence is accepted only if `kernels.sampling` could choose the generated token with log
probabilities that differ from the reference's by at most `Known.near_tie`. After a divergence, the outputs
are no longer compared.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from engine.generate import LocalEngine
from engine.messages import SamplingParams, Submit, TokenLogprob, pack_tokens
from kernels import sampling as reference
from tests.engine.output_checker import Entry
from tests.engine.soak_traffic import Limits
from tests.prompts import prompt_of

KINDS = 24
"""Number of known requests, each of a different kind."""
_TRIES = 60
"""Number of random perturbations to try before a different token counts as wrong."""


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: list[int]
    logprobs: list[TokenLogprob]


class Known:
    """A few requests of every kind, with their reference outputs.

    - near_tie: maximum difference between log probabilities of different runs, in nats.
    - listed: number of alternatives per token in the references. It is the whole vocabulary, or large enough
      to include the sampled token.
    - kinds: number of requests."""

    def __init__(
        self, engine: LocalEngine, limits: Limits, draw: random.Random, near_tie: float, kinds: int = KINDS
    ) -> None:
        self._vocab, self._near_tie, self._draw = limits.vocab, near_tie, draw
        self.counts: Counter[str] = Counter()
        self.largest_error = 0.0
        """Largest difference between log probabilities of the same token after the same tokens, in nats."""
        self._poison = limits.poison
        self._asks: list[tuple[list[int], SamplingParams]] = []
        self._answers: list[Answer] = []
        listed = limits.vocab if limits.vocab <= 1000 else 200
        while len(self._asks) < kinds:
            prompt, params = _ask(draw, limits, len(self._asks))
            asked = msgspec.structs.replace(params, logprobs=listed)
            ((sample,),) = engine.generate([prompt], asked, cache_salt=f"reference-{len(self._asks)}")
            assert sample.finish_reason == "length", (
                f"a reference ended with {sample.finish_reason!r}: {sample.error}"
            )
            # In rounds in which the poison token's embedding is NaN, the poison token would end the sequence.
            if limits.poison not in sample.token_ids:
                self._asks.append((prompt, params))
                self._answers.append(Answer(sample.token_ids, sample.logprobs))

    def submit(self, handle: int) -> Submit:
        """Return a submission that repeats one of the requests. Its `index` contains the number of the
        request."""
        number = self._draw.randrange(len(self._asks))
        prompt, params = self._asks[number]
        if self._draw.random() < 0.3:
            params = msgspec.structs.replace(params, logprobs=1)
        return Submit(
            handle=handle,
            request_id=f"known-{handle}",
            index=number,
            prompt=pack_tokens(prompt),
            sampling=params,
            cache_salt="known",
            priority=self._draw.choice([1, 1, 2]),
        )

    def check(self, entry: Entry) -> None:
        """Raise AssertionError unless the output equals the reference. Divergence at near-ties is allowed."""
        submit, reference = entry.submit, self._answers[entry.submit.index]
        told = entry.samples[0]
        poisoned = self._poison in told.token_ids
        assert told.finish_reason == "length" or poisoned, (
            f"{submit.request_id} ended with {told.finish_reason!r}"
        )
        for place, (token, expected) in enumerate(
            zip(told.token_ids, reference.token_ids, strict=not poisoned)
        ):
            listing = dict(reference.logprobs[place].top)
            if told.logprobs and token in listing:
                error = abs(told.logprobs[place].logprob - listing[token])
                self.largest_error = max(self.largest_error, error)
                assert error < self._near_tie, (
                    f"{submit.request_id}, token {place}: log probability differs by {error} nats"
                )
            if token != expected:
                self.counts["parted"] += 1
                assert self._close(submit, reference, place, token), (
                    f"{submit.request_id} (reference {submit.index}), token {place} is {token}, "
                    f"expected {expected}, and the two are not a near-tie: {submit.sampling}"
                )
                return
            self.counts["tokens"] += 1
        self.counts["equal"] += 1

    def _close(self, submit: Submit, reference: Answer, place: int, token: int) -> bool:
        """Return whether the reference's log probabilities need only small changes for `token` to be the
        sampled one."""
        top = reference.logprobs[place].top
        ids = torch.tensor([each for each, _ in top])
        logprobs = torch.tensor([value for _, value in top])
        if not (ids == token).any():
            return False
        mine = (ids == token).float()
        others = 1 - mine
        expected = (ids == reference.token_ids[place]).float()
        generator = torch.Generator().manual_seed(place)
        tries: list[Callable[[], torch.Tensor]] = [
            lambda: mine - expected,
            lambda: mine - others,
            lambda: -expected,
            lambda: 1 - 2 * expected,
            lambda: mine,
            lambda: others - mine,
            *[lambda: torch.rand(len(ids), generator=generator) * 2 - 1 for _ in range(_TRIES)],
        ]
        history = prompt_of(submit) + reference.token_ids[:place]
        for disturb in tries:
            disturbed = logprobs + self._near_tie * disturb()
            if _choose(ids, disturbed, submit, history, self._vocab) == token:
                return True
        return False


def _choose(ids: torch.Tensor, logprobs: torch.Tensor, submit: Submit, history: list[int], vocab: int) -> int:
    """Return the token that `kernels.sampling` chooses after `history` from the listed tokens."""
    params = submit.sampling
    output = history[submit.prompt_tokens :]
    x = logprobs.clone()
    times = torch.tensor([output.count(int(token)) for token in ids])
    x -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
    x += torch.tensor([(params.logit_bias or {}).get(int(token), 0.0) for token in ids])
    x = x.unsqueeze(0)
    if params.temperature < reference.GREEDY_BELOW:
        return int(ids[x.argmax()])
    x = x / params.temperature
    if params.top_k:
        reference.keep_top_k_(x, torch.tensor([params.top_k]), params.top_k)
    key = reference.noise_keys(
        torch.tensor([reference.noise_base(params.seed, 0)]), torch.tensor([len(history)])
    )
    scores = reference.gumbel_noise(key, reference.token_hashes(0, vocab, x.device)[ids]) + x
    reference.keep_min_p_(scores, x, torch.tensor([params.min_p]))
    if params.top_p < 1:
        reference.keep_top_p_(scores, x, torch.tensor([params.top_p]))
    return int(ids[reference.best(scores)[1]])


def _ask(draw: random.Random, limits: Limits, kind: int) -> tuple[list[int], SamplingParams]:
    """Return a prompt and sampling parameters, which are greedy, plain and filtered in rotation. The
    reference must list the sampled token. If references list only part of the vocabulary, filtered requests
    therefore use a small top-k and no parameters that favour unlisted tokens."""
    length = draw.choice([1, 40, 64, 65, 130, limits.longest_prompt])
    prompt = [draw.randrange(3, limits.poison) for _ in range(min(length, limits.longest_prompt))]
    most = draw.choice([10, 30, 64, 80])
    everything = limits.vocab <= 1000
    sampling = SamplingParams(max_tokens=most, ignore_eos=True, seed=draw.randrange(1 << 40))
    changes: dict[str, object] = {}
    if kind % 3 == 1:
        changes = {"temperature": 0.9} if everything else {"temperature": 0.9, "top_k": 20}
    if kind % 3 == 2:
        changes = {"temperature": 1.0, "top_k": 20, "top_p": draw.choice([1.0, 0.9, 0.6])}
        changes["min_p"] = draw.choice([0.0, 0.05])
    if everything and kind % 4 == 3:
        changes |= {"presence_penalty": 0.4, "frequency_penalty": 0.2, "logit_bias": {5: 1.5, 9: -3.0}}
    return prompt, msgspec.structs.replace(sampling, **changes)
