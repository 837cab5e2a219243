"""Short runs of zo on several ranks."""

from tests.training.conftest import make  # noqa: F401
