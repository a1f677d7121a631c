"""Shared memory between the processes of one node: a lookup index, KV regions, copies, a pipe.

Usable without vLLM: two processes, one box, paged KV, and what each knows of the other.

The life of an entry:

 1. the node makes the index                               index.py   Index.create
 2. a worker makes its KV region and says where it is      memory.py  zeros_in_new, Index.set_region
 3. a peer's worker maps it, or refuses it                 memory.py  HostRegion.attach
 4. the owner's scheduler offers blocks, with a lease      index.py   Index.insert, publish, renew
 5. a reader's scheduler finds them                        index.py   Index.select, drop_select
 6. the reader's worker copies them into its own blocks    copy.py    plan, HostCopier.copy
 7. and asks whether they were still the same              index.py   Index.validate
 8. the reader's scheduler lets go                         index.py   Index.drop
 9. the owner sees that, or the end of the lease           index.py   Index.released
10. ends the entry, and only then reuses the blocks        index.py   Index.remove
 †  the owner died: the node ends what it left             index.py   Index.sweep, segment.sweep

Without a request, by content: an engine says which blocks hold which block hash, and anybody may
look, copy, and ask afterwards whether they still did     prefixes.py  publish, take, still

    /dev/shm
    ┌─ index ───────────────┐    ┌─ KV of P, rank 0 ──────┐    ┌─ KV of D, rank 0 ──────┐
    │ engines: who, load    │    │ header: boot, size ... │    │ header                 │
    │ entries: id -> blocks ├───>│ blocks × layers  ──────┼────┼──> blocks × layers     │
    │ acks: taken, dropped  │    │                        │one │                        │
    └───────────────────────┘    └────────────────────────┘copy└────────────────────────┘
      every process maps it        written by P's worker          written by D's worker

Each byte has one writing process; every record carries boot id and generation; readers check before
and after. Where memory cannot be mapped by the peer, `pipe.py` carries tensors through a ring.
Names that need torch are loaded on first use.
"""

import importlib

from ipc.errors import IpcError
from ipc.index import Index
from ipc.prefixes import Held
from ipc.records import EngineRecord, Entry, KVLayout, RegionRecord, Role, State, Ticket
from ipc.segment import Segment, names, sweep

_LAZY = {
    "HostRegion": "ipc.memory",
    "zeros_in": "ipc.memory",
    "zeros_in_new": "ipc.memory",
    "HostCopier": "ipc.copy",
    "CopyPlan": "ipc.copy",
    "plan": "ipc.copy",
    "HeadSlice": "ipc.heads",
    "head_reads": "ipc.heads",
    "KVPipe": "ipc.pipe",
}

__all__ = [  # noqa: PLE0604 (the keys of _LAZY are strings)
    *_LAZY,
    "EngineRecord",
    "Entry",
    "Held",
    "Index",
    "IpcError",
    "KVLayout",
    "RegionRecord",
    "Role",
    "Segment",
    "State",
    "Ticket",
    "names",
    "sweep",
]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ipc' has no attribute {name!r}")
