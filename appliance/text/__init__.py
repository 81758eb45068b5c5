"""The text side of inference: tokenizer, chat templates, detokenizer, stop strings, redaction.

This package imports neither model code (torch, transformers) nor HTTP. Only the front process uses it.
"""
