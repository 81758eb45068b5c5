"""Access to CUDA's virtual memory management, which torch does not expose. The physical memory of a reserved
address range can be released and later reallocated. The driver is called through ctypes, so nothing is
compiled.

Reference: "Virtual Memory Management" in the CUDA driver API documentation.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p

import torch

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED


class DriverError(RuntimeError):
    """Raised if a CUDA driver function fails. The message contains the function's name and CUDA's description
    of the error."""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", c_ubyte),
        ("gpu_direct_rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """The driver's CUmemAllocationProp struct."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32_meta_data", c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """The driver's CUmemAccessDesc struct."""

    _fields_ = (("location", _Location), ("flags", c_int))


_ARGUMENTS = {
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuGetErrorString": (c_int, c_void_p),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemAddressReserve": (c_void_p, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemCreate": (c_void_p, c_size_t, c_void_p, c_uint64),
    "cuMemGetAllocationGranularity": (c_void_p, c_void_p, c_int),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemSetAccess": (c_uint64, c_size_t, c_void_p, c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
}


class CudaDriver:
    """The virtual memory of one GPU. Its methods may be called from any thread.

    Implements `engine.device_arena.VirtualMemory`. Addresses and sizes must be multiples of `granularity`.
    The constructor raises DriverError if the driver library is missing or the GPU does not support virtual
    memory management.
    """

    def __init__(self, device: torch.device) -> None:
        assert device.index is not None
        self.device = device
        try:
            library = ctypes.CDLL("libcuda.so.1")
            self._functions = {name: getattr(library, name) for name in _ARGUMENTS}
        except (OSError, AttributeError) as error:
            raise DriverError(f"the CUDA driver cannot be used: {error}") from error
        for name, arguments in _ARGUMENTS.items():
            self._functions[name].argtypes = arguments
            self._functions[name].restype = c_int
        self._context = c_void_p()
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # creates the CUDA context on first use of the GPU
            self._call("cuCtxGetCurrent", byref(self._context))
        number, supported = c_int(), c_int()
        # Like torch, the driver numbers only the GPUs in CUDA_VISIBLE_DEVICES.
        self._call("cuDeviceGet", byref(number), device.index)
        self._call("cuDeviceGetAttribute", byref(supported), _SUPPORTED, number)
        if not supported.value:
            raise DriverError(
                f"{torch.cuda.get_device_name(device)} does not support virtual memory management"
            )
        self._properties = _Properties(type=_PINNED, location=_Location(_ON_DEVICE, number.value))
        self._access = _Access(_Location(_ON_DEVICE, number.value), _READ_WRITE)
        granularity = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(granularity), byref(self._properties), _MINIMUM)
        self.granularity = granularity.value
        """All sizes and addresses must be multiples of this many bytes."""

    def reserve(self, nbytes: int) -> int:
        """Reserve an address range without physical memory and return its first address."""
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), nbytes, 0, 0, 0)
        return address.value

    def free_addresses(self, address: int, nbytes: int) -> None:
        """Return an address range to the driver. No memory may be mapped in the range."""
        self._call("cuMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int) -> int:
        """Allocate physical memory with undefined content, map it at `address`, and return its handle.

        Raises torch.OutOfMemoryError if the GPU has too little free memory even after torch has released its
        cache.
        """
        handle = c_uint64()
        create = ("cuMemCreate", byref(handle), nbytes, byref(self._properties), 0)
        try:
            self._call(*create)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self._call(*create)
        try:
            self._call("cuMemMap", address, nbytes, 0, handle, 0)
            try:
                self._call("cuMemSetAccess", address, nbytes, byref(self._access), 1)
            except (DriverError, torch.OutOfMemoryError):
                self._call("cuMemUnmap", address, nbytes)
                raise
        except (DriverError, torch.OutOfMemoryError):
            self._call("cuMemRelease", handle)
            raise
        return handle.value

    def unmap(self, address: int, nbytes: int, handle: int) -> None:
        """Unmap and release memory returned by `map`. The GPU must no longer be using it."""
        self._call("cuMemUnmap", address, nbytes)
        self._call("cuMemRelease", handle)

    def synchronize(self) -> None:
        """Wait until the GPU has finished all of this process's work."""
        self._call("cuCtxSynchronize")

    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        """Return mapped memory as a [nbytes] uint8 tensor, which keeps `owner` alive."""
        return torch.as_tensor(_Bytes(address, nbytes, owner), device=self.device)

    def _call(self, name: str, *arguments: object) -> None:
        if name not in ("cuCtxGetCurrent", "cuCtxSetCurrent"):
            # A new thread has no current CUDA context.
            self._call("cuCtxSetCurrent", self._context)
        code = self._functions[name](*arguments)
        if code == 0:
            return
        text = c_char_p()
        self._functions["cuGetErrorString"](code, byref(text))
        message = f"{name} failed: {(text.value or b'unknown error').decode()} ({code})"
        if code == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(message)
        raise DriverError(message)


class _Bytes:
    """Describes GPU memory to `torch.as_tensor`, in the format of Numba's CUDA array interface."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }
        self._owner = owner
