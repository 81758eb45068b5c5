"""The models that a front serves, with their tokenizers and chat templates."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.channel.identity import Identity
from appliance.channel.served_models import Route, ServedModel
from appliance.front.arms import choose_arm
from appliance.front.errors import ApiError, model_not_allowed, model_not_found
from appliance.text.template_process import TemplateProcess
from appliance.text.tokenizer import Tokenizer
from appliance.text.tokenizer_files import TokenizerFilesError

log = logging.getLogger(__name__)

_CLOSE_AFTER_S = 60.0
_CHECK_CLIENT_S = 1.0
"""Interval, in seconds, at which a request waiting for a model checks that its client is still connected."""
_RETRY_UNCHANGED_S = 60.0
"""Interval, in seconds, at which a model is loaded again that could not be loaded and whose files have not
changed."""
_TEXT_FILES = ("*.json", "*.jinja", "additional_chat_templates/*.jinja")
_MAX_REASON_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose tokenizer is in memory."""

    served: ServedModel
    tokenizer: Tokenizer
    template: TemplateProcess

    @property
    def unit(self) -> str:
        """The unit that answers requests: a model in the settings, or one version of a model
        (`ServedModel.name`)."""
        return self.served.name

    @property
    def vocab_size(self) -> int:
        """The model's vocabulary size or, if the model's config.json cannot be read, the tokenizer's."""
        return self.served.vocab_size or self.tokenizer.vocabulary_size


async def load_model(served: ServedModel) -> LoadedModel:
    """Read the tokenizer and chat template. This takes about two seconds for a vocabulary of 128 k tokens.
    Raises TokenizerFilesError if a file is missing or invalid. Unexpected contents can also cause any other
    exception."""
    tokenizer, template = await asyncio.to_thread(_read_model, served)
    await template.compile()
    return LoadedModel(served, tokenizer, template)


def _read_model(served: ServedModel) -> tuple[Tokenizer, TemplateProcess]:
    tokenizer = Tokenizer.load(served.folder)
    return tokenizer, TemplateProcess.load(served.folder, tokenizer.special_tokens, served.chat_template)


def _files(served: ServedModel) -> tuple[str, str | None, str]:
    """Return values that identify the current contents of the model's tokenizer and chat template files."""
    return served.folder, served.chat_template, served.version


def _file_state(served: ServedModel) -> set[object]:
    """Return values that change when one of the model's tokenizer or chat template files changes."""
    folder = Path(served.folder)
    state: set[object] = {_files(served)}
    with contextlib.suppress(OSError, ValueError):
        paths = {path for pattern in _TEXT_FILES for path in folder.glob(pattern)}
        if served.chat_template is not None:
            paths.add(Path(served.chat_template))
        for path in paths:
            if path.exists():
                status = path.stat()
                state.add((path, status.st_ino, status.st_size, status.st_ctime_ns))
    return state


def _reason(error: Exception) -> str:
    """Describe an error that prevented a model from being loaded. Characters that UTF-8 cannot encode are
    escaped."""
    text = str(error)
    if not isinstance(error, TokenizerFilesError):
        text = f"the model's files cannot be read ({type(error).__name__}: {text})"
    return text[:_MAX_REASON_CHARACTERS].encode(errors="backslashreplace").decode()


def allows(identity: Identity, name: str) -> bool:
    """Return whether the identity may use the model."""
    return identity.models is None or name in identity.models


class Catalog:
    """The loaded models, and the names that applications use for them. If a model cannot be loaded, its names
    remain, and requests for it are refused with an error that states the cause. Other models are served as
    usual."""

    def __init__(self, on_waiting: Callable[[], None] = lambda: None) -> None:
        """`on_waiting` is called when a request begins to wait for a model that is not loaded."""
        self._on_waiting = on_waiting
        self._models: dict[str, LoadedModel] = {}
        self.problems: dict[str, str] = {}
        """Models that cannot be used, each with the reason."""
        self._failed: dict[str, tuple[set[object], float]] = {}
        """For each of these models: the state of its files when it could not be loaded, and when to load it
        again if they do not change."""
        self._routes: dict[str, Route] = {}
        self._served: list[ServedModel] = []
        self._changed = asyncio.Event()
        """An event that is set when the names or the loaded models change and is then replaced by a new
        event."""
        self._preparing: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        """For each name whose model is not loaded: the number of requests waiting for it."""
        self.max_held, self.hold_timeout_s = 0, 0.0
        """Limits on the number of requests waiting for models to be loaded, and on their waiting time."""

    @property
    def problem(self) -> str:
        """The problems of all required models, joined into one text. Empty if there are none."""
        required = {model.name for model in self._served if model.required}
        return "; ".join(
            f"model {name}: {reason}" for name, reason in self.problems.items() if name in required
        )

    @property
    def template_problems(self) -> dict[str, tuple[int, str]]:
        """For each model with chat template problems: how often its templates have exceeded a limit, and
        which limit was exceeded last."""
        return {
            name: (model.template.bounds_exceeded, model.template.problem)
            for name, model in self._models.items()
            if model.template.bounds_exceeded
        }

    @property
    def preparing(self) -> tuple[str, ...]:
        """The models and versions for which requests are being prepared."""
        return tuple(self._preparing)

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names with requests that are waiting for a model to be loaded or woken on demand."""
        return tuple(name for name in self._held if self._waits(name) and self._is_on_demand(name))

    @property
    def listed(self) -> list[Route]:
        """The names shown in model lists: those whose models can answer requests."""
        return [route for route in self._routes.values() if route.listed and route.unit not in self.problems]

    def serves(self, name: str) -> bool:
        """Return whether a model with this name can answer requests, either now or after being loaded on
        demand."""
        return self.unit_of(name) in self._models or self._is_on_demand(name)

    def unit_of(self, name: str) -> str:
        """Return the model or version that answers requests for the name, or an empty string if none does."""
        route = self._routes.get(name)
        return "" if route is None else route.unit

    # ── changes made by the core ──

    def route(self, routes: list[Route]) -> None:
        """Replace the names that applications can use for models. The change takes effect immediately."""
        self._routes = {route.name: route for route in routes}
        self._wake_waiting()

    async def replace(self, served: list[ServedModel]) -> None:
        """Load the models in `served` and drop all others. The previous models stay in use until the new ones
        are loaded. A model that could not be loaded is loaded again when one of its files has changed, or
        after `_RETRY_UNCHANGED_S` seconds, because the cause may not have been a file."""
        models: dict[str, LoadedModel] = {}
        broken: dict[str, str] = {}
        failed: dict[str, tuple[set[object], float]] = {}
        loop = asyncio.get_running_loop()
        for model in served:
            known = self._models.get(model.name)
            if known is not None and _files(known.served) == _files(model):
                models[model.name] = LoadedModel(model, known.tokenizer, known.template)
                continue
            state = await asyncio.to_thread(_file_state, model)
            former, retry_at = self._failed.get(model.name, (None, 0.0))
            if state == former and loop.time() < retry_at:
                broken[model.name], failed[model.name] = self.problems[model.name], (former, retry_at)
                continue
            try:
                models[model.name] = await load_model(model)
            except Exception as error:
                failed[model.name] = state, loop.time() + _RETRY_UNCHANGED_S
                broken[model.name] = reason = _reason(error)
                if self.problems.get(model.name) != reason:
                    foreseen = isinstance(error, TokenizerFilesError)
                    log.error("model %s: %s", model.name, reason, exc_info=None if foreseen else error)
        kept = {model.template for model in models.values()}
        for old in self._models.values():
            if old.template not in kept:
                # Requests that started with the previous model may still need its templates.
                loop.call_later(_CLOSE_AFTER_S, old.template.close)
        self._models, self.problems, self._failed, self._served = models, broken, failed, served
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        """Let the requests that are waiting for a model look for it again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # ── use by requests ──

    def prepare(self, model: LoadedModel) -> Callable[[], None]:
        """Record that a request is being prepared for the model and return a function to call when the
        preparation has ended. Until then, the core keeps the model loaded. Calling the function again has no
        effect."""
        unit, counts = model.unit, self._preparing
        counts[unit] += 1
        left = [unit]

        def end() -> None:
            if left:
                left.clear()
                counts[unit] -= 1
                if not counts[unit]:
                    del counts[unit]

        return end

    async def find(
        self, name: str, identity: Identity, disconnected: Callable[[], bool], caller: str = ""
    ) -> LoadedModel:
        """Return the model for this name, as `get` does, but first wait until it is loaded. The wait ends
        early if `disconnected` returns true, which means that the client has disconnected. Raises a 503 if
        the wait takes too long or too many requests are waiting."""
        if allows(identity, name) and self._waits(name):
            if (held := self._held.total()) >= self.max_held:
                raise _still_loading(name, f"{held} requests are already waiting for models")
            with self._holding(name):
                await self._until_routed(name, disconnected)
        return self.get(name, identity, caller)

    @contextlib.contextmanager
    def _holding(self, name: str) -> Iterator[None]:
        """Count a request as waiting for the name while the `with` block runs."""
        self._held[name] += 1
        try:
            if self._held[name] == 1:
                self._on_waiting()
            yield
        finally:
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name]

    async def _until_routed(self, name: str, disconnected: Callable[[], bool]) -> None:
        """Wait until a model is available for the name, loading it has failed, or `disconnected` returns
        true. Raises a 503 if the wait takes too long."""
        deadline = asyncio.get_running_loop().time() + self.hold_timeout_s
        while self._waits(name) and not disconnected():
            if (left_s := deadline - asyncio.get_running_loop().time()) <= 0:
                raise _still_loading(name, f"the request has waited for {self.hold_timeout_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left_s, _CHECK_CLIENT_S))

    def get(self, name: str, identity: Identity, caller: str = "") -> LoadedModel:
        """Return the model for this name. If the name's requests are split, `caller` determines the arm.
        Raises a 403 if the identity may not use the model, a 404 if the model is not served, or a 503 if the
        model is not loaded yet or its tokenizer could not be read.
        """
        if not allows(identity, name):
            # A caller without permission to use a model must not learn whether it exists.
            raise model_not_allowed(name)
        if self._waits(name):
            raise _still_loading(name, "its files are being read")
        if (route := self.route_of(name)) is not None and route.problem:
            raise ApiError(
                503,
                f"model {name!r} could not be loaded: {route.problem}",
                code="model_failed",
                retry_after_s=30.0,
            )
        unit = self._unit_for(name, caller)
        model = self._models.get(unit)
        if model is not None:
            return model
        if unit in self.problems:
            raise ApiError(
                503,
                f"model {name!r} cannot be used: {self.problems[unit]}",
                code="model_broken",
                retry_after_s=30.0,
            )
        raise model_not_found(name)

    def _unit_for(self, name: str, caller: str) -> str:
        """Return the model or version that answers the caller's requests for the name, or an empty string if
        none does."""
        route = self.route_of(name)
        arms = () if route is None else [arm for arm in route.arms if arm.unit in self._models]
        return choose_arm(name, arms, caller).unit if arms else self.unit_of(name)

    def loaded(self, unit: str) -> LoadedModel | None:
        """Return the loaded model with this unit name (`ServedModel.name`), or None if it is not loaded."""
        return self._models.get(unit)

    def route_of(self, name: str) -> Route | None:
        """Return the route for a name, or None if there is none."""
        return self._routes.get(name)

    def fallback_of(self, name: str, identity: Identity) -> str:
        """Return the name of the fallback model that may answer the caller's requests in place of this model,
        or an empty string."""
        route = self.route_of(name)
        may = route is not None and identity.may_fall_back and allows(identity, name)
        return route.fallback if may and route is not None and allows(identity, route.fallback) else ""

    def describe(self, name: str, identity: Identity, caller: str) -> Route:
        """Return a name's description for `GET /v1/models/NAME`, without causing a model to be loaded. Raises
        the same errors as `get`."""
        route = self.route_of(name)
        if allows(identity, name) and route is not None and route.on_demand and not route.problem:
            return route
        return own_route(self.get(name, identity, caller).served, name)

    def _waits(self, name: str) -> bool:
        """Return whether requests for the name must wait: no model is loaded for it, or this front is still
        reading the model's files."""
        route = self.route_of(name)
        if route is None or route.problem:
            return False
        units = [arm.unit for arm in route.arms] or [route.unit]
        return not any(unit in self._models or unit in self.problems for unit in units)

    def _is_on_demand(self, name: str) -> bool:
        route = self.route_of(name)
        return route is not None and route.on_demand


def own_route(model: ServedModel, name: str) -> Route:
    """Return a route from the model's own name to the model."""
    return Route(name=name, unit=model.name, created=model.created, max_model_len=model.max_model_len)


def _still_loading(name: str, reason: str) -> ApiError:
    return ApiError(
        503, f"model {name!r} is still being loaded: {reason}", code="model_loading", retry_after_s=5.0
    )
