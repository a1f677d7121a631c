"""What only the fake driver can be made to do. A case is a process: `-m tests.cuda.cases NAME`."""

import sys

from tests.cuda import cases_copy, cases_memory
from tests.cuda.case_kit import CASES, owner

__all__ = ["CASES", "cases_copy", "cases_memory"]

if __name__ == "__main__":
    owner() if sys.argv[1] == "owner" else CASES[sys.argv[1]][0]()
