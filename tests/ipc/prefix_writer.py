"""An engine that evicts and refills its blocks all the time, until it is killed."""

import hashlib
import random
import sys

from ipc.index import Index
from ipc.segment import Segment

BLOCKS, BLOCK_BYTES = 24, 2048
HASHES = [hashlib.sha256(bytes([n])).digest() for n in range(32)]


def content(block_hash: bytes) -> bytes:
    return block_hash * (BLOCK_BYTES // len(block_hash))


def churn(index_name: str, memory: str, boot_id: int) -> None:
    prefixes, kv = Index.attach(index_name, me=0).prefixes, Segment.attach(memory).buf
    prefixes.own(blocks=BLOCKS, boot_id=boot_id, flag="--test")
    rng = random.Random(boot_id)
    said = False
    while True:
        block, block_hash = rng.randrange(BLOCKS), rng.choice(HASHES)
        prefixes.withdraw(block)
        kv[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = content(block_hash)
        prefixes.publish(block_hash, block)
        if not said and prefixes.published() == BLOCKS:
            said = True
            print("full", flush=True)


if __name__ == "__main__":
    churn(sys.argv[1], sys.argv[2], int(sys.argv[3]))
