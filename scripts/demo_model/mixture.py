"""Builds a small mixture-of-experts model from the demo model by "sparse upcycling" (Komatsuzaki et al.
2022).

Each expert starts as a copy of the dense MLP, with added noise to make the experts differ. The experts and
the router are then trained to reproduce the dense model's probabilities, on the model's questions and text
from the standard library.
"""

import json
import random
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from demo_model.corpus import HELD_OUT_FILES
from demo_model.tokenizer import ASSISTANT, BEGIN, END_OF_TURN, PAD, USER, special_token_id

EXPERTS, CHOSEN = 4, 2
NOISE = 0.6
"""Standard deviation of the noise, relative to that of each matrix."""
CHAT_ROWS, TEXT_ROWS, TEXT_LENGTH = 16, 2, 256
PEAK_RATE = 5e-4
BALANCE = 0.01
"""Weight of the load-balancing loss."""
_KEPT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "questions.jsonl",
    "heldout.txt",
)


def make_mixture(dense: Path, out: Path, steps: int, seed: int) -> None:
    """Build a mixture-of-experts model from the demo model in `dense` and write it to `out`. Prints
    progress."""
    teacher = LlamaForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    student = upcycle(teacher, NOISE, seed)
    train(student, teacher, dense, steps, seed)
    export(student, dense, out)


def upcycle(dense: LlamaForCausalLM, noise: float, seed: int) -> MixtralForCausalLM:
    """Return a mixture-of-experts model whose experts are copies of the dense model's MLPs with added
    noise."""
    torch.manual_seed(seed)
    fields = dense.config.to_dict()
    for name in ("architectures", "model_type", "mlp_bias", "attention_bias", "pretraining_tp"):
        fields.pop(name, None)
    model = MixtralForCausalLM(
        MixtralConfig(**fields | {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN})
    )
    # The parameters do not match exactly: the dense model has no router or experts, and the
    # mixture-of-experts model has no dense MLPs.
    model.load_state_dict(dense.state_dict(), strict=False)
    with torch.no_grad():
        for layer, source in zip(model.model.layers, dense.model.layers, strict=True):
            mlp, experts = source.mlp, layer.mlp.experts
            gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
            for target, whole in ((experts.gate_up_proj, gate_up), (experts.down_proj, mlp.down_proj.weight)):
                target.copy_(whole + noise * whole.std() * torch.randn_like(target))
            layer.mlp.gate.weight.normal_(std=layer.mlp.gate.weight.shape[1] ** -0.5)
    return model


def train(student: Any, teacher: Any, dense: Path, steps: int, seed: int) -> list[float]:
    """Train experts and routers. Returns the divergence from the teacher at each step, in nats per token."""
    tokenizer = Tokenizer.from_file(str(dense / "tokenizer.json"))
    rows, text, draw = _chat_rows(tokenizer, dense), _text(tokenizer), random.Random(seed)
    pad = special_token_id(tokenizer, PAD)
    student.requires_grad_(False)
    trained = [parameter for layer in student.model.layers for parameter in layer.mlp.parameters()]
    for parameter in trained:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    divergences = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1.0, (step + 1) / 10) * (1 - step / steps)
        starts = [draw.randrange(len(text) - TEXT_LENGTH) for _ in range(TEXT_ROWS)]
        texts = torch.stack([text[start : start + TEXT_LENGTH] for start in starts])
        chat = torch.nn.utils.rnn.pad_sequence(draw.sample(rows, CHAT_ROWS), True, pad)
        divergence = torch.zeros(())
        for batch, known in ((texts, torch.ones_like(texts)), (chat, (chat != pad).long())):
            loss, balance = _divergence(student, teacher, batch, known)
            ((loss + BALANCE * balance) / 2).backward()
            divergence += loss.detach() / 2
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        divergences.append(divergence.item())
        if (step + 1) % 5 == 0 or step + 1 == steps:
            print(json.dumps({"step": step + 1, "divergence": round(divergences[-1], 4)}), flush=True)
    return divergences


def export(student: Any, dense: Path, out: Path) -> None:
    """Write the mixture-of-experts model in bfloat16, along with the dense model's other files."""
    student.to(torch.bfloat16).save_pretrained(out)
    for name in _KEPT_FILES:
        shutil.copyfile(dense / name, out / name)


def _divergence(student: Any, teacher: Any, tokens: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return two losses: the mean divergence from the teacher (the dense model) over the tokens marked in
    `known` [rows, length], and the load-balancing loss."""
    with torch.no_grad():
        wanted = teacher(tokens, attention_mask=known).logits.log_softmax(-1)
    out = student(tokens, attention_mask=known, output_router_logits=True)
    found = out.logits.log_softmax(-1)
    each = functional.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
    return (each * known).sum() / known.sum(), out.aux_loss


def _chat_rows(tokenizer: Tokenizer, dense: Path) -> list[Tensor]:
    """Tokenize each question together with its answer and return the token ids."""
    lines = (dense / "questions.jsonl").read_text("utf-8").splitlines()
    texts = [
        f"{BEGIN}{USER}{entry['question']}{END_OF_TURN}{ASSISTANT}{entry['expected']}{END_OF_TURN}"
        for entry in map(json.loads, lines)
    ]
    return [torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]


def _text(tokenizer: Tokenizer) -> Tensor:
    """Tokenize the standard library's modules, except those held out, and return the token ids."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_text("utf-8") for file in files if file.name not in HELD_OUT_FILES]
    return torch.tensor([token for encoded in tokenizer.encode_batch(texts) for token in encoded.ids])
