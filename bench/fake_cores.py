"""Engine cores without engines: vLLM's engine-core protocol on ZeroMQ, tokens from nowhere.

One process plays any number of cores, each on its own pair of sockets. A step gives every running
request of a core one token; steps come at equal distances, or as fast as they can be sent. What a
front end costs is then all that is left to measure.

A core that was given an index also does what pdnode's connector does there: a prefill leg's KV is
offered by an entry, and the decode leg's core drops it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from ipc.index import Index
from ipc.records import Ticket
from pdnode.connector.settings import watch_node

IDENTITY = (0).to_bytes(2, "little")
TOKENS = tuple(range(300, 400))
BLOCK = 128
WAYS = ("input", "output")
LEASE_S = 60.0


@dataclass(slots=True)
class Running:
    request: EngineCoreRequest
    left: int
    turn: int = 0

    @property
    def kv_params(self) -> dict:
        return (self.request.sampling_params.extra_args or {}).get("kv_transfer_params", {})


class FakeCore:
    def __init__(self, context: zmq.Context, place: dict, ready: bytes) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, IDENTITY)
        self._out = context.socket(zmq.PUSH)
        for socket, way in zip((self.socket, self._out), WAYS, strict=True):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(place[f"{way}_address"])
        self._index = Index.attach(place["index"], me=place["slot"]) if place["index"] else None
        self._slot, self._boot_id = place["slot"], place["boot_id"]
        self._offered: list[Ticket] = []
        self._decode = MsgpackDecoder(EngineCoreRequest).decode
        self._decode_any = MsgpackDecoder().decode
        self._encode = MsgpackEncoder().encode
        self._running: dict[str, Running] = {}
        self.socket.send(ready)

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def receive(self) -> None:
        """Everything that has come."""
        while self.socket.poll(0):
            kind, *data = self.socket.recv_multipart()
            if kind == EngineCoreRequestType.ADD.value:
                self._add(self._decode(data))
            elif kind == EngineCoreRequestType.UTILITY.value:
                _, call_id, _, _ = self._decode_any(data)
                self._answer(call_id)
            elif kind == EngineCoreRequestType.ABORT.value:
                for request_id in self._decode_any(data):
                    self._running.pop(request_id, None)
        self._release()

    def _answer(self, call_id: int) -> None:
        """Front ends ask for one thing: which tasks there are."""
        answer = UtilityOutput(call_id, result=UtilityResult(("generate",)))
        self._out.send_multipart(self._encode(EngineCoreOutputs(utility_output=answer)))

    def _add(self, request: EngineCoreRequest) -> None:
        self._running[request.request_id] = running = Running(
            request, request.sampling_params.max_tokens
        )
        if self._index is not None and running.kv_params.get("do_remote_prefill"):
            params = running.kv_params
            entry = self._index.select(params["transfer_id"], owner=params["remote_slot"])
            if entry is not None:
                self._index.drop(entry)

    def step(self) -> None:
        outputs = [self._token(running) for running in self._running.values()]
        for output in outputs:
            if output.finish_reason is not None:
                del self._running[output.request_id]
        stats = SchedulerStats(num_running_reqs=len(self._running))
        self._out.send_multipart(self._encode(EngineCoreOutputs(0, outputs, stats)))

    def _token(self, running: Running) -> EngineCoreOutput:
        running.left -= 1
        running.turn += 1
        output = EngineCoreOutput(running.request.request_id, [TOKENS[running.turn % len(TOKENS)]])
        if running.turn == 1:
            output.prefill_stats = self._prefill_stats(running)
        if not running.left:
            output.finish_reason = FinishReason.LENGTH
            if running.kv_params.get("do_remote_decode"):
                output.kv_transfer_params = self._offer(running.request)
        return output

    def _prefill_stats(self, running: Running) -> PrefillStats:
        stats, total = PrefillStats(), len(running.request.prompt_token_ids)
        copied = total - 1 if running.kv_params.get("do_remote_prefill") else 0
        stats.set(total, 0, copied)
        return stats

    def _offer(self, request: EngineCoreRequest) -> dict:
        total = len(request.prompt_token_ids)
        if self._index is not None:
            ticket = self._index.insert(
                request.request_id,
                boot_id=self._boot_id,
                block_ids=range(-(-total // BLOCK)),
                tokens_ready=total,
                tokens_total=total,
                lease_s=LEASE_S,
            )
            self._offered.append(ticket)
        return {
            "do_remote_prefill": True,
            "transfer_id": request.request_id,
            "remote_slot": self._slot,
        }

    def _release(self) -> None:
        for ticket in [t for t in self._offered if self._index.released(t)]:
            self._index.remove(ticket)
            self._offered.remove(ticket)


def ready_response(max_model_len: int) -> bytes:
    fields = {
        "max_model_len": max_model_len,
        "num_gpu_blocks": 4096,
        "block_size": BLOCK,
        "dp_stats_address": None,
        "dtype": "torch.float32",
        "vllm_version": "",
        **dict.fromkeys(("world_size", "data_parallel_size", "tensor_parallel_size"), 1),
        **dict.fromkeys(("pipeline_parallel_size", "decode_context_parallel_size"), 1),
        "data_parallel_rank": 0,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 4096,
        "instance_id": "",
        "supports_lora": False,
        "max_loras": 0,
    }
    return msgspec.msgpack.encode(EngineCoreReadyResponse(**fields))


def serve(cores: list[FakeCore], step_s: float) -> None:
    """Until killed: a step of every busy core, at equal distances."""
    poller = zmq.Poller()
    for core in cores:
        poller.register(core.socket, zmq.POLLIN)
    due_s = time.perf_counter()
    while True:
        busy = any(core.busy for core in cores)
        wait_s = max(0.0, due_s - time.perf_counter()) if busy else None
        poller.poll(None if wait_s is None else wait_s * 1000)
        for core in cores:
            core.receive()
        if busy and time.perf_counter() >= due_s:
            for core in cores:
                if core.busy:
                    core.step()
            due_s = max(due_s + step_s, time.perf_counter())


def play(places: list[dict], step_ms: float, max_model_len: int, core: int) -> None:
    """The life of the process."""
    watch_node(os.getppid())
    os.sched_setaffinity(0, {core})
    gc.freeze()
    context, ready = zmq.Context(), ready_response(max_model_len)
    serve([FakeCore(context, place, ready) for place in places], step_ms / 1000)


class Cores:
    """``count`` cores in a process of their own, each with an entry in one index if ``indexed``.

    The process is a fork: start all of them before this process has threads, sockets or a loop.
    """

    def __init__(
        self, count: int, step_ms: float, max_model_len: int, core: int, *, indexed: bool
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pdb")
        self.boot_ids = [secrets.randbits(62) | 1 for _ in range(count)]
        self.addresses = [
            {f"{way}_address": f"ipc://{self._folder.name}/{slot}.{way}" for way in WAYS}
            for slot in range(count)
        ]
        self.index: Index | None = None
        if indexed:
            # One slot more than engines: the node's own.
            name, boot_id = f"pdbench-{secrets.token_hex(4)}.index", secrets.randbits(31) | 1
            self.index = Index.create(name, engine_slots=count + 1, node_boot_id=boot_id)
        name = self.index.name if self.index else ""
        places = [
            {**addresses, "slot": slot, "boot_id": boot_id, "index": name}
            for slot, (addresses, boot_id) in enumerate(
                zip(self.addresses, self.boot_ids, strict=True)
            )
        ]
        self._process = multiprocessing.get_context("fork").Process(
            target=play, args=(places, step_ms, max_model_len, core), daemon=True
        )
        self._process.start()

    @property
    def folder(self) -> Path:
        return Path(self._folder.name)

    def __enter__(self) -> Cores:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        if self.index is not None:
            self.index.unlink()
            self.index.close()
        self._folder.cleanup()
