"""What any KV memory must do, between real processes. One suite; each back end is a subclass.

A subclass has a fixture `lab`; `prefix` is a name in /dev/shm that must be free again at the end.
"""

import hashlib

import numpy as np
import pytest

from ipc.copy import Strip, plan
from ipc.heads import HeadSlice
from ipc.records import KVLayout
from ipc.segment import Segment, unlink
from tests.cuda.lab import Refused, record

PAGE, LAYERS = 2048, 3


def layout(order: str, blocks: int, gap: int = 0) -> KVLayout:
    """LB: layers outermost, BL: blocks outermost; `gap` unused bytes behind each page."""
    page = PAGE + gap
    strides = (page, blocks * page) if order == "LB" else (LAYERS * page, page)
    return KVLayout(blocks, LAYERS, PAGE, *strides, 256)


def bytes_of(seed: int, nbytes: int) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)


def sha(data: np.ndarray) -> str:
    return hashlib.sha1(data.tobytes()).hexdigest()


def moved(source: np.ndarray, target: np.ndarray, strips) -> np.ndarray:
    """The reference: one piece after the other."""
    result = target.copy()
    for strip in strips:
        for row in range(strip.rows):
            at, to = strip.src_off + row * strip.src_step, strip.dst_off + row * strip.dst_step
            result[to : to + strip.nbytes] = source[at : at + strip.nbytes]
    return result


class RegionContract:
    SMALL = layout("LB", 8)
    NBYTES = 65536

    @pytest.fixture(autouse=True)
    def _tidied(self, lab):
        yield
        lab.tidy()

    @pytest.fixture
    def two(self, lab, prefix):
        """An owner with a filled region and a reader that has mapped it as "theirs"."""
        owner, reader = lab.peer(), lab.peer()
        owner.make(label="kv", name=prefix + "kv", nbytes=self.NBYTES)
        owner.fill(label="kv", seed=1)
        reader.attach(label="theirs", record=record(prefix + "kv", self.SMALL, self.NBYTES))
        yield owner, reader
        unlink(prefix + "kv")

    def test_reader_sees_what_the_owner_wrote_and_writes_later(self, two):
        owner, reader = two
        assert reader.digest(label="theirs") == sha(bytes_of(1, self.NBYTES))
        written = owner.fill(label="kv", seed=2)
        assert reader.digest(label="theirs") == written

    def test_fresh_region_is_zero(self, lab, prefix):
        owner = lab.peer()
        owner.make(label="kv", name=prefix + "kv", nbytes=self.NBYTES)
        if lab.zeroes:
            assert owner.digest(label="kv") == sha(np.zeros(self.NBYTES, np.uint8))
        assert owner.unlink(label="kv")

    @pytest.mark.parametrize("orders", ["LB-LB", "LB-BL", "BL-LB", "BL-BL"])
    @pytest.mark.parametrize("gap", [0, 8])
    def test_blocks_arrive_whatever_the_layouts(self, lab, prefix, orders, gap):
        theirs, ours = (
            layout(order, blocks, gap if order == "BL" else 0)
            for order, blocks in zip(orders.split("-"), (40, 23), strict=True)
        )
        rng = np.random.default_rng(gap + len(orders))
        blocks = [4, 5, 6, *rng.permutation(np.arange(7, 40))[:9].tolist()]
        places = [2, 3, 4, *rng.permutation(np.arange(5, 23))[:9].tolist()]
        self._copied(lab, prefix, theirs, ours, plan(theirs, ours, blocks, places).strips)

    @pytest.mark.parametrize("heads", ["all to half", "half to all"])
    def test_half_of_the_heads_of_every_page(self, lab, prefix, heads):
        """P with one rank and D with two, and the other way round: half pages at fixed steps."""
        whole, half = layout("LB", 16), KVLayout(16, LAYERS, PAGE // 2, PAGE // 2, 16 * PAGE // 2)
        theirs, ours = (whole, half) if heads == "all to half" else (half, whole)
        sizes = (2, 1, 1, 0) if theirs is whole else (1, 2, 0, 1)
        strips = plan(theirs, ours, range(16), range(16), HeadSlice(1, 16, *sizes)).strips
        self._copied(lab, prefix, theirs, ours, strips)

    @pytest.mark.parametrize("nbytes", [1, 15, 16, 17, 4095, 40000])
    def test_odd_sizes_and_odd_offsets(self, lab, prefix, nbytes):
        span = KVLayout(1, 1, 150000, 150000, 150000)
        strips = [Strip(3, 5, nbytes, 1, 0, 0), Strip(50001, 60000, nbytes, 2, 41000, 40001)]
        self._copied(lab, prefix, span, span, strips)

    def _copied(self, lab, prefix, theirs: KVLayout, ours: KVLayout, strips) -> None:
        sizes = theirs.extent_bytes + 77, ours.extent_bytes + 77
        owner, reader = lab.peer(), lab.peer()
        owner.make(label="kv", name=prefix + "p", nbytes=sizes[0])
        owner.fill(label="kv", seed=1)
        reader.make(label="ours", name=prefix + "d", nbytes=sizes[1])
        reader.fill(label="ours", seed=2)
        reader.attach(label="theirs", record=record(prefix + "p", theirs, sizes[0]))
        total = reader.copy(strips=[list(s) for s in strips], src="theirs", dst="ours")
        assert total == sum(s.nbytes * s.rows for s in strips)
        expected = moved(bytes_of(1, sizes[0]), bytes_of(2, sizes[1]), strips)
        assert reader.digest(label="ours") == sha(expected)
        assert owner.digest(label="kv") == sha(bytes_of(1, sizes[0])), "the source changed"
        assert owner.unlink(label="kv")
        assert reader.unlink(label="ours")

    @pytest.mark.parametrize(
        "expected,values",
        [
            ({"fingerprint": "other model"}, (b"other model".hex(), b"same model".hex())),
            ({"boot_id": 8}, ("0x8", "0x7")),
            ({"generation": 2}, ("is 1", "expected 2")),
        ],
    )
    def test_region_that_is_not_what_was_agreed_is_refused(self, two, prefix, expected, values):
        told = record(prefix + "kv", self.SMALL, self.NBYTES)
        with pytest.raises(Refused) as caught:
            two[1].attach(label="x", record=told, **expected)
        assert caught.value.kind == "RegionRefused"
        assert all(value in caught.value.text for value in values)

    @pytest.mark.parametrize(
        "stale", [{"boot_id": 6}, {"generation": 9}, {"fingerprint": "old"}, {"nbytes": 4096}]
    )
    def test_record_of_a_region_that_was_replaced_is_refused(self, two, prefix, stale):
        """The index still names what the region no longer is."""
        told = {**record(prefix + "kv", self.SMALL, self.NBYTES), **stale}
        agreed = {k: v for k, v in stale.items() if k != "nbytes"}
        with pytest.raises(Refused) as caught:
            two[1].attach(label="x", record=told, **agreed)
        assert caught.value.kind == "RegionRefused"

    def test_missing_or_foreign_segment_is_refused(self, lab, prefix):
        reader = lab.peer()
        with pytest.raises(Refused, match="SegmentMissing"):
            reader.attach(label="x", record=record(prefix + "no", self.SMALL, self.NBYTES))
        other = Segment.create(prefix + "other", 100, purpose="a test", flag="--x")
        with pytest.raises(Refused, match="SegmentForeign"):
            reader.attach(label="x", record=record(other.name, self.SMALL, self.NBYTES))
        other.unlink()

    def test_plan_that_leaves_a_region_is_refused_before_anything_moves(self, two, prefix):
        reader = two[1]
        reader.make(label="ours", name=prefix + "d", nbytes=self.NBYTES)
        before = reader.fill(label="ours", seed=3)
        inside, outside = [0, 0, 64, 1, 0, 0], [self.NBYTES - 63, 0, 64, 1, 0, 0]
        for strip in outside, [outside[1], outside[0], *outside[2:]]:
            with pytest.raises(Refused, match="CopyRefused"):
                reader.copy(strips=[inside, strip], src="theirs", dst="ours")
        assert reader.digest(label="ours") == before
        assert reader.copy(strips=[], src="theirs", dst="ours") == 0
        assert reader.unlink(label="ours")

    def test_second_attach_counts_and_a_closed_region_is_refused(self, two, prefix):
        _, reader = two
        told = record(prefix + "kv", self.SMALL, self.NBYTES)
        reader.attach(label="again", record=told)
        reader.close_kept(label="theirs")
        assert reader.digest(label="again") == sha(bytes_of(1, self.NBYTES))
        with pytest.raises(Refused, match="RegionRefused"):
            reader.digest(label="theirs")

    def test_two_readers(self, lab, two, prefix):
        other = lab.peer()
        other.attach(label="theirs", record=record(prefix + "kv", self.SMALL, self.NBYTES))
        assert other.digest(label="theirs") == two[1].digest(label="theirs")

    @pytest.mark.kill
    def test_reader_keeps_a_killed_owners_bytes_then_lets_go_within_a_second(self, two, prefix):
        owner, reader = two
        reader.make(label="ours", name=prefix + "d", nbytes=self.NBYTES)
        owner.kill()
        assert reader.digest(label="theirs") == sha(bytes_of(1, self.NBYTES))
        whole = [[0, 0, self.NBYTES, 1, 0, 0]]
        assert reader.copy(strips=whole, src="theirs", dst="ours") == self.NBYTES
        assert reader.digest(label="ours") == sha(bytes_of(1, self.NBYTES))
        assert reader.let_go(boot_id=7, labels=["theirs"]) < 1
        with pytest.raises(Refused, match=r"PeerGone|RegionRefused"):
            reader.copy(strips=whole, src="theirs", dst="ours")
        assert reader.unlink(label="ours")

    @pytest.mark.kill
    def test_successor_of_a_killed_owner_is_mapped_beside_it(self, lab, two, prefix):
        owner, reader = two
        owner.kill()
        unlink(prefix + "kv")
        successor = lab.peer()
        successor.make(label="kv", name=prefix + "kv", nbytes=self.NBYTES, boot_id=8)
        successor.fill(label="kv", seed=5)
        new = record(prefix + "kv", self.SMALL, self.NBYTES, boot_id=8)
        reader.attach(label="new", record=new, boot_id=8)
        assert reader.digest(label="new") == sha(bytes_of(5, self.NBYTES))
        assert reader.digest(label="theirs") == sha(bytes_of(1, self.NBYTES))
        assert reader.let_go(boot_id=7, labels=["theirs"]) < 1
        assert reader.digest(label="new") == sha(bytes_of(5, self.NBYTES))

    @pytest.mark.kill
    def test_killed_reader_does_not_disturb_owner_or_other_readers(self, lab, two, prefix):
        owner, reader = two
        other = lab.peer()
        other.attach(label="theirs", record=record(prefix + "kv", self.SMALL, self.NBYTES))
        reader.kill()
        assert owner.fill(label="kv", seed=6) == other.digest(label="theirs")

    def test_new_generation_of_the_same_owner_is_mapped(self, two, prefix):
        """The owner gives its memory up and makes as much again, as after a sleep."""
        owner, reader = two
        reader.close(label="theirs")
        owner.unlink(label="kv")
        owner.close(label="kv")
        owner.make(label="kv", name=prefix + "kv", nbytes=self.NBYTES, generation=2)
        owner.fill(label="kv", seed=9)
        told = record(prefix + "kv", self.SMALL, self.NBYTES, generation=2)
        reader.attach(label="theirs", record=told, generation=2)
        assert reader.digest(label="theirs") == sha(bytes_of(9, self.NBYTES))
