"""Renders a model's chat templates in a child process with time and memory limits."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.background import Background
from appliance.text.fair_queue import TenantQueue, TooMuchWorkError
from appliance.text.template_files import read_template_sources
from appliance.text.template_messages import (
    MAX_RENDERED_CHARACTERS,
    ChatTemplateError,
    Compile,
    Failed,
    FromWorker,
    Render,
    Rendered,
    TemplateBoundError,
    ToWorker,
)
from appliance.text.tokenizer_files import TokenizerFilesError
from engine.client import Channel, module_command, module_environment, socketpair

log = logging.getLogger(__name__)

MAX_RENDER_S = 5.0
"""Limit on the CPU time for rendering one conversation. The longest possible conversation (4,096 messages,
2 MiB) takes about 50 ms."""
MAX_COMPILE_S = 10.0
"""Limit on the CPU time for compiling the templates."""
MAX_TEMPLATE_MEMORY_BYTES = 256 << 20
"""Memory limit for the templates. The process itself needs another 30 MB."""
MAX_WAIT_S = 30.0
"""Maximum time, in seconds, that a conversation waits for its prompt before it is refused."""

_MAX_ANSWER_S = 60.0
"""Maximum time, in seconds, until the child process answers. It takes this long only if it is stopped or if
the machine is overloaded, because the limits on its CPU time are much lower."""
_CLOSED = "this model is no longer served"
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "TZ")


@dataclass(slots=True, eq=False)
class _Job:
    message: Render
    result: asyncio.Future[str]


class TemplateProcess:
    """One model's chat templates: `default`, and additional templates by name. Must be used on one event
    loop. A child process renders one conversation at a time, with tenants taking turns. `compile` or the
    first conversation starts the process; if it has been killed, the next conversation restarts it.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        max_render_s: float = MAX_RENDER_S,
        max_compile_s: float = MAX_COMPILE_S,
    ) -> None:
        """Store the templates. The process is started later.

        - `sources`: template texts by name. Empty for a model without templates.
        - `special_tokens`: the special tokens' texts, keyed by their names in templates, such as `bos_token`.
        """
        self._compile = Compile(dict(sources), dict(special_tokens), max_compile_s)
        self._max_render_s = max_render_s
        self.bounds_exceeded = 0
        """Number of conversations that were not rendered because a limit was exceeded."""
        self.problem = ""
        """The limit that was exceeded most recently."""
        self._queue: TenantQueue[_Job] = TenantQueue()
        self._child: _Child | None = None
        self._background = Background()
        self._is_rendering = False
        self._closed = False

    @classmethod
    def load(
        cls, folder: Path | str, special_tokens: Mapping[str, str], replacement: str | None = None
    ) -> TemplateProcess:
        """Read the templates from a model folder or, if given, from the `replacement` file. A folder may have
        no templates. Raises `TokenizerFilesError` if a file is invalid."""
        return cls(read_template_sources(Path(folder), replacement), special_tokens)

    async def compile(self) -> None:
        """Start the process, which compiles the templates. Raises `TokenizerFilesError` if a template does
        not compile."""
        if self._compile.sources and self._child is None:
            try:
                await self._start()
            except Exception as error:
                self.close()
                if isinstance(error, UnicodeEncodeError):
                    raise TokenizerFilesError(
                        "the chat template or a special token contains a lone surrogate",
                        "use valid Unicode text",
                    ) from error
                if isinstance(error, ChatTemplateError):
                    raise TokenizerFilesError(
                        str(error), "fix the chat template, or restore the model's original template"
                    ) from error
                raise TokenizerFilesError(
                    f"the chat template process could not be started ({type(error).__name__}: {error})",
                    "check the machine's free memory and its number of processes",
                ) from error

    async def render(
        self,
        tenant: str,
        messages: list[dict[str, str]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text. The template writes the beginning-of-text token itself, so encode the text
        without adding special tokens. `messages` and `variables` (additional template variables) are treated
        as data, never as template code.

        Raises `ChatTemplateError`, with the template's own message, if the template rejects the messages or
        fails while rendering them, or if there is no template. Raises `TemplateBoundError` if rendering
        exceeds a limit, and `TooMuchWorkError` if there is no result within `MAX_WAIT_S` seconds.
        """
        if not self._compile.sources:
            raise ChatTemplateError(
                "this model has no chat template, so it cannot be used with messages; use "
                "/v1/completions with a prompt"
            )
        data = json.dumps(variables or {}).encode()
        message = Render(messages, add_generation_prompt, data, self._max_render_s)
        job = _Job(message, asyncio.get_running_loop().create_future())
        self._queue.put(tenant, job)
        if not self._is_rendering:
            self._is_rendering = True
            self._background.run(self._render_all())
        try:
            return await asyncio.wait_for(job.result, MAX_WAIT_S)
        except TimeoutError:
            raise TooMuchWorkError(
                f"the model's chat template did not render the messages within {MAX_WAIT_S:g} s; send fewer "
                "requests at the same time"
            ) from None

    def close(self) -> None:
        """Kill the process and refuse waiting conversations."""
        self._closed = True
        if self._child is not None:
            self._child.kill()

    async def _render_all(self) -> None:
        try:
            while (job := self._queue.take()) is not None:
                if job.result.done():
                    continue
                try:
                    text = await self._render(job.message)
                except Exception as error:
                    if not isinstance(error, ChatTemplateError | TooMuchWorkError):
                        log.exception("failed to render a conversation")
                        error = ChatTemplateError("the messages could not be rendered")
                    if not job.result.done():
                        job.result.set_exception(error)
                else:
                    if not job.result.done():
                        job.result.set_result(text)
        finally:
            self._is_rendering = False

    async def _render(self, message: Render) -> str:
        try:
            child = self._child if self._child is not None and not self._child.closed else await self._start()
            return await child.ask(message)
        except UnicodeEncodeError:
            raise ChatTemplateError(
                "the messages contain a lone surrogate; send valid Unicode text"
            ) from None
        except TemplateBoundError as error:
            self.bounds_exceeded += 1
            self.problem = str(error)
            raise

    async def _start(self) -> _Child:
        if self._closed:
            raise ChatTemplateError(_CLOSED)
        began = time.monotonic()
        child = self._child = _Child(self._background)
        try:
            await child.ask(self._compile)
        except ChatTemplateError:
            child.kill()  # It cannot render. The next conversation starts a new process.
            raise
        log.info("compiled the chat templates in %.2f s", time.monotonic() - began)
        return child


class _Child:
    """The running child process, and the channel to it."""

    def __init__(self, background: Background) -> None:
        ours, theirs = socketpair()
        environment = module_environment()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *module_command("appliance.text.template_worker"),
                    *("--channel", str(theirs.fileno())),
                    *("--memory", str(MAX_TEMPLATE_MEMORY_BYTES)),
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: environment[name] for name in _ENVIRONMENT if name in environment},
            )
        self._background = background
        self._message: ToWorker | None = None
        """The latest message to the process."""
        self._reply: asyncio.Future[FromWorker] | None = None
        self._channel: Channel[FromWorker] = Channel(ours, FromWorker, 5 * MAX_RENDERED_CHARACTERS)
        self._channel.listen(self._take, self._disconnected)

    @property
    def closed(self) -> bool:
        """Whether the process has exited or has been killed."""
        return self._channel.closed

    async def ask(self, message: ToWorker) -> str:
        """Send a message and return the text in the reply. Raises `ChatTemplateError` if the reply is an
        error or the process ends. If there is no reply within `_MAX_ANSWER_S` seconds, the process is killed,
        and `TooMuchWorkError` is raised."""
        self._message = message
        self._reply = asyncio.get_running_loop().create_future()
        self._channel.send(message)
        try:
            reply = await asyncio.wait_for(self._reply, _MAX_ANSWER_S)
        except TimeoutError:
            self.kill()
            raise TooMuchWorkError(
                f"the chat template process did not respond within {_MAX_ANSWER_S:g} s; try again later"
            ) from None
        except BaseException:
            self.kill()
            raise
        finally:
            self._reply = None
        if isinstance(reply, Rendered):
            return reply.text
        raise TemplateBoundError(reply.message) if reply.is_bound else ChatTemplateError(reply.message)

    def kill(self) -> None:
        """Kill the process immediately and refuse the conversation in progress."""
        self._channel.close()
        self._take(Failed(_CLOSED))
        self._process.kill()
        self._background.run(_reap(self._process))

    def _take(self, reply: FromWorker) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(reply)

    def _disconnected(self) -> None:
        self._background.run(self._explain_exit())

    async def _explain_exit(self) -> None:
        """Wait for the process's exit, and answer the latest message with its cause."""
        compiles = isinstance(self._message, Compile)
        status = await asyncio.to_thread(self._process.wait)
        if status == -signal.SIGPROF and self._message is not None:
            limit = f"{self._message.max_cpu_s:g} s of CPU time"
            work = "compile" if compiles else "render these messages; send fewer or shorter messages"
            message = f"the model's chat template takes more than {limit} to {work}"
        else:
            remedy = "" if compiles else "; send shorter messages"
            message = f"the chat template process ended unexpectedly, probably at its memory limit{remedy}"
        self._take(Failed(message, is_bound=True))


async def _reap(process: subprocess.Popen[bytes]) -> None:
    await asyncio.to_thread(process.wait)
