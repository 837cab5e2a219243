"""The doc line of a field is the help and the page."""

from pathlib import Path

from keyhole.config import TrainConfig, resolve
from keyhole.config.docs import annotated, markdown
from keyhole.config.fields import settings
from keyhole.config.loader import parse_config

ROOT = Path(__file__).parents[2]


def test_every_setting_has_one_line_of_documentation() -> None:
    for key, setting in settings().items():
        assert setting.doc.endswith(".") and "\n" not in setting.doc and setting.doc.isascii(), key


def test_the_docs_page_is_up_to_date() -> None:
    """docs/config.md holds what `python -m keyhole.config.docs` prints, section by section; a new method may not be on
    it yet."""
    page, now = ((text.split("\n## ")) for text in ((ROOT / "docs" / "config.md").read_text(), markdown()))
    assert page[:3] == now[:3] and set(page) <= set(now)


def test_the_annotated_config_is_a_config() -> None:
    """What `keyhole config show` prints can be saved and run, and means the same."""
    made = TrainConfig(model="m", method="zo", train_data=["a", "b"], output_dir="o", max_steps=3)
    config, _ = resolve(made)
    assert parse_config(annotated(config))[0] == config
