"""A transfer id as the index sees it: 128 bits, and from them a tag and two buckets."""

import functools
import hashlib
from typing import NamedTuple


class Key(NamedTuple):
    digest: bytes  # 16: what an entry carries
    tag: bytes  # 8, never zero: what a bucket carries
    tag_word: int  # the same as a number
    first: int  # bucket
    second: int  # bucket, another one


@functools.lru_cache(4096)
def key_of(transfer_id: str, buckets: int) -> Key:
    """blake2b, because ids come from outside and must not be able to pile up in one bucket."""
    digest = hashlib.blake2b(transfer_id.encode(), digest_size=16).digest()
    tag = digest[:8] if any(digest[:8]) else b"\1" + bytes(7)
    first = int.from_bytes(digest[8:12], "little") % buckets
    step = 1 + int.from_bytes(digest[12:], "little") % (buckets - 1)
    return Key(digest, tag, int.from_bytes(tag, "little"), first, (first + step) % buckets)
