"""Errors of the CUDA back end; all are `ipc.errors.IpcError`.

IpcError
├── CudaUnavailable           no cuda-bindings, no driver, or a driver without a call that is needed
├── CudaCallFailed            a driver call returned an error (.call, .code, .name)
│   ├── CudaOutOfMemory       2
│   ├── CudaNoContext         201: no context in this thread, or an IPC handle of this process
│   ├── CudaAlreadyMapped     208: an older mapping of the same memory is still open
│   ├── CudaNoPeerAccess      217, 711: the two GPUs cannot reach each other
│   └── CudaFault             700 and its like: the context is lost, only a new process helps
├── CopierBusy                more copies in flight than the copier was made for
└── SegmentError
    ├── NoDeviceMemory        create: the GPU is too full (.nbytes, .free_bytes, .flag)
    └── RegionRefused
        ├── NotExportable     export: memory that no other process can map, with what was probed
        └── PeerUnreadable    attach: mapped, but the probe pattern did not come across
"""

from ipc.errors import IpcError, RegionRefused, SegmentError


class CudaUnavailable(IpcError):
    """There is no CUDA here. The message says what to install."""


class CudaCallFailed(IpcError):
    """A driver call failed. Codes: `CUresult` in cuda.h."""

    def __init__(self, call: str, code: int, name: str):
        self.call, self.code, self.name = call, code, name
        super().__init__(f"{call} failed: {name} ({code})")


class CudaOutOfMemory(CudaCallFailed):
    """The device is full."""


class CudaNoContext(CudaCallFailed):
    """No context in this thread; from cuIpcOpenMemHandle also: the handle is of this process."""


class CudaAlreadyMapped(CudaCallFailed):
    """An older mapping is in the way."""


class CudaNoPeerAccess(CudaCallFailed):
    """The two devices have no peer access, or too many peers already."""


class CudaFault(CudaCallFailed):
    """A sticky error: the context cannot be used any more."""


class CopierBusy(IpcError):
    """Too many copies in flight. Nothing was submitted."""


class NoDeviceMemory(SegmentError):
    """The device has too little memory. Says what was asked, what is free, which flag to turn."""

    def __init__(self, name: str, nbytes: int, free_bytes: int, flag: str):
        self.nbytes, self.free_bytes, self.flag = nbytes, free_bytes, flag
        super().__init__(
            f"no device memory for KV region {name!r}: it needs {nbytes:,} bytes, the GPU has "
            f"{free_bytes:,} free; lower {flag}, or end what else uses this GPU (a peer that still "
            "maps memory of a dead engine keeps it allocated)"
        )


class NotExportable(RegionRefused):
    """No other process could map this memory."""


class PeerUnreadable(RegionRefused):
    """The mapping opened, but reading through it does not give what the owner wrote."""


_TYPES = {
    2: CudaOutOfMemory, 201: CudaNoContext, 208: CudaAlreadyMapped, 217: CudaNoPeerAccess,
    711: CudaNoPeerAccess,
}  # fmt: skip
# 700 illegal address, 702 timeout, 709 destroyed, 710 assert, 714 to 719 hardware and launch
# faults.
_STICKY = {700, 702, 709, 710, *range(714, 720)}


def call_failed(call: str, code: int, name: str) -> CudaCallFailed:
    """The error of the type that fits `code`."""
    kind = CudaFault if code in _STICKY else _TYPES.get(code, CudaCallFailed)
    return kind(call, code, name)
