"""The models that a front serves, with what it takes to turn text into tokens and back."""

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
        """What apps call it."""
        return self.served.name

    def close(self) -> None:
        """End its process."""
        self.template.close()


async def load_model(served: ServedModel) -> LoadedModel:
    """Read tokenizer and chat template: about two seconds for 128 k tokens. Raises TokenizerFilesError, and
    for a file that this code did not foresee anything else, Rust panics (BaseException) included."""
    tokenizer, template = await asyncio.to_thread(_read_model, served.folder)
    await template.compile()
    return LoadedModel(served, tokenizer, template)


def _read_model(folder: str) -> tuple[Tokenizer, TemplateProcess]:
    tokenizer = Tokenizer.load(folder)
    return tokenizer, TemplateProcess.load(folder, tokenizer.special_tokens)


def _reason(error: BaseException) -> str:
    """Why a model cannot be loaded, as text that every channel can carry."""
    text = str(error)
    if not isinstance(error, TokenizerFilesError):
        text = f"its files cannot be read ({type(error).__name__}: {text})"
    return text[:_MAX_REASON_CHARACTERS].encode(errors="backslashreplace").decode()


def allows(identity: Identity, name: str) -> bool:
    """Whether the identity may name this model."""
    return identity.models is None or name in identity.models


class Catalog:
    """The served models by name. A model that cannot be loaded stays listed, and requests for it are refused
    with the cause; the other models are served."""

    def __init__(self) -> None:
        self._models: dict[str, LoadedModel] = {}
        self._broken: dict[str, str] = {}
        self.served: list[ServedModel] = []

    @property
    def problems(self) -> dict[str, str]:
        """Why a model cannot be used, by its name; empty when all can."""
        return self._broken

    @property
    def problem(self) -> str:
        """Why a model cannot be used, in words; empty when all can."""
        return "; ".join(f"model {name}: {reason}" for name, reason in self._broken.items())

    @property
    def template_problems(self) -> dict[str, tuple[int, str]]:
        """Of models whose chat templates exceeded their bounds: how often, and what the latest exceeded."""
        return {
            name: (model.template.bounds_exceeded, model.template.problem)
            for name, model in self._models.items()
            if model.template.bounds_exceeded
        }

    def serves(self, name: str) -> bool:
        """Whether it has a model of this name."""
        return name in self._models

    async def replace(self, served: list[ServedModel]) -> None:
        """Serve exactly these; the former ones answer until the new ones are loaded."""
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
            except BaseException as error:  # a panic of the Rust extension is no Exception
                broken[model.name] = reason = _reason(error)
                if self._broken.get(model.name) != reason:
                    foreseen = isinstance(error, TokenizerFilesError)
                    log.error("model %s: %s", model.name, reason, exc_info=None if foreseen else error)
        kept = {model.template for model in models.values()}
        for old in self._models.values():
            if old.template not in kept:
                # Requests that found the old model may still be about to render.
                asyncio.get_running_loop().call_later(_CLOSE_AFTER_S, old.close)
        self._models, self._broken, self.served = models, broken, served

    def get(self, name: str, identity: Identity) -> LoadedModel:
        """The model of this name, for one who may ask for it. Raises a 403, a 404, or a 503 where its
        tokenizer could not be read."""
        if not allows(identity, name):
            # Whether there is such a model is not for this key to know.
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
