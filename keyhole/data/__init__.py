"""Files in, batches out: formats, templates and masks, packing, a resumable loader."""

from keyhole.data.answers import plain_template
from keyhole.data.dataset import Dataset, Sample
from keyhole.data.loader import Batch, EvalBatches, Loader, collate
from keyhole.data.packing import check_packing, pack
from keyhole.data.prepare import prepare
from keyhole.data.preview import preview
from keyhole.data.report import Report
from keyhole.data.run import Data, load_data, load_tokenizer, preview_data
from keyhole.data.settings import DataSettings, PrepareSettings

__all__ = [
    "Batch",
    "Data",
    "DataSettings",
    "Dataset",
    "EvalBatches",
    "Loader",
    "PrepareSettings",
    "Report",
    "Sample",
    "check_packing",
    "collate",
    "load_data",
    "load_tokenizer",
    "pack",
    "plain_template",
    "prepare",
    "preview",
    "preview_data",
]
