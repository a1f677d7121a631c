"""The engine table: who there is, how loaded, where each rank's KV lies. One cell per writer."""

import time

from ipc import layout
from ipc.cells import Shared, read_cell, write_cell
from ipc.errors import LookupFault
from ipc.records import LOAD_FIELDS, EngineRecord, RegionRecord

_LOAD_POSITION = {name: position for position, name in enumerate(LOAD_FIELDS)}
_BOOT_WORDS = tuple(
    (layout.LINE + side * layout.CONTROL_SPAN + layout.CELL_CRC_BYTES + layout.CONTROL_BOOT_AT) >> 3
    for side in range(2)
)  # from the beginning of a control cell
_NO_CONTROL = bytes(layout.CONTROL.size)
_NO_LOAD = bytes(layout.LOAD.size)


class Engines:
    """Cells of all engines. Who may write which is checked by `Index`; nothing here blocks."""

    def __init__(self, shared: Shared, geometry: layout.Geometry):
        self._shared, self._geometry = shared, geometry
        row = geometry.row(0) + layout.CONTROL_AT
        self._cells = [(row + slot * layout.ROW) >> 3 for slot in range(geometry.engines)]
        self._load: dict[int, list[int]] = {}  # what this process wrote last, by slot

    def set_control(
        self, slot: int, engine_id: str, role: int, state: int, boot_id: int, restarts: int
    ) -> None:
        name = engine_id.encode("ascii")
        if len(name) > 32:
            raise LookupFault(f"engine id {engine_id!r} is {len(name)} characters long, at most 32")
        body = layout.CONTROL.pack(name, role, state, boot_id, restarts)
        at = self._geometry.row(slot) + layout.CONTROL_AT
        write_cell(self._shared, at, layout.CONTROL_SPAN, body)

    def boot(self, slot: int) -> int:
        """The boot id in the control line, 0 when there is none. Two words: for hot paths."""
        words, cell = self._shared.words, self._cells[slot]
        return words[cell + _BOOT_WORDS[words[cell] & 1]]

    def state(self, slot: int) -> int:
        at = self._geometry.row(slot) + layout.CONTROL_AT
        body = self._read(at, layout.CONTROL_SPAN, _NO_CONTROL)
        return layout.CONTROL.unpack(body)[2]

    def set_load(self, slot: int, fields: dict[str, int]) -> None:
        """Set what is named, keep the rest; the heartbeat is now unless it is named."""
        load = self._own_load(slot)
        load[_LOAD_POSITION["heartbeat_ns"]] = time.monotonic_ns()
        for name, value in fields.items():
            load[_position(name)] = int(value)
        self._write_load(slot, load)

    def add_counters(self, slot: int, fields: dict[str, int]) -> None:
        load = self._own_load(slot)
        for name, value in fields.items():
            at = _position(name)
            load[at] = (load[at] + int(value)) & layout.WORD_MAX
        self._write_load(slot, load)

    def set_region(self, slot: int, rank: int, region: RegionRecord) -> None:
        segment, fingerprint = region.segment.encode("ascii"), region.fingerprint
        if len(segment) > 64 or len(fingerprint) > 32:
            raise LookupFault(f"{region}: segment at most 64 and fingerprint at most 32 bytes")
        body = layout.REGION.pack(
            segment, *region[1:10], region.worker_pid, fingerprint, len(fingerprint)
        )
        write_cell(self._shared, self._geometry.region(slot, rank), layout.REGION_SPAN, body)

    def engine(self, slot: int) -> EngineRecord:
        row = self._geometry.row(slot)
        control = self._read(row + layout.CONTROL_AT, layout.CONTROL_SPAN, _NO_CONTROL)
        load = self._read(row + layout.LOAD_AT, layout.LOAD_SPAN, _NO_LOAD)
        name, *rest = layout.CONTROL.unpack(control)
        return EngineRecord(slot, _text(name), *rest, *layout.LOAD.unpack(load))

    def region(self, slot: int, rank: int) -> RegionRecord | None:
        at = self._geometry.region(slot, rank)
        body = read_cell(self._shared, at, layout.REGION_SPAN, layout.REGION.size)
        if body is None:
            return None
        segment, *numbers, pid, fingerprint, length = layout.REGION.unpack(body)
        return RegionRecord(_text(segment), *numbers, fingerprint[:length], pid)

    def _read(self, at: int, span: int, nothing: bytes) -> bytes:
        return read_cell(self._shared, at, span, len(nothing)) or nothing

    def _own_load(self, slot: int) -> list[int]:
        """The last values written. After a restart they come from memory, so counters go on."""
        if slot not in self._load:
            at = self._geometry.row(slot) + layout.LOAD_AT
            body = self._read(at, layout.LOAD_SPAN, _NO_LOAD)
            self._load[slot] = list(layout.LOAD.unpack(body))
        return self._load[slot]

    def _write_load(self, slot: int, load: list[int]) -> None:
        at = self._geometry.row(slot) + layout.LOAD_AT
        write_cell(self._shared, at, layout.LOAD_SPAN, layout.LOAD.pack(*load))


def _position(name: str) -> int:
    if name not in _LOAD_POSITION:
        raise LookupFault(f"no load field {name!r}; there are {', '.join(LOAD_FIELDS)}")
    return _LOAD_POSITION[name]


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("ascii", "replace")
