"""Reads the GPUs of this box and the links between them from NVML into ``topology.Box``.

NVML ignores CUDA_VISIBLE_DEVICES and lists GPUs in PCI bus order. Every call may answer "not
supported" on some GPU; what cannot be read counts as absent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pdnode.topology import Box, Gpu, Link

T = TypeVar("T")

# nvidia-ml-py 13 defines NVML_P2P_CAPS_INDEX_READ as the tuple (0,) by a stray comma.
P2P_CAPS_INDEX_READ = 0
DRIVER = Path("/proc/driver/nvidia/version")
ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


class NoNvml(Exception):
    """Why the GPUs cannot be asked: no driver, or no Python module for it."""


def discover_nvml() -> Box:
    """Raises NoNvml."""
    try:
        import pynvml as nvml
    except ImportError:
        driver = DRIVER.exists()
        raise NoNvml(f"no {'package nvidia-ml-py' if driver else 'NVIDIA driver'} here") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        raise NoNvml("no NVIDIA driver here") from None
    try:
        return _read_box(nvml)
    except nvml.NVMLError as error:
        # Such as a GPU that fell off the bus.
        raise NoNvml(f"the NVIDIA driver does not answer ({error})") from None
    finally:
        nvml.nvmlShutdown()


def _read_box(nvml: Any) -> Box:
    gpus: list[Gpu] = []
    handles: dict[str, Any] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        gpu = _read_gpu(nvml, handle, index)
        handles[gpu.uuid] = handle
        gpus += _mig_slices(nvml, handle, gpu) or [gpu]
    links = {
        (reader, owner): _read_link(nvml, handles[reader], handles[owner])
        for reader, owner in itertools.permutations(handles, 2)
    }
    return Box(tuple(gpus), links)


def _ask(nvml: Any, call: Callable[..., T], *args: Any) -> T | None:
    """None where this GPU or driver does not answer."""
    try:
        return call(*args)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _read_gpu(nvml: Any, handle: Any, index: int | None) -> Gpu:
    name = _ask(nvml, nvml.nvmlDeviceGetName, handle) or ""
    return Gpu(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        index=index,
        name=_text(name),
        numa_node=_numa_node(nvml, handle),
    )


def _numa_node(nvml: Any, handle: Any) -> int | None:
    call = getattr(nvml, "nvmlDeviceGetNumaNodeId", None)
    return _ask(nvml, call, handle) if call else None


def _mig_slices(nvml: Any, handle: Any, gpu: Gpu) -> list[Gpu]:
    """A GPU in MIG mode is not usable as a whole: its slices take its place."""
    mode = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if not mode or mode[0] != 1:
        return []
    slices = []
    for i in range(_ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        mig = _ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, i)
        if mig is not None:
            uuid = _text(nvml.nvmlDeviceGetUUID(mig))
            slices.append(Gpu(uuid, name=gpu.name, numa_node=gpu.numa_node))
    return slices


def _read_link(nvml: Any, reader: Any, owner: Any) -> Link:
    status = _ask(nvml, nvml.nvmlDeviceGetP2PStatus, reader, owner, P2P_CAPS_INDEX_READ)
    ancestor = _ask(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, reader, owner)
    nvlinks = _nvlinks_between(nvml, reader, owner)
    return Link(
        p2p_read=status == 0,
        nvlinks=nvlinks,
        nvlink_gb_per_s=_nvlink_gb_per_s(nvml, reader) if nvlinks else 0.0,
        ancestor=ANCESTORS.get(50 if ancestor is None else ancestor, "SYS"),
    )


def _nvlinks_between(nvml: Any, reader: Any, owner: Any) -> int:
    """Active links that end at the other GPU, or at an NVSwitch, which reaches every GPU."""
    owner_bus = _text(nvml.nvmlDeviceGetPciInfo(owner).busId).lower()[-12:]
    count = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if _ask(nvml, nvml.nvmlDeviceGetNvLinkState, reader, link) != 1:
            continue
        remote_type = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, reader, link)
        remote = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, reader, link)
        to_switch = remote_type == 2
        to_owner = remote is not None and _text(remote.busId).lower()[-12:] == owner_bus
        count += to_switch or to_owner
    return count


def _nvlink_gb_per_s(nvml: Any, handle: Any) -> float:
    with suppress(nvml.NVMLError):
        (value,) = nvml.nvmlDeviceGetFieldValues(
            handle, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
        )
        if value.nvmlReturn == 0 and value.value.uiVal:
            return value.value.uiVal / 1000
    # The speed of the first NVLink generation still sold (A100), when the driver does not say.
    return 25.0
