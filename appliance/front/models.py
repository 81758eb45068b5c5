"""The models that a front serves, with their tokenizers and chat templates."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from appliance.front.errors import ApiError, model_not_allowed, model_not_found
from appliance.messages import Identity, ServedModel
from appliance.text.template_process import TemplateProcess
from appliance.text.tokenizer import Tokenizer
from appliance.text.tokenizer_files import TokenizerFilesError

log = logging.getLogger(__name__)

_CLOSE_AFTER_S = 60.0
_MAX_REASON_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose tokenizer is in memory."""

    served: ServedModel
    tokenizer: Tokenizer
    template: TemplateProcess

    @property
    def name(self) -> str:
        """Name by which applications refer to the model."""
        return self.served.name


async def load_model(served: ServedModel) -> LoadedModel:
    """Read the tokenizer and the chat template. This takes about two seconds for a vocabulary of 128 k
    tokens. Raises TokenizerFilesError. If a file has unexpected contents, any other error can be raised,
    including a Rust panic (BaseException)."""
    tokenizer, template = await asyncio.to_thread(_read_model, served.folder)
    await template.compile()
    return LoadedModel(served, tokenizer, template)


def _read_model(folder: str) -> tuple[Tokenizer, TemplateProcess]:
    tokenizer = Tokenizer.load(folder)
    return tokenizer, TemplateProcess.load(folder, tokenizer.special_tokens)


def _reason(error: BaseException) -> str:
    """Return the reason why a model cannot be loaded. Characters that UTF-8 cannot encode are escaped."""
    text = str(error)
    if not isinstance(error, TokenizerFilesError):
        text = f"the model's files cannot be read ({type(error).__name__}: {text})"
    return text[:_MAX_REASON_CHARACTERS].encode(errors="backslashreplace").decode()


def allows(identity: Identity, name: str) -> bool:
    """Return whether the identity may use the model."""
    return identity.models is None or name in identity.models


class Catalog:
    """The served models by name. A model that cannot be loaded stays listed: requests for it are refused with
    the cause, and the other models are served as usual."""

    def __init__(self) -> None:
        self._models: dict[str, LoadedModel] = {}
        self._broken: dict[str, str] = {}
        self.served: list[ServedModel] = []

    @property
    def problems(self) -> dict[str, str]:
        """The unusable models, each with the reason. Empty if all models are usable."""
        return self._broken

    @property
    def problem(self) -> str:
        """The problems of all models as one text, or an empty string if there are none."""
        return "; ".join(f"model {name}: {reason}" for name, reason in self._broken.items())

    @property
    def template_problems(self) -> dict[str, tuple[int, str]]:
        """For each model whose chat templates have exceeded a limit: how often this happened, and the limit
        that was exceeded last."""
        return {
            name: (model.template.bounds_exceeded, model.template.problem)
            for name, model in self._models.items()
            if model.template.bounds_exceeded
        }

    def serves(self, name: str) -> bool:
        """Return whether a model with this name can be used."""
        return name in self._models

    async def replace(self, served: list[ServedModel]) -> None:
        """Serve exactly these models. The previous models stay in use until the new models are loaded."""
        models: dict[str, LoadedModel] = {}
        broken: dict[str, str] = {}
        for model in served:
            known = self._models.get(model.name)
            try:
                if known is not None and (known.served.folder, known.served.version) == (
                    model.folder,
                    model.version,
                ):
                    models[model.name] = LoadedModel(model, known.tokenizer, known.template)
                else:
                    models[model.name] = await load_model(model)
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # `Exception` would not catch a panic in the Rust extension.
                broken[model.name] = reason = _reason(error)
                if self._broken.get(model.name) != reason:
                    foreseen = isinstance(error, TokenizerFilesError)
                    log.error("model %s: %s", model.name, reason, exc_info=None if foreseen else error)
        kept = {model.template for model in models.values()}
        for old in self._models.values():
            if old.template not in kept:
                # Requests that began with the old model may still need its templates.
                asyncio.get_running_loop().call_later(_CLOSE_AFTER_S, old.template.close)
        self._models, self._broken, self.served = models, broken, served

    def get(self, name: str, identity: Identity) -> LoadedModel:
        """Return the model with this name. Raises a 403 if the identity may not use it, a 404 if it is not
        served, or a 503 if its tokenizer could not be read."""
        if not allows(identity, name):
            # A caller who may not use a model must not learn whether it exists.
            raise model_not_allowed(name)
        model = self._models.get(name)
        if model is not None:
            return model
        if name in self._broken:
            raise ApiError(
                503,
                f"model {name!r} cannot be used: {self._broken[name]}",
                code="model_broken",
                retry_after_s=30.0,
            )
        raise model_not_found(name)
