"""Where finished requests and engine steps are written: --trace, --record-trace, OpenTelemetry."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pdnode.errors import NodeStartError
from pdnode.exchange import Exchange
from pdnode.timeline import Timeline
from pdnode.trace_file import TraceFile
from pdnode.traffic import PROBE, Recorder
from pdnode.vllm_compat import EngineCoreOutputs, EngineCoreRequest, flush_traces, trace_span

if TYPE_CHECKING:
    from pdnode.config import NodeConfig
    from pdnode.split_client import SplitClient

SPAN = "pdnode."


class Outlets:
    """From the front end's start to its end. Raises NodeStartError when a file cannot be opened."""

    def __init__(self, config: NodeConfig, client: SplitClient) -> None:
        self._names = client.history.names
        self._open = ExitStack()
        self._trace: TraceFile | None = None
        self._recorder: Recorder | None = None
        self._keep_details = config.frontend_args.enable_logging_iteration_details
        told = client.history.on_finished
        try:
            if config.trace_path is not None:
                self._trace = TraceFile(config.trace_path, self._names)
                self._open.callback(self._trace.close)
                told.append(self._to_trace)
                client.on_step = self._step
            if config.record_path is not None:
                self._recorder = Recorder(config.record_path)
                self._open.callback(self._recorder.close)
                told.append(self._record)
        except OSError as error:
            raise NodeStartError(
                f"cannot write {error.filename} ({error.strerror}); give --trace and --record-trace "
                "files in a folder that this user may write to"
            ) from error
        if config.frontend_args.otlp_traces_endpoint is not None:
            told.append(self._spans)
            self._open.callback(flush_traces)

    def close(self) -> None:
        self._open.close()

    def _step(self, slot: int, outputs: EngineCoreOutputs) -> None:
        assert self._trace is not None
        self._trace.step(slot, outputs)
        if outputs.scheduler_stats is not None and not self._keep_details:
            # Asked for by us, not by the user: vLLM would log a line for each.
            outputs.scheduler_stats.iteration_details = None

    def _to_trace(self, asked: Exchange, timeline: Timeline, request: EngineCoreRequest) -> None:
        assert self._trace is not None
        self._trace.request(asked, timeline)

    def _record(self, asked: Exchange, timeline: Timeline, request: EngineCoreRequest) -> None:
        assert self._recorder is not None
        if PROBE in timeline.request_id:
            return
        if request.prompt_token_ids and timeline.output_tokens:
            self._recorder.write(
                asked.received_at, request.prompt_token_ids, timeline.output_tokens
            )

    def _spans(self, asked: Exchange, timeline: Timeline, request: EngineCoreRequest) -> None:
        """One span per phase, beside vLLM's ``llm_request`` and under the same parent."""
        to_wall_s = asked.received_at - asked.received
        for phase in timeline.phases():
            attributes: dict[str, Any] = {
                "gen_ai.request.id": timeline.request_id,
                "pdnode.x_request_id": asked.request_id,
                "pdnode.reason": timeline.reason,
            }
            if phase.slot is not None:
                attributes["pdnode.engine"] = self._names[phase.slot]
            copied = timeline.handoff
            if phase.name == "handoff" and copied is not None:
                attributes["pdnode.handoff.from"] = self._names[copied.owner]
                attributes["pdnode.handoff.bytes"] = copied.nbytes
            trace_span(
                SPAN + phase.name,
                int((phase.begin + to_wall_s) * 1e9),
                int((phase.end + to_wall_s) * 1e9),
                attributes,
                request.trace_headers,
            )
