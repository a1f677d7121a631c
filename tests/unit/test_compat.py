"""vllm_compat against the vLLM that is installed, and the checker against a vLLM that moved."""

from __future__ import annotations

import shutil
from pathlib import Path

import vllm

from tests import compat

INSTALLED = Path(vllm.__file__).parent.parent


def test_the_installed_vllm_has_every_name():
    assert compat.problems(INSTALLED) == []


def test_a_moved_name_a_lost_parameter_and_a_lost_field_are_each_named(tmp_path):
    for module in ("v1/engine/core_client.py", "v1/engine/__init__.py", "v1/core/block_pool.py"):
        target = tmp_path / "vllm" / module
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(INSTALLED / "vllm" / module, target)
    edit = {
        "v1/engine/core_client.py": ("client_addresses:", "addresses:"),
        "v1/engine/__init__.py": ("    prefill_stats:", "    stats_of_prefill:"),
        "v1/core/block_pool.py": ("def touch(", "def hold("),
    }
    for module, (old, new) in edit.items():
        path = tmp_path / "vllm" / module
        path.write_text(path.read_text().replace(old, new))
    said = "\n".join(compat.problems(tmp_path))
    assert "AsyncMPClient.__init__: no client_addresses" in said
    assert "EngineCoreOutput: no prefill_stats" in said
    assert "BlockPool.touch: no touch in BlockPool" in said
