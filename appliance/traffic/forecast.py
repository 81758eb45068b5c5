"""Predicts when a request will start and finish on a model's replicas, based on their measured rates.

A replica is modelled as a set of slots and a queue of prompts. Each slot runs one sequence and takes one step
per output token. Prompts are computed one at a time. Waiting requests start at a rate that is limited either
by free slots or by prompt computation, whichever is slower. While the rates are unknown, nothing is
predicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from appliance.traffic.credits import CreditAccount

_BUSY_SHARE = 0.95
"""Fraction of slots that are busy while requests are waiting: less than 1, because a slot stays free for one
or two steps before it is filled."""


class Forecast:
    """The combined speed of a model's replicas, computed by `refresh` from their credit accounts."""

    def __init__(self) -> None:
        self.known = False
        """Whether any replica's rates are known. If not, the other attributes are meaningless."""
        self.measured = False
        """Whether all replicas' rates have been measured. If some are only predicted, predicted times are
        lower bounds."""
        self.step_s = 0.0
        """Recent step time. Like all values in this class, this is a mean over the replicas."""
        self.prompt_token_s = 0.0
        self._full_step_s = 0.0
        """Step time with all slots busy."""
        self._computed_share = 1.0
        self._slots = 0.0
        self.replicas = 0
        """Number of the model's replicas."""
        self.slots_busy = 0.0
        """Mean number of busy slots per replica."""
        self._slot_slope_s = 0.0
        self._longest_step_s = 0.0
        """Step time with all slots busy and the maximum number of prompt tokens."""
        self._prompt_s = 0.0
        """Time, in seconds, to compute a prompt of average length."""

    def refresh(
        self,
        accounts: Sequence[CreditAccount],
        tokens_per_seq: float,
        prompt_tokens: float,
        prompts_per_output: float,
    ) -> None:
        """Update the forecast from the credit accounts of the replicas.

        - `prompt_tokens` is the mean prompt length per request.
        - `tokens_per_seq` is the mean number of cache tokens per sequence.
        - `prompts_per_output` is the number of prompt tokens per output token.
        """
        measured = [account for account in accounts if account.rates.known]
        self.known = bool(measured)
        if not measured:
            return
        self.measured = all(account.rates.measured for account in accounts)
        count = len(measured)
        self.replicas = len(accounts)
        slots = 0.0
        for account in accounts:
            known = account.kv_tokens and tokens_per_seq
            fit = account.kv_tokens / tokens_per_seq if known else account.slots
            slots += max(1.0, min(account.slots, fit))
        self._slots = slots
        each = slots / len(accounts)
        self.step_s = sum(account.rates.step_s for account in measured) / count
        self.slots_busy = sum(account.rates.running for account in measured) / count
        prompts = each * prompts_per_output
        self._full_step_s = sum(_full_step_s(one, each, prompts) for one in measured) / count
        self._longest_step_s = sum(_full_step_s(one, each, float("inf")) for one in measured) / count
        self.prompt_token_s = sum(account.rates.prompt_token_s for account in measured) / count
        self._computed_share = sum(account.rates.computed_share for account in measured) / count
        self._prompt_s = prompt_tokens * self._computed_share * self.prompt_token_s
        empty = max(1.0, each - self.slots_busy)
        self._slot_slope_s = (self._full_step_s - self.step_s) / empty

    def serving_s(self, prompt_tokens: float, output_tokens: float) -> float:
        """Return the time in seconds that the replicas together need to serve the given numbers of tokens
        with all slots busy."""
        if not self.known or not prompt_tokens + output_tokens:
            return 0.0
        prompts_s = prompt_tokens * self.prompt_token_s * self._computed_share
        slots_s = (prompts_s + output_tokens * self._full_step_s) / (self._slots * _BUSY_SHARE)
        return max(slots_s, prompts_s / self.replicas)

    def running_s(self, prompt_tokens: float, output_tokens: float, more_slots: float) -> float:
        """Return a request's predicted run time in seconds. `output_tokens` is the length of its answer, and
        `more_slots` is the expected increase in busy slots per replica."""
        more_slots = max(0.0, min(more_slots, self.slots_each - self.slots_busy))
        step_s = min(self.step_s + more_slots * self._slot_slope_s, max(self._full_step_s, self.step_s))
        steps = 2.0 + output_tokens  # Two steps have already been launched.
        # Each additional sequence starts with a prompt, which delays the running sequences' steps.
        filling_s = min(more_slots * self._prompt_s, steps * max(0.0, self._longest_step_s - step_s))
        return prompt_tokens * self.prompt_token_s + steps * step_s + filling_s

    @property
    def slots_each(self) -> float:
        """Mean number of slots per replica."""
        return self._slots / self.replicas if self.replicas else 0.0


def _full_step_s(account: CreditAccount, busy: float, prompt_tokens: float) -> float:
    """Return the step time for the given numbers of busy slots and prompt tokens: the measured time or the
    sum of a step's predicted parts, whichever is longer."""
    rates = account.rates
    computed = min(prompt_tokens * rates.computed_share, account.tokens / 2)
    return max(rates.step_at(busy), rates.decode_s(busy) + computed * rates.prompt_token_s)
