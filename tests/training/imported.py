"""What the server of children.py imports before it forks: all that a run imports, and what it would make once.

Nothing here starts a thread or touches a model: a fork has to find the process as imports leave it. The objects that
the imports made are frozen: the collector of a child would otherwise walk, and so copy, all of them.
"""

import gc
from contextlib import suppress

gc.disable()  # imports make no garbage worth a walk through all that is there

import numpy.ctypeslib  # noqa: E402, F401
import transformers.models.auto.tokenization_auto  # noqa: E402
import transformers.models.llama.modeling_llama  # noqa: E402, F401

import keyhole.cli  # noqa: E402
import keyhole.ranks.group  # noqa: E402
import keyhole.training.build  # noqa: E402, F401
from keyhole.config.fields import settings  # noqa: E402
from keyhole.methods import METHODS  # noqa: E402

for row in METHODS.values():
    row.load()
with suppress(ImportError):  # insides of others, which another version may not have
    import typer._adapters  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")

settings()  # their docstrings, which are found in the source

gc.enable()
gc.collect()
gc.freeze()
gc.set_threshold(20_000, 20, 20)  # as in tests/conftest.py: a step makes thousands of objects and hardly a cycle
