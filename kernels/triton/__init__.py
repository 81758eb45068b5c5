"""Contains the GPU operations as Triton kernels. Importing most of its modules imports Triton."""
