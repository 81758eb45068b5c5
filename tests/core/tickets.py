"""Creates tickets for tests of the dispatch order."""

from __future__ import annotations

from appliance.traffic.credits import Levels
from appliance.traffic.fairness import Ticket
from appliance.traffic.rules import QueueRules
from engine.levels import LEVELS, level_of

RULES = QueueRules()


ALL_LEVELS = Levels((1 << LEVELS) - 1, slots=-1, free=0)


def levels(*pairs: tuple[int, int]) -> Levels:
    """Return the levels for which a replica has credit and a slot that another sequence occupies. Each level
    is a pair of class and urgency."""
    return ALL_LEVELS._replace(open=sum(1 << level_of(*pair) for pair in pairs))


class Serial:
    """Creates tickets that are numbered by arrival."""

    def __init__(self) -> None:
        self.last = 0

    def ticket(
        self,
        tenant: str = "a",
        request_class: int = 1,
        *,
        now: float = 0.0,
        prompt: int = 100,
        output: float = 50.0,
        due: float | None = None,
        begin_by: float | None = None,
        num_seqs: int = 1,
    ) -> Ticket[str]:
        self.last += 1
        return Ticket(
            item=f"{tenant}{self.last}",
            tenant=tenant,
            key_id="",
            request_class=request_class,
            serial=self.last,
            queued_at=now,
            due=due if due is not None else now + RULES.late_s(request_class),
            service=prompt + RULES.output_weight * output,
            prompt_tokens=prompt,
            output_tokens=output,
            begin_by=begin_by,
            num_seqs=num_seqs,
        )
