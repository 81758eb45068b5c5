"""Tests that the first and the last kernel of a decode step give the same results as torch on the same
tables, with and without padding. All results are integers, so the interpreter (on a CPU, in CI) verifies
completely which slots are read, written or left unchanged. The same tests also run on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.triton.decode_step import advance, empty_decodes, place

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TABLE_ROWS = 300


def _tables() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 5 * 64, (TABLE_ROWS,), generator=generator)
    tokens = torch.randint(0, 1000, (TABLE_ROWS,), generator=generator)
    blocks = torch.randint(0, 9999, (TABLE_ROWS, 5), generator=generator)
    return tokens.to(DEVICE), lengths.to(DEVICE), blocks.to(DEVICE)


@pytest.mark.parametrize(("count", "padding"), [(1, 0), (7, 1), (128, 0), (129, 70), (300, 0)])
def test_each_token_is_placed_at_the_end_of_its_sequence_and_padding_nowhere(
    count: int, padding: int
) -> None:
    tokens, lengths, blocks = _tables()
    rows = torch.randperm(TABLE_ROWS)[:count].to(DEVICE)
    padded = torch.cat((rows, rows.new_full((padding,), -1)))
    decodes = empty_decodes(400, DEVICE).first(count + padding)
    place(padded, tokens, lengths, blocks, decodes)
    positions = lengths[rows]
    assert torch.equal(decodes.token_ids[:count], tokens[rows])
    assert torch.equal(decodes.positions[:count], positions)
    assert torch.equal(decodes.lens[:count], positions + 1)
    assert torch.equal(decodes.kv_slots[:count], blocks[rows, positions // 64] * 64 + positions % 64)
    assert torch.equal(decodes.slots[:count], rows)
    assert (decodes.kv_slots[count:] == -1).all() and (decodes.lens[count:] == 0).all()
    for part in (decodes.token_ids, decodes.positions, decodes.slots):
        assert (part[count:] == 0).all()


@pytest.mark.parametrize(("count", "padding"), [(1, 0), (129, 70), (300, 0)])
def test_sampled_tokens_become_the_next_input_of_their_own_slots(count: int, padding: int) -> None:
    tokens, lengths, _ = _tables()
    rows = torch.randperm(TABLE_ROWS)[:count].to(DEVICE)
    padded = torch.cat((rows, rows.new_full((padding,), -1)))
    sampled = torch.arange(count + padding, device=DEVICE) - 1
    positions = torch.arange(count + padding, device=DEVICE) + 5000
    expected_tokens, expected_lengths = tokens.clone(), lengths.clone()
    expected_tokens[rows] = sampled[:count].clamp(min=0)
    expected_lengths[rows] = positions[:count]
    advance(padded, sampled, positions, tokens, lengths)
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(lengths, expected_lengths)
