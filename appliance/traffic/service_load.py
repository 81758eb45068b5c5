"""Measures one model's recent load: what share of the model's capacity each class uses, how much service
new requests need, and the mean token counts of recently started requests."""

from __future__ import annotations

from collections.abc import Iterable

from appliance.channel.front_messages import Admit
from appliance.traffic.fairness import QueuedTokens
from appliance.traffic.rates import DecayingMean
from store.policies import CLASSES

_BUSY_HALF_LIFE_S = 4.0
_MAX_TAKEN_S = 10.0
"""Maximum outstanding service of started requests, in seconds, that is carried over to the next tick. Capped
because predicted output lengths are often too high."""
_OFFERED_HALF_LIFE_S = 0.5
_LIGHT_LOAD, _FULL_LOAD = 0.2, 0.8
"""Offered load, as a fraction of capacity. Up to `_LIGHT_LOAD`, the number of busy slots is expected to stay
the same. At `_FULL_LOAD` and above, all slots are expected to become busy."""
_MIN_SHARE = 0.02
"""Minimum share of the model's capacity for each class, even if higher-priority classes could use all of
it."""
_OF_THE_NEW = 0.02
"""Weight of the newest request in the running means."""
_PROMISED_MARGIN = 1.25
"""Requests with a promised start affect the predicted step times only if they raise the mean prompt length by
more than this factor. Smaller increases occur by chance, and predicting longer steps because of them would
only reduce the number of promises."""


class ServiceLoad:
    """One model's recent load. Service is measured in seconds: the time that all of the model's replicas
    together need for it."""

    def __init__(self) -> None:
        self._taken_s = [0.0] * CLASSES
        """Outstanding service of started requests, by class. Long requests are spread over several ticks, so
        that they never appear to use the whole capacity."""
        self._busy = [0.0] * CLASSES
        """Each class's recent share of the model's capacity."""
        self._offered_s = 0.0
        """Service needed by the requests received since the last tick."""
        self._offered = DecayingMean()
        """Service needed by recently received requests, as a fraction of capacity."""
        self._ticked_at: float | None = None

    def start(self, request_class: int, service_s: float) -> None:
        """Add the service needed by a started request to the outstanding service of its class."""
        self._taken_s[request_class] += service_s

    def offer(self, service_s: float) -> None:
        """Add the service needed by a new request to the offered load."""
        self._offered_s += service_s

    def tick(self, now: float) -> None:
        """Update the offered load, and each class's share of the model's capacity, at the end of an
        interval."""
        if self._ticked_at is not None and now > self._ticked_at:
            passed_s = now - self._ticked_at
            keep = 0.5 ** (passed_s / _BUSY_HALF_LIFE_S)
            for number in range(CLASSES):
                served_s = min(self._taken_s[number], passed_s)
                self._busy[number] = keep * self._busy[number] + (1 - keep) * served_s / passed_s
                self._taken_s[number] = min(self._taken_s[number] - served_s, _MAX_TAKEN_S)
            self._offered.add(self._offered_s, passed_s, 0.5 ** (passed_s / _OFFERED_HALF_LIFE_S))
            self._offered_s = 0.0
        self._ticked_at = now

    def share_left(self, request_class: int, total: float = 1.0) -> float:
        """Return the share of the model's capacity that higher-priority classes leave for this class. `total`
        is the share available to all classes."""
        return max(_MIN_SHARE, total - sum(self._busy[:request_class]))

    @property
    def filling(self) -> float:
        """Fraction of the slots, from 0 to 1, that the offered load is expected to occupy soon."""
        return max(0.0, min(1.0, (self._offered.ratio - _LIGHT_LOAD) / (_FULL_LOAD - _LIGHT_LOAD)))


class StartedTokens:
    """Running means of the token counts of recently started requests."""

    def __init__(self) -> None:
        self.tokens_per_seq = 0.0
        self.prompt_tokens = 0.0
        self.output_tokens = 0.0

    def add(self, admit: Admit, expected_tokens: float) -> None:
        """Update the means with a request that is starting."""
        per_seq = (admit.prompt_tokens + expected_tokens) / max(1, admit.num_seqs)
        known = self.tokens_per_seq or per_seq
        self.tokens_per_seq = known + _OF_THE_NEW * (per_seq - known)
        prompt, output = float(admit.prompt_tokens), max(1.0, expected_tokens)
        if not self.output_tokens:
            self.prompt_tokens, self.output_tokens = prompt, output
        self.prompt_tokens += _OF_THE_NEW * (prompt - self.prompt_tokens)
        self.output_tokens += _OF_THE_NEW * (output - self.output_tokens)

    def prompts_per_output(
        self, backlogs: Iterable[QueuedTokens], promised_requests: int, promised_prompt_tokens: int
    ) -> float:
        """Return the number of prompt tokens per output token: the highest of the ratios for recently started
        requests, for waiting requests and for requests with a promised start. `backlogs` holds each class's
        waiting requests."""
        waiting = QueuedTokens()
        for backlog in backlogs:
            waiting.add(backlog)
        groups = (
            (self.prompt_tokens, self.output_tokens),
            (waiting.prompt_tokens, waiting.output_tokens),
            (self._prompt_tokens_after(promised_requests, promised_prompt_tokens), self.output_tokens),
        )
        return max((prompt / output for prompt, output in groups if output >= 1), default=0.0)

    def _prompt_tokens_after(self, promised_requests: int, promised_prompt_tokens: int) -> float:
        """Return the mean prompt length once all requests with a promised start have started. They start
        before other waiting requests, so a few of them with long prompts can lengthen steps even if most
        waiting requests have short prompts. The mean output length is assumed not to change: requests with
        short answers are promised a start more often, but requests with longer answers run at the same time.
        """
        keep = (1.0 - _OF_THE_NEW) ** promised_requests
        each = promised_prompt_tokens / max(1, promised_requests)
        return (keep * self.prompt_tokens + (1.0 - keep) * each) / _PROMISED_MARGIN
