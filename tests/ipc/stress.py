"""Two writers, four readers, one index, one KV region, and a SIGKILL every 200 ms.

    python stress.py PREFIX SECONDS KILL_EVERY_S      -> one line of JSON

The parent plays the node: it starts a process, kills it, reaps it, sweeps its slot, gives the slot
a new boot id and starts another. The content of a block is a function of its transfer id and
position, so a reader can tell whether what it copied is what was written under that generation.

Forked, not spawned: a restart must cost less than the time between two kills, and nothing here uses
threads.
"""

import collections
import json
import os
import random
import signal
import sys
import time
import traceback
import zlib

import numpy as np

from ipc import layout
from ipc.copy import HostCopier, plan
from ipc.entries import unclean_slots
from ipc.errors import IndexFull, PeerGone, WaitTimeout
from ipc.index import Index
from ipc.lookup import ack_words
from ipc.records import KVLayout, Role, State
from ipc.segment import Segment

WRITERS, READERS = (0, 1), (2, 3, 4, 5)
BLOCKS_EACH, LAYERS, PAGE = 24, 4, 4096
KV = KVLayout(BLOCKS_EACH * len(WRITERS), LAYERS, PAGE, PAGE, PAGE * BLOCKS_EACH * len(WRITERS))
MOST_BLOCKS, HISTORY = 12, 6
WRONG_DATA, LEAK = 3, 4  # exit codes of children


def content(transfer_id: str, position: int) -> int:
    """What every u64 of a block's pages holds."""
    return zlib.crc32(f"{transfer_id}/{position}".encode()) << 32 | position


def name_of(slot: int, boot: int, n: int) -> str:
    return f"{slot}-{boot:x}-{n}"


class Writer:
    """Fills blocks, offers them, takes them back when taken or when the lease ends, and again."""

    def __init__(self, prefix: str, slot: int, boot: int):
        self.index, self.slot, self.boot = Index.attach(prefix + "index", me=slot), slot, boot
        segment = Segment.attach(prefix + "kv")
        self.pages = np.frombuffer(segment.buf, np.uint64).reshape(LAYERS, KV.num_blocks, PAGE // 8)
        self.random = random.Random(boot)
        self.free = list(range(slot * BLOCKS_EACH, (slot + 1) * BLOCKS_EACH))
        self.pinned: dict = {}
        self.n = 0

    def run(self) -> None:
        while True:
            self.offer()
            self.take_back()
            blocks = len(self.free) + sum(map(len, self.pinned.values()))
            if blocks != BLOCKS_EACH or len(self.index.live()) != len(self.pinned):
                os._exit(LEAK)

    def offer(self) -> None:
        count = self.random.randint(1, MOST_BLOCKS)
        if count > len(self.free):
            return
        self.random.shuffle(self.free)
        mine = self.free[:count]
        id_ = name_of(self.slot, self.boot, self.n)
        for position, block in enumerate(mine):
            self.pages[:, block] = content(id_, position)
        lease_s = self.random.choice([0.0005, 0.005, 0.05])
        try:
            ticket = self.index.insert(
                id_, boot_id=self.boot, block_ids=mine, tokens_ready=0, tokens_total=count,
                lease_s=lease_s,
            )  # fmt: skip
            self.index.publish(ticket, block_ids=mine, tokens_ready=count)
        except IndexFull:
            self.index.add_counters(self.slot, index_full=1)
            return
        self.n += 1
        self.free, self.pinned[ticket] = self.free[count:], mine
        self.index.set_load(self.slot, steps=self.n, blocks_free=len(self.free))

    def take_back(self) -> None:
        for ticket in self.index.live():
            why = self.index.released(ticket)
            if why:
                self.index.remove(ticket)
                self.free += self.pinned.pop(ticket)
                self.index.add_counters(self.slot, leases_expired=why == "expired")


class Reader:
    """Finds a recent entry of some writer, copies its blocks, and checks every byte."""

    def __init__(self, prefix: str, slot: int, boot: int):
        self.index, self.slot = Index.attach(prefix + "index", me=slot), slot
        self.region = Segment.attach(prefix + "kv", readonly=True)
        self.mine = np.zeros(LAYERS * MOST_BLOCKS * PAGE, np.uint8)
        self.pages = self.mine.view(np.uint64).reshape(LAYERS, MOST_BLOCKS, PAGE // 8)
        self.layout = KVLayout(MOST_BLOCKS, LAYERS, PAGE, PAGE, MOST_BLOCKS * PAGE)
        self.random, self.copier = random.Random(boot), HostCopier()
        path = f"/dev/shm/{prefix}taken-{slot}-{boot:x}"
        self.taken = open(path, "a", buffering=1)  # noqa: SIM115 (open until the kill)

    def run(self) -> None:
        while True:
            owner = self.random.choice(WRITERS)
            record = self.index.engine(owner)
            n = max(0, record.steps - self.random.randrange(HISTORY))
            entry = self.find(name_of(owner, record.boot_id, n), owner, exclusive=bool(n % 2))
            if entry is not None:
                self.read(entry)

    def find(self, id_: str, owner: int, exclusive: bool):
        """Odd ones belong to one reader only; even ones may be read by all."""
        if not exclusive:
            entry = self.index.select(id_, self.random.choice([owner, None]))
            return entry if entry is not None and entry.complete else None
        try:
            entry = self.index.drop_select(id_, owner, timeout_s=0.002)
        except (WaitTimeout, PeerGone):
            return None
        if self.index.validate(
            entry
        ):  # The lease may be over: then another may not have it either.
            self.taken.write(id_ + "\n")
        return entry

    def read(self, entry) -> None:
        count = len(entry.block_ids)
        if self.random.random() < 0.2:  # A reader that dawdles: leases end, blocks are reused.
            time.sleep(0.001)
        self.copier.copy(
            plan(KV, self.layout, entry.block_ids, range(count)),
            self.region, self.mine.ctypes.data,
            dst_nbytes=self.mine.nbytes,
        )  # fmt: skip
        valid = self.index.validate(entry)
        self.index.drop(entry)
        wanted = np.array([content(entry.transfer_id, at) for at in range(count)], np.uint64)
        right = bool((self.pages[:, :count] == wanted[None, :, None]).all())
        if valid and not right:
            os._exit(WRONG_DATA)
        # load_failures: copies that were bad, and were found out.
        self.index.add_counters(
            self.slot, handoffs_in=valid, stale_reads=not valid, load_failures=not right
        )


class Node:
    """Starts, kills, sweeps and starts again."""

    def __init__(self, prefix: str):
        self.prefix, self.random = prefix, random.Random(5)
        self.index = Index.create(
            prefix + "index", engine_slots=6, entries_per_engine=64, node_boot_id=1
        )
        nbytes = KV.extent_bytes
        self.kv = Segment.create(prefix + "kv", nbytes, purpose="stress", flag="--none")
        self.children: dict[int, int] = {}
        self.boots: list[int] = []
        self.kills = self.cleared = 0

    def start(self, slot: int) -> None:
        boot = self.random.getrandbits(60) | 1
        self.boots.append(boot)
        self.index.set_control(
            slot, engine_id=f"e{slot}", role=Role.BOTH, state=State.READY, boot_id=boot, restarts=0
        )
        pid = os.fork()
        if pid == 0:
            try:
                (Writer if slot in WRITERS else Reader)(self.prefix, slot, boot).run()
            except Exception:  # noqa: BLE001 (the child must not return into the parent's code)
                traceback.print_exc()
            finally:
                os._exit(1)
        self.children[slot] = pid

    def kill(self, slot: int) -> None:
        """Ends the test when the child had ended by itself."""
        pid = self.children.pop(slot)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"child of slot {slot} ended with {os.waitstatus_to_exitcode(status)}")
        self.kills += 1
        self.cleared += self.index.sweep(slot)

    def run(self, seconds: float, every_s: float) -> None:
        for slot in (*WRITERS, *READERS):
            self.start(slot)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(every_s)
            slot = self.random.choice((*WRITERS, *READERS))
            self.kill(slot)
            self.start(slot)
        for slot in list(self.children):
            self.kill(slot)

    def report(self) -> dict:
        records = [self.index.engine(slot) for slot in (*WRITERS, *READERS)]
        total = collections.Counter()
        for record in records:
            for field in ("handoffs_in", "stale_reads", "load_failures", "leases_expired"):
                total[field] += getattr(record, field)
        return {
            "kills": self.kills,
            "copies": total["handoffs_in"],
            "refused": total["stale_reads"],
            "bad_but_refused": total["load_failures"],
            "expired": total["leases_expired"],
            "cleared_by_sweep": self.cleared,
            "leaked_entries": self.leaked_entries(),
            "claims_left": self.claims_left(),
            "taken_twice": self.taken_twice(),
        }

    def leaked_entries(self) -> int:
        shared, geometry = self.index._shared, self.index.geometry
        lines = [
            shared.mm[at : at + layout.LINE]
            for at in (geometry.table(b, o) for b in range(geometry.buckets) for o in range(6))
        ]
        unclean = sum(len(unclean_slots(shared, geometry, slot)) for slot in range(6))
        return unclean + sum(map(any, lines))

    def claims_left(self) -> int:
        geometry, shared = self.index.geometry, self.index._shared
        acks = np.stack([ack_words(shared, geometry, r) for r in range(geometry.engines)])
        return int(np.isin(acks & 3, (layout.WANT, layout.CLAIMED)).sum())

    def taken_twice(self) -> int:
        """Entries that two readers were given. The last line of each file does not count: its
        reader was killed, maybe before it let go, and then another is right to take the entry."""
        holders = collections.defaultdict(set)
        path = "/dev/shm"
        for file in os.listdir(path):
            if file.startswith(self.prefix + "taken-"):
                lines = open(f"{path}/{file}").read().splitlines()  # noqa: SIM115
                for line in lines[:-1]:
                    holders[line].add(file)
                os.unlink(f"{path}/{file}")
        return sum(len(files) > 1 for files in holders.values())


def main(prefix: str, seconds: float, every_s: float) -> None:
    node = Node(prefix)
    try:
        node.run(seconds, every_s)
        print(json.dumps(node.report()), flush=True)
    finally:
        for pid in node.children.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for name in os.listdir("/dev/shm"):
            if name.startswith(prefix):
                os.unlink(f"/dev/shm/{name}")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
