"""A user's own --worker-extension-cls beside the node's: one class for vLLM, made in each worker."""

from __future__ import annotations

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname

from pdnode.connector import worker_extension
from pdnode.connector.worker_extension import METHOD, PATH, WorkerExtension, name_with


class Theirs:
    def weights_seen(self) -> str:
        return "seen"


class Knowing(WorkerExtension):
    """Of somebody who has read our code."""


class InTheWay:
    def pdnode_made_ready(self) -> str:
        return ""


class Base(type):
    """A metaclass that lets nobody be derived."""

    def __init__(cls, name, bases, names):
        if bases:
            raise TypeError("not to be derived from")


class Final(metaclass=Base):
    pass


def of(cls: type) -> str:
    return f"{__name__}.{cls.__name__}"


def test_alone_it_is_ours():
    assert name_with("") == name_with(PATH) == PATH
    assert resolve_obj_by_qualname(PATH) is WorkerExtension


@pytest.mark.parametrize("theirs", [Theirs, Knowing])
def test_vllm_resolves_the_name_to_a_class_of_both(theirs):
    both = resolve_obj_by_qualname(name_with(of(theirs)))
    assert issubclass(both, theirs)
    assert issubclass(both, WorkerExtension)
    # vLLM asks twice whether a worker has it already.
    assert resolve_obj_by_qualname(name_with(of(theirs))) is both


def test_a_worker_gets_both_as_vllm_gives_them():
    class Worker:
        pass

    class CpuWorker(Worker):
        distributed_init_method = "tcp://127.0.0.1:1"

    both = resolve_obj_by_qualname(name_with(of(Theirs)))
    CpuWorker.__bases__ = (*CpuWorker.__bases__, both)
    worker = CpuWorker()
    assert worker.weights_seen() == "seen"
    assert getattr(worker, METHOD).__func__ is WorkerExtension.pdnode_made_ready


@pytest.mark.parametrize(
    "theirs, why",
    [
        ("no.such.module.Class", "No module named 'no'"),
        (f"{__name__}.Missing", "has no attribute 'Missing'"),
        ("Bare", "ValueError"),
        (f"{__name__}.pytest", "TypeError"),
        (of(Final), "not to be derived from"),
        (of(InTheWay), f"its {METHOD} is in the place of the node's own"),
    ],
)
def test_what_cannot_be_combined_is_refused(theirs, why):
    with pytest.raises(ValueError, match=why):
        name_with(theirs)


def test_other_names_of_the_module_stay_unknown():
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        worker_extension.Nothing  # noqa: B018
