"""torch.compile without code generation: the traced operations of a block are run one by one.

It is like torch's "aot_eager", but with the two passes of inductor that decide whether an operation may change its
argument in place or needs a copy. (aot_eager always copies, and a weight that is changed in a copy is not found by its
address.)
"""

from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops_core

IN_PLACE = "keyhole_in_place"


def _compile(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    reinplace_inplaceable_ops_core(module.graph)
    decompose_auto_functionalized(module.graph)
    module.recompile()
    return make_boxed_func(module.forward)


torch._dynamo.register_backend(aot_autograd(fw_compiler=_compile, bw_compiler=_compile), name=IN_PLACE)
