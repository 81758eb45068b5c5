"""A runner that simulates the device with Python lists, and the output that is expected of it for each
request.

The runner builds its state only from plans. An entry of the simulated KV cache contains a token and a digest
of the prefix before it, because real keys and values depend on all earlier tokens. Each read uses the slot's
block table, and raises if the entry was computed for a different prefix. A simulated token therefore depends
on the same inputs as a real token. The simulation detects wrong block tables, blocks that are reused too
early, missing copies, and gaps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.messages import BLOCK_TOKENS, SamplingParams, Submit, TokenLogprob
from engine.plan import StepPlan, StepTokens
from tests.prompts import prompt_of

VOCAB = 40
STOP = 7


def sampling_slots(plan: StepPlan) -> list[int]:
    """Return the slots that sample in `plan`, in the order of `StepTokens`."""
    return [*plan.decodes, *(slot for chunk in plan.chunks for slot in chunk.sample_slots)]


@dataclass
class SlotState:
    """The simulated device state of a slot."""

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
    def __init__(self, max_num_seqs: int, blocks: int) -> None:
        self.slots: list[SlotState | None] = [None] * max_num_seqs
        self.cache: list[list[tuple[int, int] | None]] = [[None] * BLOCK_TOKENS for _ in range(blocks)]
        self.plans: list[StepPlan] = []
        self.gap_us = 0.0
        """Simulated idle time before each step."""

    def launch(self, plan: StepPlan) -> SimulatedStep:
        assert plan.step == len(self.plans) + 1, "step numbers must have no gaps"
        self.plans.append(plan)
        owners = [slot for setup in plan.setups for slot, _ in setup.members]
        assert len(set(owners)) == len(owners), "a slot is set up twice"
        for setup in plan.setups:
            wants_history = setup.sampling.penalised
            assert bool(setup.history) == wants_history, (
                "the history must be sent exactly if penalties need it"
            )
            for slot, sample in setup.members:
                self.slots[slot] = SlotState(setup.sampling, sample, setup.prompt_tokens, list(setup.history))
        for slot, index, block in plan.blocks:
            self._state(slot).table[index] = block
        for source, count, targets in plan.shares:
            for slot in targets:
                self._state(slot).table.update((i, self._state(source).table[i]) for i in range(count))
        for block in plan.clears:
            self.cache[block] = [None] * BLOCK_TOKENS
        copied = [(destination, list(self.cache[source])) for source, destination in plan.copies]
        for destination, content in copied:
            self.cache[destination] = content
        written: set[tuple[int, int]] = set()
        for slot in plan.decodes:
            state = self._state(slot)
            assert state.position is not None and state.last_token is not None, f"slot {slot} never sampled"
            self._write(state, state.position, state.last_token, written)
            state.position += 1
        for chunk in plan.chunks:
            assert chunk.token_ids, "an empty chunk"
            for offset, token in enumerate(chunk.token_ids):
                self._write(self._state(chunk.slot), chunk.start + offset, token, written)
            for slot in chunk.sample_slots:
                self._state(slot).position = chunk.start + len(chunk.token_ids)
        slots = sampling_slots(plan)
        assert len(set(slots)) == len(slots), "a slot samples twice"
        token_ids = [self._sample(self._state(slot)) for slot in slots]
        logprobs = [
            logprob(token, self._state(slot).sampling) for slot, token in zip(slots, token_ids, strict=True)
        ]
        return SimulatedStep(
            StepTokens(token_ids, logprobs if any(logprobs) else None, self._prompt_logprobs(plan)),
            self.gap_us,
        )

    def _state(self, slot: int) -> SlotState:
        state = self.slots[slot]
        assert state is not None, f"slot {slot} was never set up"
        return state

    def _entry(self, state: SlotState, position: int) -> tuple[int, int]:
        entry = self.cache[state.table[position // BLOCK_TOKENS]][position % BLOCK_TOKENS]
        assert entry is not None, f"position {position} was never written"
        return entry

    def _write(self, state: SlotState, position: int, token: int, written: set[tuple[int, int]]) -> None:
        before = self._entry(state, position - 1)[1] if position else 0
        place = (state.table[position // BLOCK_TOKENS], position % BLOCK_TOKENS)
        assert place not in written, "two sequences write the same KV slot in one step"
        written.add(place)
        self.cache[place[0]][place[1]] = (token, extend(before, token))

    def _prefix(self, state: SlotState, length: int) -> int:
        """Return the digest of the first `length` tokens, read through the block table."""
        digest = 0
        for position in range(length):
            token, computed = self._entry(state, position)
            digest = extend(digest, token)
            assert digest == computed, f"position {position} was computed for another prefix"
        return digest

    def _sample(self, state: SlotState) -> int:
        assert state.position is not None
        token = choose(
            self._prefix(state, state.position),
            state.position,
            state.sampling,
            state.sample,
            state.position - state.prompt_tokens,
            state.history,
        )
        state.last_token = token
        if state.sampling.penalised:
            state.history.append(token)
        return token

    def _prompt_logprobs(self, plan: StepPlan) -> dict[int, list[TokenLogprob]]:
        scores: dict[int, list[TokenLogprob]] = {}
        for chunk in plan.chunks:
            if chunk.prompt_logprobs is None:
                continue
            state = self._state(chunk.slot)
            following = chunk.token_ids[1:] + ([] if chunk.next_token is None else [chunk.next_token])
            scores[chunk.slot] = [
                score(self._prefix(state, chunk.start + offset + 1), token)
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
    """The expected output of one sample."""

    tokens: list[int]
    finish_reason: str
    prompt_logprobs: list[TokenLogprob | None] | None


def alone(submit: Submit, sample: int, max_model_len: int) -> Expected:
    """Return the tokens, finish reason and prompt logprobs that a sample must have. They do not depend on
    other requests."""
    sampling, prompt = submit.sampling, prompt_of(submit)
    known = prompt + submit.output_token_ids
    digest, scores = 0, None
    if sampling.prompt_logprobs is not None and sample == submit.first_sample:
        scores = [None]
    for position, token in enumerate(known):
        if scores is not None and 0 < position < len(prompt):
            scores.append(score(digest, token))
        digest = extend(digest, token)
    tokens: list[int] = []
    finish_reason = ""
    while not finish_reason:
        length = len(known) + len(tokens)
        if length - len(prompt) >= sampling.max_tokens or length >= max_model_len:
            finish_reason = "length"
            break
        token = choose(digest, length, sampling, sample, length - len(prompt), known + tokens)
        tokens.append(token)
        digest = extend(digest, token)
        if token in sampling.stop_token_ids and not sampling.ignore_eos:
            finish_reason = "stop"
    return Expected(tokens, finish_reason, scores)
