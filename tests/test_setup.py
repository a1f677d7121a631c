"""What `make setup` leaves behind: pinned packages that fit together, and the default model."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pdnode import default_model

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.lock"
PIN = re.compile(r"[a-z0-9-]+==[^\s;=]+( ; [a-z_]+ == \"[^\"]+\")?")
CONVERSION_BUDGET_S = 300


def lock_lines() -> list[str]:
    return [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]


def locked() -> dict[str, str]:
    pins = [Requirement(line) for line in lock_lines()]
    here = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    return {pin.name: str(pin.specifier).removeprefix("==") for pin in here}


def wanted(*extras: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    texts = list(project["project"]["dependencies"])
    for extra in extras:
        texts += project["project"]["optional-dependencies"][extra]
    return [Requirement(text) for text in texts]


# --- the lock ------------------------------------------------------------------------------------


def test_lock_has_one_exact_version_per_line_and_no_address():
    lines = lock_lines()
    names = [line.partition("==")[0] for line in lines]
    assert [line for line in lines if not PIN.fullmatch(line)] == []
    assert names == sorted(set(names))
    assert not re.search(r"://|@|--", LOCK.read_text().partition("\n\n")[2])


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_lock_leaves_out_what_breaks_transformers(name):
    assert name not in locked()


def test_lock_satisfies_pyproject():
    pins = locked()
    for requirement in wanted("cpu", "default-model", "test"):
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement


def test_installed_packages_are_the_locked_ones():
    different = {}
    for name, version in locked().items():
        installed = importlib.metadata.version(name).partition("+")[0]
        if installed != version:
            different[name] = (installed, version)
    assert different == {}


# --- the default model ---------------------------------------------------------------------------


def command(cache: Path) -> tuple[list[str], dict[str, str]]:
    argv = [sys.executable, "-P", os.fspath(ROOT / "pdnode" / "default_model.py")]
    return argv, os.environ | {"PDNODE_CACHE": os.fspath(cache), "HF_HUB_OFFLINE": "1"}


def start(cache: Path) -> subprocess.Popen:
    argv, environment = command(cache)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(argv, env=environment, **pipes)


def visible(cache: Path) -> list[str]:
    return [path.name for path in cache.glob("*") if not path.name.startswith(".")]


@pytest.fixture(scope="module")
def killed_cache(tmp_path_factory) -> Path:
    """A cache whose only conversion was killed after it had written its first files."""
    cache = tmp_path_factory.mktemp("cache")
    process = start(cache)
    deadline = time.monotonic() + CONVERSION_BUDGET_S
    while not list(cache.glob(".*.partial/tokenizer.json")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, "the conversion wrote nothing"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return cache


@pytest.fixture(scope="module")
def converted(killed_cache) -> Path:
    """The folder that two simultaneous calls made of what the killed one had left."""
    assert visible(killed_cache) == [], (
        "a killed conversion must leave nothing under the final name"
    )
    processes = [start(killed_cache) for _ in range(2)]
    outputs = [process.communicate(timeout=CONVERSION_BUDGET_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    folders = {stdout.strip() for stdout, _ in outputs}
    assert len(folders) == 1
    assert sum("Converting the default model" in stderr for _, stderr in outputs) == 1
    return Path(folders.pop())


@pytest.mark.kill
def test_two_calls_after_a_killed_one_leave_one_complete_folder(converted):
    assert visible(converted.parent) == [converted.name]
    assert list(converted.parent.glob(".*.partial")) == []
    assert {path.name for path in converted.iterdir()} >= set(default_model.FILES)
    # 135 M parameters at 2 bytes, the embedding stored once.
    assert (converted / "model.safetensors").stat().st_size == pytest.approx(269e6, rel=0.01)


def test_a_prepared_model_is_found_at_once_and_left_alone(converted):
    before = {path: path.stat().st_mtime_ns for path in converted.iterdir()}
    argv, environment = command(converted.parent)
    environment["PYTHONPROFILEIMPORTTIME"] = "1"
    found = subprocess.run(argv, env=environment, check=True, capture_output=True, text=True)
    # These two take seconds to import, and `make setup` asks for the model every time.
    assert not re.search(r"\| +(torch|transformers)$", found.stderr, re.MULTILINE)
    assert found.stdout.strip() == str(converted)
    assert {path: path.stat().st_mtime_ns for path in converted.iterdir()} == before


def test_a_folder_that_lost_a_file_is_not_taken_for_complete(converted, monkeypatch):
    remade = []
    monkeypatch.setenv("PDNODE_CACHE", str(converted.parent))
    monkeypatch.setattr(default_model, "_convert", lambda source, target: remade.append(target))
    assert default_model.ensure() == converted
    assert remade == []
    hidden = converted / "model.safetensors.hidden"
    (converted / "model.safetensors").rename(hidden)
    try:
        default_model.ensure()
    finally:
        hidden.rename(converted / "model.safetensors")
    assert remade == [converted]


def test_model_facts(converted):
    config = json.loads((converted / "config.json").read_text())
    generation = json.loads((converted / "generation_config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 8192
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["dtype"] == "bfloat16"
    assert generation["eos_token_id"] == config["eos_token_id"] == 2


def test_tokenizer_splits_text_as_the_published_one_does(converted):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(os.fspath(converted / "tokenizer.json"))
    assert tokenizer.token_to_id("<|im_end|>") == 2
    assert tokenizer.encode("<|im_start|>a<|im_end|>").ids[::2] == [1, 2]
    # Blank lines before a digit stay one token, digits come one by one.
    assert tokenizer.encode("a\n\n12").tokens == ["a", "ĊĊ", "1", "2"]


def test_chat_answers_and_ends(converted):
    # Also shows that transformers' Llama imports beside the installed torch. In a process of its
    # own, so that a later fork or spawn in this one starts without torch threads.
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "chat = [{'role': 'user', 'content': 'What is the capital of France?'}]\n"
        "prompt = tokenizer.apply_chat_template(\n"
        "    chat, add_generation_prompt=True, return_tensors='pt', return_dict=True)\n"
        "ids = model.generate(**prompt, max_new_tokens=30, do_sample=False)[0]\n"
        "print(tokenizer.decode(ids[prompt['input_ids'].shape[1]:]))\n"
    )
    argv = [sys.executable, "-c", code, os.fspath(converted)]
    answer = subprocess.run(
        argv, env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=True, capture_output=True, text=True
    )
    assert answer.stdout.strip() == "The capital of France is Paris.<|im_end|>"


def test_missing_package_is_one_sentence_with_the_command(monkeypatch):
    monkeypatch.setattr(default_model, "MODULE", "pdnode_no_such_module")
    with pytest.raises(default_model.DefaultModelError, match=r"not installed; run `make setup`"):
        default_model.ensure()


def test_little_disk_space_is_refused_before_any_work(monkeypatch, tmp_path):
    usage = type("usage", (), {"free": 5_000_000})
    monkeypatch.setenv("PDNODE_CACHE", str(tmp_path))
    monkeypatch.setattr(default_model.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(default_model.DefaultModelError, match=r"has 5 MB free; .* PDNODE_CACHE"):
        default_model.ensure()
    assert visible(tmp_path) == []


def test_disk_that_fills_up_leaves_nothing(monkeypatch, tmp_path):
    def full(source, folder):
        (folder / "tokenizer.json").write_text("{")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("PDNODE_CACHE", str(tmp_path))
    monkeypatch.setattr(default_model, "_write_tokenizer", full)
    with pytest.raises(default_model.DefaultModelError, match=r"No space left.*PDNODE_CACHE"):
        default_model.ensure()
    assert visible(tmp_path) == []
    assert list(tmp_path.glob(".*.partial")) == []


def test_cache_that_cannot_be_written_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDNODE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(default_model.DefaultModelError, match="PDNODE_CACHE"):
        default_model.ensure()


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({"PDNODE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/pdnode"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/x/.cache/pdnode"),
        ({}, "/home/x/.cache/pdnode"),
    ],
)
def test_cache_dir(monkeypatch, environment, expected):
    for name in ("PDNODE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/x"} | environment).items():
        monkeypatch.setenv(name, value)
    assert default_model.cache_dir() == Path(expected)
