"""The CUDA back end against a driver that does what a bad day would: one process a case."""

import pytest

from tests.cuda import fake
from tests.cuda.cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_case(name, fake_driver, prefix, tmp_path):
    env = CASES[name][1]
    if "FAKE_CUDA_HOLD" in env:
        env = {**env, "FAKE_CUDA_HOLD": str(tmp_path / "hold")}
    fake.run_case(fake_driver, name, CASE_PREFIX=prefix, **env)


def test_without_a_driver_the_error_is_ours():
    """Over whatever this machine has: a GPU, or a sentence, but never a foreign exception."""
    fake.run_code(
        "from ipc.cuda.device import device\n"
        "from ipc.cuda.errors import CudaCallFailed, CudaUnavailable\n"
        "try: print(device())\n"
        "except (CudaUnavailable, CudaCallFailed) as error: print(error)\n"
    )
