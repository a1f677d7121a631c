"""All that two engines must agree on before one may read the other's KV, as one digest.

Not the tensor parallel size: a reader takes the heads that it needs from whichever ranks have them.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from pdnode.vllm_compat import VLLM_VERSION, VllmConfig


def facts(config: VllmConfig) -> dict[str, Any]:
    # Two engines with other seeds give one content two names. The digest, as the seed is a secret
    # for hashes that are not cryptographic.
    seed = hashlib.blake2b(os.environ.get("PYTHONHASHSEED", "").encode(), digest_size=8).digest()
    return {
        "vllm": VLLM_VERSION,
        "model": config.model_config.model,
        "revision": config.model_config.revision,
        "dtype": str(config.model_config.dtype),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "block_size": config.cache_config.block_size,
        "prefix_hash": str(config.cache_config.prefix_caching_hash_algo),
        "prefix_hash_seed": seed.hex(),
    }


def of(config: VllmConfig) -> str:
    """64 hex digits."""
    text = json.dumps(facts(config), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
