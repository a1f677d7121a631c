"""Which path is taken, which are refused: from the plan alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pdnode import kvpath
from pdnode.assign import Assignment
from pdnode.device import CpuDevice
from pdnode.errors import ConfigError

CPUS = Assignment(prefill=(CpuDevice(((0,),)),), decode=(CpuDevice(((1,),)),))


class Gpu:
    kind = "gpu"

    def __init__(self, path: str) -> None:
        self._path = path

    def kv_path_to(self, other: object) -> str:
        return self._path


def engines(path: str) -> list:
    gpu = Gpu(path)
    return [
        SimpleNamespace(engine_id=f"{role}-0", role=role, device=gpu)
        for role in ("prefill", "decode")
    ]


@pytest.mark.parametrize("asked", ["shm", "staged", "cuda-ipc"])
def test_what_is_asked_for_is_taken(asked: str) -> None:
    assert kvpath.between(asked, CPUS.prefill[0], CPUS.decode[0]) == asked
    assert kvpath.between("auto", CPUS.prefill[0], CPUS.decode[0]) == "shm"


def test_cuda_ipc_without_a_gpu_needs_the_stand_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(kvpath.FAKE_DRIVER, raising=False)
    with pytest.raises(ConfigError, match=r"--kv-path cuda-ipc needs GPUs .*--kv-path auto"):
        kvpath.prepared("cuda-ipc", CPUS)
    library = tmp_path / "libcuda.so.1"
    monkeypatch.setenv(kvpath.FAKE_DRIVER, str(library))
    with pytest.raises(ConfigError, match=r"libcuda\.so\.1"):
        kvpath.prepared("cuda-ipc", CPUS)
    library.touch()
    made = kvpath.prepared("cuda-ipc", CPUS)
    for device in (*made.prefill, *made.decode):
        assert device.env()["LD_LIBRARY_PATH"].split(":")[0] == str(tmp_path)


def test_shm_is_refused_on_gpus() -> None:
    gpus = Assignment(prefill=(Gpu("cuda-ipc"),), decode=(Gpu("cuda-ipc"),))
    with pytest.raises(ConfigError, match="--kv-path shm is for CPU engines"):
        kvpath.prepared("shm", gpus)
    assert kvpath.prepared("auto", gpus) is gpus


def test_a_pair_that_falls_back_is_said_and_strict_refuses_it() -> None:
    assert kvpath.warnings("auto", engines("cuda-ipc"), strict=True) == []
    [said] = kvpath.warnings("auto", engines("staged"), strict=False)
    assert "prefill-0 to decode-0" in said
    with pytest.raises(ConfigError, match="--strict"):
        kvpath.warnings("auto", engines("staged"), strict=True)
    assert kvpath.warnings("staged", engines("staged"), strict=True) == []
    with pytest.raises(ConfigError, match="no peer access from prefill-0 to decode-0"):
        kvpath.warnings("cuda-ipc", engines("staged"), strict=False)


def test_rings_are_counted() -> None:
    ring = kvpath.PIPE_SLOTS * kvpath.PIPE_SLOT_BYTES
    ring += kvpath.REQUEST_SLOTS * kvpath.REQUEST_SLOT_BYTES
    assert kvpath.pipe_bytes("auto", CPUS.prefill, CPUS.decode) == 0
    assert kvpath.pipe_bytes("staged", CPUS.prefill, CPUS.decode * 2) == 3 * 2 * ring
