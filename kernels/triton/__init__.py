"""Contains the GPU operations, implemented as Triton kernels. Importing most of these modules imports
Triton."""
