"""Checks, for the soak test, that every request ends exactly once and with the right result."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from engine.core import StepResult
from engine.messages import Output, Submit, TokenLogprob
from engine.rank_messages import Finished
from tests.engine.soak_traffic import FORBIDDEN
from tests.prompts import prompt_of


@dataclass(slots=True)
class Told:
    """The outputs that a front process received for one sample."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    outputs: int = 0
    finish_reason: str = ""


@dataclass(slots=True)
class Entry:
    """A submission that has not finished yet."""

    origin: str
    submit: Submit
    wrong: str
    """The kind of invalid field, as returned by `soak_traffic.draw_submit`."""
    samples: dict[int, Told]
    cancelled: set[int] = field(default_factory=set)
    """Samples that were cancelled."""
    deaf: bool = False
    """Whether the submission's front has disconnected, after which the front must not receive any output."""


class OutputChecker:
    """Checks the engine's outputs, and raises AssertionError with the request if an output is wrong. An entry
    is removed when its submission finishes. An output that arrives later is therefore detected, and memory
    use does not grow with the length of the run."""

    def __init__(self, max_model_len: int, vocab: int, poison: int | None) -> None:
        """Prepare an empty checker. The embedding of token `poison` is sometimes NaN, so sequences that
        contain this token may end with an error."""
        self._max_model_len, self._vocab, self._poison = max_model_len, vocab, poison
        self.open: dict[int, Entry] = {}
        self.counts: Counter[str] = Counter()
        self.done: list[Entry] = []
        """Submissions that have finished since this list was last cleared."""

    def submitted(self, origin: str, submit: Submit, wrong: str) -> None:
        first = submit.first_sample
        samples = {sample: Told() for sample in range(first, first + max(1, submit.n))}
        self.open[submit.handle] = Entry(origin, submit, wrong, samples)
        self.counts["requests"] += 1
        self.counts["samples"] += len(samples)

    def cancelled(self, handle: int, sample: int | None) -> None:
        entry = self.open[handle]
        entry.cancelled |= set(entry.samples) if sample is None else {sample}

    def front_disconnected(self, origin: str) -> None:
        for handle, entry in self.open.items():
            if entry.origin == origin:
                self.cancelled(handle, None)
                entry.deaf = True

    def take(self, result: StepResult) -> None:
        for origin, outputs in result.outputs.items():
            for output in outputs:
                self._told(str(origin), output)
        for finished in result.finished:
            self._closed(finished)

    # ── outputs ──────────────────────────────────────────────────────────────────────────────────

    def _told(self, origin: str, output: Output) -> None:
        entry = self.open.get(output.handle)
        assert entry is not None, f"output of a request that had ended: {output}"
        assert not entry.deaf and entry.origin == origin, (
            f"output was sent to {origin} instead of {entry.origin}: {output}"
        )
        told = entry.samples[output.sample]
        assert not told.finish_reason, f"output after the end ({told.finish_reason!r}): {output}"
        submit = entry.submit
        if not told.outputs:
            assert output.cached_tokens is not None
            assert output.cached_tokens <= submit.prompt_tokens
            self._scored(entry, output)
        told.outputs += 1
        self._tokens(entry, told, output)
        told.finish_reason = output.finish_reason
        if output.finish_reason:
            self.counts[output.finish_reason] += 1
            self._ended(entry, output.sample, told, output.error)

    def _scored(self, entry: Entry, output: Output) -> None:
        submit, scores = entry.submit, output.prompt_logprobs
        asked = submit.sampling.prompt_logprobs
        if asked is None or output.sample != submit.first_sample:
            assert scores is None
        elif output.finish_reason not in ("cancelled", "error"):
            assert scores is not None and len(scores) == submit.prompt_tokens and scores[0] is None
            for token, score in zip(prompt_of(submit)[1:], scores[1:], strict=True):
                assert score is not None
                self._logprob(score, token, asked)

    def _tokens(self, entry: Entry, told: Told, output: Output) -> None:
        sampling = entry.submit.sampling
        told.token_ids += output.token_ids
        self.counts["tokens"] += len(output.token_ids)
        for token in output.token_ids:
            assert 0 <= token < self._vocab
            assert (sampling.logit_bias or {}).get(token) != FORBIDDEN, f"banned token {token}: {output}"
            if sampling.allowed_tokens:
                assert sampling.allowed_tokens[token // 8] >> token % 8 & 1, f"token {token}: {output}"
        for word in sampling.bad_words:
            known = entry.submit.output_token_ids + told.token_ids
            end_positions = range(len(known) - len(output.token_ids) + 1, len(known) + 1)
            assert all(tuple(known[max(0, end - len(word)) : end]) != word for end in end_positions), (
                f"{word}: {output}"
            )
        if sampling.logprobs is None:
            assert output.logprobs is None
            return
        told.logprobs += output.logprobs or []
        for token, logprob in zip(output.token_ids, output.logprobs or [], strict=True):
            self._logprob(logprob, token, sampling.logprobs)

    def _logprob(self, logprob: TokenLogprob, token: int, top: int) -> None:
        values = [value for _, value in logprob.top]
        assert logprob.token_id == token and math.isfinite(logprob.logprob) and logprob.logprob <= 0
        assert len(values) == min(top, self._vocab) and values == sorted(values, reverse=True)
        assert not values or values[0] >= logprob.logprob

    def _ended(self, entry: Entry, sample: int, told: Told, error: str | None) -> None:
        submit, sampling = entry.submit, entry.submit.sampling
        known = submit.output_token_ids + told.token_ids
        name = f"{submit.request_id}, sample {sample}"
        stops = () if sampling.ignore_eos else sampling.stop_token_ids
        places = [place for place, token in enumerate(known) if token in stops]
        assert all(place >= sampling.min_tokens for place in places), f"{name} stopped early: {known}"
        if told.finish_reason == "stop":
            assert places == [len(known) - 1], f"{name} ended with 'stop' after {known}"
        else:
            assert not places, f"{name} continued after a stop token: {known}"
        if told.finish_reason == "length":
            most = min(sampling.max_tokens, self._max_model_len - submit.prompt_tokens)
            assert len(known) == max(most, len(submit.output_token_ids)), (
                f"{name}: {len(known)} tokens instead of {most}"
            )
        if told.finish_reason == "cancelled":
            assert sample in entry.cancelled, f"{name} ended as cancelled, but no cancel was sent"
        if told.finish_reason == "error":
            # The prompt of a wrong submission may contain bytes that do not form a whole token id.
            expected = entry.wrong or self._poison in prompt_of(submit) or self._poison in known
            assert error and expected, f"{name} failed: {error}: {submit}, {told.token_ids}"
        else:
            assert entry.wrong != "refused", f"{name} should have been refused: {told.finish_reason}"
            assert entry.wrong != "banned" or told.finish_reason == "cancelled", f"{name} has tokens: {told}"

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────

    def _closed(self, finished: Finished) -> None:
        handle = int(finished.request_id.rpartition("-")[2])
        entry = self.open.pop(handle, None)
        assert entry is not None, f"closed twice: {finished}"
        assert finished.prompt_tokens == entry.submit.prompt_tokens
        if entry.deaf:
            self.counts["undelivered"] += len(entry.samples)
        else:
            finishes = [told.finish_reason for told in entry.samples.values()]
            assert finished.finish_reason == finishes and all(finishes), (
                f"{finished}, but the outputs ended with {finishes}"
            )
            told_tokens = sum(len(told.token_ids) for told in entry.samples.values())
            assert finished.generated_tokens == told_tokens, f"{finished}, but {told_tokens} tokens were sent"
        self.done.append(entry)
