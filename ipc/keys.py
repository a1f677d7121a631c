"""A transfer id as the index sees it: 128 bits, and from them a tag and two buckets."""

import functools
import hashlib
import struct
from typing import NamedTuple

_PARTS = struct.Struct("<QII")
_new = tuple.__new__  # Half the time of the constructor, which only checks the number of fields.


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
    tag_word, one, other = _PARTS.unpack(digest)
    first = one % buckets
    second = (first + 1 + other % (buckets - 1)) % buckets
    if not tag_word:
        return Key(digest, b"\1" + bytes(7), 1, first, second)
    return _new(Key, (digest, digest[:8], tag_word, first, second))
