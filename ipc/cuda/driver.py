"""The CUDA driver API, one thin function a call: ints and bytes in, ints and bytes out.

Every call that fails raises `CudaCallFailed` (or a subclass) with the name of the call. All but
`init`, `version` and the device queries need a current context in the calling thread
(`device.Device.use`). Units: bytes. Addresses, streams, events, modules: ints.

The driver and not the runtime API: one process may have several runtimes (torch brings one), but
only one driver, and a test can put another driver in its place.
"""

import ctypes
import functools
from types import ModuleType
from typing import Any

from ipc.cuda.errors import CudaUnavailable, call_failed

HANDLE_BYTES = 64  # of CUipcMemHandle, and of CUmemFabricHandle
NOT_READY = 600

# CUpointer_attribute
MEMORY_TYPE, BUFFER_ID, DEVICE_ORDINAL = 2, 7, 9
LEGACY_IPC_CAPABLE, RANGE_START, RANGE_SIZE, ALLOWED_HANDLE_TYPES = 10, 11, 12, 14
# CUmemAllocationHandleType
POSIX_FD, FABRIC = 1, 8
# CUdevice_attribute
COMPUTE_MAJOR, COMPUTE_MINOR = 75, 76

_LAZY_PEER_ACCESS = 1  # The only flag cuIpcOpenMemHandle takes.
_NON_BLOCKING = 1
_EVENT_NO_TIMING = 2
_INSTALL = "install the 'cuda' extra: pip install 'cuda-bindings>=12.9'"


@functools.cache
def _cuda() -> ModuleType:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaUnavailable(f"no cuda.bindings.driver ({error}); {_INSTALL}") from None
    return driver


def _call(name: str, *args: Any) -> Any:
    """The value, or tuple of values, that the call gives besides its status."""
    try:
        status, *values = getattr(_cuda(), name)(*args)
    except (RuntimeError, AttributeError) as error:  # No library, or one without this function.
        raise CudaUnavailable(
            f"no NVIDIA driver, or one that is too old: {name}: {error}"
        ) from None
    if int(status):
        raise call_failed(name, int(status), getattr(status, "name", str(status)))
    return values[0] if len(values) == 1 else tuple(values)


# devices and contexts ----------------------------------------------------------------------------


def init() -> None:
    """Raises CudaUnavailable where there is no driver, CudaCallFailed where there is no GPU."""
    _call("cuInit", 0)


def version() -> int:
    """12080 is CUDA 12.8."""
    return _call("cuDriverGetVersion")


def device_count() -> int:
    return _call("cuDeviceGetCount")


def device_name(ordinal: int) -> str:
    return _call("cuDeviceGetName", 256, ordinal).split(b"\0")[0].decode()


def device_uuid(ordinal: int) -> bytes:
    """16 bytes."""
    return bytes(_call("cuDeviceGetUuid", ordinal).bytes)[:16]


def device_pci(ordinal: int) -> str:
    return _call("cuDeviceGetPCIBusId", 32, ordinal).split(b"\0")[0].decode()


def device_attribute(attribute: int, ordinal: int) -> int:
    return _call("cuDeviceGetAttribute", _cuda().CUdevice_attribute(attribute), ordinal)


def can_access_peer(ordinal: int, peer_ordinal: int) -> bool:
    return bool(_call("cuDeviceCanAccessPeer", ordinal, peer_ordinal))


def retain_primary(ordinal: int) -> int:
    return int(_call("cuDevicePrimaryCtxRetain", ordinal))


def push_context(context: int) -> None:
    _call("cuCtxPushCurrent", _cuda().CUcontext(context))


def pop_context() -> None:
    _call("cuCtxPopCurrent")


def current_ordinal() -> int | None:
    """The device of this thread's context, None without one."""
    return int(_call("cuCtxGetDevice")) if int(_call("cuCtxGetCurrent")) else None


# memory ------------------------------------------------------------------------------------------


def mem_info() -> tuple[int, int]:
    """(free, total) bytes of the current device."""
    return _call("cuMemGetInfo")


def mem_alloc(nbytes: int) -> int:
    return int(_call("cuMemAlloc", nbytes))


def mem_free(address: int) -> None:
    _call("cuMemFree", _ptr(address))


def mem_zero(address: int, nbytes: int, stream: int) -> None:
    _call("cuMemsetD8Async", _ptr(address), 0, nbytes, _stream(stream))


def host_alloc(nbytes: int) -> int:
    """Pinned host memory."""
    return int(_call("cuMemHostAlloc", nbytes, 0))


def host_free(address: int) -> None:
    _call("cuMemFreeHost", address)


def pointer_attribute(attribute: int, address: int) -> int:
    return int(_call("cuPointerGetAttribute", _cuda().CUpointer_attribute(attribute), address) or 0)


def address_range(address: int) -> tuple[int, int]:
    """(base, size) of the allocation that `address` lies in."""
    base, size = _call("cuMemGetAddressRange", _ptr(address))
    return int(base), int(size)


def ipc_get(base: int) -> bytes:
    """64 bytes. For the whole allocation, whatever address in it is given."""
    return _raw(_call("cuIpcGetMemHandle", _ptr(base)))


def ipc_open(handle: bytes) -> int:
    """The base address, here. The current device gets access to the exporter's."""
    opaque = _cuda().CUipcMemHandle()
    ctypes.memmove(int(opaque.getPtr()), handle, HANDLE_BYTES)
    return int(_call("cuIpcOpenMemHandle", opaque, _LAZY_PEER_ACCESS))


def ipc_close(base: int) -> None:
    _call("cuIpcCloseMemHandle", _ptr(base))


# memory made in two steps (cuMemCreate, cuMemMap) ------------------------------------------------


def vmm_granularity(ordinal: int, handle_type: int) -> int:
    flag = _cuda().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(_call("cuMemGetAllocationGranularity", _vmm_properties(ordinal, handle_type), flag))


def vmm_create(nbytes: int, ordinal: int, handle_type: int) -> int:
    """`handle_type` 0: memory that cannot be exported."""
    return int(_call("cuMemCreate", nbytes, _vmm_properties(ordinal, handle_type), 0))


def vmm_retain(address: int) -> int:
    return int(_call("cuMemRetainAllocationHandle", address))


def vmm_release(allocation: int) -> None:
    _call("cuMemRelease", _cuda().CUmemGenericAllocationHandle(allocation))


def vmm_export_fd(allocation: int) -> int:
    return int(_call("cuMemExportToShareableHandle", _allocation(allocation), _handle(POSIX_FD), 0))


def vmm_export_fabric(allocation: int) -> bytes:
    return _raw(_call("cuMemExportToShareableHandle", _allocation(allocation), _handle(FABRIC), 0))


def vmm_import_fd(fd: int) -> int:
    """The descriptor itself is the OS handle, not a pointer to it."""
    return int(_call("cuMemImportFromShareableHandle", fd, _handle(POSIX_FD)))


def vmm_import_fabric(handle: bytes) -> int:
    raw = ctypes.create_string_buffer(handle, HANDLE_BYTES)
    return int(_call("cuMemImportFromShareableHandle", ctypes.addressof(raw), _handle(FABRIC)))


def vmm_reserve(nbytes: int) -> int:
    return int(_call("cuMemAddressReserve", nbytes, 0, _ptr(0), 0))


def vmm_map(address: int, nbytes: int, allocation: int, ordinal: int) -> None:
    """Map, and let device `ordinal` read and write."""
    _call("cuMemMap", _ptr(address), nbytes, 0, _allocation(allocation), 0)
    access = _cuda().CUmemAccessDesc()
    access.location.type = _cuda().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = _cuda().CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    _call("cuMemSetAccess", _ptr(address), nbytes, [access], 1)


def vmm_unmap(address: int, nbytes: int) -> None:
    _call("cuMemUnmap", _ptr(address), nbytes)


def vmm_unreserve(address: int, nbytes: int) -> None:
    _call("cuMemAddressFree", _ptr(address), nbytes)


# streams, events, copies, kernels ----------------------------------------------------------------


def stream_create() -> int:
    """One that does not wait for the default stream."""
    return int(_call("cuStreamCreate", _NON_BLOCKING))


def stream_destroy(stream: int) -> None:
    _call("cuStreamDestroy", _stream(stream))


def event_create() -> int:
    return int(_call("cuEventCreate", _EVENT_NO_TIMING))


def event_destroy(event: int) -> None:
    _call("cuEventDestroy", _event(event))


def event_record(event: int, stream: int) -> None:
    _call("cuEventRecord", _event(event), _stream(stream))


def stream_wait(stream: int, event: int) -> None:
    """Later work of `stream` begins when the work that `event` was recorded after has ended."""
    _call("cuStreamWaitEvent", _stream(stream), _event(event), 0)


def event_done(event: int) -> bool:
    """Never waits. Raises the error of earlier work when there was one."""
    status = _cuda().cuEventQuery(_event(event))[0]
    if int(status) in (0, NOT_READY):
        return not int(status)
    raise call_failed("cuEventQuery", int(status), status.name)


def copy_to_host(host_address: int, address: int, nbytes: int) -> None:
    """Waits."""
    _call("cuMemcpyDtoH", host_address, _ptr(address), nbytes)


def copy_from_host(address: int, host_address: int, nbytes: int) -> None:
    """Waits."""
    _call("cuMemcpyHtoD", _ptr(address), host_address, nbytes)
    # From memory that is not pinned the call may return while the bytes are still on their way
    # (CUDA driver API, "API synchronization behavior"), and our reader is another process.
    _call("cuStreamSynchronize", _stream(0))


def copy_from_host_async(address: int, host_address: int, nbytes: int, stream: int) -> None:
    """`host_address` is pinned, and must not change before the copy has run."""
    _call("cuMemcpyHtoDAsync", _ptr(address), host_address, nbytes, _stream(stream))


def copy_async(dst: int, src: int, nbytes: int, stream: int) -> None:
    _call("cuMemcpyDtoDAsync", _ptr(dst), _ptr(src), nbytes, _stream(stream))


def proc_address(symbol: str, cuda_version: int) -> int:
    """The function of this name with the ABI of that CUDA version; 0 when there is none."""
    status, address, *_ = _cuda().cuGetProcAddress(symbol.encode(), cuda_version, 0)
    return 0 if int(status) else int(address or 0)


def module_load(image: bytes) -> int:
    return int(_call("cuModuleLoadData", image))


def module_function(module: int, name: str) -> int:
    return int(_call("cuModuleGetFunction", _cuda().CUmodule(module), name.encode()))


def launch(
    function: int, grid: tuple[int, int], threads: int, shared_bytes: int, stream: int, params: int
) -> None:
    """`params`: address of an array of pointers to the arguments."""
    _call(
        "cuLaunchKernel", _cuda().CUfunction(function), *grid, 1, threads, 1, 1, shared_bytes,
        _stream(stream), params, 0,
    )  # fmt: skip


def error_name(code: int) -> str:
    try:
        return _cuda().CUresult(code).name
    except ValueError:  # A newer driver may know more codes than the bindings.
        return f"CUresult {code}"


def _vmm_properties(ordinal: int, handle_type: int) -> Any:
    properties = _cuda().CUmemAllocationProp()
    properties.type = _cuda().CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = _cuda().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    properties.requestedHandleTypes = _handle(handle_type)
    return properties


def _raw(opaque: Any) -> bytes:
    # Not through its fields: their names differ between releases of cuda-bindings.
    return ctypes.string_at(int(opaque.getPtr()), HANDLE_BYTES)


def _handle(handle_type: int) -> Any:
    return _cuda().CUmemAllocationHandleType(handle_type)


def _allocation(allocation: int) -> Any:
    return _cuda().CUmemGenericAllocationHandle(allocation)


def _ptr(address: int) -> Any:
    return _cuda().CUdeviceptr(address)


def _stream(stream: int) -> Any:
    return _cuda().CUstream(stream)


def _event(event: int) -> Any:
    return _cuda().CUevent(event)
