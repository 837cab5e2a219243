"""The wheel in an empty environment: what a new user does first. It takes minutes, and downloads:

    pytest -m install tests/install

Each interpreter that is found (python3.11 to 3.13 on the path, or KEYHOLE_PYTHONS="/path/a:/path/b") gets an
environment of its own. Where torch has no wheel without CUDA for it, KEYHOLE_WITHOUT_TORCH=1 installs everything else,
and runs what needs no torch.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOUND = [path for minor in (11, 12, 13) if (path := shutil.which(f"python3.{minor}"))]
PYTHONS = os.environ["KEYHOLE_PYTHONS"].split(":") if "KEYHOLE_PYTHONS" in os.environ else FOUND
EXTRAS = "hf,lora,tensorboard,hub,harness"
pytestmark = [pytest.mark.install, pytest.mark.slow]


def run(*command: object, cwd: Path, **env: str) -> str:
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=clean | env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source") / "keyhole"
    left_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests", "benchmarks")
    shutil.copytree(ROOT, source, ignore=left_out)
    made = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", made, source, cwd=made)
    (path,) = made.glob("keyhole-*.whl")
    assert any(name.endswith("licenses/LICENSE") for name in zipfile.ZipFile(path).namelist())
    return path


@pytest.mark.parametrize("extras", ["", EXTRAS], ids=["plain", "extras"])
@pytest.mark.parametrize("python", PYTHONS)
def test_a_new_environment_trains(python: str, extras: str, wheel: Path, tmp_path: Path) -> None:
    """pip install of the wheel, then, outside of the sources: help, recipes, a run, an evaluation."""
    if subprocess.run([python, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"{python} does not run (pyenv has a stand-in for every version, chosen or not)")
    run(python, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    here = tmp_path / "env" / "bin"
    what = f"{wheel}[{extras}]" if extras else str(wheel)
    without_torch = "KEYHOLE_WITHOUT_TORCH" in os.environ
    if without_torch:
        needed = [line for line in _needs(wheel) if not line.startswith("torch")]
        run(here / "pip", "install", "-q", "--no-deps", wheel, cwd=tmp_path)
        run(here / "pip", "install", "-q", *needed, cwd=tmp_path)
    else:
        run(here / "pip", "install", "-q", "-c", ROOT / "constraints.txt", what, cwd=tmp_path)
    assert run(here / "keyhole", "--version", cwd=tmp_path).startswith("keyhole ")
    assert "demo-lomo" in run(here / "keyhole", "config", "ls", cwd=tmp_path)
    run(here / "python", "-m", "compileall", "-q", _package(here), cwd=tmp_path)
    if without_torch:
        return
    run(here / "pip", "check", cwd=tmp_path)
    said = run(here / "keyhole", "train", "demo-lomo", "max_steps=2", "output_dir=out", "device=cpu", cwd=tmp_path)
    assert "the model is in out" in said
    assert "perplexity" in run(here / "keyhole", "eval", "out", "--tasks", "demo", "--limit", "20", cwd=tmp_path)
    if extras:
        imports = "import peft, accelerate, tensorboard, datasets, lm_eval, keyhole.hf, keyhole.harness.lm"
        run(here / "python", "-c", imports, cwd=tmp_path)
        entry = "from importlib.metadata import entry_points as e; e(group='lm_eval.models')['keyhole'].load()"
        run(here / "python", "-c", entry, cwd=tmp_path)


def _package(here: Path) -> str:
    code = "import keyhole, os; print(os.path.dirname(keyhole.__file__))"
    return run(here / "python", "-c", code, cwd=here).strip()


def _needs(wheel: Path) -> list[str]:
    """The wheel's dependencies, extras excepted."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("METADATA")]
        lines = archive.read(name).decode().splitlines()
    needs = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist:")]
    return [need for need in needs if "extra ==" not in need]
