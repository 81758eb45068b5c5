"""The model commands. The implementation, in `appliance.cli.models`, is loaded on demand; the descriptions
come from `appliance.actions`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from appliance.actions import action_named
from appliance.cli.action_commands import add_command, add_commands, keyword
from appliance.cli.options import Json, RunDir

commands = typer.Typer()
models = typer.Typer(help="Add, load, swap and remove models.", no_args_is_help=True)
commands.add_typer(models, name="models")

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="The model's name, as shown by `models list`.", show_default=False),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A setting of the model, as in [models.NAME] of a settings file, such as max_num_seqs=32 or "
        "sampling.temperature=0.6. May be repeated.",
        show_default=False,
    ),
]


@models.command("add", help=action_named("models.add").description)
def models_add(
    name_folder: Annotated[
        str,
        typer.Argument(
            metavar="[NAME=]FOLDER",
            help="Folder of a Hugging Face checkpoint. The model's name defaults to the folder's name.",
            show_default=False,
        ),
    ],
    settings: Settings = None,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    from appliance.cli.models import add_model

    add_model(run_dir, name_folder, settings or [], as_json=json)


@models.command("fit")
def models_fit(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER|NAME[@VERSION]",
            help="Folder of a Hugging Face checkpoint, or a model in the registry.",
            show_default=False,
        ),
    ],
    settings: Settings = None,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Predict how much memory a model needs before it is loaded, and how many sequences can run at the same
    time. The exit code is 1 if the model does not fit into the free memory. If a folder is given, the
    service need not be running."""
    from appliance.cli.fit import show_fit
    from appliance.cli.models import version_settings

    raise typer.Exit(show_fit(run_dir, target, version_settings(settings or []), as_json=json))


@models.command("pull")
def models_pull(
    repository: Annotated[
        str,
        typer.Argument(
            metavar="ORG/NAME[@REVISION]",
            help="Repository on the hub, optionally with a branch, tag or commit. Default: main.",
            show_default=False,
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Name of the model. Default: the last part of the repository's name.",
            show_default=False,
        ),
    ] = None,
    add: Annotated[
        bool, typer.Option("--add/--no-add", help="Add the model to the registry after the download.")
    ] = True,
    cache_dir: Annotated[
        str | None,
        typer.Option(
            "--cache-dir",
            metavar="DIR",
            help="Hub cache to download into. Default: $HF_HUB_CACHE, $HF_HOME/hub, or the hub folder in the "
            "service's state directory.",
            show_default=False,
        ),
    ] = None,
    run_dir: RunDir = None,
    json: Json = False,
) -> None:
    """Download a model from a Hugging Face hub and add it to the registry.

    Downloads the safetensors, tokenizer and configuration files and verifies their checksums. If the pull is
    interrupted, run the same command again to resume it. The hub is $HF_ENDPOINT (default:
    https://huggingface.co). The token for private and restricted repositories is $HF_TOKEN, or the token that
    'hf auth login' stored. The service itself needs no network access.
    """
    # huggingface_hub reads this variable when it is imported, so set it first.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from appliance.cli.pull import pull

    raise typer.Exit(pull(repository, name=name, add=add, cache_dir=cache_dir, run_dir=run_dir, as_json=json))


@models.command("list")
def models_list(run_dir: RunDir = None, json: Json = False) -> None:
    """List the models in the settings and in the registry, with their versions and states."""
    from appliance.cli.models import list_models

    list_models(run_dir, as_json=json)


@models.command("ps")
def models_ps(run_dir: RunDir = None, json: Json = False) -> None:
    """List the versions that are loaded or being loaded, with their memory use and the time when they will be
    unloaded."""
    from appliance.cli.models import list_loaded

    list_loaded(run_dir, as_json=json)


@models.command("show")
def models_show(name: Name, run_dir: RunDir = None, json: Json = False) -> None:
    """Show a model with its versions, their settings and the SHA-256 hashes of their files."""
    from appliance.cli.models import show_model

    show_model(run_dir, name, as_json=json)


add_commands(
    models,
    "models.load",
    "models.unload",
    "models.retry",
    "models.sleep",
    "models.wake",
    "models.pin",
    "models.unpin",
    "models.default",
    "models.rollback",
    "models.alias",
    "models.split",
    "models.shadow",
)


def _remove(asked: Any, given: Mapping[str, Any]) -> None:
    from appliance.cli.model_files import remove

    remove(given["run_dir"], asked, files=given["files"], yes=given["yes"], as_json=given["json"])


def _prune(asked: Any, given: Mapping[str, Any]) -> None:
    from appliance.cli.model_files import prune

    prune(given["run_dir"], asked, files=given["files"], yes=given["yes"], as_json=given["json"])


Files = Annotated[
    bool,
    typer.Option(
        "--files",
        help="Also delete the files that `models pull` downloaded. Files that another version uses are kept.",
    ),
]
add_command(models, "models.remove", keyword("files", Files, False), perform=_remove)
add_command(models, "models.prune", keyword("files", Files, False), perform=_prune)
