"""Chooses the traffic split arm that answers a caller's requests."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from appliance.channel.served_models import Arm


def choose_arm(name: str, arms: Sequence[Arm], caller: str) -> Arm:
    """Return the arm that answers this caller's requests for `name`. Each arm gets callers in proportion to
    its weight, by weighted rendezvous hashing (Thaler and Ravishankar 1998; weights as in Schindelhauer and
    Schomaker 2005): each arm gets a score from a hash of the name, the caller and the arm's target, and the
    arm with the highest score is chosen. Every front process therefore chooses the same arm for a given
    caller, and changing one arm's weight moves callers only to or from that arm.
    """
    return max(arms, key=lambda arm: _score(name, arm, caller))


def _score(name: str, arm: Arm, caller: str) -> float:
    text = f"{name}\0{arm.target}\0{caller}".encode("utf-8", "backslashreplace")
    hashed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
    uniform = (hashed + 0.5) / 2**64  # between 0 and 1, or exactly 1 after rounding
    return -arm.weight / math.log(min(uniform, 1 - 2**-53))
