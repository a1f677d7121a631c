"""What placement is told of a request, and what a client may not put into one."""

from __future__ import annotations

from pdnode import token1
from pdnode.connector.prompt_order import TURN
from pdnode.connector.replay import FORCED_TOKENS
from pdnode.journey import KV_PARAMS
from pdnode.placement import Facts
from pdnode.vllm_compat import EngineCoreRequest

PRIVATE_ARGS = frozenset({KV_PARAMS, FORCED_TOKENS, TURN})


def remove_private_args(request: EngineCoreRequest) -> None:
    """Hand-off, replay and turns are the node's own: what a client sends under their names is not used."""
    params = request.sampling_params
    if params is not None and params.extra_args and PRIVATE_ARGS & params.extra_args.keys():
        rest = {k: v for k, v in params.extra_args.items() if k not in PRIVATE_ARGS}
        params.extra_args = rest or None


def facts_of(request: EngineCoreRequest, custom_logits_processors: bool = False) -> Facts:
    params = request.sampling_params
    if params is None:
        return Facts(len(request.prompt_token_ids or ()), 0, whole="pooling")
    where, field_name = token1.decide(params, custom_logits_processors=custom_logits_processors)
    return Facts(
        prompt_tokens=len(request.prompt_token_ids or ()),
        max_tokens=params.max_tokens or 0,
        token1=where,
        token1_field=field_name,
        whole=_why_whole(request),
    )


def _why_whole(request: EngineCoreRequest) -> str:
    if request.resumable:
        return "streaming_input"
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "prompt_embeds"
    return ""
