"""When a request would begin and end on a model's replicas, by their measured rates.

The model of a replica: rows that each carry a sequence through its prompt and its answer, a step for each
token; and prompts that are computed one after another. What waits is served as fast as the scarcer of the two
allows. As long as nothing was measured nothing is known, and whoever asks must do without.
"""

from __future__ import annotations

from collections.abc import Sequence

from appliance.traffic.credits import CreditAccount

_PART_OF_A_REPLICA = 0.95
"""Rows that are busy on average while requests wait: a row that ends is filled a step or two later."""


class Forecast:
    """What the replicas of a model can do together. `refresh` takes in what their accounts have learned."""

    def __init__(self) -> None:
        self.known = False
        """Whether anything below means something."""
        self.step_s = 0.0
        """Of late, the mean over replicas, as all here."""
        self.prompt_token_s = 0.0
        self._full_step_s = 0.0
        """With all rows busy."""
        self._computed_share = 1.0
        self._rows = 0.0
        self._replicas = 0
        self._row_slope_s = 0.0
        self._longest_step_s = 0.0
        """With all rows busy and as many prompts as a step takes."""
        self._prompt_s = 0.0
        """Of a request's prompt."""
        self._running = 0.0

    def refresh(
        self,
        accounts: Sequence[CreditAccount],
        tokens_per_row: float,
        prompt_tokens: float,
        prompts_per_output: float,
    ) -> None:
        """Learn the latest. A request's prompt has so many tokens; a sequence takes `tokens_per_row` of the
        cache, and brings so many prompt tokens for each of its output."""
        measured = [account for account in accounts if account.rates.known]
        self.known = bool(measured)
        if not measured:
            return
        count = len(measured)
        self._replicas = len(accounts)
        rows = 0.0
        for account in accounts:
            fit = account.kv_tokens / tokens_per_row if account.kv_tokens and tokens_per_row else account.rows
            rows += max(1.0, min(account.rows, fit))
        self._rows = rows
        each = rows / len(accounts)
        self.step_s = sum(account.rates.step_s for account in measured) / count
        self._running = sum(account.rates.rows for account in measured) / count
        prompts = each * prompts_per_output
        self._full_step_s = sum(_full_step_s(one, each, prompts) for one in measured) / count
        self._longest_step_s = sum(_full_step_s(one, each, float("inf")) for one in measured) / count
        self.prompt_token_s = sum(account.rates.prompt_token_s for account in measured) / count
        self._computed_share = sum(account.rates.computed_share for account in measured) / count
        self._prompt_s = prompt_tokens * self._computed_share * self.prompt_token_s
        empty = max(1.0, each - self._running)
        self._row_slope_s = (self._full_step_s - self.step_s) / empty

    def serving_s(self, prompt_tokens: float, output_tokens: float) -> float:
        """Seconds in which all replicas together serve so many tokens, while others wait behind them."""
        if not self.known or not prompt_tokens + output_tokens:
            return 0.0
        prompts_s = prompt_tokens * self.prompt_token_s * self._computed_share
        rows_s = (prompts_s + output_tokens * self._full_step_s) / (self._rows * _PART_OF_A_REPLICA)
        return max(rows_s, prompts_s / self._replicas)

    def running_s(self, prompt_tokens: float, output_tokens: float, rows_more: float) -> float:
        """Seconds from its turn to its end of a request whose answer has so many tokens, when by then so many
        rows more are busy on each replica than now."""
        rows_more = max(0.0, min(rows_more, self.rows_each - self._running))
        step_s = min(self.step_s + rows_more * self._row_slope_s, max(self._full_step_s, self.step_s))
        steps = 2.0 + output_tokens  # Two are launched already when it comes.
        # Each of these rows begins with a prompt, which all wait for, as far as a step takes prompts.
        filling_s = min(rows_more * self._prompt_s, steps * max(0.0, self._longest_step_s - step_s))
        return prompt_tokens * self.prompt_token_s + steps * step_s + filling_s

    @property
    def rows_running(self) -> float:
        """Of a replica, now."""
        return self._running

    @property
    def rows_each(self) -> float:
        """Rows of a replica that can be busy."""
        return self._rows / self._replicas if self._replicas else 0.0

    @property
    def replicas(self) -> int:
        """That serve the model."""
        return self._replicas


def _full_step_s(account: CreditAccount, rows: float, prompt_tokens: float) -> float:
    """A step with so many rows busy, and so many tokens of prompts as far as a step takes them: what steps
    took, or what this asks of them."""
    rates = account.rates
    computed = min(prompt_tokens * rates.computed_share, account.tokens / 2)
    return max(rates.step_at(rows), rates.decode_s(rows) + computed * rates.prompt_token_s)
