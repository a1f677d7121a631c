"""What torch's allocators hand out: exported by some way, or refused in a sentence. Printed: `-s`."""

import pytest

from tests.cuda import fake

pytestmark = pytest.mark.gpu

_SHARE = """
import sys, torch
from ipc.cuda import share
from ipc.cuda.device import device
from ipc.cuda.errors import NotExportable
nbytes = int(sys.argv[1])
tensor = torch.zeros(nbytes, dtype=torch.int8, device="cuda")
torch.cuda.synchronize()
with device().use():
    try:
        made = share.share(tensor.data_ptr(), nbytes)
        print(made.kind.name, f"{tensor.data_ptr() - made.base:,} in {made.range_bytes:,} bytes")
        made.close()
    except NotExportable as error:
        print("NotExportable:", error)
"""


@pytest.mark.parametrize("nbytes", [1 << 16, 16 << 20, 1 << 30])
@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "backend:cudaMallocAsync"])
def test_tensor_is_exported_or_refused(gpu, conf, nbytes):
    env = fake.environment(None, PYTORCH_CUDA_ALLOC_CONF=conf, PYTORCH_ALLOC_CONF=conf)
    done = fake.python(["-c", _SHARE, str(nbytes)], env)
    print(f"\n{conf or 'default'}, {nbytes:,} bytes: {done.stdout.strip()}")
    assert done.returncode == 0, done.stderr
    assert ("NotExportable" in done.stdout) == (conf.startswith("backend")) or "expandable" in conf
