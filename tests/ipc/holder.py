"""A process that makes something in shared memory, says so, and waits to be killed."""

import sys

from ipc.segment import Segment


def hold_segment(name: str) -> Segment:
    made = Segment.create(name, 100, purpose="a test", flag="--test")
    made.buf[:5] = b"still"
    return made


def hold_region(name: str):
    from ipc.memory import HostRegion

    region = HostRegion.create(
        name, 8192, flag="--test", boot_id=7, generation=3, fingerprint=b"same model"
    )
    region.tensor().fill_(42)
    return region


if __name__ == "__main__":
    kind, name = sys.argv[1:]
    held = {"segment": hold_segment, "region": hold_region}[kind](name)
    print("ready", flush=True)
    sys.stdin.read()
