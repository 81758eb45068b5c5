"""The offline tuner, `python -m kernels.tune`: which kernel each product of a decoder gets on a GPU."""
