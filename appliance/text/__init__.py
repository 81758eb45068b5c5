"""Text processing for inference: tokenizer, chat templates, detokenizer, stop strings and redaction. Used
only by front processes. Imports neither model code (torch, transformers) nor HTTP code."""
