"""How fast blocks move between two processes on one GPU. Printed, not judged: run with `-s`.

"cuda-engine" is the copy engine alone, "cuda" the kernel (one GPU, so the kernel takes everything).
"""

import numpy as np
import pytest

from ipc.copy import plan
from ipc.records import KVLayout
from tests.cuda.lab import Lab, record

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

LAYERS, BLOCKS = 28, 512
PAGES = (16 << 10, 64 << 10, 368 << 10, 1 << 20)


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
    blocks = max(64, min(BLOCKS, (8 << 30) // (LAYERS * page_bytes)))
    outer = blocks * page_bytes, LAYERS * page_bytes
    strides = (page_bytes, outer[0]) if order == "LB" else (outer[1], page_bytes)
    layout = KVLayout(blocks, LAYERS, page_bytes, *strides)
    reader = pair(layout.extent_bytes, layout)
    for count in (1, 16, 64):
        ids = np.random.default_rng(count).permutation(blocks)[: 2 * count].tolist()
        strips = [list(s) for s in plan(layout, layout, ids[:count], ids[count:]).strips]
        speed = reader.speed(strips=strips, src="theirs", dst="ours", repeats=10)
        what = f"{order} {count} x {page_bytes:,} B x {LAYERS}"
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
def test_calibration(pair, lab, gpu, page_bytes):
    if lab.backend == "cuda-engine":
        pytest.skip("there is no kernel to compare with")
    layout = KVLayout(64, 1, page_bytes, page_bytes, 64 * page_bytes)
    found = pair(layout.extent_bytes, layout).calibrate(src="theirs", piece_bytes=page_bytes)
    print(f"\n{gpu}\n{found}")
    assert found
