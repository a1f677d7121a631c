"""What can go wrong in a node, and who is told.

    PdNodeError             base: one sentence with what was tried, the numbers and the knob
      ConfigError           the command line cannot be honoured: exit code 2, nothing was started
      BadTrace              a file of recorded traffic cannot be read: exit code 2
      PlanError             `plan` has no node to measure, or nothing to split: exit code 2
      NodeStartError        an engine, the index or the server did not come up in its budget
        SelfTestError       everything started, but a P->D pair gave a wrong answer
      EngineFailed          an engine died or hung while the node was serving
      NoEngine              no engine is left that may take this request: HTTP 503
      HandoffLost           the KV of one request was gone or replaced before it was copied
        HandoffRecomputed   the same under --strict: the request ends with HTTP 500
      RequestBlamed         engines ended under this request, one after the other: HTTP 500
      RequestUnsendable     one request has a value that no message to an engine can hold: HTTP 400
      NodeFault             a fault of the node's own, which ends the request it is about: HTTP 500
      BadRole               POST /pd/role or /pd/drain asked for what cannot be: HTTP 400
      EnginesDisagree       a call to all engines got answers that cannot be one answer

``exit_code`` is what the launcher returns when the error ends the node.
"""

from __future__ import annotations


class PdNodeError(Exception):
    exit_code = 1
    status = 500
    """Of the HTTP answer, where a request is what ends."""


class ConfigError(PdNodeError):
    exit_code = 2


class BadTrace(PdNodeError):
    exit_code = 2


class PlanError(PdNodeError):
    exit_code = 2


class NodeStartError(PdNodeError):
    pass


class SelfTestError(NodeStartError):
    pass


class EngineFailed(PdNodeError):
    pass


class NoEngine(PdNodeError):
    status = 503


class HandoffLost(PdNodeError):
    pass


class HandoffRecomputed(HandoffLost):
    pass


class RequestBlamed(PdNodeError):
    pass


class RequestUnsendable(PdNodeError):
    status = 400


class NodeFault(PdNodeError):
    pass


class BadRole(PdNodeError):
    pass


class EnginesDisagree(PdNodeError):
    pass
