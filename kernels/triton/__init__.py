"""The GPU operations as Triton kernels. Importing most of these modules imports Triton."""
