"""What tenants' policies keep of prompts and answers, in the core: kept in `contents.db`, and shown to
operators."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from appliance.protocol import Contents, KeptText
from store.contents import read_contents
from store.policies import Policies
from store.writer import Writer


class ContentKeeper:
    """Has the texts from fronts written, and reads them for operators."""

    def __init__(self, writer: Writer, policies: Callable[[], Policies]) -> None:
        """`writer` is that of `contents.db`."""
        self._writer = writer
        self._policies = policies

    async def show(self, request_id: str) -> Contents:
        """What is kept of a request. Raises LookupError where nothing is, or a StoreError."""
        found = await asyncio.to_thread(read_contents, self._writer.path, request_id)
        if not found:
            raise LookupError(
                f"nothing is kept of a request {request_id!r}: its tenant keeps metadata only, or "
                f"its time is over"
            )
        texts = [msgspec.convert(content, KeptText, from_attributes=True) for content in found]
        first = found[0]
        return Contents(
            request_id=request_id,
            tenant=first.tenant,
            created_at=first.created_at,
            goes_at=self._goes_at(first.tenant, first.created_at),
            texts=texts,
        )

    def _goes_at(self, tenant: str, created_at: float) -> float | None:
        known = self._policies().tenants.get(tenant)
        days = known.log_days if known is not None else None
        return None if days is None else created_at + days * 86400.0
