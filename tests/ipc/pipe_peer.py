"""The other end of a pipe, in a process of its own: `pipe_peer.py ROLE NAME`."""

import os
import sys

import torch

from ipc.errors import PipeClosed
from ipc.pipe import RECEIVE, SEND, KVPipe


def echo(name: str) -> None:
    """Send back on NAME-back whatever comes on NAME, until that is closed."""
    source = KVPipe.attach(name, end=RECEIVE)
    target = KVPipe.attach(name + "-back", end=SEND)
    print("ready", flush=True)
    try:
        while True:
            target.send_tensor(source.recv_tensor(timeout_s=30), timeout_s=30)
    except PipeClosed:
        target.close()


def die_in_send(name: str) -> None:
    """One whole tensor, then SIGKILL inside a large one: the ring is full, nobody reads yet."""
    pipe = KVPipe.attach(name, end=SEND)
    pipe.send_tensor(torch.arange(100))
    print("ready", flush=True)
    pipe.send_tensor(torch.zeros(10 * pipe.slots * pipe.slot_bytes, dtype=torch.uint8))


def hold_receive(name: str) -> None:
    """Be the receiver, and receive nothing."""
    held = KVPipe.attach(name, end=RECEIVE)
    print("ready", flush=True)
    sys.stdin.read()
    held.close()


def numbers(name: str) -> None:
    """500 tensors whose values are their number and whose sizes differ."""
    pipe = KVPipe.attach(name, end=SEND)
    print("ready", flush=True)
    for n in range(500):
        pipe.send_tensor(torch.full((n * 37 % 4001,), n), timeout_s=30)
    pipe.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    roles = {"echo": echo, "die": die_in_send, "hold": hold_receive, "numbers": numbers}
    roles[sys.argv[1]](sys.argv[2])
    os._exit(0)
