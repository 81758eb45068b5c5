"""Reads the prompts of submissions."""

from __future__ import annotations

from engine.messages import Submit, view_tokens


def prompt_of(submit: Submit) -> list[int]:
    """Return the token ids of a submission's prompt."""
    return view_tokens(submit.prompt).tolist()
