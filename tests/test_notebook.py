"""examples/quickstart.ipynb runs from top to bottom, and the model in it learns."""

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"


def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells one after the other in one namespace; it is kept without outputs."""
    pages = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert pages["nbformat"] == 4 and len({cell["id"] for cell in pages["cells"]}) == len(pages["cells"])
    spaces: dict[str, Any] = {"__name__": "__main__"}
    for cell in pages["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, {cell['id']}", "exec"), spaces)
    assert spaces["losses"][-1] < spaces["losses"][0] / 2 and spaces["after"] > spaces["before"] + 0.2
    assert "accuracy" in capsys.readouterr().out
