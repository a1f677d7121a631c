"""One engine's prefix table as a reader sees it: which of these hashes it holds, and in which blocks.

Look-ups go hash by hash up to the first that is missing. Searching by halves would be quicker and
wrong: blocks are evicted one by one, so a table may lack the fifth block of a prompt and have the
sixth. What makes it quick is one gather for many hashes, most of which stand at their position.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ipc import prefix_layout
from ipc.cells import Shared
from ipc.errors import LookupFault
from ipc.layout import PAGE
from ipc.prefix_layout import MAX_HASH_BYTES, WINDOW
from ipc.segment import Segment

_FIRST_LOOK, _GROWTH = 32, 32  # hashes looked up at once; then that many times more
_MIXED, _HASH = prefix_layout.MIXED_AT // 8, prefix_layout.HASH_AT // 8
_AFTER = np.arange(1, WINDOW, dtype=np.intp)
_NEAR = _AFTER[:7]
_FEW = 8  # hashes: one by one is quicker than an array
_NONE = np.zeros(0, np.uint64)


class Keys(NamedTuple):
    """Block hashes, made ready for look-ups in any engine's table."""

    words: np.ndarray  # [n, k] u64: the hashes, zero-padded
    mixed: np.ndarray  # [n] u64
    tags: np.ndarray  # [n] u64, the low bits zero

    @classmethod
    def of(cls, hashes: Sequence[bytes], salt: int) -> "Keys":
        """Raises LookupFault for a hash that no table can hold."""
        lengths = set(map(len, hashes)) or {8}
        if min(lengths) < 1 or max(lengths) > MAX_HASH_BYTES:
            raise LookupFault(f"block hashes of {lengths} bytes, 1 to {MAX_HASH_BYTES}")
        width = -(-max(lengths) // 8) * 8
        if lengths == {width}:
            words = _as_words(b"".join(hashes), width)
            mixed = prefix_layout.mix_many(words, width, salt)
        else:
            words = _as_words(b"".join(one.ljust(width, b"\0") for one in hashes), width)
            mixed = np.array([prefix_layout.mix(one, salt) for one in hashes], np.uint64)
        return cls(words, mixed, mixed & np.uint64(prefix_layout.TAG_MASK))

    def part(self, first: int, last: int) -> "Keys":
        return Keys(self.words[first:last], self.mixed[first:last], self.tags[first:last])


class PrefixView:
    """A mapped table. Nothing of it changes but its contents."""

    def __init__(self, segment: Segment):
        """Raises SegmentForeign; the segment stays the caller's to close then."""
        self._shared = Shared(segment)
        try:
            self.geometry, self.boot_id, self.salt = prefix_layout.read_header(self._shared)
        except BaseException:
            self._shared.words.release()
            raise
        segment.populate(write=False)
        slots, mm = self.geometry.slots, self._shared.mm
        self._words = np.ndarray((slots + WINDOW,), np.uint64, mm, PAGE)
        records = (self.geometry.blocks, prefix_layout.RECORD // 8)
        self._records = np.ndarray(records, np.uint64, mm, self.geometry.records_at)
        self._generations = self._records[:, 0]
        self._mask = np.uint64(slots - 1)

    def close(self) -> None:
        del self._words, self._records, self._generations
        self._shared.close()

    def leading(self, keys: Keys) -> int:
        """How many of the first hashes are here, up to the first that is not.

        By 64 bits of each: position and tag. `read` compares whole hashes.
        """
        if len(keys.mixed) > _FEW:
            return len(self._leading_words(keys))
        here = (self._find(mixed, 0) for mixed in keys.mixed.tolist())
        return next((n for n, word in enumerate(here) if not word), len(keys.mixed))

    def has(self, mixed: int) -> bool:
        return self._find(mixed, 0) != 0

    def read(self, keys: Keys) -> tuple[np.ndarray, np.ndarray]:
        """(blocks, generations) of the leading hashes, u64 each; every byte of them compared."""
        words = self._leading_words(keys)
        blocks = ((words & np.uint64(prefix_layout.BLOCK_MASK)) - np.uint64(1)).astype(np.intp)
        within = (blocks >= 0) & (blocks < self.geometry.blocks)
        blocks = blocks[: _leading_true(within)]
        keys = keys.part(0, len(blocks))
        generations = self._generations.take(blocks)
        records = self._records.take(blocks, axis=0)
        sound = (generations & np.uint64(1)).astype(bool)
        sound &= records[:, _MIXED] == keys.mixed
        sound &= (records[:, _HASH : _HASH + keys.words.shape[1]] == keys.words).all(1)
        sound &= self._generations.take(blocks) == generations
        count = _leading_true(sound)
        return blocks[:count], generations[:count]

    def read_one(self, content: bytes, mixed: int) -> tuple[int, int] | None:
        """(block, generation) of one hash; None when it is not here."""
        block = (self._find(mixed, 0) & prefix_layout.BLOCK_MASK) - 1
        if not 0 <= block < self.geometry.blocks:
            return None
        words, at = self._shared.words, self.geometry.records_at + block * prefix_layout.RECORD
        generation = words[at >> 3]
        begin = at + prefix_layout.MIXED_AT
        raw = self._shared.mm[begin : begin + 8 + MAX_HASH_BYTES]
        same = raw == mixed.to_bytes(8, "little") + content.ljust(MAX_HASH_BYTES, b"\0")
        sound = generation & 1 and same and words[at >> 3] == generation
        return (block, generation) if sound else None

    def still(self, blocks: np.ndarray, generations: np.ndarray) -> int:
        """How many of the first blocks have their generation yet."""
        if len(blocks) and not 0 <= int(blocks.max()) < self.geometry.blocks:
            return 0
        return _leading_true(self._generations.take(blocks) == generations)

    def _leading_words(self, keys: Keys) -> np.ndarray:
        n, at, look, parts = len(keys.mixed), 0, _FIRST_LOOK, []
        if n == 0 or not self._find(int(keys.mixed[0]), 0):
            return _NONE  # The usual answer of most engines.
        while at < n:
            part = keys.part(at, at + look)
            parts.append(self._words_of(part))
            at += len(parts[-1])
            if len(parts[-1]) < len(part.mixed):
                break
            look *= _GROWTH
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _words_of(self, keys: Keys) -> np.ndarray:
        """The words of the leading hashes."""
        places = (keys.mixed & self._mask).astype(np.intp)
        words = self._words.take(places)
        tag_mask = np.uint64(prefix_layout.TAG_MASK)
        elsewhere = np.flatnonzero((words & tag_mask) != keys.tags)
        if elsewhere.size:
            near = self._words[places[elsewhere, None] + _NEAR]
            fits = (near & tag_mask) == keys.tags[elsewhere, None]
            words[elsewhere] = near[np.arange(len(near)), fits.argmax(1)]
            for n in elsewhere[~fits.any(1)].tolist():
                words[n] = word = self._find(int(keys.mixed[n]), 1 + len(_NEAR))
                if not word:
                    return words[:n]
        return words

    def _find(self, mixed: int, first: int) -> int:
        """The word of one hash, at its position plus `first` or later; 0 when there is none."""
        at = PAGE + ((mixed & self.geometry.slots - 1) + first) * 8
        raw = self._shared.mm[at : at + (WINDOW - first) * 8]
        tag = (mixed >> prefix_layout.BLOCK_BITS).to_bytes(5, "little")
        found = raw.find(tag)
        while found >= 0 and found & 7 != 3:
            found = raw.find(tag, found + 1)
        return int.from_bytes(raw[found - 3 : found + 5], "little") if found >= 0 else 0


def _leading_true(sound: np.ndarray) -> int:
    """How many of the first are true."""
    first_false = int(sound.argmin()) if len(sound) else 0
    return first_false if len(sound) and not sound[first_false] else len(sound)


def _as_words(raw: bytes, width: int) -> np.ndarray:
    return np.frombuffer(raw, np.uint64).reshape(-1, width // 8)
