"""Owns share 0 of a pool and inserts for ever: `pool_writer.py NAME PAGE_BYTES LAYERS`."""

import itertools
import os
import sys

from ipc.pool import Pool


def main(name: str, page_bytes: int, layers: int) -> None:
    pool = Pool.attach(name, me=0, fingerprint=b"model")
    pool.own(page_bytes, layers, grace_s=0.0)
    print("ready", flush=True)
    start = int.from_bytes(os.urandom(2), "little") * 64
    for n in itertools.count(start):
        word = (n & 0xFFFFFFFF).to_bytes(4, "little")
        pool.insert((n % 64).to_bytes(32, "big"), word * (page_bytes * layers // 4))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
