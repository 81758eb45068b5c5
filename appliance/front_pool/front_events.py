"""The events of fronts, and the messages from fronts. `appliance.front_pool.pool` handles both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from appliance.channel.front_messages import AboutRequest, Claim, FrontProgress, Keep, Release

if TYPE_CHECKING:
    from appliance.front_pool.front import Front, Untaken


class FrontEvents(Protocol):
    """Receives events about a front, and the messages that the front's process sends."""

    def front_started(self, front: Front) -> None:
        """Handle the start of a front process, which has no configuration yet. If this method raises OSError,
        the process is killed and started again."""

    def front_available(self, front: Front) -> None:
        """Handle a message from which it follows that the front is ready, responds or has free places. The
        front may now accept connections."""

    def front_returns(self, front: Front, connection: Untaken) -> None:
        """Give a connection that the front could not receive to another front. The front accepts no
        connections until its next report."""

    def name_wanted(self, name: str) -> None:
        """Handle that requests are waiting in a front until the model of this name is loaded or woken. Called
        for every report of the front while requests are waiting."""

    def request_message(self, front: Front, message: AboutRequest) -> None:
        """Handle a front's message about a request."""

    def claim_message(self, front: Front, message: Claim | Release) -> None:
        """Handle a front's claim of an `Idempotency-Key`, or the release of a claim."""

    def front_hands_over(self, front: Front, scope: bytes, connection: Untaken) -> None:
        """Pass a connection, together with the request on it, to the front that must answer all requests with
        this `scope` (see `HandOver`)."""

    def front_keeps(self, front: Front, message: Keep, descriptor: int) -> None:
        """Store prompts and answers that the front has sent. After this method returns, the caller closes the
        descriptor."""

    def front_progress(self, front: Front, message: FrontProgress) -> None:
        """Handle the front's reply to the message `AskProgress`."""

    def front_changed(self, front: Front, former: dict[str, str]) -> None:
        """Handle a change of `front.problems`, which contains the models that the front cannot serve.
        `former` is the previous value."""

    def front_exited(self, front: Front, name: str) -> None:
        """Handle the exit of the front process with this name."""

    def front_problem(self, front: Front, description: str) -> None:
        """Report a problem of the front to the operator."""
