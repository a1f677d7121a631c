"""The owner's half of the prefix entries: publish, withdraw. The engine's scheduler process only.

What is where is kept in that process too; the segment holds what others must see.
"""

from ipc import prefix_layout
from ipc.cells import Shared
from ipc.errors import IndexFull, LookupFault
from ipc.layout import PAGE, WORD_MAX
from ipc.prefix_layout import PrefixGeometry
from ipc.segment import Segment, names, unlink


class PrefixTable:
    """The table of this process's engine. A hash that several blocks hold is found in one of them;
    when that one goes another takes its place."""

    def __init__(self, index_name: str, slot: int, boot_id: int, salt: int, blocks: int, flag: str):
        """Make the segment. Raises NoSharedMemory naming `flag`, SegmentExists, LookupFault."""
        if not 0 < blocks <= prefix_layout.MAX_BLOCKS:
            raise LookupFault(f"a prefix table of {blocks} blocks, 1 to {prefix_layout.MAX_BLOCKS}")
        self.geometry, self._salt, self._flag = PrefixGeometry(blocks), salt, flag
        segment = Segment.create(
            prefix_layout.segment_name(index_name, slot, boot_id), self.geometry.total,
            purpose=f"the prefix table of engine slot {slot}", flag=flag,
        )  # fmt: skip
        segment.populate(write=True)
        self._shared = Shared(segment)
        prefix_layout.write_header(self._shared, self.geometry, boot_id, salt)
        self._hash_of: dict[int, bytes] = {}  # block -> hash
        self._block_of: dict[bytes, int] = {}  # hash -> the block that is found
        self._spare: dict[bytes, list[int]] = {}  # hash -> other blocks that hold it
        self._place: dict[bytes, int] = {}  # hash -> number of its word

    def publish(self, content: bytes, block: int) -> None:
        before = self._hash_of.get(block)
        if before == content:
            return
        self._check(content, block)
        if before is not None:
            self.withdraw(block)
        mixed = prefix_layout.mix(content, self._salt)
        found = content in self._block_of
        place = self._place[content] if found else self._free_place(mixed)
        self._fill(block, content, mixed)
        self._hash_of[block] = content
        if found:
            self._spare.setdefault(content, []).append(block)
        else:
            self._point(content, place, mixed, block)

    def withdraw(self, block: int) -> bool:
        content = self._hash_of.pop(block, None)
        if content is None:
            return False
        if self._block_of[content] == block:
            self._replace(content)
        else:
            self._forget_spare(content, block)
        self._end(block)
        return True

    def withdraw_all(self) -> int:
        """Returns how many blocks held something."""
        blocks = list(self._hash_of)
        for block in blocks:
            self.withdraw(block)
        return len(blocks)

    def __len__(self) -> int:
        """Blocks that hold something."""
        return len(self._hash_of)

    def close(self) -> None:
        self._shared.close()

    def _check(self, content: bytes, block: int) -> None:
        if not 0 <= block < self.geometry.blocks:
            raise LookupFault(f"block {block} of an engine with {self.geometry.blocks} blocks")
        if not 0 < len(content) <= prefix_layout.MAX_HASH_BYTES:
            raise LookupFault(
                f"a block hash of {len(content)} bytes, 1 to {prefix_layout.MAX_HASH_BYTES}"
            )

    def _free_place(self, mixed: int) -> int:
        first = (PAGE >> 3) + (mixed & self.geometry.slots - 1)
        for place in range(first, first + prefix_layout.WINDOW):
            if not self._shared.words[place]:
                return place
        raise IndexFull(
            f"the {prefix_layout.WINDOW} words of a block hash are taken",
            len(self._hash_of), self.geometry.blocks, self._flag,
        )  # fmt: skip

    def _fill(self, block: int, content: bytes, mixed: int) -> None:
        words, at = self._shared.words, self._record(block)
        words[at + prefix_layout.MIXED_AT >> 3] = mixed
        body = at + prefix_layout.HASH_AT
        self._shared.mm[body : body + prefix_layout.MAX_HASH_BYTES] = content.ljust(
            prefix_layout.MAX_HASH_BYTES, b"\0"
        )
        words[at >> 3] = (words[at >> 3] + 1 | 1) & WORD_MAX

    def _end(self, block: int) -> None:
        words, at = self._shared.words, self._record(block)
        words[at >> 3] = (words[at >> 3] + 1) & ~1 & WORD_MAX

    def _point(self, content: bytes, place: int, mixed: int, block: int) -> None:
        self._block_of[content], self._place[content] = block, place
        self._shared.words[place] = mixed & prefix_layout.TAG_MASK | block + 1

    def _replace(self, content: bytes) -> None:
        """Another block is found in the place of the one that goes; or none."""
        others = self._spare.get(content)
        if not others:
            del self._block_of[content]
            self._shared.words[self._place.pop(content)] = 0
            return
        mixed = prefix_layout.mix(content, self._salt)
        self._point(content, self._place[content], mixed, others[-1])
        self._forget_spare(content, others[-1])

    def _forget_spare(self, content: bytes, block: int) -> None:
        others = self._spare[content]
        others.remove(block)
        if not others:
            del self._spare[content]

    def _record(self, block: int) -> int:
        return self.geometry.records_at + block * prefix_layout.RECORD


def unlink_tables(index_name: str, slot: int | None = None) -> int:
    """Take away what earlier boots of an engine left, or everybody's. Returns how many."""
    tables = names(prefix_layout.tables_of(index_name, slot))
    return sum(map(unlink, tables))
