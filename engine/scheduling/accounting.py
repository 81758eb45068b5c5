"""The books of a replica: which submissions are open, what they were told, what is granted back for them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from engine.messages import Finished, Output, Submit
from engine.scheduling.sequence import MAX_SAMPLES, Sequence, Submission

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class Totals:
    """Counts since the start."""

    preemptions: int = 0
    prompt_tokens: int = 0
    """Of submissions that were started, once each."""
    cached_tokens: int = 0
    """Of these, found in the prefix cache."""
    computed_tokens: int = 0
    """Of prompts, each time they were computed."""
    generated_tokens: int = 0


class Ledger:
    """Open submissions by origin and by request, outputs until they are taken, credits as running totals.

    Credits (see `Report`): a row for each sample that ended; each submission's `credit_tokens`, each token
    once, when a sample first got as far or when the submission closed without.
    """

    def __init__(self, credit_rows: int, credit_tokens: int) -> None:
        self.credit_rows = credit_rows
        self.credit_tokens = credit_tokens
        self.totals = Totals()
        self._by_origin: dict[Hashable, dict[int, Submission]] = {}
        self._by_request: dict[str, dict[int, Submission]] = {}
        self._outputs: dict[Hashable, list[Output]] = {}
        self._finished: list[Finished] = []

    @property
    def has_open(self) -> bool:
        return bool(self._by_origin)

    @property
    def has_news(self) -> bool:
        """Whether `take` would return something."""
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
        """A sequence got its `finish`; with the last one, its submission is closed."""
        self.credit_rows += 1
        submission = sequence.submission
        submission.live -= 1
        if submission.live:
            return
        submit = submission.submit
        self.credit(submission, submit.credit_tokens)
        self._finished.append(submission.ledger())
        # They know each other: apart, both are freed when the last step in flight is read, and the collector,
        # which would have to walk over every token of every prompt, has nothing to find.
        submission.sequences = []
        _remove(self._by_origin, submission.origin, submit.handle)
        _remove(self._by_request, submit.request_id, submission.arrival)

    def refuse(self, origin: Hashable, submit: Submit, reason: str) -> None:
        """Close a submission that never gets sequences."""
        samples = submit.n if 1 <= submit.n <= MAX_SAMPLES else 1
        for sample in range(submit.first_sample, submit.first_sample + samples):
            self.emit(
                origin,
                Output(submit.handle, sample, [], "error", cached_tokens=0, batch_size=0, error=reason),
            )
        self.credit_rows += max(submit.n, 0)
        self.credit_tokens += submit.credit_tokens
        self._finished.append(
            Finished(
                request_id=submit.request_id,
                index=submit.index,
                first_sample=submit.first_sample,
                prompt_tokens=len(submit.prompt_token_ids),
                cached_tokens=0,
                generated_tokens=0,
                preemptions=0,
                batch_size=0,
                finish=["error"] * samples,
                credit_tokens=submit.credit_tokens,
            )
        )

    def credit(self, submission: Submission, reached: int) -> None:
        """Grant token credit up to the furthest position that any sample reached, each token once."""
        reached = min(reached, submission.submit.credit_tokens)
        if reached > submission.credited_tokens:
            self.credit_tokens += reached - submission.credited_tokens
            submission.credited_tokens = reached

    def emit(self, origin: Hashable, output: Output) -> None:
        outputs = self._outputs.get(origin)
        if outputs is None:
            self._outputs[origin] = [output]
        else:
            outputs.append(output)

    def forget_outputs(self, origin: Hashable) -> None:
        """Nobody reads this origin's outputs any more."""
        self._outputs.pop(origin, None)

    def take(self) -> tuple[dict[Hashable, list[Output]], list[Finished]]:
        """Outputs by origin, and the ledgers of submissions that closed, since the last call."""
        taken = self._outputs, self._finished
        self._outputs, self._finished = {}, []
        return taken


def _remove(index: dict[Key, dict[int, Submission]], key: Key, name: int) -> None:
    del index[key][name]
    if not index[key]:
        del index[key]
