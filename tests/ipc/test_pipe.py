import signal
import threading

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ipc.errors import (
    FrameTooLarge,
    NoSharedMemory,
    PeerGone,
    PipeBusy,
    PipeClosed,
    PipeError,
    SegmentForeign,
    TensorUnsupported,
    WaitTimeout,
)
from ipc.frames import DTYPES
from ipc.pipe import RECEIVE, SEND, KVPipe
from ipc.segment import Segment
from tests.ipc.conftest import until

SLOTS, SLOT_BYTES = 8, 1024


@pytest.fixture
def ends(prefix):
    sender = KVPipe.create(prefix + "pipe", SLOTS, SLOT_BYTES, end=SEND)
    receiver = KVPipe.attach(prefix + "pipe", end=RECEIVE)
    yield sender, receiver
    sender.close()
    receiver.close()
    sender.unlink()


@pytest.fixture
def sender(ends):
    return ends[0]


@pytest.fixture
def receiver(ends):
    return ends[1]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal in shape, dtype and bytes; comparing bytes also works for dtypes without `==`."""
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    # `contiguous` leaves a single element its stride of 2, which `view` then refuses.
    pair = [t.resolve_conj().resolve_neg().contiguous() for t in (left, right)]
    flat = [t.as_strided((t.numel(),), (1,)) for t in pair]
    return left.numel() == 0 or torch.equal(*(t.view(torch.uint8) for t in flat))


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bytes as a tensor (bool: zeros and ones)."""
    count = torch.empty(shape, dtype=dtype, device="meta").numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed))
    raw = raw.to(torch.uint8) & 1 if dtype is torch.bool else raw.to(torch.uint8)
    made = torch.empty(shape, dtype=dtype)
    if count:
        made.reshape(-1).view(torch.uint8).copy_(raw)
    return made


def through(ends, tensor: torch.Tensor | None) -> torch.Tensor | None:
    sender, receiver = ends
    thread = threading.Thread(target=sender.send_tensor, args=(tensor, 10))
    thread.start()
    received = receiver.recv_tensor(timeout_s=10)
    thread.join()
    return received


# Once each (torch.half is torch.float16); those that start with q are quantized.
PLAIN = {dtype for name, dtype in DTYPES.items() if not name.startswith("q")}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", sorted(PLAIN, key=str), ids=str)
def test_every_dtype_goes_through_unchanged(ends, dtype):
    for shape in ((), (0,), (3, 5), (2, 0, 3), (700, 3)):
        tensor = filled(shape, dtype)
        assert same(through(ends, tensor), tensor)


@settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(shape=[1], dtype=torch.float32, change="every second")
@given(
    shape=st.lists(st.integers(0, 9), max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.uint8]),
    change=st.sampled_from(["none", "transposed", "every second", "expanded", "flipped"]),
)
def test_any_shape_and_strides_arrive_with_equal_values(ends, shape, dtype, change):
    tensor = filled(tuple(shape), dtype, seed=len(shape))
    if change == "transposed" and len(shape) > 1:
        tensor = tensor.transpose(0, -1)
    elif change == "every second" and shape:
        tensor = tensor[::2]
    elif change == "expanded":
        tensor = tensor.expand(3, *tensor.shape)
    elif change == "flipped" and shape:
        tensor = tensor.flip(0)
    received = through(ends, tensor)
    assert received.is_contiguous()
    assert same(received, tensor)


def test_lazy_conjugates_negatives_gradients_and_none_arrive_as_values(ends):
    complex_ = torch.tensor([1 + 2j, 3 - 4j])
    assert same(through(ends, complex_.conj()), torch.tensor([1 - 2j, 3 + 4j]))
    assert same(through(ends, complex_.conj().imag), torch.tensor([-2.0, 4.0]))
    parameter = torch.ones(3, requires_grad=True)
    assert not through(ends, parameter).requires_grad
    assert through(ends, None) is None


@pytest.mark.parametrize("nbytes", [959, 960, 961, 1984, 4032, 4033, 8128, 8129, 100_000])
def test_tensors_around_slot_half_ring_and_ring_size_arrive_whole(ends, nbytes):
    tensor = filled((nbytes,), torch.uint8)
    assert same(through(ends, tensor), tensor)


def test_tensors_with_as_many_dimensions_as_torch_allows(ends):
    tensor = torch.arange(2).reshape([1] * 63 + [2])
    assert same(through(ends, tensor), tensor)


def test_several_in_flight_come_out_first_in_first_out(sender, receiver):
    for n in range(4):
        sender.send_tensor(torch.tensor([n]), timeout_s=0)
    sender.send_tensor(None, timeout_s=0)
    assert [int(receiver.recv_tensor(0)) for _ in range(4)] == [0, 1, 2, 3]
    assert receiver.recv_tensor(0) is None
    with pytest.raises(WaitTimeout, match="empty"):
        receiver.recv_tensor(timeout_s=0)


def test_full_ring_pushes_back_within_the_timeout_and_loses_nothing(sender, receiver):
    half = torch.arange(3 * SLOT_BYTES // 8)
    for n in range(2):
        sender.send_tensor(half + n, timeout_s=0)
    with pytest.raises(WaitTimeout, match="full"):
        sender.send_tensor(half + 2, timeout_s=0.01)
    assert same(receiver.recv_tensor(0), half)
    sender.send_tensor(half + 2, timeout_s=0)
    assert [int(receiver.recv_tensor(0)[0]) for _ in range(2)] == [1, 2]


def test_frame_above_half_the_ring_that_times_out_closes_the_pipe(sender, receiver):
    with pytest.raises(WaitTimeout):
        sender.send_tensor(torch.zeros(20 * SLOT_BYTES, dtype=torch.uint8), timeout_s=0.01)
    with pytest.raises(PipeClosed, match="into a frame of 20,480"):
        receiver.recv_tensor(timeout_s=1)
    with pytest.raises(PipeClosed, match="this side"):
        sender.send_tensor(None)


def test_receiver_that_timed_out_in_a_frame_goes_on_with_it(sender, receiver):
    tensor = filled((20 * SLOT_BYTES,), torch.uint8)
    thread = threading.Thread(target=sender.send_tensor, args=(tensor, 10))
    received = None
    with pytest.raises(WaitTimeout):
        receiver.recv_tensor(timeout_s=0)
    thread.start()
    while received is None:
        try:
            received = receiver.recv_tensor(timeout_s=0)
        except WaitTimeout:
            pass
    thread.join()
    assert same(received, tensor)


def test_what_was_sent_before_close_is_received_then_closed_is_raised(sender, receiver):
    sender.send_tensor(torch.tensor(1))
    sender.close()
    sender.close()
    assert int(receiver.recv_tensor(0)) == 1
    with pytest.raises(PipeClosed, match="the sender closed it"):
        receiver.recv_tensor()


def test_send_to_a_closed_receiver_is_pipe_closed_even_with_room(sender, receiver):
    receiver.close()
    with pytest.raises(PipeClosed, match="the receiver closed it"):
        sender.send_tensor(torch.tensor(1))


def test_ends_do_one_thing_each(sender, receiver):
    with pytest.raises(PipeError, match="receiver"):
        receiver.send_tensor(None)
    with pytest.raises(PipeError, match="sender"):
        sender.recv_tensor()


def test_end_that_is_taken_or_was_used_is_refused(ends, prefix):
    with pytest.raises(PipeBusy, match="living"):
        KVPipe.attach(prefix + "pipe", end=RECEIVE)
    ends[1].close()
    with pytest.raises(PipeBusy, match="used before"):
        KVPipe.attach(prefix + "pipe", end=RECEIVE)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    ],
)
def test_tensors_that_are_more_than_their_bytes_are_refused(sender, receiver, make):
    with pytest.raises(TensorUnsupported):
        sender.send_tensor(make())
    sender.send_tensor(torch.tensor(1))
    assert int(receiver.recv_tensor(0)) == 1


def test_frame_above_the_limit_is_refused_by_the_sender(prefix):
    with KVPipe.create(prefix + "pipe", 4, 1024, end=SEND, max_frame_bytes=100) as pipe:
        with pytest.raises(FrameTooLarge, match="101"):
            pipe.send_tensor(torch.zeros(101, dtype=torch.uint8))
        pipe.unlink()


def test_other_segments_and_too_little_memory_are_typed(prefix):
    other = Segment.create(prefix + "pipe", 4096, purpose="a test", flag="--x")
    with pytest.raises(SegmentForeign):
        KVPipe.attach(other.name, end=SEND)
    other.unlink()
    with pytest.raises(NoSharedMemory, match="--pipe-slots"):
        KVPipe.create(prefix + "big", 1 << 20, 1 << 30, end=SEND)


# Two processes -----------------------------------------------------------------------------------


@pytest.fixture
def echo(prefix, python):
    out = KVPipe.create(prefix + "pipe", SLOTS, SLOT_BYTES, end=SEND)
    back = KVPipe.create(prefix + "pipe-back", SLOTS, SLOT_BYTES, end=RECEIVE)
    process = python("pipe_peer.py", "echo", out.name)
    assert process.stdout.readline() == "ready\n"
    yield out, back, process
    for pipe in (out, back):
        pipe.close()
        pipe.unlink()


def test_tensors_of_all_sizes_go_to_another_process_and_back(echo):
    out, back, process = echo
    tensors = [filled((n * n * 7,), torch.bfloat16, n) for n in range(40)]
    thread = threading.Thread(target=lambda: [out.send_tensor(t, 20) for t in tensors])
    thread.start()
    for tensor in tensors:
        assert same(back.recv_tensor(timeout_s=20), tensor)
    thread.join()
    out.close()
    with pytest.raises(PipeClosed):
        back.recv_tensor(timeout_s=20)
    assert process.wait(10) == 0


def test_sender_in_another_process_keeps_order(prefix, python):
    receiver = KVPipe.create(prefix + "pipe", SLOTS, SLOT_BYTES, end=RECEIVE)
    python("pipe_peer.py", "numbers", receiver.name)
    for n in range(500):
        tensor = receiver.recv_tensor(timeout_s=20)
        assert tensor.shape == (n * 37 % 4001,)
        assert bool((tensor == n).all())
    with pytest.raises(PipeClosed):
        receiver.recv_tensor(timeout_s=20)
    receiver.unlink()


def test_sender_killed_in_the_middle_of_a_frame_is_peer_gone(prefix, python):
    receiver = KVPipe.create(prefix + "pipe", SLOTS, SLOT_BYTES, end=RECEIVE)
    process = python("pipe_peer.py", "die", receiver.name)
    assert process.stdout.readline() == "ready\n"
    assert same(receiver.recv_tensor(timeout_s=10), torch.arange(100))

    # Stopped with a full ring: a running sender could fill it as fast as this end empties it.
    until(lambda: receiver._word(SEND) - receiver._word(RECEIVE) == SLOTS)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(WaitTimeout):
        receiver.recv_tensor(timeout_s=0.01)
    assert receiver._frame is not None
    process.kill()
    process.wait()
    with pytest.raises(PeerGone, match=r"sender died, .* into a frame of 81,920"):
        receiver.recv_tensor(timeout_s=10)
    receiver.unlink()


def test_receiver_killed_while_the_sender_waits_is_peer_gone(prefix, python):
    sender = KVPipe.create(prefix + "pipe", SLOTS, SLOT_BYTES, end=SEND)
    process = python("pipe_peer.py", "hold", sender.name)
    assert process.stdout.readline() == "ready\n"
    killer = threading.Timer(0.05, process.kill)
    killer.start()
    with pytest.raises(PeerGone, match="receiver died"):
        sender.send_tensor(torch.zeros(20 * SLOT_BYTES, dtype=torch.uint8), timeout_s=10)
    killer.join()
    sender.unlink()


def test_stopped_peer_is_alive_and_costs_the_timeout_only(prefix, python):
    sender = KVPipe.create(prefix + "pipe", SLOTS, SLOT_BYTES, end=SEND)
    process = python("pipe_peer.py", "hold", sender.name)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(WaitTimeout):
        sender.send_tensor(torch.zeros(20 * SLOT_BYTES, dtype=torch.uint8), timeout_s=0.05)
    sender.unlink()
