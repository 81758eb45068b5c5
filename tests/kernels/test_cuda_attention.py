"""Tests of attention in passes with `AttentionInput.queries`. In these passes, attention is computed only for
each sequence's last token. The GPU operations run in Triton's interpreter and are compared with the reference
implementations."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels import PAGE_TOKENS, AttentionInput, KvPool, Rotation, reference

attention_decode = pytest.importorskip("kernels.triton.attention_decode", exc_type=ImportError)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="float32 linears need the interpreter")

HEADS, KV_HEADS, HEAD_DIM, SCALE = 4, 2, 16, 0.25
BLOCKS, COLUMNS = 24, 3


@dataclass
class Pass:
    """A pass over sequences in slots 0, 1, and so on. Slot r has blocks 3r to 3r + 2. Each entry of `tokens`
    is a pair of slot and position. The pass computes attention only for the tokens at `logits_indices`."""

    tokens: list[tuple[int, int]]
    logits_indices: list[int]
    written: bool = True

    def __post_init__(self) -> None:
        random_ = torch.Generator().manual_seed(2)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random_)

        self.pool = KvPool(*(draw(BLOCKS, KV_HEADS, PAGE_TOKENS, HEAD_DIM) for _ in range(2)))
        self.qkv = draw(len(self.tokens), (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        angle = draw(COLUMNS * PAGE_TOKENS, HEAD_DIM // 2)
        self.rotation = Rotation(torch.cat((angle.cos(), angle.sin()), dim=1))
        self.table = torch.arange(BLOCKS).view(-1, COLUMNS)
        rows, self.positions = torch.tensor(self.tokens).T.contiguous().unbind()
        self.slots = self.table[rows, self.positions // PAGE_TOKENS] * PAGE_TOKENS
        self.slots += self.positions % PAGE_TOKENS
        if not self.written:
            self.slots.fill_(-1)

    def attend(self, ops: object, padding: int) -> tuple[torch.Tensor, KvPool]:
        """Return the result of attention, and the cache after the pass."""
        pool = KvPool(self.pool.keys.clone(), self.pool.values.clone())
        asking = [(*self.tokens[at], at) for at in self.logits_indices]
        columns = [(row, position + 1, at) for row, position, at in asking] + [(0, 0, 0)] * padding
        rows, lens, queries = torch.tensor(columns).T.contiguous().unbind()
        plan = ops.plan_attention(AttentionInput(self.table, rows, lens, COLUMNS, [], queries=queries))  # type: ignore[attr-defined]
        where = (self.positions, self.slots, self.rotation, pool, HEADS)
        return ops.attend(self.qkv, *where, plan, SCALE, None), pool  # type: ignore[attr-defined]


@pytest.fixture
def ops() -> object:
    from kernels.cuda import CudaOps

    return CudaOps(pdl=False)  # the interpreter does not support PDL


@pytest.mark.parametrize("padding", [0, 3])
def test_queries_attend_to_the_tokens_of_their_pass_and_padding_to_nothing(ops: object, padding: int) -> None:
    """Two sequences decode in the same pass as a chunk that has earlier context and a chunk of one token."""
    tokens = [(1, 70), (0, 5), *((2, at) for at in range(60, 133)), (3, 0)]
    made = Pass(tokens, [0, 1, len(tokens) - 2, len(tokens) - 1])
    (found, pool), (expected, other) = made.attend(ops, padding), made.attend(reference, 0)
    assert found.shape == (4 + padding, HEADS, HEAD_DIM)
    torch.testing.assert_close(found[:4], expected, atol=1e-5, rtol=1e-5)
    assert not found[4:].any()
    torch.testing.assert_close(pool.keys, other.keys)
    torch.testing.assert_close(pool.values, other.values)


def test_a_pass_of_padding_leaves_the_cache_unchanged(ops: object) -> None:
    """Warm-up runs passes that contain only padding, to load kernels before the engine serves requests. These
    passes must not write to the cache."""
    made = Pass([(0, 0)] * 3, [], written=False)
    found, pool = made.attend(ops, 3)
    assert found.shape == (3, HEADS, HEAD_DIM) and not found.any()
    assert torch.equal(pool.keys, made.pool.keys) and torch.equal(pool.values, made.pool.values)
