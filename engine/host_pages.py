"""Allocates host memory for large transfers to and from a GPU, in huge pages that can be page-locked."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch


def map_pages(nbytes: int) -> torch.Tensor:
    """Return `nbytes` bytes of new host memory, in huge pages if the kernel supports them: [nbytes] uint8.
    Page-locking them is five times as fast as torch's `pin_memory` and can be undone. Creating the tensor
    takes almost no time, because each page is allocated when first written. Raises OSError if the process may
    not map that much memory.
    """
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the kernel may not support huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def lock_pages(host: torch.Tensor) -> None:
    """Page-lock host memory for GPU access. Locking is faster if the pages have already been written. Raises
    torch.AcceleratorError if the memory cannot be locked."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))


def unlock_pages(host: torch.Tensor) -> None:
    """Unlock host memory. All transfers from or to it must have finished."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(host.data_ptr()))
