"""Tests that chat templates are rendered in a separate process with limits on time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psutil
import pytest

from appliance.text.fair_queue import TooMuchWorkError
from appliance.text.template_files import MAX_TEMPLATE_BYTES
from appliance.text.template_messages import ChatTemplateError, Compile, TemplateBoundError
from appliance.text.template_process import TemplateProcess
from appliance.text.tokenizer_files import TokenizerFilesError
from tests.text.conftest import TEMPLATE

Result = TypeVar("Result")

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
USER = [{"role": "user", "content": "Hi"}]
ENDLESS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
HUNGRY = "{% set ns = namespace(text='x' * 1000) %}" + (
    "{% for i in range(30) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}{{ ns.text | length }}"
)


def with_process(
    source: str, work: Callable[[TemplateProcess], Awaitable[Result]], max_render_s: float = 60.0
) -> Result:
    async def main() -> Result:
        sources = {"default": source} if source else {}
        process = TemplateProcess(sources, NAMES, max_render_s, max_compile_s=60.0)
        try:
            return await work(process)
        finally:
            process.close()

    return asyncio.run(main())


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if is_worker(child)]


def is_worker(process: psutil.Process) -> bool:
    """Return whether this process renders templates. The process may end while its command is being read."""
    try:
        return (
            process.status() != psutil.STATUS_ZOMBIE and "appliance.text.template_worker" in process.cmdline()
        )
    except psutil.Error:
        return False


def have_ended(processes: list[psutil.Process]) -> bool:
    """Wait for the processes to end, and return whether all of them did. A killed process stays listed until
    the kernel has freed its memory."""
    return not psutil.wait_procs(processes, timeout=600)[1]


def memory_of(process: psutil.Process) -> int:
    """Return the memory of a process, or 0 if it has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def test_a_conversation_is_rendered_with_the_models_template() -> None:
    assert (
        with_process(TEMPLATE, lambda process: process.render("a", USER)) == "<s><|user|>Hi</s><|assistant|>"
    )


def test_variables_of_any_size_reach_the_template_and_cannot_replace_the_messages() -> None:
    source = "{{ big }} {{ enable_thinking }} {{ messages[0].content }} {{ tools }}"
    variables = {"big": 1 << 80, "enable_thinking": False, "messages": [{"content": "forged"}]}
    text = with_process(source, lambda process: process.render("a", USER, variables=variables))
    assert text == f"{1 << 80} False Hi None"


def test_the_templates_error_message_reaches_the_client() -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ChatTemplateError, match=r"^roles must alternate$"):
        with_process(source, lambda process: process.render("a", USER))
    with pytest.raises(ChatTemplateError, match="/v1/completions"):
        with_process("", lambda process: process.render("a", USER))


@pytest.mark.parametrize(
    ("source", "max_render_s", "message"),
    [
        ("{{ (['xy'] * 4000000) | unique | list | length }}" * 100, 0.3, r"more than 0\.3 s of CPU time"),
        (HUNGRY, 60.0, "memory limit"),
        ("{{ 'x' | center(10000000000) }}", 60.0, "memory limit"),
        (
            "{% for i in range(9999) %}{{ 'x' * 100000 }}{% endfor %}",
            60.0,
            "exceed the limit of [0-9]+ characters",
        ),
    ],
)
def test_a_template_that_exceeds_a_bound_is_killed_and_the_next_conversation_is_rendered(
    source: str, max_render_s: float, message: str
) -> None:
    hostile = "{% if messages[0].content == 'Hi' %}" + source + "{% else %}fine{% endif %}"

    async def both(process: TemplateProcess) -> str:
        await process.compile()
        before = workers()[0]
        with pytest.raises(TemplateBoundError, match=message):
            await process.render("a", USER)
        while memory_of(before) >= 400e6:
            await asyncio.sleep(0.01)
        assert process.bounds_exceeded == 1 and process.problem
        process._max_render_s = 60.0
        return await process.render("a", [{"role": "user", "content": "?"}])

    assert with_process(hostile, both, max_render_s) == "fine"


def test_a_pause_of_the_process_does_not_count_as_time_of_the_template() -> None:
    async def paused(process: TemplateProcess) -> str:
        await process.compile()
        (worker,) = workers()
        worker.suspend()
        rendering = asyncio.create_task(process.render("a", USER))
        await asyncio.sleep(1.5)  # longer than the time limit
        worker.resume()
        return await rendering

    assert with_process(TEMPLATE, paused, max_render_s=1.0).startswith("<s>")


def test_a_stopped_process_is_no_fault_of_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stopped(process: TemplateProcess) -> str:
        await process.compile()
        (worker,) = workers()
        worker.suspend()
        with monkeypatch.context() as short:
            short.setattr("appliance.text.template_process._MAX_ANSWER_S", 0.3)
            with pytest.raises(TooMuchWorkError, match=r"did not respond within 0\.3 s"):
                await process.render("a", USER)
        assert not process.bounds_exceeded
        return await process.render("a", USER)

    assert with_process(TEMPLATE, stopped).startswith("<s>")


def test_closing_refuses_all_conversations_at_once() -> None:
    async def closed(process: TemplateProcess) -> None:
        await process.compile()
        workers()[0].suspend()
        renderings = [asyncio.create_task(process.render("a", USER)) for _ in range(2)]
        await asyncio.sleep(0.1)
        process.close()
        for rendering in renderings:
            with pytest.raises(ChatTemplateError, match="no longer served"):
                await asyncio.wait_for(rendering, 10)

    with_process(TEMPLATE, closed)


def test_a_template_that_takes_too_long_to_compile_is_refused_at_load() -> None:
    longest = "{{a}}" * (MAX_TEMPLATE_BYTES // 5)  # Compiling this template takes more than ten seconds.

    async def compile_template() -> None:
        process = TemplateProcess({"default": longest}, NAMES, max_compile_s=0.3)
        with pytest.raises(TokenizerFilesError, match=r"more than 0\.3 s of CPU time to compile; fix"):
            await process.compile()
        assert have_ended(workers())

    asyncio.run(compile_template())


@pytest.mark.parametrize(
    "source",
    ["{% if %}", "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}"],
)
def test_a_template_that_does_not_compile_or_not_within_the_bounds_is_refused_at_load(source: str) -> None:
    with pytest.raises(TokenizerFilesError, match="restore the model's original"):
        with_process(source, lambda process: process.compile())
    assert have_ended(workers())


def test_a_template_with_a_lone_surrogate_is_refused_at_load() -> None:
    with pytest.raises(TokenizerFilesError, match="lone surrogate"):
        with_process("\ud800", lambda process: process.compile())
    assert have_ended(workers())


def test_the_process_is_restarted_when_it_dies_and_ends_with_its_owner() -> None:
    async def killed(process: TemplateProcess) -> str:
        await process.compile()
        workers()[0].kill()
        while process._child is not None and not process._child.closed:
            await asyncio.sleep(0.01)
        return await process.render("a", USER)

    assert with_process(TEMPLATE, killed).startswith("<s>")
    assert have_ended(workers())


def test_every_conversation_gets_the_reason_why_a_restarted_process_could_not_compile() -> None:
    async def killed(process: TemplateProcess) -> None:
        await process.compile()
        workers()[0].kill()
        while process._child is not None and not process._child.closed:
            await asyncio.sleep(0.01)
        process._compile = Compile({"default": "{% if %}"}, NAMES, 60.0)
        for _ in range(2):
            with pytest.raises(ChatTemplateError, match="not valid Jinja2"):
                await process.render("a", USER)
        assert not process.bounds_exceeded

    with_process(TEMPLATE, killed)
    assert have_ended(workers())


def test_the_process_has_no_descriptors_except_its_channel_and_null_and_cannot_write_files() -> None:
    async def descriptors(process: TemplateProcess) -> int:
        await process.compile()
        limits = [
            workers()[0].rlimit(limit)[1]
            for limit in (psutil.RLIMIT_FSIZE, psutil.RLIMIT_NPROC, psutil.RLIMIT_CORE)
        ]
        assert limits == [0, 0, 0] and workers()[0].rlimit(psutil.RLIMIT_AS)[1] < 512 << 20
        return workers()[0].num_fds()

    assert with_process(TEMPLATE, descriptors) == 4


def test_tenants_take_turns() -> None:
    order: list[str] = []

    async def one(process: TemplateProcess, tenant: str) -> None:
        await process.render(tenant, USER)
        order.append(tenant)

    async def all_of_them(process: TemplateProcess) -> None:
        await process.compile()
        await asyncio.gather(*(one(process, tenant) for tenant in "aaaaaaab"))

    with_process(TEMPLATE, all_of_them)
    assert order.index("b") <= 2


def test_a_conversation_waits_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.text.template_process.MAX_WAIT_S", 0.3)
    with pytest.raises(TooMuchWorkError, match=r"within 0\.3 s"):
        with_process(ENDLESS, lambda process: process.render("a", USER))
