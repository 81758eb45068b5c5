"""Checks the consistency of the scheduler's state. Used by the tests and the soak test."""

from __future__ import annotations

from collections import Counter

from engine.messages import BLOCK_TOKENS
from engine.scheduling.block_pool import BlockPool, InvariantError
from engine.scheduling.running import RunningSequences
from engine.scheduling.sequence import Sequence
from engine.scheduling.waiting import WaitingQueue


def check_consistency(
    unfinished: list[Sequence], waiting: WaitingQueue, running: RunningSequences, pool: BlockPool
) -> None:
    """Raise InvariantError if slots, waiting queue and blocks do not match the unfinished sequences. Takes
    time linear in the number of blocks."""
    holders = Counter(sequence.shared for sequence in unfinished if sequence.shared is not None)
    pool.check([*(sequence.table for sequence in unfinished), *(shared.blocks for shared in holders)])
    for shared, count in holders.items():
        if count != shared.holders:
            raise InvariantError(
                f"shared blocks count {shared.holders} sequences, but {count} sequences use them"
            )
    queued = set(waiting)
    for sequence in unfinished:
        _check_sequence(sequence, queued, running)
    if len(queued) != len(waiting):
        raise InvariantError(f"{len(queued)} sequences are queued, but the queue counts {len(waiting)}")
    _check_slots(unfinished, running)
    if not unfinished and (pool.used or len(running)):
        raise InvariantError(
            f"no sequence is left, but {pool.used} blocks and {len(running)} slots are in use"
        )


def _check_sequence(sequence: Sequence, queued: set[Sequence], running: RunningSequences) -> None:
    name = f"sample {sequence.sample} of {sequence.submission.submit.request_id}"
    if (sequence.slot >= 0) == (sequence in queued):
        raise InvariantError(f"{name} must either have a slot or be queued: its slot is {sequence.slot}")
    if sequence.slot >= 0 and running.owners[sequence.slot] is not sequence:
        raise InvariantError(f"{name} has slot {sequence.slot}, which belongs to another sequence")
    blocks = sequence.block_count
    if sequence.slot < 0 and (blocks or sequence.leader or sequence.forks):
        raise InvariantError(f"{name} is queued, but has blocks, forks or a leader")
    if blocks and not sequence.position <= blocks * BLOCK_TOKENS:
        raise InvariantError(f"{name} has written {sequence.position} tokens, but has only {blocks} blocks")
    if sequence.leader is not None and sequence not in sequence.leader.forks:
        raise InvariantError(f"{name} is not among the forks of its leader")


def _check_slots(unfinished: list[Sequence], running: RunningSequences) -> None:
    owned = {sequence.slot for sequence in unfinished if sequence.slot >= 0}
    taken = {slot for slot, sequence in enumerate(running.owners) if sequence is not None}
    free = running.free_slots
    if taken != owned:
        raise InvariantError(
            f"slots {sorted(taken)} are marked as taken, but unfinished sequences own {sorted(owned)}"
        )
    if len(set(free)) != len(free) or taken & set(free):
        raise InvariantError(f"free slots {free} contain duplicates or taken slots; taken: {sorted(taken)}")
    if len(taken) + len(free) != len(running.owners):
        raise InvariantError(
            f"{len(taken)} taken and {len(free)} free slots do not add up to {len(running.owners)}"
        )
    if running.decoding.keys() & running.prefilling.keys():
        raise InvariantError("a slot is both decoding and in prefill")
    for slot, sequence in [*running.decoding.items(), *running.prefilling.items()]:
        if running.owners[slot] is not sequence:
            raise InvariantError(f"slot {slot} is scheduled for a sequence that does not own it")
