"""Collects what a replica reports: outputs for the fronts, and final counts and credits for the core."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from engine.levels import LEVELS
from engine.messages import Output, Submit
from engine.rank_messages import Finished
from engine.scheduling.sequence import Sequence, Submission
from engine.scheduling.validation import MAX_SAMPLES

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class Totals:
    """Numbers of preemptions and tokens since the replica started."""

    preemptions: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of all started submissions. A prompt is counted once per submission, however many samples
    it has."""
    cached_tokens: int = 0
    """Prompt tokens of started submissions that were found in the prefix cache."""
    computed_tokens: int = 0
    """Tokens computed in prefills. Tokens recomputed after a preemption, including output tokens, are counted
    again."""
    generated_tokens: int = 0


class RequestAccounting:
    """Tracks open submissions by origin and by request, collects outputs until they are sent, and counts
    credits.

    Credits are running totals (see `Report`). Each finished sample grants one sequence credit. Each token of
    a submission's `credit_tokens` is refunded once: as soon as any sample has computed it or, at the latest,
    when the submission ends.
    """

    def __init__(self, credit_seqs: int, credit_tokens: int) -> None:
        self._initial = (credit_seqs, credit_tokens)
        self.returned_seqs = [0] * LEVELS
        """Sequence credit refunded for each level."""
        self.returned_tokens = [0] * LEVELS
        """Token credit refunded for each level."""
        self.totals = Totals()
        self._by_origin: dict[Hashable, dict[int, Submission]] = {}
        self._by_request: dict[str, dict[int, Submission]] = {}
        self._outputs: dict[Hashable, list[Output]] = {}
        self._finished: list[Finished] = []

    @property
    def credit_seqs(self) -> int:
        return self._initial[0] + sum(self.returned_seqs)

    @property
    def credit_tokens(self) -> int:
        return self._initial[1] + sum(self.returned_tokens)

    @property
    def has_open(self) -> bool:
        return bool(self._by_origin)

    @property
    def has_news(self) -> bool:
        """Whether there are outputs or final counts that `take` has not returned yet."""
        return bool(self._outputs or self._finished)

    def find(self, origin: Hashable, handle: int) -> Submission | None:
        return self._by_origin.get(origin, {}).get(handle)

    def of_origin(self, origin: Hashable) -> list[Submission]:
        return list(self._by_origin.get(origin, {}).values())

    def of_request(self, request_id: str) -> list[Submission]:
        return list(self._by_request.get(request_id, {}).values())

    def all_open(self) -> list[Submission]:
        return [submission for of_origin in self._by_origin.values() for submission in of_origin.values()]

    def open(self, submission: Submission) -> None:
        submit = submission.submit
        self._by_origin.setdefault(submission.origin, {})[submit.handle] = submission
        self._by_request.setdefault(submit.request_id, {})[submission.arrival] = submission

    def end_sample(self, sequence: Sequence) -> None:
        """Record that a sequence has finished. If it was the last one in its submission, close the
        submission."""
        self.returned_seqs[sequence.level] += 1
        submission = sequence.submission
        submission.unfinished -= 1
        if submission.unfinished:
            return
        submit = submission.submit
        self.credit(submission, submit.credit_tokens)
        self._finished.append(submission.final_counts())
        # Break the reference cycle between the submission and its sequences. Reference counting then frees
        # the objects after the last step in flight, so the garbage collector need not traverse the tokens of
        # every prompt.
        submission.sequences = []
        _remove(self._by_origin, submission.origin, submit.handle)
        _remove(self._by_request, submit.request_id, submission.arrival)

    def refuse(self, origin: Hashable, submit: Submit, reason: str) -> None:
        """Reject a submission that cannot be computed: report an error for each sample, and report the final
        counts."""
        samples = submit.n if 1 <= submit.n <= MAX_SAMPLES else 1
        for sample in range(submit.first_sample, submit.first_sample + samples):
            self.emit(
                origin,
                Output(submit.handle, sample, [], "error", cached_tokens=0, error=reason, refused=True),
            )
        level = min(max(submit.level, 0), LEVELS - 1)
        self.returned_seqs[level] += max(submit.n, 0)
        self.returned_tokens[level] += submit.credit_tokens
        self._finished.append(
            Finished(
                request_id=submit.request_id,
                index=submit.index,
                first_sample=submit.first_sample,
                prompt_tokens=submit.prompt_tokens,
                cached_tokens=0,
                generated_tokens=0,
                preemptions=0,
                batch_size=0,
                finish_reason=["error"] * samples,
                credit_tokens=submit.credit_tokens,
            )
        )

    def credit(self, submission: Submission, reached: int) -> None:
        """Refund the token credit up to the furthest position that any sample has reached. Each token is
        refunded only once."""
        reached = min(reached, submission.submit.credit_tokens)
        if reached > submission.credited_tokens:
            self.returned_tokens[submission.submit.level] += reached - submission.credited_tokens
            submission.credited_tokens = reached

    def emit(self, origin: Hashable, output: Output) -> None:
        outputs = self._outputs.get(origin)
        if outputs is None:
            self._outputs[origin] = [output]
        else:
            outputs.append(output)

    def forget_outputs(self, origin: Hashable) -> None:
        """Drop an origin's pending outputs after its channel has closed."""
        self._outputs.pop(origin, None)

    def take(self) -> tuple[dict[Hashable, list[Output]], list[Finished]]:
        """Return and clear the outputs (by origin) and the final counts collected since the previous call."""
        taken = self._outputs, self._finished
        self._outputs, self._finished = {}, []
        return taken


def _remove(index: dict[Key, dict[int, Submission]], key: Key, name: int) -> None:
    del index[key][name]
    if not index[key]:
        del index[key]
