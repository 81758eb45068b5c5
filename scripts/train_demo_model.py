#!/usr/bin/env python
"""Builds the demo model that ships in appliance/demo_model, in three steps. A fourth command builds a
mixture-of-experts model from the demo model.

    python scripts/train_demo_model.py corpus          # on CPython 3.11; writes build/demo_corpus
    python scripts/train_demo_model.py train FOLDER    # on a GPU; needs torch, numpy, safetensors, tokenizers
    python scripts/train_demo_model.py score FOLDER    # anywhere; needs transformers
    python scripts/train_demo_model.py mixture FOLDER  # on a CPU; builds a mixture of experts

The corpus is taken from the standard library of the Python that runs the first step; the other steps run on
any Python. Runs are seeded, so they are repeatable on the same machine with the same software. Training takes
a minute and a half on one H200.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from demo_model.corpus import build_corpus, load_documents, load_purposes
from demo_model.tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "build" / "demo_corpus"
SEED = 20240711


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="corpus folder (default: %(default)s)")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("corpus", help="collect the text, names and questions, and train the tokenizer")
    training = commands.add_parser("train", help="train the model and export the checkpoint")
    training.add_argument("out", type=Path, help="output folder for the checkpoint")
    training.add_argument("--device", default="cuda")
    training.add_argument(
        "--set", action="append", default=[], metavar="NAME=NUMBER", help="override a field of the recipe"
    )
    training.add_argument(
        "--smoke", action="store_true", help="use tiny batches to try out the script on a CPU"
    )
    scoring = commands.add_parser(
        "score", help="measure the perplexity, and the accuracy on the frozen questions"
    )
    scoring.add_argument("folder", type=Path)
    scoring.add_argument("--device", default="cpu")
    scoring.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    mixing = commands.add_parser("mixture", help="build a mixture-of-experts model from the demo model")
    mixing.add_argument("out", type=Path, help="output folder for the checkpoint")
    mixing.add_argument("--steps", type=int, default=60, help="training steps (default: %(default)s)")
    arguments = parser.parse_args()

    if arguments.command == "corpus":
        _corpus(arguments.corpus)
    elif arguments.command == "train":
        _train(arguments.corpus, arguments.out, arguments.device, arguments.set, arguments.smoke)
    elif arguments.command == "mixture":
        from demo_model.mixture import make_mixture

        make_mixture(ROOT / "appliance" / "demo_model", arguments.out, arguments.steps, SEED)
    else:
        _score(arguments.corpus, arguments.folder, arguments.device, arguments.dtype)


def _corpus(folder: Path) -> None:
    build_corpus(folder, SEED)
    texts = [document.text for document in load_documents(folder)]
    texts += [f"{purpose.name} {purpose.answer}" for purpose in load_purposes(folder)] * 2
    tokenizer = train_tokenizer(texts)
    tokenizer.save(str(folder / "tokenizer.json"))
    print(f"the tokenizer has {tokenizer.get_vocab_size()} entries", flush=True)


def _train(corpus: Path, out: Path, device: str, changes: list[str], smoke: bool) -> None:
    import torch
    from demo_model.export import export_model
    from demo_model.training import Recipe, train

    recipe = Recipe(seed=SEED)
    if smoke:
        recipe = replace(
            recipe, steps=6, warmup_steps=2, text_rows=1, text_length=256, chat_rows=4, distinct_chat_rows=64,
            workers=1, report_every=3,
        )  # fmt: skip
    numbers = {name: float(value) for name, _, value in (change.partition("=") for change in changes)}
    recipe = replace(recipe, **{name: type(getattr(recipe, name))(value) for name, value in numbers.items()})
    model, summary = train(corpus, recipe, torch.device(device))
    export_model(model, corpus, out)
    summary["corpus"] = json.loads((corpus / "manifest.json").read_text("utf-8"))
    summary["torch"] = torch.__version__
    (out / "training.json").write_text(json.dumps(summary, indent=2) + "\n", "utf-8")
    print(f"exported to {out}", flush=True)


def _score(corpus: Path, folder: Path, device: str, dtype: str) -> None:
    import torch
    from demo_model.score import score

    has_corpus = (corpus / "purposes.jsonl").exists()
    score(folder, torch.device(device), getattr(torch, dtype), corpus if has_corpus else None)


if __name__ == "__main__":
    main()
