"""The interface that receives a front's events and messages. `appliance.front_pool.pool` implements it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from appliance.channel.front_messages import AboutRequest, FrontProgress, Keep

if TYPE_CHECKING:
    from appliance.front_pool.front import Front, Untaken


class FrontEvents(Protocol):
    """Receives a front's events and the messages from its process."""

    def front_started(self, front: Front) -> None:
        """Called when a front process has started, before it has a configuration. If this method raises
        OSError, the process is killed and restarted."""

    def front_available(self, front: Front) -> None:
        """Called when a message shows that the front may now accept connections: it is ready, is responding
        again, or has room for more."""

    def front_returns(self, front: Front, connection: Untaken) -> None:
        """Give a connection to a different front, because `front` could not receive the connection. `front`
        accepts no connections until its next report."""

    def name_wanted(self, name: str) -> None:
        """Called whenever a front reports that requests are waiting for the model `name` to be loaded or
        woken."""

    def request_message(self, front: Front, message: AboutRequest) -> None:
        """Called for each message from a front about a request."""

    def front_hands_over(self, front: Front, scope: bytes, connection: Untaken) -> None:
        """Pass a connection and its request to the front that must answer all requests with this `scope` (see
        `HandOver`)."""

    def front_keeps(self, front: Front, message: Keep, descriptor: int) -> None:
        """Store the prompts and answers that the front has sent in a memory file. The caller then closes the
        file's descriptor."""

    def front_progress(self, front: Front, message: FrontProgress) -> None:
        """Called with the front's reply to `AskProgress`."""

    def front_changed(self, front: Front, former: dict[str, str]) -> None:
        """Called when `front.report.problems`, which lists the models that the front cannot serve, has
        changed. `former` is the previous value."""

    def front_exited(self, front: Front, name: str) -> None:
        """Called when the front process with this name has exited."""

    def front_problem(self, front: Front, description: str) -> None:
        """Report a front's problem to the operator."""
