"""A follower's life on a real index and vLLM's real block pool; only the copy itself is told of."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import pytest
from vllm.v1.core.block_pool import BlockPool

from ipc.index import Index
from ipc.records import Role, State, Ticket
from pdnode.connector.following import Following
from pdnode.connector.metadata import LoadDone, LoadFailed, LoadReport

BLOCK, FULL, BOOT = 16, 10, 7
P, D = 0, 1
ROOM = 30


@dataclass
class Request:
    """What a follower reads of vLLM's request: a prompt of ten blocks and a part."""

    request_id: str = "r/p1/f"
    num_prompt_tokens: int = FULL * BLOCK + 5
    kv_transfer_params: dict = field(
        default_factory=lambda: {"do_follow": True, "transfer_id": "r/p1", "remote_slot": P}
    )

    def __post_init__(self):
        self.block_hashes = [self.request_id[:1].encode() + bytes([i]) for i in range(FULL)]


class Lab:
    def __init__(self) -> None:
        name = f"pdtest-{secrets.token_hex(6)}"
        self.node = Index.create(name, engine_slots=2, node_boot_id=1)
        for slot in (P, D):
            self.node.set_control(
                slot, engine_id=f"e{slot}", role=Role.BOTH, state=State.READY, boot_id=BOOT,
                restarts=0,
            )  # fmt: skip
        self.owner, self.reader = (Index.attach(name, me=slot) for slot in (P, D))
        self.taken: list[int] = []
        self.pool = BlockPool(ROOM + 1, enable_caching=True, hash_block_size=BLOCK)
        self.shown: dict[int, bytes] = {}
        self.following = Following(
            self.reader,
            D,
            BLOCK,
            self.pool,
            taken=self.taken.extend,
            filled=lambda keys, blocks: self.shown.update(zip(blocks, keys, strict=True)),
        )
        self.request = Request()
        self.following.begin(self.request)
        self.ticket: Ticket

    def offer(self, ready: int, blocks: int = FULL + 1) -> None:
        self.ticket = self.owner.insert(
            "r/p1", boot_id=BOOT, block_ids=range(100, 100 + blocks), tokens_ready=ready,
            tokens_total=self.request.num_prompt_tokens, lease_s=60,
        )  # fmt: skip

    def publish(self, ready: int) -> None:
        self.owner.publish(self.ticket, block_ids=range(100, 100 + FULL + 1), tokens_ready=ready)

    def done(self) -> None:
        line = LoadDone(self.request.request_id, P, 1, 1)
        assert self.following.loaded(LoadReport(done=[line])) == {self.request.request_id}

    def cached(self) -> int:
        """Leading blocks of the prompt that a decode leg would find."""
        hits = [self.pool.get_cached_block(h, [0]) for h in self.request.block_hashes]
        return next((i for i, hit in enumerate(hits) if hit is None), FULL)

    @property
    def free(self) -> int:
        return self.pool.get_num_free_blocks()

    def counted(self, name: str) -> int:
        return getattr(self.node.engine(D), name)

    def close(self) -> None:
        for index in (self.owner, self.reader):
            index.close()
        self.node.unlink()
        self.node.close()


@pytest.fixture
def lab():
    lab = Lab()
    yield lab
    lab.close()


def test_each_chunk_is_copied_once_and_then_cached(lab):
    assert lab.following.step(0) == []
    lab.offer(ready=0)
    assert lab.following.step(0) == []
    assert lab.free == ROOM - FULL, "room for the whole prompt is reserved when P begins"
    copied = []
    for ready, first, last in ((3 * BLOCK + 1, 0, 3), (4 * BLOCK, 3, 4), (9 * BLOCK - 1, 4, 8)):
        lab.publish(ready)
        (load,) = lab.following.step(0)
        assert load.src_blocks == tuple(range(100 + first, 100 + last))
        assert load.tokens == (last - first) * BLOCK
        assert load.ahead
        assert lab.following.step(0) == [], "one copy at a time"
        assert lab.following.is_copying("r/p1")
        assert lab.cached() == len(lab.shown) == first, "what is on its way is nobody's hit"
        lab.done()
        assert lab.cached() == last
        copied += load.dst_blocks
        assert [lab.shown[block] for block in copied] == lab.request.block_hashes[:last]
        assert len(lab.shown) == last
    assert len(set(copied)) == 8
    assert set(copied) <= set(lab.taken), "peers must not find here what these blocks held before"
    lab.publish(lab.request.num_prompt_tokens)
    assert lab.following.step(0) == [], "what is complete is the decode leg's to copy"
    assert not lab.following.is_copying("r/p1")
    lab.following.end("r/p1")
    assert lab.free == ROOM
    assert lab.cached() == 8
    assert lab.counted("follows") == 1


def test_a_prefix_that_is_there_is_not_copied_again(lab):
    held = lab.pool.get_new_blocks(2)
    lab.pool.cache_full_blocks(lab.request, held, 0, 2, BLOCK, 0)
    lab.pool.free_blocks(held)
    lab.offer(ready=5 * BLOCK)
    (load,) = lab.following.step(0)
    assert load.src_blocks == (102, 103, 104)
    assert [block.ref_cnt for block in held] == [1, 1], "nor may it be evicted meanwhile"
    lab.following.ended(lab.request)
    assert lab.free == ROOM


@pytest.mark.parametrize("running, follows", [(0, True), (1, False)])
def test_without_room_nothing_is_held(lab, running, follows):
    lab.pool.get_new_blocks(ROOM - FULL)
    lab.offer(ready=BLOCK)
    assert len(lab.following.step(running)) == follows
    assert lab.free == (0 if follows else FULL)
    assert lab.counted("follow_no_room") == (not follows)


def test_room_is_given_back_at_once_when_somebody_needs_it(lab):
    lab.offer(ready=2 * BLOCK)
    lab.following.step(0)
    lab.done()
    lab.publish(4 * BLOCK)
    (load,) = lab.following.step(0)
    assert lab.following.yield_room()
    assert lab.free == ROOM
    assert not lab.following.is_copying("r/p1"), "a decode leg has nothing to wait for"
    taken = lab.pool.get_new_blocks(ROOM - 2)
    assert set(load.dst_blocks) <= {block.block_id for block in taken}
    lab.done()
    assert lab.cached() == len(lab.shown) == 2, "what is somebody else's by now gets no name"
    lab.publish(9 * BLOCK)
    assert lab.following.step(0) == []
    assert not lab.following.yield_room()
    assert lab.counted("follow_yielded") == 1


def test_a_copy_that_fails_ends_it(lab):
    lab.offer(ready=2 * BLOCK)
    lab.following.step(0)
    line = LoadFailed(lab.request.request_id, 2 * BLOCK, "gone")
    assert lab.following.loaded(LoadReport(failed=[line])) == {lab.request.request_id}
    assert lab.free == ROOM
    assert lab.cached() == len(lab.shown) == 0
    lab.publish(9 * BLOCK)
    assert lab.following.step(0) == []


def test_a_report_that_comes_after_the_end_is_still_known(lab):
    lab.offer(ready=2 * BLOCK)
    lab.following.step(0)
    lab.following.ended(lab.request)
    lab.done()
    assert lab.following.loaded(LoadReport(done=[LoadDone("other", P, 1, 1)])) == set()
    assert lab.free == ROOM
