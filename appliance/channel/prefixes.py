"""Hashes of a prompt's prefixes. The core uses them to find a replica that has probably cached one of the
prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from engine.messages import pack_tokens

LENGTHS = (64, 256, 1024, 4096)
"""Lengths, in tokens, of the hashed prefixes. The first is the size of a KV block. Hashing more prefixes
would take more time per request than a better choice of replica would save."""
_HASH_BYTES = 8
"""Hash size in bytes. A small hash is sufficient, because a false match only sends a request to a replica
that has not cached its prefix."""


def prefix_hashes(token_ids: Sequence[int]) -> tuple[bytes, ...]:
    """Return one hash for each length in `LENGTHS` that is less than the prompt's length. The shortest prefix
    comes first."""
    lengths = [length for length in LENGTHS if length < len(token_ids)]
    if not lengths:
        return ()
    packed = memoryview(pack_tokens(token_ids[: lengths[-1]]))
    token_bytes = len(packed) // lengths[-1]
    state, begin, hashes = blake2b(digest_size=_HASH_BYTES), 0, []
    for length in lengths:
        state.update(packed[begin : length * token_bytes])
        begin = length * token_bytes
        hashes.append(state.digest())
    return tuple(hashes)
