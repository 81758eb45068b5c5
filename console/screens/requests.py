"""Requests: all unfinished requests. A request's details show where its time was spent. `v` switches to
finished requests (`console.screens.finished`)."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.actions import TargetKind
from appliance.snapshot import UnfinishedRequest
from console import units
from console.context import Context
from console.lines import BLANK, Line, fact_lines
from console.roles import Role
from console.screens.panels import CLASS_ROLES
from console.screens.request_time import Part, time_lines
from console.screens.table import TableColumn, TableView

_PHASES: dict[str, tuple[str, Role]] = {
    "queued": ("Q", "warn"),
    "prefill": ("P", "prefill"),
    "decode": ("D", "decode"),
    "ending": ("E", "dim"),
}


def _phase(row: UnfinishedRequest) -> str:
    return row.phase or row.state


def _phase_text(row: UnfinishedRequest) -> str:
    letter, _ = _PHASES.get(_phase(row), (row.state[0].upper(), "text"))
    return f"{letter} {_phase(row)}"


def _phase_role(row: UnfinishedRequest) -> Role:
    return "bad" if row.state == "interrupted" else _PHASES.get(_phase(row), ("", "text"))[1]


def tokens_per_s(row: UnfinishedRequest) -> float | None:
    """Return the output tokens per second since the first token."""
    if row.ttft_s is None or row.generated_tokens is None or row.age_s - row.ttft_s < 0.5:
        return None
    return row.generated_tokens / (row.age_s - row.ttft_s)


class RequestsView(TableView[UnfinishedRequest]):
    """The screen that lists unfinished requests."""

    name = "requests"
    key = "4"
    title = "Requests"
    short = "Reqs"
    reads_blocks = True
    alternate = "finished"
    help_text = (
        "All unfinished requests, oldest first. Press {open} to see how long a request has spent in the "
        "queue, in prefill and in decode. Press {variant} to see the finished requests."
    )
    target: TargetKind = "request"
    sorted_by = "age_s"
    reverse = True
    empty = "no unfinished requests"
    columns = (
        TableColumn("request_id", "REQUEST", 16, lambda r: r.request_id, right=False, flexible=True),
        TableColumn("phase", "PHASE", 9, _phase, _phase_text, right=False, role=_phase_role),
        TableColumn(
            "class_name",
            "CL",
            3,
            lambda r: r.class_name or None,
            right=False,
            role=lambda r: CLASS_ROLES.get(r.class_name, "dim"),
        ),
        TableColumn("tenant", "TENANT", 12, lambda r: r.tenant, right=False, role=lambda r: "bold"),
        TableColumn(
            "key_name", "KEY", 14, lambda r: r.key_name or r.key_id, right=False, drop=9, role=lambda r: "dim"
        ),
        TableColumn("model", "MODEL", 13, lambda r: r.model, right=False, drop=4),
        TableColumn(
            "age_s",
            "AGE",
            6,
            lambda r: r.age_s,
            lambda r: units.seconds(r.age_s),
            unit="s",
        ),
        TableColumn(
            "queue_s", "QUEUE", 6, lambda r: r.queue_s, lambda r: units.seconds(r.queue_s), drop=6, unit="s"
        ),
        TableColumn(
            "ttft_s", "TTFT", 6, lambda r: r.ttft_s, lambda r: units.seconds(r.ttft_s), drop=5, unit="s"
        ),
        TableColumn(
            "prompt_tokens", "PROMPT", 7, lambda r: r.prompt_tokens, lambda r: units.count(r.prompt_tokens)
        ),
        TableColumn(
            "generated_tokens",
            "OUT",
            6,
            lambda r: r.generated_tokens,
            lambda r: units.count(r.generated_tokens),
            role=lambda r: "output",
        ),
        TableColumn(
            "max_tokens", "MAX", 6, lambda r: r.max_tokens, lambda r: units.count(r.max_tokens), drop=7
        ),
        TableColumn("tokens_per_s", "TOK/S", 6, tokens_per_s, lambda r: units.rate(tokens_per_s(r)), drop=3),
        TableColumn("blocks", "BLOCKS", 7, lambda r: r.blocks, lambda r: units.count(r.blocks), drop=8),
        TableColumn("replica", "REPLICA", 15, lambda r: r.replica or None, right=False, drop=10),
        TableColumn("front", "FRONT", 8, lambda r: r.front or None, right=False, drop=11),
    )
    explanations = (
        *(column.name for column in columns),
        *("phases", "request_state", "peer", "attempt", "streamed", "cached_tokens"),
        *("request_computed_tokens", "request_preemptions", "deadline_left_s"),
    )

    def rows(self, context: Context) -> Sequence[UnfinishedRequest]:
        return context.snapshot.requests if context.snapshot else []

    def id_of(self, row: UnfinishedRequest) -> str:
        return row.request_id

    def note(self, context: Context) -> str:
        rows = self.rows(context)
        counts = {
            phase: sum(_phase(row) == phase for row in rows) for phase in ("queued", "prefill", "decode")
        }
        return " · ".join(f"{count} {phase}" for phase, count in counts.items() if count)

    def describe(self, row: UnfinishedRequest, context: Context, width: int) -> list[Line]:
        lines: list[Line] = [
            BLANK,
            *time_lines("Time since arrival", row.age_s, _parts(row), width),
            BLANK,
        ]
        facts = [
            ("state", row.state),
            ("phase", _phase(row)),
            ("class", row.class_name or units.UNKNOWN),
            ("tenant", row.tenant),
            ("key", " ".join(part for part in (row.key_name, row.key_id) if part) or "none"),
            ("peer", row.peer or "none"),
            ("model", row.model),
            ("replica", row.replica or units.UNKNOWN),
            ("front", row.front or units.UNKNOWN),
            ("attempt", units.count(row.attempt)),
            ("streamed", units.UNKNOWN if row.stream is None else "yes" if row.stream else "no"),
            ("prompt tokens", units.count(row.prompt_tokens)),
            ("cached tokens", units.count(row.cached_tokens)),
            ("computed tokens", units.count(row.computed_tokens)),
            (
                "output tokens",
                f"{units.count(row.generated_tokens)} of at most {units.count(row.max_tokens)}",
            ),
            ("output tokens/s", units.rate(tokens_per_s(row))),
            ("KV blocks", units.count(row.blocks)),
            ("preemptions", units.count(row.preemptions)),
        ]
        if row.deadline_left_s is not None:
            facts.append(("deadline in", units.seconds(row.deadline_left_s)))
        return lines + fact_lines(facts, width)


def _parts(row: UnfinishedRequest) -> list[Part]:
    """Return an unfinished request's phases so far."""
    if row.queue_s is None:
        return []
    parts = [Part("queue", row.queue_s)]
    if row.ttft_s is not None:
        parts.append(Part("prefill", row.ttft_s - row.queue_s))
        parts.append(Part("decode", row.age_s - row.ttft_s))
    elif row.phase == "prefill":
        parts.append(Part("prefill", row.age_s - row.queue_s))
    return parts
