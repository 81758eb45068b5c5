"""The events and messages of fronts. `appliance.front_pool.pool` handles them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from appliance.channel.front_messages import AboutRequest, Claim, FrontProgress, Keep, Release

if TYPE_CHECKING:
    from appliance.front_pool.front import Front, Untaken


class FrontEvents(Protocol):
    """Receives events about a front, and the messages that its process sends."""

    def front_started(self, front: Front) -> None:
        """Handle the start of a process, which has no configuration yet. If this method raises OSError, the
        process is killed and started again."""

    def front_available(self, front: Front) -> None:
        """Handle a message that shows that the front is ready, responds or has free places. The front may now
        accept connections."""

    def front_returns(self, front: Front, connection: Untaken) -> None:
        """Reassign a connection that the front could not receive. The front accepts no connections until its
        next report."""

    def name_wanted(self, name: str) -> None:
        """Handle requests that are waiting in a front until the model for `name` is loaded or woken on
        demand. Called for every report while requests are waiting."""

    def request_message(self, front: Front, message: AboutRequest) -> None:
        """Handle a message about a request."""

    def claim_message(self, front: Front, message: Claim | Release) -> None:
        """Handle a claim or a release for an `Idempotency-Key`."""

    def front_hands_over(self, front: Front, scope: bytes, connection: Untaken) -> None:
        """Pass a connection, with its request, to the front that must answer the requests of this `scope`
        (see `HandOver`)."""

    def front_keeps(self, front: Front, message: Keep, descriptor: int) -> None:
        """Store prompts and answers that the front has sent. The descriptor is closed after this method
        returns."""

    def front_progress(self, front: Front, message: FrontProgress) -> None:
        """Handle the front's reply to `AskProgress`."""

    def front_changed(self, front: Front, former: dict[str, str]) -> None:
        """Handle a change of `front.problems`, the models that the front cannot serve. `former` is the
        previous value of `front.problems`."""

    def front_exited(self, front: Front, name: str) -> None:
        """Handle the exit of the process with this name."""

    def front_problem(self, front: Front, description: str) -> None:
        """Report a problem to the operator."""
