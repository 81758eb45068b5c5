"""Trains the demo model. Every step uses both text from the standard library and conversations about it."""

import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path

import numpy
import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo_model.conversations import ChatRows, ConversationMaker
from demo_model.corpus import CorpusDocument, load_documents, load_purposes, load_questions
from demo_model.llama import Llama, LlamaShape
from demo_model.tokenizer import BEGIN, END_OF_TEXT, special_token_id


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of a training run."""

    seed: int = 20240711
    steps: int = 3500
    warmup_steps: int = 150
    peak_rate: float = 2e-3
    weight_decay: float = 2.5  # large, because a run reads the text many times and could overfit
    clip_norm: float = 1.0
    text_rows: int = 16
    text_length: int = 2048
    chat_rows: int = 256
    chat_length: int = 192
    distinct_chat_rows: int = 400_000
    workers: int = 8
    report_every: int = 250


@dataclass(frozen=True)
class TrainingStream:
    """The training text. `tokens`, int16 [total], contains the shuffled documents, each followed by its end
    token.

    `starts`, int64, contains the positions where rows may begin: the starts of lines, each repeated according
    to its document's weight.
    """

    tokens: Tensor
    starts: Tensor


def train(corpus: Path, recipe: Recipe, device: torch.device) -> tuple[Llama, dict[str, object]]:
    """Return the trained model (float32) and a summary of the run. Prints progress."""
    started = time.monotonic()
    torch.manual_seed(recipe.seed)
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    chat = _chat_rows(corpus, recipe)
    stream = _text_stream(tokenizer, load_documents(corpus), recipe)
    heldout = heldout_windows(tokenizer, (corpus / "heldout.txt").read_text("utf-8"), length=1024).to(device)
    chat_tokens = torch.from_numpy(chat.tokens).to(device)
    chat_labels = torch.from_numpy(chat.labels).to(device)
    text_tokens, text_starts = stream.tokens.to(device), stream.starts.to(device)
    print(
        f"text {len(text_tokens):,} tokens, chat {len(chat_tokens):,} rows, "
        f"{int((chat_labels >= 0).sum()):,} answer tokens, prepared in {time.monotonic() - started:.0f} s",
        flush=True,
    )

    model = Llama(LlamaShape(vocabulary=tokenizer.get_vocab_size())).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters on {device}", flush=True)
    optimizer = _optimizer(model, recipe, fused=device.type == "cuda")
    loss_of: Callable[[Tensor, Tensor], Tensor] = model.loss
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        loss_of = torch.compile(model.loss, dynamic=False)
    random = torch.Generator(device=device)
    random.manual_seed(recipe.seed)
    batches = _chat_batches(chat_tokens, chat_labels, recipe.chat_rows, random)
    begin = special_token_id(tokenizer, BEGIN)

    training_started = time.monotonic()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = _rate(recipe, step)
        with _autocast(device):
            text_loss = loss_of(*_text_batch(text_tokens, text_starts, begin, recipe, random))
            text_loss.backward()
            chat_loss = loss_of(*next(batches))
            chat_loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 0:
            text_loss.item()
            training_started = time.monotonic()  # the first step includes compilation
        elif (step + 1) % recipe.report_every == 0 or step + 1 == recipe.steps:
            seconds = time.monotonic() - training_started
            tokens = step * (recipe.text_rows * recipe.text_length + recipe.chat_rows * recipe.chat_length)
            report = {
                "step": step + 1,
                "text_loss": round(text_loss.item(), 4),
                "chat_loss": round(chat_loss.item(), 5),
                "heldout_loss": round(heldout_loss(model, heldout, device), 4),
                "tokens_per_s": round(tokens / seconds),
                "seconds": round(seconds, 1),
            }
            print(json.dumps(report), flush=True)
    summary: dict[str, object] = {"parameters": parameters, "recipe": asdict(recipe), "last": report}
    return model, summary


def heldout_windows(tokenizer: Tokenizer, text: str, length: int) -> Tensor:
    """Return the text as int64 [windows, length + 1]. Each window is a BOS token followed by `length` tokens
    to predict."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    windows = len(ids) // length
    body = torch.tensor(ids[: windows * length], dtype=torch.int64).view(windows, length)
    begin = torch.full((windows, 1), special_token_id(tokenizer, BEGIN), dtype=torch.int64)
    return torch.cat((begin, body), dim=1)


@torch.no_grad()
def heldout_loss(model: Llama, windows: Tensor, device: torch.device) -> float:
    """Return the mean loss over windows from `heldout_windows`, in nats per token."""
    losses = []
    for batch in windows.split(16):
        with _autocast(device):
            losses.append(model.loss(batch[:, :-1], batch[:, 1:].contiguous()).float() * len(batch))
    return float(torch.stack(losses).sum() / len(windows))


def _rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate for a step: linear warm-up followed by cosine decay to zero."""
    if step < recipe.warmup_steps:
        return recipe.peak_rate * (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return recipe.peak_rate * 0.5 * (1 + math.cos(math.pi * progress))


def _optimizer(model: Llama, recipe: Recipe, fused: bool) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=recipe.peak_rate,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=fused,
    )


def _autocast(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def _text_batch(
    tokens: Tensor, starts: Tensor, begin: int, recipe: Recipe, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return a batch of inputs and labels. Each input row is a BOS token followed by text from the start of a
    random line. Labels are the next tokens."""
    picks = torch.randint(len(starts), (recipe.text_rows, 1), generator=random, device=tokens.device)
    labels = tokens[starts[picks] + torch.arange(recipe.text_length, device=tokens.device)].long()
    inputs = torch.cat((torch.full_like(labels[:, :1], begin), labels[:, :-1]), dim=1)
    return inputs, labels


def _chat_batches(
    tokens: Tensor, labels: Tensor, rows: int, random: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches indefinitely, reshuffling the rows for each pass."""
    while True:
        order = torch.randperm(len(tokens), generator=random, device=tokens.device)
        for picks in order.split(rows):
            if len(picks) == rows:
                yield tokens[picks].long(), labels[picks].long()


def _text_stream(tokenizer: Tokenizer, documents: list[CorpusDocument], recipe: Recipe) -> TrainingStream:
    generator = numpy.random.default_rng(recipe.seed)
    order = generator.permutation(len(documents))
    texts = [f"# {documents[index].title}\n{documents[index].text}" for index in order]
    end = special_token_id(tokenizer, END_OF_TEXT)
    # A token ends a line if its bytes end in a line feed, which byte-level BPE writes as "Ċ".
    entries = sorted(tokenizer.get_vocab().items(), key=itemgetter(1))
    closes_line = numpy.array([token.endswith("Ċ") or index == end for token, index in entries])
    pieces, starts, offset = [], [], 0
    for index, encoding in zip(
        order, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True
    ):
        ids = numpy.array([*encoding.ids, end], dtype=numpy.int16)
        line_starts = numpy.concatenate(([0], numpy.flatnonzero(closes_line[ids[:-1]]) + 1)) + offset
        starts.extend([line_starts] * documents[index].weight)
        pieces.append(ids)
        offset += len(ids)
    all_starts = numpy.concatenate(starts)
    all_starts = all_starts[all_starts <= offset - recipe.text_length]
    return TrainingStream(torch.from_numpy(numpy.concatenate(pieces)), torch.from_numpy(all_starts))


def _chat_rows(corpus: Path, recipe: Recipe) -> ChatRows:
    share = math.ceil(recipe.distinct_chat_rows / recipe.workers)
    jobs = [(corpus, recipe.seed + worker, share, recipe.chat_length) for worker in range(recipe.workers)]
    if recipe.workers == 1:
        parts = [_make_chat_rows(*jobs[0])]
    else:
        with ProcessPoolExecutor(recipe.workers) as pool:
            parts = list(pool.map(_make_chat_rows, *zip(*jobs, strict=True)))
    return ChatRows(
        numpy.concatenate([part.tokens for part in parts]), numpy.concatenate([part.labels for part in parts])
    )


def _make_chat_rows(corpus: Path, seed: int, count: int, length: int) -> ChatRows:
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    questions = load_questions(corpus / "questions.jsonl")
    return ConversationMaker(tokenizer, load_purposes(corpus), questions, seed).rows(count, length)
