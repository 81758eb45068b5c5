"""Everything between characters and token ids: tokenizer, chat template, detokenizer, stop strings.

Imports no model code (neither torch nor transformers) and no HTTP: the front process is its only user.
"""
