"""Writes prompts and answers to `contents.db` according to tenants' log policies, returns them to operators,
and removes them after the tenant's retention period."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from appliance.channel.front_messages import Keep
from appliance.host.memory_files import read_memory
from appliance.protocol import Contents
from appliance.settings import LogSettings
from store.contents import Content, ContentLog, read_contents
from store.policies import Policies
from store.structs import KeptText
from store.writer import Writer

log = logging.getLogger(__name__)

DAY_S = 86400.0
_MAX_BYTES = 64 << 20
"""Maximum size of one request's texts, in UTF-8 bytes."""
_MAX_WAITING = 256
"""Maximum number of requests whose texts are waiting to be read from memfds. Each request occupies a file
descriptor."""


class ContentKeeper:
    """Stores prompts and answers sent by fronts and reads them for operators. Methods must be called on the
    event loop thread. A separate thread reads and decodes the texts from fronts."""

    def __init__(
        self, writer: Writer, policies: Callable[[], Policies], rules: Callable[[], LogSettings]
    ) -> None:
        """`writer` writes to `contents.db`."""
        self.writer = writer
        self._policies = policies
        self._rules = rules
        self._log = ContentLog(writer)
        self._thread = ThreadPoolExecutor(1, "contents")
        self._lock = threading.Lock()
        self._waiting = 0

    def close(self) -> None:
        """Pass all texts received so far to the writer."""
        self._thread.shutdown()

    # ── storing ──

    def keep(self, message: Keep, descriptor: int) -> None:
        """Store the texts in the memfd according to the log policy of `message.identity`. The caller closes
        the descriptor."""
        if message.identity.log_policy == "metadata":
            return
        with self._lock:
            if self._waiting >= _MAX_WAITING:
                self.writer.count_dropped(1)
                log.error(
                    "request %s: prompts and answers not stored, because the texts of too many requests are "
                    "waiting to be stored",
                    message.request_id,
                )
                return
            try:
                copy = os.dup(descriptor)
            except OSError as error:
                self.writer.count_dropped(1)
                log.error(
                    "request %s: prompts and answers not stored (%s): raise the open file limit (ulimit -n)",
                    message.request_id,
                    error.strerror,
                )
                return
            self._waiting += 1
        self._thread.submit(self._take, message, copy)

    def _take(self, message: Keep, descriptor: int) -> None:
        try:
            parts = msgspec.msgpack.decode(read_memory(descriptor, _MAX_BYTES), type=list[KeptText])
            texts = message.identity.log_policy == "full"
            if not self._log.keep(_content(message, part, texts) for part in parts):
                log.error(
                    "request %s: prompts and answers not stored, because too much data is "
                    "waiting to be written to disk",
                    message.request_id,
                )
        except Exception:
            self.writer.count_dropped(1)
            log.exception("request %s: prompts and answers could not be stored", message.request_id)
        finally:
            with self._lock:
                self._waiting -= 1

    # ── showing ──

    async def show(self, request_id: str) -> Contents:
        """Return a request's stored texts. Raises LookupError if no texts are stored, and StoreError if the
        database fails."""
        found = await asyncio.to_thread(read_contents, self.writer.path, request_id)
        if not found:
            raise LookupError(
                f"no prompts or answers are stored for request {request_id!r}: its tenant's log policy is "
                "'metadata', or the retention period has ended"
            )
        first = found[0]
        days = self._days(first.tenant)
        return Contents(
            request_id=request_id,
            tenant=first.tenant,
            created_at=first.created_at,
            goes_at=first.created_at + days * DAY_S if days else None,
            texts=[
                KeptText(*(getattr(content, name) for name in KeptText.__struct_fields__))
                for content in found
            ],
        )

    def _days(self, tenant: str) -> float:
        """Return how many days a tenant's contents are kept, or 0 for no limit."""
        known = self._policies().tenants.get(tenant)
        own = known.log_days if known is not None else None
        return self._rules().contents_days if own is None else own

    # ── removing ──

    def limits(self) -> tuple[dict[str, float | None], float | None]:
        """Return the unix times before which contents are removed: one for each tenant, as a dict, and one
        for deleted tenants. None means that contents are kept forever."""

        def before(days: float) -> float | None:
            return time.time() - days * DAY_S if days else None

        tenants = self._policies().tenants
        return {name: before(self._days(name)) for name in tenants}, before(self._rules().contents_days)


def _content(message: Keep, part: KeptText, texts: bool) -> Content:
    kept = part if texts else msgspec.structs.replace(part, text=None)
    return Content(
        request_id=message.request_id,
        tenant=message.identity.tenant,
        created_at=message.created_at,
        **msgspec.structs.asdict(kept),
    )
