"""Manages the sequences' block tables: which KV blocks each sequence uses, and which table entries have been
sent to the device.

A block is used by a single sequence, unless it was found in the prefix cache or is shared with forks (full
blocks are shared as `SharedBlocks`). If the last block of a shared prompt is only partly filled, the block is
copied before a sequence writes to it. Full blocks are offered to the prefix cache once their values are known
to be finite.
"""

from __future__ import annotations

from itertools import repeat

from engine.messages import BLOCK_TOKENS
from engine.plan import StepPlan
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.sequence import Sequence, SharedBlocks, blocks_for


class BlockTables:
    """Updates the sequences' blocks (`Sequence.shared` and `Sequence.table`) and the fields that depend on
    them. All blocks belong to one pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def find(self, sequence: Sequence) -> tuple[list[int], int, int]:
        """Return a prefill's cached blocks, the number of additional blocks it needs, and the number of
        blocks available in the pool."""
        pool, count = self._pool, sequence.prefill_end
        # Bypass the prefix cache if prompt log probabilities are requested, because they need every prompt
        # token's logits.
        hits = [] if sequence.wants_prompt_logprobs else pool.match(sequence.chain, sequence.tokens, count)
        return hits, blocks_for(count) - len(hits), pool.available - pool.unused_among(hits)

    def take(self, sequence: Sequence, hits: list[int], needed: int) -> None:
        """Build a sequence's block table from the cached blocks (`hits`) and `needed` new blocks."""
        for block in hits:
            self._pool.share(block)
        sequence.table = hits + [self._pool.allocate() for _ in range(needed)]
        sequence.registered = len(hits)
        sequence.position = sequence.finite = len(hits) * BLOCK_TOKENS

    def fork(self, plan: StepPlan, leader: Sequence, forks: list[Sequence], end: int) -> None:
        """Share all blocks of a leader with its forks. The leader's prefill of `end` tokens must be
        complete."""
        full = end // BLOCK_TOKENS
        self.send(plan, leader)
        if full:
            leader.shared = SharedBlocks(leader.table[:full], 1 + len(forks), leader.registered)
            leader.table = leader.table[full:]
            plan.shares.append((leader.slot, full, [fork.slot for fork in forks]))
        for fork in forks:
            fork.shared = leader.shared
            fork.table = leader.table.copy()
            for block in fork.table:
                self._pool.share(block)
            fork.finite = leader.finite
            fork.sent_blocks = full
            self.send(plan, fork)

    def make_writable(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Make the sequence's next position writable: allocate a block, or copy the last block if it is
        shared. Returns False if the pool has no free block."""
        pool, table, slot = self._pool, sequence.table, sequence.slot
        count = sequence.block_count
        if sequence.position == count * BLOCK_TOKENS:
            if not pool.available:
                return False
            table.append(pool.allocate())
            plan.blocks.append((slot, count, table[-1]))
            count = sequence.sent_blocks = count + 1
        elif pool.references(table[-1]) > 1:
            if not pool.available:
                return False
            shared, table[-1] = table[-1], pool.allocate()
            pool.release(shared)
            plan.copies.append((shared, table[-1]))
            plan.blocks.append((slot, count - 1, table[-1]))
        sequence.next_allocation = min(count * BLOCK_TOKENS, sequence.limit - 1)
        return True

    def send(self, plan: StepPlan, sequence: Sequence) -> None:
        """Add the sequence's new block table entries to the plan."""
        slot, sent = sequence.slot, sequence.sent_blocks
        # Shared blocks were sent before they became shared.
        new = sequence.table[sent - sequence.shared_blocks :]
        plan.blocks.extend(zip(repeat(slot, len(new)), range(sent, sequence.block_count), new, strict=True))
        sequence.sent_blocks = sequence.block_count

    def register(self, sequence: Sequence, confirmed: int) -> None:
        """Offer the full blocks of the first `confirmed` tokens to the prefix cache."""
        pool = self._pool
        if not pool.prefix_cache:
            return
        shared, end = sequence.shared, confirmed // BLOCK_TOKENS
        begin = sequence.registered if shared is None else max(sequence.registered, shared.registered)
        for index in range(begin, end):
            block = sequence.block(index)
            if not pool.is_cached(block):
                pool.register(block, sequence.chain.key(index, sequence.tokens))
        sequence.registered = max(sequence.registered, end)
        if shared is not None:
            shared.registered = max(shared.registered, min(end, len(shared.blocks)))

    def mark_non_finite(self, sequence: Sequence) -> None:
        """Remove a sequence's blocks from the prefix cache, except those that are known to be finite. Called
        after the sequence computed NaN or infinity."""
        for index in range(sequence.finite // BLOCK_TOKENS, sequence.block_count):
            self._pool.mark_non_finite(sequence.block(index))

    def release(self, sequence: Sequence) -> None:
        """Free a sequence's blocks.

        Steps in flight may still write to these blocks, which is safe because all later plans run after those
        steps. The blocks are nevertheless marked as possibly non-finite, because the steps may write NaN or
        infinity to them.
        """
        if sequence.finite < sequence.position:
            for index in range(sequence.finite // BLOCK_TOKENS, blocks_for(sequence.position)):
                self._pool.mark_may_be_non_finite(sequence.block(index))
        self._pool.release_table(sequence.table)
        shared, sequence.shared = sequence.shared, None
        if shared is not None:
            shared.holders -= 1
            if not shared.holders:
                self._pool.release_table(shared.blocks)
        sequence.table = []
        sequence.position = sequence.registered = sequence.finite = 0
