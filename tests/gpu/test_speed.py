"""How fast blocks move between two processes on one GPU. Printed, not judged: run with `-s`.

"cuda-engine" is the copy engine alone, "cuda" the kernel (one GPU, so the kernel takes everything).
All times are of the host, from the call until the GPU was seen to be done.
"""

import numpy as np
import pytest

from ipc.copy import plan
from ipc.records import KVLayout
from tests.cuda.lab import Lab, record

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

LAYERS, BLOCKS = 28, 512
PAGES = (16 << 10, 64 << 10, 368 << 10, 1 << 20, 8 << 20, 64 << 20)
MOST_BYTES = 8 << 30  # Of one region.


@pytest.fixture(scope="module", params=["cuda-engine", "cuda"])
def lab(request, start_lab) -> Lab:
    return start_lab(request.param)


@pytest.fixture
def pair(lab, prefix):
    """An owner and a reader with a region of `nbytes` each."""

    def make(nbytes: int, layout: KVLayout):
        owner, reader = lab.peer(), lab.peer()
        owner.make(label="kv", name=prefix + "p", nbytes=nbytes)
        reader.make(label="ours", name=prefix + "d", nbytes=nbytes)
        reader.attach(label="theirs", record=record(prefix + "p", layout, nbytes))
        owner.unlink(label="kv")
        reader.unlink(label="ours")
        return reader

    yield make
    lab.tidy()


@pytest.mark.parametrize("page_bytes", PAGES)
@pytest.mark.parametrize("order", ["LB", "BL"])
def test_scattered_blocks(pair, lab, gpu, order, page_bytes):
    layers = LAYERS if page_bytes <= 1 << 20 else 2
    blocks = min(BLOCKS, MOST_BYTES // (layers * page_bytes))
    outer = blocks * page_bytes, layers * page_bytes
    strides = (page_bytes, outer[0]) if order == "LB" else (outer[1], page_bytes)
    layout = KVLayout(blocks, layers, page_bytes, *strides)
    reader = pair(layout.extent_bytes, layout)
    for count in (1, 16, 64):
        if 2 * count > blocks:
            continue
        ids = np.random.default_rng(count).permutation(blocks)[: 2 * count].tolist()
        strips = [list(s) for s in plan(layout, layout, ids[:count], ids[count:]).strips]
        speed = reader.speed(strips=strips, src="theirs", dst="ours", repeats=10)
        what = f"{order} {count} x {page_bytes:,} B x {layers}"
        print(f"\n{gpu} {lab.backend} {what}: {speed / 1e9:.1f} GB/s")
        assert speed > 0


def test_whole_region(pair, lab, gpu):
    nbytes = 1 << 30
    layout = KVLayout(1, 1, nbytes, nbytes, nbytes)
    reader = pair(nbytes, layout)
    speed = reader.speed(strips=[[0, 0, nbytes, 1, 0, 0]], src="theirs", dst="ours", repeats=5)
    print(f"\n{gpu} {lab.backend} 1 GiB in one piece: {speed / 1e9:.1f} GB/s")
    assert speed > 0


@pytest.mark.parametrize("page_bytes", PAGES)
def test_torch_in_one_process(lab, gpu, page_bytes):
    """What there is to compare with: the same bytes, no other process, no table of addresses."""
    if lab.backend == "cuda-engine":
        pytest.skip("torch does not use it")
    count = max(2, min(64 * LAYERS, (1 << 30) // page_bytes))
    ids = np.random.default_rng(0).permutation(2 * count).tolist()
    gathered, piece = lab.peer().torch_speed(
        page_bytes=page_bytes, ids=ids[:count], places=ids[count:], repeats=10
    )
    lab.tidy()
    what = f"{count} x {page_bytes:,} B"
    print(
        f"\n{gpu} torch {what}: select and put {gathered / 1e9:.1f}, copy_ {piece / 1e9:.1f} GB/s"
    )
    assert min(gathered, piece) > 0


@pytest.mark.parametrize("nbytes", [2 << 20, 64 << 20])
@pytest.mark.parametrize("to_host", [True, False], ids=["to_host", "from_host"])
def test_pinned_host_memory(pair, lab, gpu, to_host, nbytes):
    """The GPU's part of the staged path; 2 MiB is its chunk."""
    reader = pair(nbytes, KVLayout(1, 1, nbytes, nbytes, nbytes))
    speed = reader.host_speed(label="ours", nbytes=nbytes, to_host=to_host, repeats=10)
    print(f"\n{gpu} {lab.backend} {nbytes:,} B, pinned memory: {speed / 1e9:.1f} GB/s")
    assert speed > 0


@pytest.mark.parametrize("nbytes", [64 << 20, MOST_BYTES])
def test_export_map_unmap(lab, gpu, prefix, nbytes):
    owner, reader = lab.peer(), lab.peer()
    owner.make(label="warm", name=prefix + "w", nbytes=4096)  # The context, and the first calls.
    make = {"label": "kv", "name": prefix + "p", "nbytes": nbytes}
    told = record(prefix + "p", KVLayout(1, 1, nbytes, nbytes, nbytes), nbytes)
    warm = record(prefix + "w", KVLayout(1, 1, 4096, 4096, 4096), 4096)
    reader.attach(label="warm", record=warm)
    times = [
        owner.seconds(command="make", arguments=make),
        reader.seconds(command="attach", arguments={"label": "theirs", "record": told}),
        reader.seconds(command="close", arguments={"label": "theirs"}),
    ]
    owner.unlink(label="kv")
    owner.unlink(label="warm")
    lab.tidy()
    shown = ", ".join(f"{t * 1e3:.1f} ms" for t in times)
    print(f"\n{gpu} {lab.backend} {nbytes:,} B: make and export, map, unmap: {shown}")


@pytest.mark.parametrize("page_bytes", PAGES)
def test_calibration(pair, lab, gpu, page_bytes):
    if lab.backend == "cuda-engine":
        pytest.skip("there is no kernel to compare with")
    layout = KVLayout(16, 1, page_bytes, page_bytes, 16 * page_bytes)
    found = pair(layout.extent_bytes, layout).calibrate(src="theirs", piece_bytes=page_bytes)
    print(f"\n{gpu}\n{found}")
    assert found
