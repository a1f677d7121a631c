"""A pool key as a share sees it: a tag and two buckets."""

import functools
import hashlib
from typing import NamedTuple

from ipc.errors import LookupFault
from ipc.pool_layout import MAX_KEY_BYTES


class PoolKey(NamedTuple):
    tag: bytes  # 8, never zero: what a bucket carries
    tag_word: int  # the same as a number
    first: int  # bucket
    second: int  # bucket, another one


@functools.lru_cache(16384)
def key_of(key: bytes, buckets: int) -> PoolKey:
    """Hashed once more: keys need not be hashes, and must not be able to pile up in one bucket."""
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise LookupFault(f"a pool key of {len(key)} bytes: 1 to {MAX_KEY_BYTES}")
    digest = hashlib.blake2b(key, digest_size=16).digest()
    tag = digest[:8] if any(digest[:8]) else b"\1" + bytes(7)
    first = int.from_bytes(digest[8:12], "little") % buckets
    step = 1 + int.from_bytes(digest[12:], "little") % (buckets - 1)
    return PoolKey(tag, int.from_bytes(tag, "little"), first, (first + step) % buckets)
