"""One prefill/decode node: ``python launcher.py [MODEL] [placement flags] [vllm serve flags]``.

And ``python launcher.py plan TRACE``: which placement flags suit recorded traffic.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence

from pdnode import config, plan_command, plan_text
from pdnode.errors import ConfigError
from pdnode.nursery import Nursery, restart_marked
from pdnode.process_group import own_process_group

if "--multiprocessing-fork" in sys.orig_argv:
    # A process that vLLM spawned: it runs its parent's main module before anything of its own.
    own_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    _quiet_terminal()
    as_program = argv is None
    if as_program:
        # Until the node has handlers of its own, Ctrl-C ends us without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["plan"]:
        return plan_command.main(argv[1:])
    # Before vLLM is imported, which reading its flags does: it takes many seconds.
    boot_id = restart_marked() if as_program else secrets.token_hex(4)
    try:
        node_config = config.parse(argv)
    except ConfigError as error:
        print(f"pdnode: error: {error}", file=sys.stderr)
        return error.exit_code
    if node_config.dry_run:
        print(plan_text.render(node_config))
        return 0
    # Only now: the node pulls in all of vLLM, which a plan or most refusals do not need.
    from pdnode.node import run

    forked = all(engine.device.forked for engine in node_config.engines)
    nursery = Nursery() if forked else None
    run(node_config, boot_id, nursery)


def _quiet_terminal() -> None:
    """vLLM logs go to the engines' log files; the terminal is for what a person must read."""
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("PDNODE_ENGINE_LOGGING_LEVEL", "INFO" if level == "ERROR" else level)
    # vLLM obeys it only once it has read its configuration. A wrong name it refuses itself.
    with contextlib.suppress(ValueError):
        logging.getLogger("vllm").setLevel(level.upper())


if __name__ == "__main__":
    sys.exit(main())
