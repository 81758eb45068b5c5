"""Renders chat messages into a prompt with the model's own Jinja2 template, in a sandbox. The sandbox limits
neither time nor memory, so fronts render templates in a child process (`appliance.text.template_process`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from appliance.text.template_messages import (
    MAX_RENDERED_CHARACTERS,
    ChatTemplateError,
    TemplateBoundError,
)

Message = Mapping[str, Any]

_MAX_ERROR_CHARACTERS = 500


class ChatTemplate:
    """A model's compiled chat templates: `default`, and additional named templates such as `tool_use`."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        max_characters: int = MAX_RENDERED_CHARACTERS,
    ) -> None:
        """Compile the templates.

        - `sources`: template texts by name.
        - `special_tokens`: the special tokens' texts, keyed by their names in templates, such as `bos_token`.

        Raises `ChatTemplateError` if a template does not compile.
        """
        self._special_tokens = dict(special_tokens)
        self._max_characters = max_characters
        environment = _environment(max_characters)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except Exception as error:
                # A hostile template can make Jinja2 or Python's compiler raise any exception.
                reason = _for_client(f"{type(error).__name__}: {error}")
                raise ChatTemplateError(f"chat template {name!r} is not valid Jinja2 ({reason})") from error

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text. The template writes the beginning-of-text token itself, so encode the text
        without adding special tokens. `messages` and `variables` (additional template variables) are JSON
        values. They are treated as data, never as template code.

        Raises `ChatTemplateError` if the model has no default template, or if the template rejects the
        messages, fails while rendering them, or exceeds the limits.
        """
        template = self._templates.get("default")
        if template is None:
            raise ChatTemplateError(
                f"this model has no default chat template, only {sorted(self._templates)}; use "
                "/v1/completions with a prompt"
            )
        everything = {
            **self._special_tokens,
            "documents": None,
            **(variables or {}),
            "messages": messages,
            "tools": None,
            "add_generation_prompt": add_generation_prompt,
        }
        left = self._max_characters
        pieces: list[str] = []
        try:
            for piece in template.generate(everything):
                pieces.append(piece)
                left -= len(piece)
                if left < 0:
                    raise TemplateBoundError(
                        f"the rendered messages exceed the limit of {self._max_characters} characters"
                    )
        except (ChatTemplateError, MemoryError):
            raise
        except jinja2.TemplateError as error:
            raise ChatTemplateError(_for_client(str(error) or type(error).__name__)) from error
        except Exception as error:
            # If rendering fails, refuse only this request. The process must keep running.
            raise ChatTemplateError(
                _for_client(
                    f"the chat template cannot render these messages: {type(error).__name__}: {error}"
                )
            ) from error
        return "".join(pieces)


def _for_client(message: str) -> str:
    """Shorten an error message, because it may quote text of any length, and replace characters that cannot
    be encoded."""
    return message[:_MAX_ERROR_CHARACTERS].encode("utf-8", "replace").decode()


def _environment(max_characters: int) -> ImmutableSandboxedEnvironment:
    """Return a Jinja2 environment like the one that transformers uses for chat templates, with additional
    limits."""
    environment = _BoundedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.max_characters = max_characters
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _PlainNamespace
    return environment


class _BoundedSandbox(ImmutableSandboxedEnvironment):
    """A sandbox that also limits operators whose results can be much larger than their operands. `render`
    limits the output size."""

    intercepted_binops = frozenset(["*", "**"])
    max_characters = MAX_RENDERED_CHARACTERS

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if max(abs(left), abs(right)) > 1000:
                raise jinja2.TemplateError(
                    f"the chat template computes {left} ** {right}, and the result is too large"
                )
        else:
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and len(sequence) * times > self.max_characters:
                    raise jinja2.TemplateError(
                        f"the chat template creates a text of more than {self.max_characters} characters"
                    )
        return super().call_binop(context, operator, left, right)


class _PlainNamespace(jinja2.utils.Namespace):
    """The `namespace(…)` function for templates, without access to attributes that have a special meaning in
    Python."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in dict(*args, **kwargs):
            _refuse_internal(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_internal(name)
        super().__setitem__(name, value)


def _refuse_internal(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.TemplateError(
            f"the chat template sets the {name!r} attribute of a namespace; use a name without a "
            "leading underscore"
        )


class _GenerationTag(jinja2.ext.Extension):
    """Renders the body of the Jinja2 tag `{% generation %}…{% endgeneration %}`, which marks the assistant's
    text for training."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode a value as JSON without the HTML escapes of Jinja2's `tojson` filter, because models were not
    trained on escaped text."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
