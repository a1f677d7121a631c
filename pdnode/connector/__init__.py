"""The only door between vLLM's KV blocks and `ipc`.

connector.py   the facade vLLM instantiates; forwards each hook to one half
scheduler.py   which entry a request needs, which blocks are pinned; the only writer of the index
following.py   decode-first: copying a prompt while it is computed
worker.py      owns the KV memory, has blocks loaded into it; knows no requests
paths/         how they get here from a peer: mapped, or sent by its worker
prompt_order.py, schedulers.py   whose prompt the next pass computes
metadata.py    what crosses between the two
"""
