"""Every row of the table of kernels runs, by the references, and has its floor."""

from typing import Any

from benchmarks import kernels


def test_every_kernel_runs(capsys: Any) -> None:
    """On a CPU, in small."""
    kernels.main(["--quick"])
    lines = capsys.readouterr().out.splitlines()[2:]
    assert all(float(line[40:].split()[0]) > 0 for line in lines)
    assert [kind for kind in kernels.KINDS if not any(line.startswith(kind) for line in lines)] == []
