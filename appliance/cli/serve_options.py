"""The options of `appliance serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance import protocol
from appliance.cli.options import TOKENS, count_option, whole_number
from engine import messages

Models = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]FOLDER",
        help="Serve the checkpoint in FOLDER under NAME, or under the folder's own name. May be "
        "repeated. Default: the shipped model, named demo.",
        show_default=False,
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Also serve TCP clients on this address; they need a bearer key."),
]
Fronts = Annotated[int | None, count_option("Number of front processes.", whole_number(1, 256))]
Device = Annotated[
    messages.Device | None, typer.Option(help="Device that runs the models.", show_default=False)
]
Dtype = Annotated[
    messages.DType | None,
    typer.Option(help="Data type of the models' weights and activations.", show_default=False),
]
Quantization = Annotated[
    messages.Quantization | None,
    typer.Option(
        help="Quantization of the layers' weights; fp8 converts them to FP8 while they are loaded.",
        show_default=False,
    ),
]
KvCacheDtype = Annotated[
    messages.Quantization | None,
    typer.Option(help="Data type of the KV cache; fp8 stores it in FP8.", show_default=False),
]
LoadFormat = Annotated[
    messages.LoadFormat | None,
    typer.Option(
        help="Source of the weights; dummy creates random weights to measure speed.", show_default=False
    ),
]
TensorParallelSize = Annotated[
    int | None, count_option("Number of ranks per replica; each rank uses one GPU.", whole_number(1, 64))
]
MaxModelLen = Annotated[
    int | None,
    count_option("Maximum length of a sequence (prompt and output) in tokens.", TOKENS),
]
MaxNumSeqs = Annotated[
    int | None,
    count_option(
        "Maximum number of sequences that run at the same time in a replica.", whole_number(1, 65_536)
    ),
]
MaxNumBatchedTokens = Annotated[
    int | None, count_option("Maximum number of tokens computed per step.", whole_number(1, 1_048_576))
]
KvBlocks = Annotated[
    int | None, count_option("Number of KV cache blocks of 64 tokens each.", whole_number(1, 1_000_000_000))
]
Replicas = Annotated[int | None, count_option("Number of replicas of each model.", whole_number(1, 1024))]
LogLevel = Annotated[
    protocol.LogLevel | None, typer.Option(help="Minimum level of log messages.", show_default=False)
]
