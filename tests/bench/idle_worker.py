"""A worker (keyhole/bench/process.py) that computes nothing: what is left is the process and its pipes."""

import sys
from typing import Any

from keyhole.bench.process import serve
from keyhole.bench.zo.cases import Case


class Idle:
    """Measures which system it was asked for."""

    def __init__(self, *told: Any) -> None:
        pass

    def machine(self) -> dict[str, Any]:
        return {}

    def estimate_s(self, case: Case) -> float:
        return 0.0

    def measure(self, case: Case) -> dict[str, Any]:
        return {"measured": case.system}

    def clear(self) -> None:
        pass


if __name__ == "__main__":
    sys.exit(serve(Idle, Case))
