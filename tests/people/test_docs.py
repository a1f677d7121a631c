"""The docs name everything there is, link to what exists, and their commands run."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import ipc.errors
import pdnode.errors
from pdnode import flags, metrics
from pdnode.engine import EngineState
from pdnode.placement import REASONS
from tests.people.commands import ALL, MARK, PAGES, ROOT, Command

OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def classes(module) -> set[str]:
    return {
        name
        for name, value in inspect.getmembers(module, inspect.isclass)
        if value.__module__ == module.__name__ and name != "PdNodeError"
    }


@pytest.mark.parametrize("module", [pdnode.errors, ipc.errors], ids=["pdnode", "ipc"])
def test_operations_names_every_error(module) -> None:
    assert {name for name in classes(module) if f"`{name}`" not in OPERATIONS} == set()


def test_operations_names_every_metric_state_and_reason_not_to_split() -> None:
    assert {name for name in metrics.NAMES if f"`{name}`" not in OPERATIONS} == set()
    assert {s.value for s in EngineState if f"`{s.value}`" not in OPERATIONS} == set()
    whole = set(REASONS) - {"split_faster", "idle_prefill", "split_always", "split_unmeasured"}
    assert {reason for reason in whole if f"`{reason}`" not in OPERATIONS} == set()


def test_every_flag_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    ours = {
        option
        for action in flags.own_parser()._actions
        for option in action.option_strings
        if option.startswith("--") and option != "--help"
    }
    assert {option for option in ours if option not in readme} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("command", ALL, ids=str)
def test_every_command_says_how_it_is_tried(command: Command) -> None:
    assert MARK.fullmatch(command.mark), f"{command}: {command.mark!r} before: {command.text}"


@pytest.mark.parametrize("command", [c for c in ALL if c.mark == "run: here"], ids=str)
def test_cheap_commands_run_as_they_stand(command: Command) -> None:
    command.run()
