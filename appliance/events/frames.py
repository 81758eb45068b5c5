"""The event stream's frames, and how readers turn them into snapshots. The first frame contains a full
snapshot; each later frame contains the fields that have changed since the preceding one. Because there may be
thousands of requests, only changed requests are sent: in full when they arrive or change phase, otherwise
just their token counts. Readers compute request ages themselves.
"""

from __future__ import annotations

from typing import Annotated, Any, get_type_hints

import msgspec

from appliance.calls import AdminError
from appliance.snapshot import Snapshot, UnfinishedRequest


class EventsQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of `GET /events`."""

    hz: Annotated[int, msgspec.Meta(ge=1, le=4)] = 2
    """Frames per second."""
    frames: Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)] | None = None
    """Number of frames after which the stream ends. Default: the stream ends when the reader disconnects."""


class Frame(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A frame of `GET /events`."""

    seq: int
    """The frame's number. A frame that is not `whole` applies to the snapshot that the preceding frame
    produced."""
    whole: bool = False
    """Whether the frame contains a full snapshot, as the first frame always does. A reader that falls behind
    gets a full snapshot instead of the missed frames."""
    at: float
    """Time when the values were read, in unix seconds."""
    fields: dict[str, msgspec.Raw] = {}
    """The snapshot's changed fields, by name, except `requests`."""
    requests: list[UnfinishedRequest] = []
    """New requests, and requests with changes in fields other than tokens and times."""
    ended: list[str] = []
    """Ids of finished requests."""
    generated_tokens: dict[str, int] = {}
    """Output token counts so far, by request id, of the requests that have generated tokens and are not in
    `requests`."""


class MissingFrameError(Exception):
    """Raised if a frame does not directly follow the preceding frame."""


class SnapshotAssembler:
    """Turns a stream's frames into snapshots."""

    def __init__(self) -> None:
        self._types = get_type_hints(Snapshot)
        self._seq: int | None = None
        self._at = 0.0
        self._fields: dict[str, Any] = {}
        self._requests: dict[str, UnfinishedRequest] = {}

    def add(self, frame: Frame) -> Snapshot:
        """Apply a frame and return the resulting snapshot. The previous snapshot's requests are modified in
        place. Raises MissingFrameError if a frame is missing, and AdminError if this version of the client
        cannot read the service's snapshots."""
        if frame.whole:
            self._fields, self._requests = {}, {}
        elif self._seq is None or frame.seq != self._seq + 1:
            raise MissingFrameError(
                f"frame {frame.seq} does not follow frame {self._seq}: open the stream again"
            )
        passed_s, self._seq, self._at = frame.at - self._at, frame.seq, frame.at
        for name, value in frame.fields.items():
            if name in self._types:  # a newer service may send additional fields
                self._fields[name] = self._decoded(name, value)
        for name in frame.ended:
            self._requests.pop(name, None)
        for request in self._requests.values():
            let_pass(request, passed_s)
        for name, tokens in frame.generated_tokens.items():
            if (known := self._requests.get(name)) is not None:
                known.generated_tokens = tokens
        for request in frame.requests:
            self._requests[request.request_id] = request
        try:
            return Snapshot(**self._fields, requests=list(self._requests.values()))
        except TypeError as error:  # an older service does not send all fields
            raise _unreadable(str(error)) from error

    def _decoded(self, name: str, value: msgspec.Raw) -> Any:
        try:
            return msgspec.json.decode(value, type=self._types[name])
        except msgspec.DecodeError as error:
            raise _unreadable(f"{name}: {error}") from error


def _unreadable(reason: str) -> AdminError:
    return AdminError(
        200,
        f"the service sent a snapshot that this version of the command cannot read ({reason}): if the "
        "command was updated, restart the service",
    )


def signature(one: UnfinishedRequest) -> tuple[object, ...]:
    """Return the values of the fields that cause a request to be sent again in full when they change."""
    return (
        one.state,
        one.phase,
        one.front,
        one.replica,
        one.attempt,
        one.ttft_s,
        one.cached_tokens,
        one.computed_tokens,
        one.blocks,
        one.preemptions,
        one.key_name,
        one.max_tokens,
        one.class_name,
        None if one.phase == "queued" else one.queue_s,
    )


def let_pass(request: UnfinishedRequest, seconds: float) -> None:
    """Advance the elapsed times of a request whose other fields are unchanged."""
    request.age_s += seconds
    # The time in the queue ends with the first dispatch, even if the request is queued again later.
    if request.phase == "queued" and not request.attempt and request.queue_s is not None:
        request.queue_s += seconds
    if request.deadline_left_s is not None:
        request.deadline_left_s -= seconds
