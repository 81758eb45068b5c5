"""What tenants' policies keep of prompts and answers, in the core: written to `contents.db`, shown to
operators, and removed when its time is over."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from appliance.memory_files import read_memory
from appliance.messages import Keep
from appliance.protocol import Contents
from appliance.settings import LogSettings
from store.contents import Content, ContentLog, read_contents
from store.policies import Policies
from store.structs import KeptText
from store.writer import Writer

log = logging.getLogger(__name__)

DAY_S = 86400.0
_MOST_BYTES = 64 << 20
"""Of one request, as it comes from a front: texts in UTF-8."""
_MOST_WAITING = 256
"""Requests whose texts wait to be read: each is a descriptor."""


class ContentKeeper:
    """Has the texts from fronts written, and reads them for operators. Methods belong on the event loop's
    thread, which never sees a text of a front."""

    def __init__(
        self, writer: Writer, policies: Callable[[], Policies], rules: Callable[[], LogSettings]
    ) -> None:
        """`writer` is that of `contents.db`."""
        self.writer = writer
        self._policies = policies
        self._rules = rules
        self._log = ContentLog(writer)
        self._thread = ThreadPoolExecutor(1, "contents")
        self._lock = threading.Lock()
        self._waiting = 0

    def close(self) -> None:
        """Hand everything that came over to the writer."""
        self._thread.shutdown()

    # ── keeping ──

    def keep(self, message: Keep, descriptor: int) -> None:
        """Keep what is in the memfd, as the policy of `message.identity` says. The descriptor stays the
        caller's."""
        if message.identity.log_policy == "metadata":
            return
        with self._lock:
            if self._waiting >= _MOST_WAITING:
                self.writer.count_dropped(1)
                log.error("request %s: its texts are not kept, too many wait already", message.request_id)
                return
            self._waiting += 1
        self._thread.submit(self._take, message, os.dup(descriptor))

    def _take(self, message: Keep, descriptor: int) -> None:
        try:
            parts = msgspec.msgpack.decode(read_memory(descriptor, _MOST_BYTES), type=list[KeptText])
            texts = message.identity.log_policy == "full"
            if not self._log.keep(_content(message, part, texts) for part in parts):
                log.error(
                    "request %s: its texts are not kept, too much waits for the disk", message.request_id
                )
        except Exception:
            log.exception("request %s: its texts could not be kept", message.request_id)
        finally:
            with self._lock:
                self._waiting -= 1

    # ── showing ──

    async def show(self, request_id: str) -> Contents:
        """What is kept of a request. Raises LookupError where nothing is, or a StoreError."""
        found = await asyncio.to_thread(read_contents, self.writer.path, request_id)
        if not found:
            raise LookupError(
                f"nothing is kept of a request {request_id!r}: its tenant keeps metadata only, or its time "
                f"is over"
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
        """For how long its contents are kept; 0: for ever."""
        known = self._policies().tenants.get(tenant)
        own = known.log_days if known is not None else None
        return self._rules().contents_days if own is None else own

    # ── removing ──

    def limits(self) -> tuple[dict[str, float | None], float | None]:
        """Before which moment (unix seconds) contents are to be removed: by tenant, and those of tenants that
        are not there any more. None: never."""

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
