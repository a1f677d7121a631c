"""Start-up lines: plain into a pipe; on a terminal the same, with a table while engines start."""

from __future__ import annotations

import io
import os
import pty
import re
import time

from pdnode.progress import Progress

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def start(progress: Progress) -> None:
    for state in ("starting", "loading", "loading", "warming"):
        progress.state("prefill-0", state)
    progress.line("something [bold]in between[/bold]")
    progress.state("prefill-0", "ready")
    progress.line("ready: http://127.0.0.1:8000 (1.0 s)")
    progress.close()


def test_a_pipe_gets_one_plain_line_per_fact() -> None:
    out = io.StringIO()
    start(Progress(out))
    lines = out.getvalue().splitlines()
    assert [line.split()[2] for line in lines[:3]] == ["starting", "loading", "warming"]
    assert lines[3] == "pdnode: something [bold]in between[/bold]"
    assert len(lines) == 6
    assert "\x1b" not in out.getvalue()


def test_a_terminal_shows_the_phase_and_is_left_as_it_was() -> None:
    main, side = pty.openpty()
    with os.fdopen(side, "w", buffering=1) as out:
        progress = Progress(out)
        progress.state("prefill-0", "loading")
        seen, deadline = b"", time.monotonic() + 30
        while b"loading" not in seen:
            assert time.monotonic() < deadline, seen
            seen += os.read(main, 4096)
        start(progress)
        seen += os.read(main, 65536)
    os.close(main)
    text = CONTROL.sub("", seen.decode())
    assert "pdnode: something [bold]in between[/bold]" in text
    assert re.search(r"pdnode: prefill-0 +ready", text)
    # The cursor is shown again.
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")
