"""The contract of KV memory on a real GPU: two processes on one device are enough."""

import pytest

from tests.cuda.contract import RegionContract
from tests.cuda.lab import Lab, Refused
from tests.cuda.test_contract import KINDS

pytestmark = pytest.mark.gpu


class TestCudaOnDevice(RegionContract):
    @pytest.fixture(scope="module", params=(*KINDS, "cuda-torch"))
    @staticmethod
    def lab(request, start_lab) -> Lab:
        """Skips the kinds of memory that this machine does not have."""
        lab = start_lab(request.param)
        name = f"pdcuda-can-{request.param}"
        try:
            first = lab.peer()
            first.make(label="can", name=name, nbytes=4096)
            first.unlink(label="can")
        except Refused as refusal:
            pytest.skip(f"{request.param}: {refusal}")
        lab.tidy()
        return lab
