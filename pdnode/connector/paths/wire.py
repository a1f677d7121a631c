"""What the two ends of a staged path say to each other. Every message is one tensor in a pipe.

    reader -> owner   request   blocks of one transfer, as this entry shows them; or blocks by what they
                                hold, as their generations in the owner's prefix table tell
    owner -> reader   answer    int64 [number, refusal, chunks, bytes]
                      chunks    uint8 [bytes] each; or None: the blocks were given up meanwhile

A chunk is some layers of some blocks, packed as [layers, blocks, page]. Both ends cut in the same
way, so nothing but the bytes is sent with it. Numbers count the requests of one connection.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from ipc.errors import CopyRefused, IpcError, PeerGone, PipeError, StaleRead
from ipc.records import KVLayout
from pdnode.kvpath import CHUNK_BYTES

# Number, boot, generation, page bytes; bytes of the id; how many blocks, and generations.
_REQUEST = struct.Struct("=4QIII")


class Refusal(enum.IntEnum):
    """Why the owner sends nothing."""

    NONE = 0
    GIVEN_UP = 1
    OTHER_BOOT = 2
    OTHER_BLOCKS = 3
    OTHER_LAYOUT = 4


REASONS: dict[Refusal, tuple[type[IpcError], str]] = {
    Refusal.GIVEN_UP: (StaleRead, "its owner has given it up"),
    Refusal.OTHER_BOOT: (PeerGone, "its owner is another boot of that engine"),
    Refusal.OTHER_BLOCKS: (CopyRefused, "the blocks asked for are not in its entry, or not there"),
    Refusal.OTHER_LAYOUT: (CopyRefused, "the pages of the two engines differ in size"),
}


@dataclass(frozen=True, slots=True)
class Request:
    """``blocks`` of the owner, in the order in which the reader wants them.

    Of the entry ``transfer_id`` in its ``generation``; or, with ``generations``, one each, of nobody's.
    """

    number: int
    boot_id: int
    generation: int
    page_bytes: int
    transfer_id: str
    blocks: tuple[int, ...]
    generations: tuple[int, ...] = ()

    def pack(self) -> torch.Tensor:
        name = self.transfer_id.encode()
        head = _REQUEST.pack(
            self.number, self.boot_id, self.generation, self.page_bytes, len(name), len(self.blocks),
            len(self.generations),
        )  # fmt: skip
        numbers = np.asarray(self.blocks, np.int64).tobytes()
        numbers += np.asarray(self.generations, np.uint64).tobytes()
        raw = head + numbers + name
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    @classmethod
    def unpack(cls, tensor: torch.Tensor | None) -> Request:
        """Raises PipeError for anything else."""
        raw = b"" if tensor is None else tensor.numpy().tobytes()
        if len(raw) < _REQUEST.size:
            raise PipeError(f"a request of {len(raw)} bytes, at least {_REQUEST.size}")
        *numbers, name_bytes, count, held = _REQUEST.unpack_from(raw)
        between = _REQUEST.size + 8 * count
        at = between + 8 * held
        if len(raw) != at + name_bytes or held not in (0, count):
            raise PipeError(
                f"a request of {len(raw)} bytes that names {at + name_bytes}, for {count} blocks and "
                f"{held} generations"
            )
        blocks = np.frombuffer(raw, np.int64, count, _REQUEST.size)
        generations = np.frombuffer(raw, np.uint64, held, between)
        return cls(*numbers, raw[at:].decode(), (*blocks.tolist(),), (*generations.tolist(),))


class Answer(NamedTuple):
    number: int
    refusal: int
    chunks: int
    nbytes: int

    def pack(self) -> torch.Tensor:
        return torch.tensor(self, dtype=torch.int64)

    @classmethod
    def unpack(cls, tensor: torch.Tensor | None) -> Answer:
        """Raises PipeError for anything else."""
        if tensor is None or tensor.dtype != torch.int64 or tensor.numel() != len(cls._fields):
            raise PipeError(f"no answer but {tensor if tensor is None else tuple(tensor.shape)}")
        return cls(*tensor.tolist())


class Chunk(NamedTuple):
    """Layers [first_layer, + layers) of the requested blocks [first, + count)."""

    first_layer: int
    layers: int
    first: int
    count: int

    def packed(self, page_bytes: int) -> KVLayout:
        """How it lies in the tensor."""
        return KVLayout(self.count, self.layers, page_bytes, page_bytes, self.count * page_bytes)

    def part_of(self, whole: KVLayout) -> KVLayout:
        """These layers of a KV cache; its blocks keep their numbers."""
        skipped = self.first_layer * whole.layer_stride_bytes
        base = whole.base_offset_bytes + skipped
        return replace(whole, num_layers=self.layers, base_offset_bytes=base)

    @property
    def span(self) -> tuple[int, int]:
        """Of the requested blocks."""
        return self.first, self.first + self.count

    def of(self, blocks: Sequence[int]) -> Sequence[int]:
        return blocks[slice(*self.span)]


def chunks(
    num_layers: int, page_bytes: int, blocks: int, limit: int = CHUNK_BYTES
) -> Iterator[Chunk]:
    """Cut so that a chunk has at most ``limit`` bytes, or one page where that is more.

    Layers outermost: in vLLM's caches a layer's blocks lie together, so pieces stay long.
    """
    most = max(1, min(blocks, limit // page_bytes))
    count = -(-blocks // -(-blocks // most))  # as many cuts as it takes, and about equal ones
    layers = max(1, limit // (count * page_bytes)) if count == blocks else 1
    for layer in range(0, num_layers, layers):
        for first in range(0, blocks, count):
            yield Chunk(layer, min(layers, num_layers - layer), first, min(count, blocks - first))
