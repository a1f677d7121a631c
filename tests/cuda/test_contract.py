"""The contract of KV memory, on the host back end and on the CUDA one over the fake driver.

The fake driver encodes a reading of the documentation. That the CUDA back end passes here says that
its calls follow that reading, and nothing about a GPU.
"""

from collections.abc import Iterator

import pytest

from tests.cuda import fake
from tests.cuda.contract import RegionContract
from tests.cuda.lab import Lab

KINDS = ("cuda", "cuda-engine", "cuda-foreign", "cuda-fd", "cuda-fabric")


class TestHost(RegionContract):
    @pytest.fixture(scope="class")
    @classmethod
    def lab(cls) -> Iterator[Lab]:
        lab = Lab("host", fake.environment(None))
        yield lab
        lab.close()


class TestCudaOverFakeDriver(RegionContract):
    @pytest.fixture(scope="class", params=KINDS)
    @classmethod
    def lab(cls, request, fake_driver) -> Iterator[Lab]:
        env = fake.environment(fake_driver, FAKE_CUDA_FABRIC=1, FAKE_CUDA_DELAY_US=300)
        lab = Lab(request.param, env)
        yield lab
        lab.close()
