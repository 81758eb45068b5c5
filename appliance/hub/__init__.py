"""Downloads models from a Hugging Face hub. Only the command line imports this package, because it loads
huggingface_hub and connects to the network."""
