"""Receiving into memory that the caller has already."""

import threading

import pytest
import torch

from ipc.errors import TensorUnsupported, WaitTimeout
from ipc.pipe import RECEIVE, SEND, KVPipe

SLOTS, SLOT_BYTES = 8, 1024


@pytest.fixture
def ends(prefix):
    sender = KVPipe.create(prefix + "pipe", SLOTS, SLOT_BYTES, end=SEND)
    receiver = KVPipe.attach(prefix + "pipe", end=RECEIVE)
    yield sender, receiver
    sender.close()
    receiver.close()
    sender.unlink()


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (600,), ()])
def test_the_given_tensor_is_filled_and_returned(ends, shape):
    sender, receiver = ends
    sent = torch.randn(shape)
    out = torch.full(shape, 7.0)
    sender.send_tensor(sent)
    assert receiver.recv_tensor(0, out=out) is out
    assert torch.equal(out, sent)


def test_a_part_of_a_larger_tensor_can_be_filled_and_nothing_else_is(ends):
    sender, receiver = ends
    rows = torch.zeros(4, 100, dtype=torch.uint8)
    sender.send_tensor(torch.full((100,), 5, dtype=torch.uint8))
    receiver.recv_tensor(0, out=rows[2])
    assert rows.sum(1).tolist() == [0, 0, 500, 0]


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(9),
        torch.zeros(10, dtype=torch.float64),
        torch.zeros(2, 5),
        torch.zeros(20)[::2],
        torch.zeros(10, requires_grad=True),
        torch.zeros(10, device="meta"),
        torch.zeros(10).to_sparse(),
    ],
)
def test_one_that_does_not_fit_is_refused_and_the_tensor_stays(ends, out):
    sender, receiver = ends
    sender.send_tensor(torch.arange(10.0))
    with pytest.raises(TensorUnsupported, match=r"torch.float32, shape \(10,\)"):
        receiver.recv_tensor(0, out=out)
    assert torch.equal(receiver.recv_tensor(0), torch.arange(10.0))


def test_none_arrives_as_none(ends):
    sender, receiver = ends
    sender.send_tensor(None)
    assert receiver.recv_tensor(0, out=torch.zeros(1)) is None


def test_after_a_timeout_the_same_memory_is_filled_on(ends):
    """A frame above half the ring is published slot by slot: the receiver may time out in it."""
    sender, receiver = ends
    sent = torch.randint(0, 255, (20 * SLOT_BYTES,), dtype=torch.uint8)
    out = torch.zeros_like(sent)
    sending = threading.Timer(0.05, sender.send_tensor, (sent, 10))
    sending.start()
    received = None
    while received is None:
        try:
            received = receiver.recv_tensor(0.0001, out=out)
        except WaitTimeout:
            pass
    sending.join()
    assert received is out
    assert torch.equal(received, sent)
