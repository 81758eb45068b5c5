"""A runner whose device is a few lists, and what each request should get from it.

Its state is built from plans alone. A KV slot holds the token and a digest of the whole prefix that it was
computed after, as real keys and values depend on all tokens before; each read walks the row's block table and
raises where a slot was computed for another prefix. So a wrong table, an early reuse, a missed copy or a gap
cannot go unseen: the sampled token depends on everything that a real one would depend on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.messages import (
    BLOCK_TOKENS,
    SamplingParams,
    StepPlan,
    StepTokens,
    Submit,
    TokenLogprob,
)

VOCAB = 40
STOP = 7


def sampling_rows(plan: StepPlan) -> list[int]:
    """Rows that sample in `plan`, in the order of `StepTokens`."""
    return [*plan.decodes, *(row for chunk in plan.chunks for row in chunk.sample_slots)]


@dataclass
class Row:
    sampling: SamplingParams
    sample: int
    prompt_tokens: int
    history: list[int]
    table: dict[int, int] = field(default_factory=dict)
    position: int | None = None
    last_token: int | None = None


@dataclass
class SimulatedStep:
    tokens: StepTokens
    host_gap_us: float = 0.0

    def wait(self) -> StepTokens:
        return self.tokens

    def ready(self) -> bool:
        return True


class SimulatedRunner:
    def __init__(self, max_rows: int, blocks: int) -> None:
        self.rows: list[Row | None] = [None] * max_rows
        self.slots: list[list[tuple[int, int] | None]] = [[None] * BLOCK_TOKENS for _ in range(blocks)]
        self.plans: list[StepPlan] = []
        self.gap_us = 0.0
        """Before each step."""

    def launch(self, plan: StepPlan) -> SimulatedStep:
        assert plan.step == len(self.plans) + 1, "steps are numbered without gaps"
        self.plans.append(plan)
        owners = [row for setup in plan.setups for row, _ in setup.members]
        assert len(set(owners)) == len(owners), "a row is set up twice"
        for setup in plan.setups:
            wants_history = setup.sampling.penalised
            assert bool(setup.history) == wants_history, "history travels exactly where penalties need it"
            for row, sample in setup.members:
                self.rows[row] = Row(setup.sampling, sample, setup.prompt_tokens, list(setup.history))
        for row, index, block in plan.blocks:
            self._row(row).table[index] = block
        for block in plan.clears:
            self.slots[block] = [None] * BLOCK_TOKENS
        copied = [(destination, list(self.slots[source])) for source, destination in plan.copies]
        for destination, content in copied:
            self.slots[destination] = content
        written: set[tuple[int, int]] = set()
        for row in plan.decodes:
            state = self._row(row)
            assert state.position is not None and state.last_token is not None, f"row {row} never sampled"
            self._write(state, state.position, state.last_token, written)
            state.position += 1
        for chunk in plan.chunks:
            assert chunk.token_ids, "an empty chunk"
            for offset, token in enumerate(chunk.token_ids):
                self._write(self._row(chunk.row), chunk.start + offset, token, written)
            for row in chunk.sample_slots:
                self._row(row).position = chunk.start + len(chunk.token_ids)
        rows = sampling_rows(plan)
        assert len(set(rows)) == len(rows), "a row samples twice"
        token_ids = [self._sample(self._row(row)) for row in rows]
        logprobs = [
            logprob(token, self._row(row).sampling) for row, token in zip(rows, token_ids, strict=True)
        ]
        return SimulatedStep(
            StepTokens(token_ids, logprobs if any(logprobs) else None, self._prompt_logprobs(plan)),
            self.gap_us,
        )

    def _row(self, row: int) -> Row:
        state = self.rows[row]
        assert state is not None, f"row {row} was never set up"
        return state

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        slot = self.slots[row.table[position // BLOCK_TOKENS]][position % BLOCK_TOKENS]
        assert slot is not None, f"position {position} was never written"
        return slot

    def _write(self, row: Row, position: int, token: int, written: set[tuple[int, int]]) -> None:
        before = self._slot(row, position - 1)[1] if position else 0
        place = (row.table[position // BLOCK_TOKENS], position % BLOCK_TOKENS)
        assert place not in written, "two sequences write the same slot in one step"
        written.add(place)
        self.slots[place[0]][place[1]] = (token, extend(before, token))

    def _prefix(self, row: Row, length: int) -> int:
        """Digest of the first `length` tokens as found through the block table."""
        digest = 0
        for position in range(length):
            token, computed = self._slot(row, position)
            digest = extend(digest, token)
            assert digest == computed, f"position {position} holds what was computed after another prefix"
        return digest

    def _sample(self, row: Row) -> int:
        assert row.position is not None
        token = choose(
            self._prefix(row, row.position),
            row.position,
            row.sampling,
            row.sample,
            row.position - row.prompt_tokens,
            row.history,
        )
        row.last_token = token
        if row.sampling.penalised:
            row.history.append(token)
        return token

    def _prompt_logprobs(self, plan: StepPlan) -> dict[int, list[TokenLogprob]]:
        scores: dict[int, list[TokenLogprob]] = {}
        for chunk in plan.chunks:
            if chunk.prompt_logprobs is None:
                continue
            row = self._row(chunk.row)
            following = chunk.token_ids[1:] + ([] if chunk.next_token is None else [chunk.next_token])
            scores[chunk.row] = [
                score(self._prefix(row, chunk.start + offset + 1), token)
                for offset, token in enumerate(following)
            ]
        return scores


def extend(digest: int, token: int) -> int:
    return hash((digest, token))


def score(prefix: int, token: int) -> TokenLogprob:
    return TokenLogprob(token, -float(prefix % 1000), [])


def logprob(token: int, sampling: SamplingParams) -> TokenLogprob | None:
    return None if sampling.logprobs is None else TokenLogprob(token, -float(token), [])


def choose(
    prefix: int, position: int, sampling: SamplingParams, sample: int, generated: int, history: list[int]
) -> int:
    noise = (sampling.seed, sample) if sampling.temperature else ()
    counts = tuple(sorted(history)) if sampling.penalised else ()
    token = hash((prefix, position, noise, counts)) % VOCAB
    while generated < sampling.min_tokens and not sampling.ignore_eos and token in sampling.stop_token_ids:
        token = (token + 1) % VOCAB
    return token


@dataclass(frozen=True)
class Expected:
    """What one sample should get."""

    tokens: list[int]
    finish: str
    prompt_logprobs: list[TokenLogprob | None] | None


def alone(submit: Submit, sample: int, max_model_len: int) -> Expected:
    """The tokens, finish and prompt scores of one sample with nobody else in the house."""
    sampling, prompt = submit.sampling, submit.prompt_token_ids
    known = prompt + submit.output_token_ids
    digest, scores = 0, None
    if sampling.prompt_logprobs is not None and sample == submit.first_sample:
        scores = [None]
    for position, token in enumerate(known):
        if scores is not None and 0 < position < len(prompt):
            scores.append(score(digest, token))
        digest = extend(digest, token)
    tokens: list[int] = []
    finish = ""
    while not finish:
        length = len(known) + len(tokens)
        if length - len(prompt) >= sampling.max_tokens or length >= max_model_len:
            finish = "length"
            break
        token = choose(digest, length, sampling, sample, length - len(prompt), known + tokens)
        tokens.append(token)
        digest = extend(digest, token)
        if token in sampling.stop_token_ids and not sampling.ignore_eos:
            finish = "stop"
    return Expected(tokens, finish, scores)
