"""Files in, batches out: formats, templates and masks, packing, a resumable loader."""

from keyhole.data.answers import plain_template
from keyhole.data.dataset import Dataset, Report, Sample
from keyhole.data.loader import Batch, EvalBatches, Loader, collate
from keyhole.data.packing import check_packing, pack
from keyhole.data.prepare import prepare
from keyhole.data.preview import preview
from keyhole.data.run import Data, from_config, load_tokenizer, preview_config

__all__ = [
    "Batch", "Data", "Dataset", "EvalBatches", "Loader", "Report", "Sample", "check_packing", "collate",
    "from_config", "load_tokenizer", "pack", "plain_template", "prepare", "preview",
    "preview_config",
]  # fmt: skip
