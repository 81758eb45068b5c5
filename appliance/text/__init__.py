"""The text side of inference: tokenizer, chat templates, detokenizer, stop strings and redaction.

This package imports neither model code (torch, transformers) nor HTTP code. Only the front process uses it.
"""
