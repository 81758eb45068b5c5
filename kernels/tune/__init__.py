"""Selects the fastest kernel for each GEMM on a GPU, by generating and timing candidate plans."""
