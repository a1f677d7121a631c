"""One process of the contract suite: commands as JSON lines in, results out. `peer.py BACKEND`.

The same program is owner or reader; a back end is what its regions are made of:

    host          a POSIX segment, HostRegion
    cuda          CudaRegion.create
    cuda-engine   the same, all copies on the copy engine (else pieces this small take the kernel)
    cuda-foreign  memory that something else allocated: in the middle of a larger piece
    cuda-torch    a small tensor, which torch puts into a larger allocation (needs torch with CUDA)
    cuda-fd       memory of cuMemCreate, handed over as a file descriptor
    cuda-fabric   the same with a fabric handle
"""

import ctypes
import hashlib
import json
import os
import sys
import time

import numpy as np

from ipc.copy import CopyPlan, Strip
from ipc.errors import IpcError
from ipc.records import RegionRecord

BEFORE = 12288  # Bytes of the foreign piece that lie before the region.


class Host:
    def __init__(self):
        from ipc.copy import HostCopier
        from ipc.memory import HostRegion

        self.region, self.copier = HostRegion, HostCopier()

    def make(self, name: str, nbytes: int, **stamp):
        return self.region.create(name, nbytes, flag="--kv-bytes", **stamp)

    def attach(self, *args):
        return self.region.attach(*args)

    def write(self, region, at: int, data: bytes) -> None:
        ctypes.memmove(region.address + at, data, len(data))

    def read(self, region, at: int, nbytes: int) -> bytes:
        return ctypes.string_at(region.address + at, nbytes)

    def let_go(self, boot_id: int, regions: list) -> int:
        return 0  # The mapping goes with the object; the peer closes it.


class Cuda:
    def __init__(self, kind: str):
        from ipc.cuda import driver
        from ipc.cuda.device import device
        from ipc.cuda.memory import CudaRegion

        self.region, self.driver, self.kind, self.gpu = CudaRegion, driver, kind, device()
        self._copier = None

    @property
    def copier(self):
        from ipc.cuda.copy import CudaCopier

        self._copier = self._copier or CudaCopier(self.gpu, with_kernel=self.kind != "cuda-engine")
        return self._copier

    def make(self, name: str, nbytes: int, **stamp):
        if self.kind in ("cuda", "cuda-engine"):
            return self.region.create(name, nbytes, flag="--kv-bytes", **stamp)
        address = self._foreign(nbytes + 2 * BEFORE) + BEFORE
        return self.region.export(name, address, nbytes, **stamp)

    def _foreign(self, nbytes: int) -> int:
        from ipc.cuda import vmm

        types = {"cuda-fd": self.driver.POSIX_FD, "cuda-fabric": self.driver.FABRIC}
        with self.gpu.use():
            if self.kind == "cuda-foreign":
                return self.driver.mem_alloc(nbytes)
            if self.kind == "cuda-torch":
                return _tensor(nbytes)
            return vmm.allocate(nbytes, self.gpu, types[self.kind])[0]

    def attach(self, *args):
        return self.region.attach(*args)

    def write(self, region, at: int, data: bytes) -> None:
        with self.gpu.use():
            raw = np.frombuffer(data, np.uint8)
            self.driver.copy_from_host(region.address + at, raw.ctypes.data, len(data))

    def read(self, region, at: int, nbytes: int) -> bytes:
        raw = np.empty(nbytes, np.uint8)
        with self.gpu.use():
            self.driver.copy_to_host(raw.ctypes.data, region.address + at, nbytes)
        return raw.tobytes()

    def let_go(self, boot_id: int, regions: list) -> int:
        from ipc.cuda.memory import close_dead

        return close_dead(boot_id)


def _tensor(nbytes: int) -> int:
    import torch

    _kept.append(torch.zeros(nbytes, dtype=torch.int8, device="cuda"))
    torch.cuda.synchronize()
    return _kept[-1].data_ptr()


_kept: list = []  # Tensors that regions were made of.


class Peer:
    """Regions by a label that the test chooses."""

    def __init__(self, backend: str):
        self._back = Host() if backend == "host" else Cuda(backend)
        self._regions: dict = {}

    def make(self, label, name, nbytes, boot_id=7, generation=1, fingerprint="same model") -> int:
        self._regions[label] = self._back.make(
            name, nbytes, boot_id=boot_id, generation=generation, fingerprint=fingerprint.encode()
        )
        return os.getpid()

    def attach(self, label, record, fingerprint="same model", boot_id=7, generation=1) -> int:
        fields = {**record, "fingerprint": record["fingerprint"].encode()}
        self._regions[label] = self._back.attach(
            RegionRecord(**fields), fingerprint.encode(), boot_id, generation
        )
        return self._regions[label].nbytes

    def fill(self, label, seed) -> str:
        region = self._regions[label]
        data = np.random.default_rng(seed).bytes(region.nbytes)
        self._back.write(region, 0, data)
        return hashlib.sha1(data).hexdigest()

    def digest(self, label) -> str:
        region = self._regions[label]
        return hashlib.sha1(self._back.read(region, 0, region.nbytes)).hexdigest()

    def copy(self, strips, src, dst) -> int:
        parts = tuple(Strip(*strip) for strip in strips)
        extents = [
            max((s[side] + (s.rows - 1) * s[side + 4] + s.nbytes for s in parts), default=0)
            for side in (0, 1)
        ]
        made = CopyPlan(parts, *extents, sum(s.rows * s.nbytes for s in parts))
        return self._back.copier.copy(made, self._regions[src], self._regions[dst])

    def let_go(self, boot_id, labels) -> float:
        """Seconds until nothing of this boot is mapped."""
        begin = time.monotonic()
        left = self._back.let_go(boot_id, labels)
        for label in labels:
            self._regions[label].close()
        assert left == 0, f"{left} mappings are still there"
        return time.monotonic() - begin

    def close(self, label) -> None:
        self._regions.pop(label).close()

    def close_kept(self, label) -> None:
        """Close, and keep the label: what comes after must be refused."""
        self._regions[label].close()

    def unlink(self, label) -> bool:
        return self._regions[label].unlink()

    def speed(self, strips, src, dst, repeats) -> float:
        """Bytes a second, the best of some."""
        best = 0.0
        for _ in range(repeats):
            begin = time.perf_counter()
            best = max(best, self.copy(strips, src, dst) / (time.perf_counter() - begin))
        return best

    def seconds(self, command, arguments) -> float:
        begin = time.perf_counter()
        getattr(self, command)(**arguments)
        return time.perf_counter() - begin

    def host_speed(self, label, nbytes, to_host, repeats) -> float:
        """Bytes a second between a region and pinned host memory, the best of some."""
        region, copier, gpu = self._regions[label], self._back.copier, self._back.gpu
        made = CopyPlan((Strip(0, 0, nbytes, 1, 0, 0),), nbytes, nbytes, nbytes)
        with gpu.use():
            host = self._back.driver.host_alloc(nbytes)
        pair = (region, host) if to_host else (host, region)
        sizes = {"src_nbytes": nbytes, "dst_nbytes": nbytes}
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            copier.copy(made, *pair, **sizes)
            times.append(time.perf_counter() - begin)
        with gpu.use():
            self._back.driver.host_free(host)
        return nbytes / min(times)

    def torch_speed(self, page_bytes, ids, places, repeats) -> list[float]:
        """Bytes a second of torch in one process: rows gathered and put, and one piece. bfloat16."""
        import torch

        rows = torch.ones(max(ids + places) + 1, page_bytes // 2, dtype=torch.bfloat16).cuda()
        target = torch.zeros_like(rows)
        src, dst = torch.tensor(ids).cuda(), torch.tensor(places).cuda()
        whole = rows[: len(ids)]
        return [
            len(ids) * page_bytes / _best(torch, work, repeats)
            for work in (
                lambda: target.index_copy_(0, dst, rows.index_select(0, src)),
                lambda: target[: len(ids)].copy_(whole),
            )
        ]

    def calibrate(self, src, piece_bytes) -> str:
        return self._back.copier.calibrate(self._regions[src], piece_bytes).as_text()

    def reset(self) -> None:
        for region in self._regions.values():
            region.close()
        self._regions.clear()


def _best(torch, work, repeats) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    peer = Peer(sys.argv[1])
    print(json.dumps({"ok": os.getpid()}), flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"ok": getattr(peer, name)(**arguments)}
        except (IpcError, AssertionError) as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
