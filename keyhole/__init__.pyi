"""What `import keyhole` offers, for editors and type checkers: the module imports each name on first use."""

from keyhole.loading import load as load
from keyhole.methods.adam_offload.method import AdamOffload as AdamOffload
from keyhole.methods.apollo_mini.method import APOLLOMini as APOLLOMini
from keyhole.methods.baselines.first_order import SGD as SGD
from keyhole.methods.baselines.first_order import AdamW as AdamW
from keyhole.methods.baselines.galore import GaLore as GaLore
from keyhole.methods.lomo.adalomo import AdaLOMO as AdaLOMO
from keyhole.methods.lomo.lomo_lora import LOMOLoRA as LOMOLoRA
from keyhole.methods.lomo.method import LOMO as LOMO
from keyhole.methods.lora.method import LoRA as LoRA
from keyhole.methods.lsp.method import LSP as LSP
from keyhole.methods.muon.method import Muon as Muon
from keyhole.methods.workload import Workload as Workload
from keyhole.methods.zo.method import ZO as ZO
from keyhole.model.model import Model as Model

__version__: str
__all__: list[str]
