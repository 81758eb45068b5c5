"""A simulation, in host memory, of a GPU's virtual memory."""

from __future__ import annotations

import torch

GRANULARITY = 4096


class FakeDriver:
    """A simulated `engine.device_arena.VirtualMemory`. Newly mapped memory and unmapped memory contain
    garbage, so that tests detect lost content. At most `limit_bytes` can be mapped."""

    granularity = GRANULARITY

    def __init__(self, limit_bytes: int = 1 << 30) -> None:
        self.limit_bytes = limit_bytes
        self.mapped: dict[int, tuple[int, int]] = {}
        """Address and size of each mapping, keyed by handle."""
        self.ranges: dict[int, torch.Tensor] = {}
        """The reserved memory, keyed by its first address."""
        self.log: list[str] = []
        self._next_address = 1 << 40
        self._next_handle = 1

    @property
    def mapped_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.mapped.values())

    def reserve(self, nbytes: int) -> int:
        assert nbytes % GRANULARITY == 0
        address, self._next_address = self._next_address, self._next_address + nbytes + GRANULARITY
        self.ranges[address] = torch.full((nbytes,), 0x55, dtype=torch.uint8)
        return address

    def free_addresses(self, address: int, nbytes: int) -> None:
        assert len(self.ranges.pop(address)) == nbytes
        assert not any(address <= start < address + nbytes for start, _ in self.mapped.values())

    def map(self, address: int, nbytes: int) -> int:
        assert address % GRANULARITY == 0 and nbytes % GRANULARITY == 0
        if self.mapped_bytes + nbytes > self.limit_bytes:
            raise torch.OutOfMemoryError("out of memory")
        assert not any(start < address + nbytes and address < start + n for start, n in self.mapped.values())
        self.log.append("map")
        self._bytes(address, nbytes).fill_(0xAA)
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self.mapped[handle] = (address, nbytes)
        return handle

    def unmap(self, address: int, nbytes: int, handle: int) -> None:
        assert self.mapped.pop(handle) == (address, nbytes)
        assert "synchronize" in self.log[-1:] + ["synchronize"] * ("unmap" in self.log[-1:])
        self.log.append("unmap")
        self._bytes(address, nbytes).fill_(0x55)

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        sizes = self.mapped.values()
        assert any(start <= address < start + size for start, size in sizes), "the memory is not mapped"
        return self._bytes(address, nbytes)

    def _bytes(self, address: int, nbytes: int) -> torch.Tensor:
        for start, content in self.ranges.items():
            if start <= address and address + nbytes <= start + len(content):
                return content[address - start : address - start + nbytes]
        raise AssertionError("the address is not reserved")
