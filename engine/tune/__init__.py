"""The offline tuner, `python -m engine.tune`: selects the kernel for each of a decoder's linears on a GPU."""
