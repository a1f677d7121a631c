"""An engine's processes and the launcher's process group, in which they must not be."""

from __future__ import annotations

import os


def own_process_group() -> None:
    """Leave the group of the launcher, which is a terminal's foreground group.

    Ctrl-C reaches every process of that group; an engine that obeyed it would drop the requests the
    launcher is still draining. The launcher alone decides when engines stop.

    And engines are stopped before they are killed while they start. If the launcher leads its session,
    as a service does, the end of a process can leave its group without a link to another one, and the
    kernel then sends SIGHUP to all of a group that has a stopped process in it (setpgid(2)).
    """
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
