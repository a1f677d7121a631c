"""What one engine runs on: the environment of its processes, and how KV reaches another engine.

The node builds CPU and GPU engines by the same code; what differs is answered here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pdnode.topology import Box, Gpu, engine_link


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """Cores of one CPU engine, one tuple per tensor parallel rank."""

    rank_cores: tuple[tuple[int, ...], ...]
    driver_folder: str = ""
    """Tests only: where a stand-in for NVIDIA's driver library is."""
    kind: ClassVar[str] = "cpu"
    checked: ClassVar[bool] = True

    @property
    def forked(self) -> bool:
        """May its processes be forked from one that runs? Where to look for libraries is read when a
        program starts."""
        return not self.driver_folder

    def env(self) -> dict[str, str]:
        # "auto" would give every engine all cores: it does not know of the other engines.
        env = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(format_ids, self.rank_cores))}
        if self.driver_folder:
            folders = [self.driver_folder, os.environ.get("LD_LIBRARY_PATH", "")]
            env["LD_LIBRARY_PATH"] = ":".join(filter(None, folders))
        return env

    def exclusive_while_starting(self) -> tuple[str, ...]:
        """What no other engine may start on at the same time; sorted, so that none waits in a ring."""
        return ()

    @property
    def power(self) -> tuple:
        """Engines on devices of equal power are about as fast."""
        return tuple(map(len, self.rank_cores))

    def describe(self) -> str:
        cores = " | ".join(map(format_ids, self.rank_cores))
        return f"CPU core{'s' if len(set().union(*self.rank_cores)) > 1 else ''} {cores}"

    def kv_path_to(self, other: Device) -> str:
        return "shm"

    def link_to(self, other: Device) -> str:
        return "shared memory"


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """GPUs of one engine in rank order, and the GPUs whose memory it may have to reach."""

    own: tuple[Gpu, ...]
    peers: tuple[Gpu, ...]
    box: Box | None
    """None: planned on a machine without an NVIDIA driver, from the flags alone."""
    kind: ClassVar[str] = "gpu"

    @property
    def checked(self) -> bool:
        return self.box is not None

    @property
    def forked(self) -> bool:
        """No: a CUDA context does not survive a fork, and who may have made one is not ours to know."""
        return False

    def env(self) -> dict[str, str]:
        """vLLM uses the first GPUs it sees; the peers behind them stay askable for peer access."""
        # A process sees at most one MIG slice, and then no other GPU.
        mig = self.own[0].is_mig
        seen = self.own if mig else self.own + tuple(g for g in self.peers if not g.is_mig)
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(gpu.cuda_name for gpu in seen)),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }

    def exclusive_while_starting(self) -> tuple[str, ...]:
        return tuple(sorted({gpu.cuda_name for gpu in self.own}))

    @property
    def power(self) -> tuple:
        """Engines on devices of equal power are about as fast. Of a GPU without a name nothing is known."""
        return tuple(gpu.name or gpu.cuda_name for gpu in self.own)

    def describe(self) -> str:
        return ", ".join(map(str, self.own))

    def kv_path_to(self, other: Device) -> str:
        """``cuda-ipc`` or ``staged``: how ``other`` reads this engine's KV."""
        assert isinstance(other, GpuDevice)
        if any(gpu.is_mig for gpu in self.own + other.own):
            return "staged"
        if self.box is None:
            return "cuda-ipc"
        return engine_link(self.box, self.own, other.own).path

    def link_to(self, other: Device) -> str:
        """For people: the slowest link a hand-off to ``other`` needs."""
        assert isinstance(other, GpuDevice)
        if self.box is None:
            return "not checked"
        if set(self.own) == set(other.own):
            return "same GPU"
        return engine_link(self.box, self.own, other.own).kind


Device = CpuDevice | GpuDevice


def format_ids(ids: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> "0-2,5": the form vLLM and the kernel read."""
    runs: list[list[int]] = []
    for i in sorted(ids):
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
