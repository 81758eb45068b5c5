"""Text processing for inference: tokenizer, chat templates, detokenizer, stop strings and redaction. This
package imports neither model code (torch, transformers) nor HTTP code. Only front processes use it."""
