"""Reads the chat templates in a model folder. A separate process compiles the templates."""

from __future__ import annotations

from pathlib import Path

from appliance.text.tokenizer_files import TokenizerFilesError, read_json_object, read_regular_file

MAX_TEMPLATE_BYTES = 1 << 20
"""Maximum size of a template file, in bytes. The largest known template is 20 kB long."""


def read_template_sources(folder: Path, replacement: str | None = None) -> dict[str, str]:
    """Return chat template texts by name: `default`, and additional templates such as `tool_use`. The result
    is empty if there are none. Raises `TokenizerFilesError` if a file is invalid.

    If `replacement` is given, that file replaces all templates in the folder. Otherwise, templates are read
    from `chat_template.jinja` and `additional_chat_templates/` or, if these do not exist, from
    `chat_template` in `tokenizer_config.json` (a text, or a list of named texts).
    """
    if replacement is not None:
        try:
            return {"default": read_regular_file(Path(replacement), MAX_TEMPLATE_BYTES).decode()}
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise TokenizerFilesError(
                f"chat_template = {replacement!r} cannot be read as UTF-8 text ({reason})",
                "set it to a file with a Jinja template of at most 1 MiB",
            ) from error
    sources: dict[str, str] = {}
    files = {"default": folder / "chat_template.jinja"} | {
        path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    for name, path in files.items():
        try:
            sources[name] = read_regular_file(path, MAX_TEMPLATE_BYTES).decode()
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise TokenizerFilesError(f"{path} cannot be read as UTF-8 text ({error})") from error
    if sources:
        return sources
    path = folder / "tokenizer_config.json"
    value = read_json_object(path).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError) as error:
        raise TokenizerFilesError(
            f"{path}: chat_template must be a text or a list of objects with the fields name and template"
        ) from error
