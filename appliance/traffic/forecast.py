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
        self._running = 0.0

    def refresh(self, accounts: Sequence[CreditAccount], tokens_per_row: float) -> None:
        """Learn the latest; a sequence takes `tokens_per_row` of the cache."""
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
        self._full_step_s = sum(account.rates.step_at(each) for account in measured) / count
        self.prompt_token_s = sum(account.rates.prompt_token_s for account in measured) / count
        self._computed_share = sum(account.rates.computed_share for account in measured) / count
        empty = max(1.0, each - self._running)
        self._row_slope_s = (self._full_step_s - self.step_s) / empty

    def serving_s(self, prompt_tokens: float, output_tokens: float) -> float:
        """Seconds in which all replicas together serve so many tokens, while others wait behind them."""
        prompts_s = prompt_tokens * self.prompt_token_s * self._computed_share
        rows_s = (prompts_s + output_tokens * self._full_step_s) / (self._rows * _PART_OF_A_REPLICA)
        return max(rows_s, prompts_s / self._replicas)

    def running_s(self, prompt_tokens: float, output_tokens: float, rows_more: float) -> float:
        """Seconds from its turn to its end of a request whose answer has so many tokens, when by then so many
        rows more are busy on each replica than now."""
        step_s = min(
            self.step_s + max(0.0, rows_more) * self._row_slope_s, max(self._full_step_s, self.step_s)
        )
        # Two steps are launched already when it comes.
        return prompt_tokens * self.prompt_token_s + (2.0 + output_tokens) * step_s

    @property
    def rows_each(self) -> float:
        """Rows of a replica that can be busy."""
        return self._rows / self._replicas if self._replicas else 0.0

    @property
    def replicas(self) -> int:
        """That serve the model."""
        return self._replicas
