"""Command lines that are honoured: who gets which cores, GPUs, memory and vLLM arguments."""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path

import pytest

from pdnode import assign, checks, config, flags, plan_text, vllm_args
from pdnode.assign import Assignment, Machine
from pdnode.device import CpuDevice, GpuDevice
from pdnode.topology import Box, Core, CpuBox, Gpu, Link

MIB, GIB = 1 << 20, 1 << 30


def cores(n: int) -> CpuBox:
    return CpuBox(tuple(Core(cpu, 0, (0, cpu)) for cpu in range(n)))


def gpu_box(n: int) -> Box:
    gpus = tuple(Gpu(f"GPU-{i}{i}{i}{i}", i) for i in range(n))
    links = {(a.uuid, b.uuid): Link(True, 12, 25.0) for a in gpus for b in gpus if a != b}
    return Box(gpus, links)


def machine(
    n_cores: int = 8, n_gpus: int = 0, visible: str | None = None, cpu_build: bool | None = None
) -> Machine:
    return Machine(
        cpu=cores(n_cores),
        gpus=gpu_box(n_gpus) if n_gpus else None,
        no_gpus_because="" if n_gpus else "no NVIDIA driver here",
        visible_devices=visible,
        cpu_build=not n_gpus if cpu_build is None else cpu_build,
    )


def place(text: str, where: Machine) -> Assignment:
    own, rest = flags.split(text.split())
    assert rest == []
    return assign.assign(own, where)


def rank_cores(devices: tuple[object, ...]) -> list[tuple[tuple[int, ...], ...]]:
    return [device.rank_cores for device in devices if isinstance(device, CpuDevice)]


def visible_gpus(devices: tuple[object, ...]) -> list[str]:
    return [
        device.env()["CUDA_VISIBLE_DEVICES"] for device in devices if isinstance(device, GpuDevice)
    ]


# ---- cores


@pytest.mark.parametrize(
    "text, n_cores, prefill, decode",
    [
        ("", 8, [((0, 1, 2, 3),)], [((4, 5, 6, 7),)]),
        ("", 3, [((0, 1),)], [((2,),)]),
        ("", 1, [((0,),)], [((0,),)]),
        ("--prefill-cpus 0-3 --decode-cpus 4-7", 8, [((0, 1, 2, 3),)], [((4, 5, 6, 7),)]),
        ("--prefill-cpus 6,0-2 --decode-cpus 7", 8, [((0, 1, 2, 6),)], [((7,),)]),
        ("--prefill_cpus=0 --decode_cpus=1", 2, [((0,),)], [((1,),)]),
        (
            "--prefill-cpus 0-4 --decode-cpus 5-7 --prefill-engines 2",
            8,
            [((0, 1, 2),), ((3, 4),)],
            [((5, 6, 7),)],
        ),
        (
            "--prefill-cpus 0 --decode-cpus 1 --prefill-engines 2 --decode-engines 2",
            2,
            [((0,),), ((0,),)],
            [((1,),), ((1,),)],
        ),
        (
            "--prefill-cpus 0-1 --decode-cpus 2 --prefill-engines 3",
            3,
            [((0,),), ((1,),), ((0,),)],
            [((2,),)],
        ),
        ("--prefill-tp 2", 8, [((0, 1), (2, 3))], [((4, 5, 6, 7),)]),
        (
            "--decode-cpus 4-7 --prefill-cpus 0-3 --decode-tp 2 --decode-engines 2",
            8,
            [((0, 1, 2, 3),)],
            [((4,), (5,)), ((6,), (7,))],
        ),
        ("--prefill-cpus 0 --decode-cpus 1 --decode-tp 2", 2, [((0,),)], [((1,), (1,))]),
    ],
)
def test_cores(text: str, n_cores: int, prefill: object, decode: object) -> None:
    assignment = place(text, machine(n_cores))
    assert rank_cores(assignment.prefill) == prefill
    assert rank_cores(assignment.decode) == decode


@pytest.mark.parametrize(
    "text, n_cores, words",
    [
        ("", 1, ["share core 0"]),
        (
            "--prefill-cpus 0 --decode-cpus 1 --prefill-engines 2 --decode-engines 2",
            2,
            ["2 prefill engines share 1 core(s) (0)", "2 decode engines share 1 core(s) (1)"],
        ),
        ("--prefill-tp 2", 2, ["--prefill-tp 2 puts 2 ranks on 1 core(s)"]),
        ("", 8, []),
    ],
)
def test_sharing_cores_is_said(text: str, n_cores: int, words: list[str]) -> None:
    warnings = place(text, machine(n_cores)).warnings
    assert len(warnings) == len(words)
    for warning, word in zip(warnings, words, strict=True):
        assert word in warning


# ---- GPUs


@pytest.mark.parametrize(
    "text, visible, prefill, decode",
    [
        (
            "--prefill-gpus 0,1 --decode-gpus 2,3",
            None,
            ["GPU-0000,GPU-2222,GPU-3333", "GPU-1111,GPU-2222,GPU-3333"],
            ["GPU-2222,GPU-0000,GPU-1111", "GPU-3333,GPU-0000,GPU-1111"],
        ),
        (
            "--prefill-gpus 0 --decode-gpus 2,3 --decode-tp 2",
            None,
            ["GPU-0000,GPU-2222,GPU-3333"],
            ["GPU-2222,GPU-3333,GPU-0000"],
        ),
        # Numbers count what CUDA_VISIBLE_DEVICES shows, in its order.
        (
            "--prefill-gpus 0 --decode-gpus 1",
            "3,1",
            ["GPU-3333,GPU-1111"],
            ["GPU-1111,GPU-3333"],
        ),
        (
            "--prefill-gpus 1 --decode-gpus 0",
            "GPU-2222,GPU-11",
            ["GPU-1111,GPU-2222"],
            ["GPU-2222,GPU-1111"],
        ),
        (
            "--prefill-gpus GPU-3333 --decode-gpus 0",
            "1,3",
            ["GPU-3333,GPU-1111"],
            ["GPU-1111,GPU-3333"],
        ),
        ("", "2,0", ["GPU-2222,GPU-0000"], ["GPU-0000,GPU-2222"]),
        # CUDA ignores an unknown entry and all that follow.
        ("", "1,2,9,3", ["GPU-1111,GPU-2222"], ["GPU-2222,GPU-1111"]),
        ("", "2", ["GPU-2222"], ["GPU-2222"]),
        ("--prefill-tp 2", "0,1,2", ["GPU-0000,GPU-1111,GPU-2222"], ["GPU-2222,GPU-0000,GPU-1111"]),
    ],
)
def test_gpus(text: str, visible: str | None, prefill: list[str], decode: list[str]) -> None:
    assignment = place(text, machine(n_gpus=4, visible=visible))
    assert visible_gpus(assignment.prefill) == prefill
    assert visible_gpus(assignment.decode) == decode


def test_gpu_numbers_without_a_driver_come_from_the_flags() -> None:
    assignment = place("--prefill-gpus 0 --decode-gpus 1,2 --decode-tp 2 --dry-run", machine())
    assert visible_gpus(assignment.prefill) == ["0,1,2"]
    assert visible_gpus(assignment.decode) == ["1,2,0"]
    assert "no NVIDIA driver here" in assignment.not_checked[0]


def test_gpu_numbers_without_a_driver_are_relative_to_the_environment() -> None:
    where = machine(visible="5,GPU-abcd")
    assignment = place("--prefill-gpus 1 --decode-gpus 0 --dry-run", where)
    assert visible_gpus(assignment.prefill) == ["GPU-abcd,5"]
    assert visible_gpus(assignment.decode) == ["5,GPU-abcd"]


def test_cpu_build_leaves_gpus_unused_and_says_so() -> None:
    assignment = place("", machine(n_gpus=4, cpu_build=True))
    assert rank_cores(assignment.prefill) == [((0, 1, 2, 3),)]
    assert "4 GPU(s) stay unused" in assignment.warnings[0]


def test_hidden_gpus_mean_cores() -> None:
    assignment = place("", machine(n_gpus=4, visible="", cpu_build=True))
    assert rank_cores(assignment.prefill) == [((0, 1, 2, 3),)]
    assert assignment.warnings == ()


# ---- the whole command line


@pytest.fixture
def port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_every_flag_arrives(model: str, port: int) -> None:
    parsed = config.parse(
        [
            model,
            *("--prefill-engines", "2", "--decode-engines", "3", "--decode-tp", "2"),
            *("--strict", "--index-entries", "64", "--lease", "7", "--start-timeout", "8"),
            *("--health_timeout", "9.5", "--drain-timeout=10", "--host", "localhost"),
            *("--port", str(port), "--max-model-len", "2k", "--dtype", "float32"),
            *("--kv-cache-memory-bytes", "80M", "--served-model-name", "a", "b"),
        ]
    )
    assert [engine.engine_id for engine in parsed.engines] == [
        "prefill-0",
        "prefill-1",
        "decode-0",
        "decode-1",
        "decode-2",
    ]
    assert [engine.slot for engine in parsed.engines] == [0, 1, 2, 3, 4]
    assert [engine.tensor_parallel_size for engine in parsed.engines] == [1, 1, 2, 2, 2]
    assert (parsed.model, parsed.host, parsed.port) == (model, "localhost", port)
    assert (parsed.flow, parsed.strict, parsed.dry_run) == ("prefill-first", True, False)
    assert (parsed.index_entries, parsed.kv_cache_bytes) == (64, 80 * MIB)
    assert (parsed.lease_s, parsed.start_timeout_s) == (7, 8)
    assert (parsed.health_timeout_s, parsed.drain_timeout_s) == (9.5, 10)
    assert parsed.frontend_args.served_model_name == ["a", "b"]
    assert parsed.frontend_args.model == model
    assert (parsed.frontend_args.host, parsed.frontend_args.port) == ("localhost", port)


def test_engine_arguments_are_a_vllm_command_line(model: str, port: int) -> None:
    parsed = config.parse(["--max-model-len", "512", model, "--port", str(port), "--decode-tp=2"])
    for engine in parsed.engines:
        args = vllm_args.parse(engine.vllm_args)
        assert args.model == model
        assert args.max_model_len == 512
        assert args.kv_cache_memory_bytes == parsed.kv_cache_bytes
        assert args.tensor_parallel_size == (2 if engine.role == "decode" else 1)


def test_model_flag_is_the_model(model: str, port: int) -> None:
    assert config.parse(["--model", model, "--port", str(port)]).model == model


def test_defaults(model: str, port: int) -> None:
    parsed = config.parse([model, f"--port={port}"])
    assert (parsed.host, parsed.flow, parsed.index_entries) == ("127.0.0.1", "prefill-first", 4096)
    assert (parsed.lease_s, parsed.start_timeout_s) == (60, 600)
    assert (parsed.health_timeout_s, parsed.drain_timeout_s) == (60, 30)
    assert vllm_args.default("port") == config.DEFAULT_PORT == 8000


def test_without_a_model_the_embedded_one_is_served(
    monkeypatch: pytest.MonkeyPatch, model: str, port: int
) -> None:
    monkeypatch.setattr("pdnode.default_model.ensure", lambda: Path(model))
    parsed = config.parse(["--port", str(port)])
    assert parsed.model == parsed.frontend_args.model == model
    assert parsed.frontend_args.served_model_name == ["SmolLM2-135M-Instruct"]
    named = config.parse(["--port", str(port), "--served-model-name", "mine"])
    assert named.frontend_args.served_model_name == ["mine"]


def test_a_config_file_may_hold_both_kinds_of_flags(tmp_path: Path, model: str, port: int) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(f"model: {model}\nport: {port}\nprefill-engines: 2\nstrict: true\nlease: 5\n")
    parsed = config.parse(["--config", str(file), "--lease", "6"])
    assert len(parsed.prefill) == 2
    assert (parsed.model, parsed.port, parsed.strict, parsed.lease_s) == (model, port, True, 6)


def test_a_unix_socket_needs_no_port(tmp_path: Path, model: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        parsed = config.parse(
            [model, "--uds", str(tmp_path / "sock"), "--port", str(taken.getsockname()[1])]
        )
    assert parsed.frontend_args.uds == str(tmp_path / "sock")


# ---- memory


@pytest.mark.parametrize(
    "shm_bytes, memory_bytes, n_ranks, expected",
    [
        (100 * GIB, 100 * GIB, 2, 2 * GIB),
        (10 * GIB, 100 * GIB, 2, 2 * GIB),
        (100 * GIB, 10 * GIB, 4, GIB),
        (GIB, GIB, 4, 102 * MIB),
        (64 * MIB, GIB, 4, 64 * MIB),
    ],
)
def test_default_kv_size(
    monkeypatch: pytest.MonkeyPatch, shm_bytes: int, memory_bytes: int, n_ranks: int, expected: int
) -> None:
    monkeypatch.setattr(checks, "free_shm_bytes", lambda: shm_bytes)
    monkeypatch.setattr(checks, "available_memory_bytes", lambda: memory_bytes)
    assert checks.default_kv_bytes(n_ranks) == expected


def test_memory_of_this_machine_is_readable() -> None:
    assert checks.free_shm_bytes() > 0
    assert checks.available_memory_bytes() > 0


def test_kv_size_from_vllms_variable(
    monkeypatch: pytest.MonkeyPatch, model: str, port: int
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    parsed = config.parse([model, "--port", str(port)])
    assert parsed.kv_cache_bytes == GIB
    assert not any("kv-cache-memory" in arg for arg in parsed.engines[0].vllm_args)


def test_a_bound_environment_is_overruled_and_said(
    monkeypatch: pytest.MonkeyPatch, model: str, port: int
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "all")
    parsed = config.parse([model, "--port", str(port)])
    assert any("VLLM_CPU_OMP_THREADS_BIND=all is ignored" in text for text in parsed.warnings)
    assert parsed.engines[0].device.env()["VLLM_CPU_OMP_THREADS_BIND"] != "all"


def test_one_gpu_is_shared_by_halves(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(config, "_machine", lambda _: machine(n_gpus=1))
    parsed = config.parse(["--dry-run", "--port", str(port)])
    assert parsed.engines[0].vllm_args[-2:] == ("--gpu-memory-utilization", "0.45")
    assert parsed.kv_cache_bytes == 0
    assert "share GPU 0" in parsed.warnings[0]


def test_staged_paths_are_said(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    gpus = gpu_box(2).gpus
    where = Machine(cores(2), Box(gpus), "", None, False)
    monkeypatch.setattr(config, "_machine", lambda _: where)
    parsed = config.parse(["--dry-run", "--port", str(port)])
    assert "no peer access from prefill-0 to decode-0" in parsed.warnings[0]


# ---- --dry-run and --help


def test_plan_of_2p2d_on_two_cores(monkeypatch: pytest.MonkeyPatch, model: str, port: int) -> None:
    monkeypatch.setattr(config, "_machine", lambda _: machine(2))
    parsed = config.parse(
        [
            model,
            *("--prefill-cpus", "0", "--decode-cpus", "1", "--port", str(port)),
            *("--prefill-engines", "2", "--decode-engines", "2", "--dry-run"),
            *("--kv-cache-memory-bytes", "64M", "--dtype", "float32"),
        ]
    )
    assert plan_text.render(parsed).splitlines() == [
        "pdnode plan: nothing was started",
        "",
        f"model  {model}",
        f"serve  http://127.0.0.1:{port}",
        "flow   prefill-first",
        "KV     64 MiB per rank, 256 MiB of /dev/shm for 4 rank(s)",
        "",
        "engine     role     device      TP  environment",
        "prefill-0  prefill  CPU core 0  1   VLLM_CPU_OMP_THREADS_BIND=0",
        "prefill-1  prefill  CPU core 0  1   VLLM_CPU_OMP_THREADS_BIND=0",
        "decode-0   decode   CPU core 1  1   VLLM_CPU_OMP_THREADS_BIND=1",
        "decode-1   decode   CPU core 1  1   VLLM_CPU_OMP_THREADS_BIND=1",
        "",
        "KV from    to        path  link",
        "prefill-0  decode-0  shm   shared memory",
        "prefill-0  decode-1  shm   shared memory",
        "prefill-1  decode-0  shm   shared memory",
        "prefill-1  decode-1  shm   shared memory",
        "",
        "vLLM arguments of every engine (and --tensor-parallel-size where TP is not 1):",
        f"  '{model}' --port {port} --kv-cache-memory-bytes 64M --dtype float32",
        "",
        "warnings:",
        "  - 2 prefill engines share 1 core(s) (0), so they slow each other down: name more "
        "with --prefill-cpus or lower --prefill-engines",
        "  - 2 decode engines share 1 core(s) (1), so they slow each other down: name more "
        "with --decode-cpus or lower --decode-engines",
    ]


def test_plan_of_gpus_without_a_driver(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(config, "_machine", lambda _: machine())
    parsed = config.parse(
        [
            *("--prefill-gpus", "0,1", "--decode-gpus", "2,3", "--decode-tp", "2"),
            *("--dry-run", "--port", str(port)),
        ]
    )
    assert plan_text.render(parsed).splitlines() == [
        "pdnode plan: nothing was started",
        "",
        "model  SmolLM2-135M-Instruct",
        f"serve  http://127.0.0.1:{port}",
        "flow   prefill-first",
        "KV     what vLLM's --gpu-memory-utilization leaves on each GPU",
        "",
        "engine     role     device        TP  environment",
        "prefill-0  prefill  GPU 0         1   CUDA_VISIBLE_DEVICES=0,2,3 "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
        "prefill-1  prefill  GPU 1         1   CUDA_VISIBLE_DEVICES=1,2,3 "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
        "decode-0   decode   GPU 2, GPU 3  2   CUDA_VISIBLE_DEVICES=2,3,0,1 "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
        "",
        "KV from    to        path      link",
        "prefill-0  decode-0  cuda-ipc  not checked",
        "prefill-1  decode-0  cuda-ipc  not checked",
        "",
        "vLLM arguments of every engine (and --tensor-parallel-size where TP is not 1):",
        f"  --model SmolLM2-135M-Instruct --served-model-name SmolLM2-135M-Instruct --port {port}",
        "",
        "not checked:",
        "  - that these GPUs exist, and may read each other's memory: no NVIDIA driver here",
        "  - that vLLM runs on these GPUs: the CPU build is installed, not pdnode[cuda]",
    ]


def test_help_shows_our_flags_then_vllms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        config.parse(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert 0 < text.index("--prefill-gpus") < text.index("SchedulerConfig")


def test_no_flag_of_ours_is_vllms_or_its_beginning() -> None:
    theirs = vllm_args.make_parser()._option_string_actions
    ours = {option for action in flags.own_parser()._actions for option in action.option_strings}
    assert ours
    assert not [(a, b) for a in ours for b in theirs if b.startswith(a)]


@pytest.mark.parametrize(
    ("asked", "by_deadline"),
    [
        ([], True),
        (["--prompt-order", "arrival"], False),
        (["--scheduling-policy", "priority"], False),
        (["--scheduler-cls", "vllm.v1.core.sched.scheduler.Scheduler"], False),
    ],
)
def test_prompts_take_turns_unless_vllm_is_told_how(model, port, asked, by_deadline) -> None:
    parsed = config.parse([model, "--port", str(port), *asked])
    assert bool(parsed.placement.stretch) is by_deadline


def test_parsing_leaves_the_environment_alone(model: str, port: int) -> None:
    before = dict(os.environ)
    config.parse([model, "--port", str(port)])
    assert dict(os.environ) == before


def test_frontend_arguments_hold_no_flag_of_ours(model: str, port: int) -> None:
    parsed = config.parse([model, "--port", str(port)])
    assert isinstance(parsed.frontend_args, argparse.Namespace)
    assert not hasattr(parsed.frontend_args, "prefill_cpus")
