"""The operations as Triton kernels, for GPUs. Importing a module here imports Triton."""
