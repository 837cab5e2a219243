"""What a caller changes by hand in the module between steps: weights, and the parameters themselves.

A model keeps more than the parameters that the module shows: streamed weights may still lie in a slot on the device,
and a method may hold fp32 masters, or an update that is not applied yet. So the model must know of a change before it
uses the weights again. Before each step it looks for three kinds of change:

    param.copy_(..), load_state_dict, init.*      torch counts changes in place: `param._version`
    param.data = other                            the parameter no longer points to its home: the home takes its values,
                                                  unless the caller keeps the home as a backup (UserError). The
                                                  module's own forward without gradients uses the other weights as they
                                                  are, if it can: averaged weights are evaluated like that
    module.weight = nn.Parameter(..), a new       the module no longer holds the parameter that is trained: UserError,
    module, resize_token_embeddings               since the new one would be neither trained nor saved

Torch does not count a change through an alias that `.data` returns (`param.data.copy_(..)`). A caller who flushes the
method first says that he may make one: until the next step, weights are then taken from their homes again.

The comparison takes less than a microsecond per parameter, on the host.
"""

import gc
import weakref
from collections.abc import Iterable
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from keyhole.errors import UserError, listed
from keyhole.model.structure.layout import FlatTensor, Layout
from keyhole.model.weights.homes import Homes

VERSION = attrgetter("_version")


class ByHand:
    """Compares the parameters of a module with what they were after the last step."""

    def __init__(self, module: nn.Module, layout: Layout, homes: Homes) -> None:
        self._module, self._layout, self._homes = weakref.ref(module), layout, homes
        self._loaded = {id(param) for param in module.parameters()}  # they live as long as the module
        self._params = [tensor.param for tensor in layout.tensors]
        self._versions: list[int] | None = None  # None: no method was made yet
        self._at_home: list[tuple[FlatTensor, torch.Tensor]] = []
        self._own: list[nn.Parameter] = []
        self._addresses: list[int] = []
        self._tables: list[dict[str, Any]] = []  # of the module and all modules in it: parameters and modules by name
        self._members: list[Any] = []  # the values of these tables; kept, so that no other object has their ids
        self._ids: list[int] | None = None
        self._released = False

    def release(self) -> None:
        """The homes are gone, and the parameters are the caller's own: nothing is compared or brought home."""
        self._released = True

    def note(self) -> None:
        """The weights are as they should be: called after every step, which changes them too."""
        self._versions = list(map(VERSION, self._params))

    def take(self, pointed: bool = True) -> list[str]:
        """The names of the parameters that were changed since; their homes have the new weights now. UserError if they
        cannot. pointed: also those that were pointed to other memory."""
        if self._released:
            return []
        if not self._at_home:
            plain = [tensor for tensor in self._layout.tensors if not self._homes.is_apart(tensor)]
            self._at_home = [(tensor, self._homes.read(tensor)) for tensor in plain]
            self._own = [tensor.param for tensor in plain]
            self._addresses = [home.data_ptr() for _, home in self._at_home]
        changed: list[str] = []
        if pointed and self._addresses != list(map(torch.Tensor.data_ptr, self._own)):
            changed += self._take_data()
        versions = list(map(VERSION, self._params))
        if self._versions is not None and versions != self._versions:
            pairs = zip(self._layout.tensors, self._versions, versions, strict=True)
            changed += [tensor.name for tensor, old, new in pairs if old != new]
        if changed:
            self._versions = versions
        return changed

    @torch.no_grad()
    def _take_data(self) -> list[str]:
        """Brings home the tensors that a caller has pointed parameters to."""
        elsewhere = [one for one in self._at_home if one[0].param.data_ptr() != one[1].data_ptr()]
        kept = self._backups(elsewhere)
        if kept:
            raise UserError(
                f"model: {listed(kept)} was pointed to other memory (param.data = ..), and its own memory is still in "
                "use, as a backup of the trained weights: it would be overwritten. Point it back, and copy: "
                "backup = param.detach().clone(), and param.copy_(..) under torch.no_grad() (also to go back)"
            )
        for tensor, home in elsewhere:
            data = tensor.param.data
            if data.shape != home.shape or data.dtype != home.dtype:
                found, wanted = (f"{list(x.shape)} in {str(x.dtype)[6:]}" for x in (data, home))
                raise UserError(
                    f"model: {tensor.name} was changed to {found} after keyhole.load, and is {wanted} in the memory "
                    "that is trained and saved. Give keyhole.load the dtype (dtype=..), and save a model with other "
                    "shapes before you load it"
                )
        for tensor, home in elsewhere:
            home.copy_(tensor.param.data)
            tensor.param.data = home
        return [tensor.name for tensor, _ in elsewhere]

    def _backups(self, elsewhere: list[tuple[FlatTensor, torch.Tensor]]) -> list[str]:
        """The names of those whose homes the caller still uses: several of them, as moving averages do that go back to
        them; or one, as another parameter, or while the new weights have a second owner. (One tensor alone is a
        variable that was left over: old = param.data; param.data = old.clamp(..).) Takes 0.1 us per Python object."""
        ours = {id(one) for one in (*self._homes.flats, *(home for _, home in self._at_home))}
        tensors = {home.data_ptr(): tensor for tensor, home in elsewhere if home.numel()}
        found, is_sure = set(), False
        for one in [one for one in gc.get_objects() if type(one) is torch.Tensor or type(one) is nn.Parameter]:
            tensor = tensors.get(one.data_ptr()) if _has_memory(one) and id(one) not in ours else None
            if tensor is None or one.shape != tensor.shape or not (one._base is None or one._base is tensor.param):
                continue  # (views of keyhole's own have a flat tensor as their base)
            found.add(tensor.name)
            is_sure = is_sure or isinstance(one, nn.Parameter) or _owners(tensor.param) > 1
        return [tensor.name for tensor, _ in elsewhere if tensor.name in found] if is_sure or len(found) > 1 else []

    # -- the parameters themselves -----------------------------------------------------------------------------------

    def check_parameters(self, beside: Iterable[nn.Parameter] = ()) -> None:
        """UserError if the module has lost a parameter that was loaded, or has one that was not. beside: trained
        parameters that a method has added."""
        if self._released or self._ids == list(map(id, chain.from_iterable(map(dict.values, self._tables)))):
            return
        module = self._module()
        assert module is not None  # the model holds both
        there = dict(module.named_parameters())
        ids, known = {id(param) for param in there.values()}, self._loaded | {id(param) for param in beside}
        gone = next((tensor.name for tensor in self._layout.tensors if id(tensor.param) not in ids), None)
        if gone is not None:
            raise UserError(
                f"model: {gone} was replaced or resized after keyhole.load, and the new weights would be neither "
                "trained nor saved; save a model with the weights it needs first (AutoModelForCausalLM, "
                "save_pretrained), and load that. To change values only, write into the parameter: param.copy_(..)"
            )
        added = next((name for name, param in there.items() if id(param) not in known), None)
        if added is not None:
            raise UserError(
                f"model: {added} was added to the module after keyhole.load, and would be neither trained nor saved; "
                "save a model that has it, and load that (adapters: method lora or lomo-lora)"
            )
        self._tables = [table for one in module.modules() for table in (one._parameters, one._modules)]
        self._members = [one for table in self._tables for one in table.values()]
        self._ids = [id(one) for one in self._members]


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type != "meta" and not torch._is_functional_tensor(tensor)


def _owners(tensor: torch.Tensor) -> int:
    """How many tensors use the memory of this one."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1  # less the storage object of this line
