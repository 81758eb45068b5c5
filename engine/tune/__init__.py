"""The offline tuner, `python -m engine.tune`: selects the kernel for each linear layer of a decoder on a
GPU."""
