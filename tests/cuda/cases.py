"""What only the fake driver can be made to do. A case is a process: `-m tests.cuda.cases NAME`."""

import sys

import pytest

from tests.cuda import cases_copy, cases_memory
from tests.cuda.case_kit import CASES, owner
from tests.cuda.fake import SKIPPED

__all__ = ["CASES", "cases_copy", "cases_memory"]


def main(name: str) -> None:
    try:
        owner() if name == "owner" else CASES[name][0]()
    except pytest.skip.Exception as reason:
        print(reason, file=sys.stderr)
        sys.exit(SKIPPED)


if __name__ == "__main__":
    main(sys.argv[1])
