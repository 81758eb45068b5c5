"""Tests that the OpenAPI document is complete and that responses match it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from appliance.front import documents
from tests.front.harness import Harness
from tests.front.raw import ask, chat


@pytest.fixture
def document(front: Harness) -> dict[str, Any]:
    answer: dict[str, Any] = ask(front, "GET", "/openapi.json").json
    return answer


def test_the_document_lists_every_path_and_marks_the_open_ones(document: dict[str, Any]) -> None:
    operations = {
        (method, path): operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
    }
    assert set(operations) == {
        ("get", "/v1/models"),
        ("get", "/v1/models/{model}"),
        ("post", "/v1/chat/completions"),
        ("post", "/v1/completions"),
        ("post", "/tokenize"),
        ("post", "/detokenize"),
        ("get", "/health"),
        ("get", "/health/live"),
        ("get", "/health/ready"),
    }
    open_paths = {path for (_, path), operation in operations.items() if not operation["security"]}
    assert open_paths == {"/health", "/health/live", "/health/ready"}
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"


def test_every_reference_resolves(document: dict[str, Any]) -> None:
    def walk(node: Any) -> None:
        if isinstance(node, dict):
            reference = node.get("$ref")
            if isinstance(reference, str):
                target: Any = document
                for part in reference.removeprefix("#/").split("/"):
                    target = target[part]
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(document)


def test_every_operation_lists_its_errors(document: dict[str, Any]) -> None:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            statuses = set(operation["responses"])
            assert ("422" in statuses) == ("completions" in path)
            if operation["security"]:
                assert {"200", "400", "401", "503"} <= statuses
            if method == "post":
                assert {"404", "413", "415"} <= statuses
                assert operation["requestBody"]["required"]
            if "completions" in path:
                assert {"409", "429"} <= statuses
                assert [parameter["name"] for parameter in operation["parameters"]] == ["Idempotency-Key"]
                assert "text/event-stream" in operation["responses"]["200"]["content"]


@pytest.mark.parametrize(
    ("method", "path", "body", "model"),
    [
        ("GET", "/v1/models", None, documents.ModelListDocument),
        ("GET", "/v1/models/demo", None, documents.ModelDocument),
        ("POST", "/v1/chat/completions", chat(), documents.ChatCompletionDocument),
        (
            "POST",
            "/v1/chat/completions",
            chat(n=2, logprobs=True, top_logprobs=2, max_tokens=3),
            documents.ChatCompletionDocument,
        ),
        ("POST", "/v1/completions", {"model": "demo", "prompt": "x"}, documents.CompletionDocument),
        (
            "POST",
            "/v1/completions",
            {"model": "demo", "prompt": "x", "echo": True, "logprobs": 0},
            documents.CompletionDocument,
        ),
        (
            "POST",
            "/v1/completions",
            {"model": "demo", "prompt": ["x", "y"], "echo": True, "logprobs": 2},
            documents.CompletionDocument,
        ),
        (
            "POST",
            "/v1/completions",
            {"model": "demo", "prompt": "x", "return_token_ids": True, "prompt_logprobs": 2, "best_of": 3},
            documents.CompletionDocument,
        ),
        (
            "POST",
            "/v1/chat/completions",
            chat(return_token_ids=True, prompt_logprobs=0),
            documents.ChatCompletionDocument,
        ),
        ("POST", "/tokenize", {"model": "demo", "prompt": "x"}, documents.TokenizeDocument),
        ("POST", "/detokenize", {"model": "demo", "tokens": [1, 2]}, documents.DetokenizeDocument),
        ("GET", "/health", None, documents.HealthDocument),
        ("GET", "/health/live", None, documents.HealthDocument),
        ("GET", "/health/ready", None, documents.HealthDocument),
        ("GET", "/nowhere", None, documents.ErrorDocument),
    ],
)
def test_answers_match_the_document(
    front: Harness, method: str, path: str, body: dict[str, Any] | None, model: type[msgspec.Struct]
) -> None:
    msgspec.json.decode(ask(front, method, path, body).body, type=model)
