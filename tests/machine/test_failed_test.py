"""A test that has failed leaves nothing in its process: tests/conftest.py."""

from pathlib import Path

import pytest

from tests.training.children import server

FAILS = """
import keyhole
from tests.model.decoders import batch, load

def test_one():
    model = load(placement="stream", tf32=True)
    opt = keyhole.AdamOffload(model, 1e-3)
    opt.step(batch())
    def inside(module, args):
        raise ZeroDivisionError
    model.module.model.norm.register_forward_pre_hook(inside)
    opt.step(batch())
"""
AFTER = """
import gc, threading, torch, keyhole

def test_two():
    assert not [each for each in gc.get_objects() if type(each) is keyhole.Model]
    assert torch.get_float32_matmul_precision() == "highest"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("keyhole")]

def test_three():
    gc.unfreeze()
    test_two()
"""


def _run(path: Path) -> None:
    found = path / "found.xml"
    pytest.main(["-q", "-ptests.conftest", "-pno:cacheprovider", f"--rootdir={path}", f"--junitxml={found}", str(path)])


def test_its_model_its_settings_and_its_threads_are_gone(tmp_path: Path) -> None:
    """In the next file, whose objects are frozen by then."""
    for name, text in (("test_a.py", FAILS), ("test_b.py", AFTER)):
        (tmp_path / name).write_text(text)
    process = server.Process(target=_run, args=(tmp_path,))
    process.start()
    process.join(120)
    process.kill()
    assert 'errors="0" failures="1" skipped="0" tests="3"' in (tmp_path / "found.xml").read_text()
