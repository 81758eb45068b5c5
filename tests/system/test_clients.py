"""Tests of common clients against the real service. Some clients are run. For the others, the tests replay
the request that the client sends by default."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import langchain_openai
import openai
import psutil
import pytest
from pydantic import SecretStr

from appliance.client import AdminClient
from appliance.settings import demo_model_folder
from tests.system.service import CALL_TIMEOUT_S, Service, service

pytestmark = pytest.mark.system

HI: list[Any] = [{"role": "user", "content": "What does textwrap.dedent do?"}]
PARTS: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What does textwrap.dedent do?"}]}]
TALK: list[Any] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None},
    *HI,
]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USAGE = {"include_usage": True}
STAINLESS = {
    "Accept": "application/json",
    "User-Agent": "OpenAI/JS 5.12.2",
    "X-Stainless-Lang": "js",
    "X-Stainless-Retry-Count": "0",
    "X-Stainless-Timeout": "600",
}


@pytest.fixture(scope="module")
def key(demo: Service) -> str:
    return demo.key("clients")


@pytest.fixture(scope="module")
def base(demo: Service) -> str:
    return f"http://{demo.flags[1]}"


class Default(NamedTuple):
    """The request that a client sends when only the URL, the key and the model have been configured."""

    client: str
    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    key_header: str = "Authorization"


def of(client: str, path: str, key_header: str = "Authorization", /, **body: Any) -> Default:
    headers = body.pop("headers", {})
    return Default(client, path, {"model": "demo", **body}, headers, key_header)


DEFAULTS = [
    of("LlamaIndex", CHAT, messages=HI, stream=False, temperature=0.1),
    of("LlamaIndex, completions", COMPLETION, prompt="import ", stream=False, temperature=0.1, max_tokens=64),
    of("litellm", CHAT, messages=HI, headers={"User-Agent": "litellm/1.77.0"}),
    of("guidellm, chats", CHAT, messages=PARTS, stream=True,
       stream_options={"include_usage": True, "continuous_usage_stats": True}, max_completion_tokens=16,
       max_tokens=16, stop=None, ignore_eos=True),
    of("guidellm, completions", COMPLETION, prompt="import ", stream=True,
       stream_options={"include_usage": True, "continuous_usage_stats": True}, max_completion_tokens=16,
       max_tokens=16, stop=None, ignore_eos=True),
    of("aider", CHAT, messages=TALK, temperature=0, stream=True,
       headers={"HTTP-Referer": "https://aider.chat", "X-Title": "Aider"}),
    of("Continue", CHAT, messages=TALK, max_tokens=64, stream=True, stream_options=USAGE,
       headers={"api-key": "unused", "x-api-key": "unused", "User-Agent": "Continue/1.0.0"}),
    of("Continue, autocomplete", COMPLETION, prompt="import ", max_tokens=64, temperature=0.01, stream=True,
       stop=["\n\n", "/src/", "#- coding: utf-8", "```"]),
    of("Open WebUI", CHAT, stream=True, messages=HI,
       headers={"X-OpenWebUI-User-Name": "User", "X-OpenWebUI-User-Role": "admin", "Accept": "*/*"}),
    of("Open WebUI, titles", CHAT, stream=False, messages=HI, max_completion_tokens=64),
    of("LibreChat", CHAT, user="65d2a9f0b1c2d3e4f5a6b7c8", stream=True, messages=HI, temperature=1, top_p=1,
       presence_penalty=0, frequency_penalty=0, headers=STAINLESS),
    of("Vercel's AI SDK", CHAT, messages=PARTS, stream=True, stream_options=USAGE, temperature=0),
    of("Spring AI", CHAT, messages=HI, stream=False, temperature=0.7,
       headers={"User-Agent": "Java-http-client/21.0.4", "Accept": "*/*"}),
    of("LangChain4j", CHAT, messages=HI, stream=False,
       headers={"User-Agent": "langchain4j-openai", "Content-Type": "application/json; charset=utf-8"}),
    of("Semantic Kernel on Azure", "/openai/deployments/demo/chat/completions?api-version=2024-10-21",
       "api-key", messages=HI, max_tokens=16),
    of("Anthropic's header", CHAT, "x-api-key", messages=HI, max_tokens=16),
    of("lm-eval", COMPLETION, prompt=[[5, 6, 7, 8]], max_tokens=1, logprobs=1, echo=True, temperature=0,
       seed=1),
    of("vLLM's benchmark", COMPLETION, prompt="import ", temperature=0.0, repetition_penalty=1.0,
       max_tokens=8, logprobs=None, ignore_eos=True, stream=True, stream_options=USAGE),
    of("SGLang's benchmark", COMPLETION, prompt="import ", temperature=0.0, best_of=1, max_tokens=8,
       stream=True, ignore_eos=True),
    of("llama.cpp's web page", CHAT, messages=HI, stream=True, cache_prompt=True, max_tokens=-1,
       temperature=0.8, dynatemp_range=0, dynatemp_exponent=1, top_k=40, top_p=0.95, min_p=0.05, typical_p=1,
       xtc_probability=0, xtc_threshold=0.1, repeat_last_n=64, repeat_penalty=1, presence_penalty=0,
       frequency_penalty=0, dry_multiplier=0, dry_base=1.75, dry_allowed_length=2, dry_penalty_last_n=-1,
       timings_per_token=False),
]  # fmt: skip


@pytest.mark.parametrize("default", DEFAULTS, ids=lambda default: default.client)
def test_the_default_request_of_each_client_is_answered(default: Default, base: str, key: str) -> None:
    bearer = default.key_header == "Authorization"
    headers = {**default.headers, default.key_header: f"Bearer {key}" if bearer else key}
    with httpx.Client(base_url=base, timeout=600, verify=False) as http:
        answer = http.post(default.path, json=default.body, headers=headers)
    assert answer.status_code == 200, answer.text
    if not default.body.get("stream"):
        document = answer.json()
        assert document["choices"][0]["finish_reason"] in ("stop", "length")
        assert document["usage"]["completion_tokens"] >= 1
        return
    *chunks, done = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    assert done == "[DONE]"
    documents = [json.loads(chunk) for chunk in chunks]
    finished = [choice["finish_reason"] for document in documents for choice in document["choices"]]
    assert finished[-1] in ("stop", "length")
    wanted = (default.body.get("stream_options") or {}).get("include_usage", False)
    assert bool(documents[-1].get("usage")) == wanted


def test_the_paths_that_clients_probe_first_respond_without_a_key(base: str, key: str) -> None:
    with httpx.Client(base_url=base, timeout=600, verify=False) as http:
        assert http.get("/health").status_code == 200
        assert http.get("/v1/models").status_code == 401
        models = http.get("/v1/models/", headers={"api-key": key}).json()
    assert [model["id"] for model in models["data"]] == ["demo"]


def test_bad_words_and_best_of_apply_across_the_death_of_a_replica() -> None:
    """Tokens generated before the replica's death must still be checked against bad words, and must still
    count towards the choice of the best answer."""
    # Without this list, the answers contain these words. With this seed, other samples are the best if the
    # first tokens do not count.
    words = ["\nimport", "=", "sys"]
    body = {
        "model": "demo", "prompt": "import ", "max_tokens": 150, "ignore_eos": True, "best_of": 3, "n": 2,
        "temperature": 1.0, "seed": 19, "bad_words": words, "return_token_ids": True, "user": "tester",
    }  # fmt: skip
    with service() as running, running.http() as http, ThreadPoolExecutor(1) as threads:
        expected = http.post(COMPLETION, json=body).json()["choices"]
        rank = psutil.Process(running.replica()["pids"][0])
        while True:
            asked = threads.submit(http.post, COMPLETION, json=body, timeout=300)
            running.wait_until(
                lambda asked=asked: asked.done() or generated_tokens(running) >= 90, 60, "the first tokens"
            )
            rank.suspend()
            if generated_tokens(running):
                break
            # On a busy machine, the request may have ended.
            rank.resume()
            asked.result()
        rank.kill()
        answer = asked.result()
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == expected
        banned = [
            http.post("/tokenize", json={"model": "demo", "prompt": text, "add_special_tokens": False}).json()
            for word in words
            for text in (word, " " + word)
        ]
        rows = running.wait_until(
            lambda: [row for row in running.rows() if row["resubmissions"]],
            60,
            "the row of the resubmitted request",
        )
    for choice in expected:
        ids = choice["token_ids"]
        for run_of_ids in (each["tokens"] for each in banned):
            end_positions = range(len(run_of_ids), len(ids) + 1)
            assert all(ids[end - len(run_of_ids) : end] != run_of_ids for end in end_positions)
    assert [(row["user"], row["billed_tokens"]) for row in rows] == [("tester", 450)]


def generated_tokens(running: Service) -> int:
    """Return the number of tokens of all unfinished requests."""
    with AdminClient(running.run_dir, CALL_TIMEOUT_S) as client:
        return sum(one.generated_tokens or 0 for one in client.in_flight())


# ── real clients ─────────────────────────────────────────────────────────────────────────────────


def run(*command: str, **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_over_tcp_and_the_unix_socket(demo: Service, base: str, key: str) -> None:
    body = json.dumps({"model": "demo", "messages": HI, "max_tokens": 8, "stream": True})
    words = ["curl", "-sSN", "--fail-with-body", "-H", "Content-Type: application/json", "-d", body]
    over_tcp = run(*words, "-H", f"Authorization: Bearer {key}", base + CHAT + "/")
    over_unix = run(*words, "--unix-socket", str(demo.api_socket), "http://server" + CHAT)
    for text in (over_tcp, over_unix):
        assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("azure", [False, True])
def test_openais_client_with_the_fields_of_vllm(base: str, key: str, azure: bool) -> None:
    async def ask() -> Any:
        made: Any = (
            openai.AsyncAzureOpenAI(azure_endpoint=base, api_key=key, api_version="2024-10-21")
            if azure
            else openai.AsyncOpenAI(base_url=base + "/v1/", api_key=key)
        )
        async with made as client:
            options = {"model": "demo", "temperature": 0, "max_tokens": 12}
            free = await client.completions.create(
                prompt="import ", extra_body={"return_token_ids": True, "prompt_logprobs": 1}, **options
            )
            ids = free.choices[0].token_ids
            allowed = await client.completions.create(
                prompt="import ",
                extra_body={"allowed_token_ids": ids[1:3], "return_token_ids": True},
                **options,
            )
            word = httpx.post(
                base + "/detokenize",
                json={"model": "demo", "tokens": ids[:2]},
                headers={"api-key": key},
                timeout=600,
            ).json()["prompt"]
            banned = await client.completions.create(
                prompt="import ", extra_body={"bad_words": [word], "return_token_ids": True}, **options
            )
            return free, ids, allowed, banned

    free, ids, allowed, banned = asyncio.run(ask())
    assert len(ids) == free.usage.completion_tokens
    assert len(free.choices[0].prompt_logprobs) == free.usage.prompt_tokens
    assert set(allowed.choices[0].token_ids) <= set(ids[1:3])
    assert banned.choices[0].token_ids[:2] != ids[:2]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_gets_heads_without_bodies_on_one_connection(base: str, key: str) -> None:
    """If the answer to the first HEAD request had a body, curl would read it as the beginning of the second
    answer."""
    urls = [f"{base}/v1/models", f"{base}/health"]
    connects = ["-w", "new connections: %{num_connects}\n"]
    answers = run("curl", "-sS", "--head", "-H", f"Authorization: Bearer {key}", *connects, *urls)
    assert answers.count("HTTP/1.1 200 OK") == 2 and answers.endswith("new connections: 0\n")
    length = len(httpx.get(urls[0], headers={"api-key": key}, timeout=600).content)
    assert f"content-length: {length}\n" in answers.lower()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_that_offers_http_2_gets_an_answer_over_http_1_1(base: str, key: str) -> None:
    """With `--http2`, curl sends `Upgrade: h2c` with the POST request. The server may ignore the offer."""
    body = json.dumps({"model": "demo", "messages": HI, "max_tokens": 8})
    answer = run(
        *("curl", "-sSv", "--http2", "--stderr", "-", "--fail-with-body"),
        *("-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {key}", "-d", body),
        base + CHAT,
    )
    if "> Upgrade: h2c" not in answer:
        pytest.skip("this curl is built without HTTP/2")
    assert "< HTTP/1.1 200 OK" in answer and '"finish_reason"' in answer


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_with_http_1_0_gets_a_stream_without_chunks(base: str, key: str) -> None:
    body = json.dumps({"model": "demo", "messages": HI, "max_tokens": 8, "stream": True})
    answer = run(
        *("curl", "-sSi", "--http1.0", "--raw", "-H", "Content-Type: application/json"),
        *("-H", f"Authorization: Bearer {key}", "-H", "x-request-id: curl-1", "-d", body, base + CHAT),
    )
    head, _, text = answer.partition("\n\n")
    assert "200 OK" in head and "transfer-encoding" not in head.lower()
    assert "x-request-id: curl-1" in head.splitlines()
    assert text.startswith("data: {") and text.endswith("data: [DONE]\n\n")


LITELLM = """
import json, sys
import litellm

base, key, limited_key = sys.argv[1:]
messages = [{"role": "user", "content": "What does textwrap.dedent do?"}]
common = {"api_base": base, "api_key": key, "max_retries": 0}
options = {"messages": messages, "temperature": 0, "max_tokens": 8} | common
answer = litellm.completion("openai/demo", **options)
usage = {"stream_options": {"include_usage": True}}
pieces = list(litellm.completion("openai/demo", stream=True, **usage, **options))
text = litellm.text_completion(prompt="import ", model="text-completion-openai/demo", max_tokens=8, **common)


def refusal(model="openai/demo", **changes):
    try:
        litellm.completion(model, **(options | changes))
    except Exception as error:
        # `_should_retry` decides in the router of LiteLLM whether to retry.
        return [type(error).__name__, error.status_code, litellm._should_retry(error.status_code)]


print(json.dumps({
    "answer": answer.choices[0].message.content,
    "streamed": "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices),
    "tokens": [answer.usage.completion_tokens, pieces[-1].usage.completion_tokens],
    "text": text.choices[0].text,
    "models": litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_base=base, api_key=key
    ),
    "key": refusal(api_key="wrong"),
    "model": refusal("openai/other"),
    "length": refusal(messages=[{"role": "user", "content": "word " * 20_000}]),
    "field": refusal(temperature=-1),
    "limit": [refusal(api_key=limited_key) for _ in range(2)],
}))
"""


def test_litellm_works(demo: Service, base: str, key: str) -> None:
    demo.tenant("limited", requests_per_minute=1.0)
    keys = [key, demo.key("limited", "limited")]
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    printed = run(sys.executable, "-W", "ignore", "-c", LITELLM, base + "/v1", *keys, env=environment)
    found = json.loads(printed.splitlines()[-1])
    assert found["answer"] and found["streamed"] == found["answer"]
    assert found["text"] and found["tokens"][0] == found["tokens"][1] >= 1
    assert found["models"] == ["demo"]
    assert found["key"] == ["AuthenticationError", 401, False]
    assert found["model"] == ["NotFoundError", 404, False]
    assert found["length"] == ["ContextWindowExceededError", 400, False]
    assert found["field"] == ["BadRequestError", 400, False]
    assert found["limit"] == [None, ["RateLimitError", 429, True]]


@pytest.mark.skipif(shutil.which("guidellm") is None, reason="guidellm is not installed")
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_the_requests_of_guidellm_are_answered(base: str, key: str, tmp_path: Path, path: str) -> None:
    """guidellm is not a dependency of the tests, because it takes 315 MB. It asks `/health` before a
    benchmark, and requests streams."""
    report = tmp_path / "report.json"
    run(
        *("guidellm", "run", "--disable-console", "--profile", "kind=synchronous"),
        *("--backend", f"kind=openai_http,target={base},model=demo,api_key={key},request_format={path}"),
        *("--constraint", "kind=max_requests,count=3"),
        *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"),
        *("--tokenizer", f"kind=huggingface_auto,model={demo_model_folder()}"),
        *("--output", f"kind=json,path={report}"),
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert len(benchmark["requests"]["successful"]) == 3
    assert not benchmark["requests"]["errored"]


def test_langchain_works(base: str, key: str) -> None:
    model = langchain_openai.ChatOpenAI(
        base_url=base + "/v1", api_key=SecretStr(key), model="demo", max_completion_tokens=8, temperature=0
    )
    answer = model.invoke("What does textwrap.dedent do?")
    pieces = list(model.stream("What does textwrap.dedent do?", stream_usage=True))
    assert answer.content and "".join(str(piece.content) for piece in pieces) == answer.content
    streamed = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert answer.usage_metadata and streamed[-1]["output_tokens"] == answer.usage_metadata["output_tokens"]


LLM_MODELS = """
- model_id: on-appliance
  model_name: demo
  api_base: {base}/v1
  api_key_name: appliance
"""


def test_the_llm_command_works(base: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(LLM_MODELS.format(base=base))
    (tmp_path / "keys.json").write_text(json.dumps({"appliance": key}))
    words = [
        sys.executable,
        "-m",
        "llm",
        "-m",
        "on-appliance",
        "-o",
        "max_tokens",
        "8",
        "-o",
        "temperature",
        "0",
    ]
    environment = os.environ | {"LLM_USER_PATH": str(tmp_path)}
    streamed, complete = (
        run(*words, *options, "What does textwrap.dedent do?", env=environment)
        for options in ((), ("--no-stream",))
    )
    assert streamed.strip() and streamed == complete


JAVASCRIPT = """
const [base, key] = process.argv.slice(1);
const body = {model: "demo", messages: [{role: "user", content: "hi"}], max_tokens: 8, stream: true};
const answer = await fetch(base + "/v1/chat/completions", {
  method: "POST", body: JSON.stringify(body),
  headers: {"content-type": "application/json", authorization: `Bearer ${key}`},
});
let text = "";
for await (const piece of answer.body.pipeThrough(new TextDecoderStream())) text += piece;
console.log(answer.status, text.trimEnd().endsWith("data: [DONE]"));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_fetch_in_node_works(base: str, key: str) -> None:
    assert run("node", "--input-type=module", "-e", JAVASCRIPT, base, key).split() == ["200", "true"]


JAVA = """
import java.net.URI;
import java.net.http.*;

public class Ask {
    public static void main(String[] words) throws Exception {
        var body = "{\\"model\\": \\"demo\\", \\"max_tokens\\": 8, \\"messages\\": "
            + "[{\\"role\\": \\"user\\", \\"content\\": \\"hi\\"}]}";
        var client = HttpClient.newHttpClient();
        var request = HttpRequest.newBuilder(URI.create(words[0] + "/v1/chat/completions"))
            .header("Content-Type", "application/json").header("Authorization", "Bearer " + words[1])
            .POST(HttpRequest.BodyPublishers.ofString(body)).build();
        var answer = client.send(request, HttpResponse.BodyHandlers.ofString());
        System.out.println(answer.statusCode() + " " + answer.body().contains("\\"finish_reason\\""));
    }
}
"""


@pytest.mark.skipif(shutil.which("java") is None, reason="java is not installed")
def test_the_http_client_of_java_works(base: str, key: str, tmp_path: Path) -> None:
    source = tmp_path / "Ask.java"
    source.write_text(JAVA)
    assert run("java", str(source), base, key).split() == ["200", "true"]
