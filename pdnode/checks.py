"""Refusals that look at this machine: is the port free, is the model there, does the KV fit."""

from __future__ import annotations

import errno
import http.client
import os
import re
import socket
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from ipc.layout import Geometry
from pdnode.errors import ConfigError

MIB, GIB = 1 << 20, 1 << 30
SHM = Path("/dev/shm")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
HUB_TIMEOUT_S = 5.0
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
TRUE = ("1", "true", "yes", "on")

# vLLM's queue between an engine and its workers: 10 chunks of 16 MiB, and it refuses to start when
# that much is not free, though it touches little of it.
QUEUE_BYTES = 192 * MIB


def port(host: str, number: int) -> None:
    """Raises ConfigError unless the server could listen there now."""
    if not 0 < number < 65536:
        raise ConfigError(f"--port {number} is not a port: choose one from 1 to 65535")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host or None, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except OSError as error:
        raise ConfigError(_why_not(host, number, error)) from None


def _why_not(host: str, number: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine ({error.strerror})"
    if error.errno == errno.EADDRINUSE:
        return f"--port {number} is in use on {host}: choose another --port"
    return f"cannot listen on {host}, --port {number} ({error.strerror}): choose another --port"


def writable(flag: str, name: str | None) -> Path | None:
    """The file to write; raises ConfigError when that is known to fail."""
    if name is None:
        return None
    path = Path(name).expanduser()
    if path.is_dir():
        raise ConfigError(f"{flag} {name} is a folder: give the name of a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} {name}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag} {name}: this user may not write there; give another file")
    return path


# ---- model


def model(name: str, *, ask_hub: bool) -> str | None:
    """Raises ConfigError when the model cannot be had; a note when that was not found out."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not any((path / file).is_file() for file in ("config.json", "params.json")):
            raise ConfigError(f"model {name} is a folder without a config.json")
        return None
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"model {name} is a file: name the folder that holds its config.json")
        return None
    if "://" in name:
        return f"that the model {name} exists"
    if not HUB_ID.fullmatch(name) or name.startswith((".", "~", "/")):
        raise ConfigError(f"model {name} does not exist: there is no such folder")
    return _hub_model(name, ask_hub)


def _hub_model(name: str, ask_hub: bool) -> str | None:
    cache = _hub_cache()
    if any(cache.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json")):
        return None
    offline = next((v for v in OFFLINE if os.environ.get(v, "").lower() in TRUE), None)
    reason = f"{offline} forbids to download it" if offline else None
    if ask_hub and reason is None and os.environ.get("VLLM_USE_MODELSCOPE", "").lower() not in TRUE:
        reason = _hub_refuses(name)
    if reason:
        raise ConfigError(
            f"model {name} does not exist: there is no such folder, it is not in the hub cache "
            f"{cache}, and {reason}"
        )
    return f"that the model {name} exists: it would be downloaded from the hub"


def _hub_refuses(name: str) -> str | None:
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        with urllib.request.urlopen(f"{hub}/api/models/{name}", timeout=HUB_TIMEOUT_S):
            return None
    except urllib.error.HTTPError as error:
        # The hub answers 401 for what it does not know; a private model looks the same without the
        # user's token, which is vLLM's to find and to send.
        return f"{hub} does not know it" if error.code == 404 else None
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{hub} cannot be reached ({getattr(error, 'reason', error)})"


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(cache or f"{home}/hub").expanduser()


# ---- memory


def default_kv_bytes(n_ranks: int, pool_bytes: int = 0) -> int:
    """KV of one rank when the user did not say: the rest of the memory is for weights and work."""
    free = max(0, min(free_shm_bytes(), available_memory_bytes()) - pool_bytes)
    share = int(0.4 * free / n_ranks)
    return max(min(2 * GIB, share) // MIB * MIB, 64 * MIB)


def shm(kv_bytes: int, n_ranks: int, index_bytes: int, pool_bytes: int = 0) -> None:
    """Raises ConfigError when /dev/shm cannot hold the KV of all ranks, the pool and the index."""
    rest, have = index_bytes + QUEUE_BYTES, free_shm_bytes()
    need = kv_bytes * n_ranks + pool_bytes + rest
    pool = f", {pool_bytes / MIB:.0f} MiB of KV pool" if pool_bytes else ""
    lower = "--kv-pool-gib or --kv-cache-memory-bytes" if pool_bytes else "--kv-cache-memory-bytes"
    if need > have:
        raise ConfigError(
            f"/dev/shm has {have / MIB:.0f} MiB free and this node needs {need / MIB:.0f} MiB "
            f"({n_ranks} x {kv_bytes / MIB:.0f} MiB of KV{pool} and {rest / MIB:.0f} MiB for "
            f" index and queues): lower {lower}, or enlarge it (in a "
            "container: --shm-size)"
        )


def index_bytes(entries: int, n_engines: int) -> int:
    return Geometry.of(n_engines, entries, None).total


def free_shm_bytes() -> int:
    try:
        stat = os.statvfs(SHM)
    except OSError:
        raise ConfigError(
            f"there is no {SHM}, and the engines share KV through it: mount a tmpfs there"
        ) from None
    return stat.f_bavail * stat.f_frsize


def available_memory_bytes() -> int:
    """What the kernel and, in a container, its limit still allow."""
    available = [_meminfo_available()]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        # "max", or no such file: no limit here.
        with suppress(OSError, ValueError):
            available.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(min(available), 0)


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo does not say how much memory is available")
