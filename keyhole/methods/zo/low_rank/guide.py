"""Low-rank directions that follow the error (zo.guide): V of a period from one forward pass over some rows.

A direction z = u v^T perturbs the output of a layer by u (v . x). What a step of rate r along the slope c of such
directions gains is  r G - r^2 c^2 J / 2,  c^2 = G + S / rows:  G the square of the gradient within their span, S and J
(which go together) what single rows contribute to its noise, and to the curvature. A random v sees both in equal
shares. So what counts is the ratio of the two in the span of the chosen v, and it differs a lot: all inputs have a
large part in common (their mean, a few outlier columns), which carries most of J and, once a preference for one answer
is corrected, little of G.

The gradient of a matrix W with input x is the sum of  delta_n x_n^T  over tokens, delta_n the error at its output. The
latter needs a backward pass; but the residual stream carries outputs to the head unchanged, apart from what later
layers add, so the error at the head, d_n, known after a forward pass alone, stands in for it. At the start of each
period, before its first step, `zo.guide` rows pass the model without perturbation:

    X [N, I]    the inputs of every trained linear layer, at the positions that predict a trained token (with the loss
                over tokens, at MOST_POSITIONS of them)
    D [N, H]    d_n: the gradient of the loss with respect to the hidden states before the head, which alone is
                reversed, chunk by chunk (backward/vocabulary.py)
    Y = D P     [N, r] its r principal components (binary choice: one, the signed residual of each question)
    v_j         the direction with the largest  (sum_n y_nj (v . x_n))^2 / (v^T (C + lambda) v),   C = X^T X / N:
                v_j = (C + lambda)^-1 X^T y_j

which is ridge regression of the error on the inputs. lambda = RIDGE times the mean of C's diagonal. C is dominated by a
few directions, so conjugate gradients converge in a few steps, and C is never computed:  4 N I r FLOPs per iteration.
u stays random, so a step estimates the true gradient within the span, whatever the quality of this guess. Scale: the
mean of (v_j . x)^2 is that of |x|^2 / r, as for a random V / sqrt(r), so eps and rates mean the same.

A layer whose input is something else than tokens in the order of the batch keeps its random V, and so does a column for
which there is (nearly) no error: a rank above the number of its components has random directions beside those that
follow the error.

The rows are those of the coming steps (the training loop looks ahead; their order is a function of the seed, so a
resumed run has the same), or in one's own loop those given to `look_ahead`, or those of the step itself. Of several
ranks, each passes all of them, as one process would, and takes the leader's V, since kernels of another machine may
round otherwise.

V depends on weights and data, so it cannot be drawn again. It is part of a checkpoint, and beside a journal each
period's V is a file (directions/000000.safetensors, and so on), which is on the disk before the first record of the
period is: with these a replay needs neither data nor passes. A file has a checksum of V, the id of its run and the
number of its period: other directions would give other weights, without an error.

Bytes on the device: hidden states of all guide rows; for N positions 4 N H (D); the inputs, b N I per layer, at most
KEPT_BYTES (further ones wait in host memory); and 4 N I for the layer that is solved. On the disk b m per period
(SmolLM2-135M, rank 1: 0.3 MB in 16 bit; OPT-13B: 4 MB).
"""

import math
import zlib
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from keyhole import ops
from keyhole.disk.files import make_directories, replacing
from keyhole.errors import UserError, warn
from keyhole.methods.zo.estimators import send_options
from keyhole.methods.zo.low_rank.factors import Factors
from keyhole.methods.zo.low_rank.parts import ALIGN
from keyhole.model.backward.vocabulary import VocabularyGradients
from keyhole.model.batch import Batch, DeviceBatch
from keyhole.model.forward.evaluation import swept
from keyhole.model.model import Model

KEPT_BYTES = 256 * 2**20
MOST_POSITIONS = 4096  # of the loss over tokens
PASS_BYTES = 128 * 2**20  # of the widest activation of a pass that looks ahead, unless a step's are larger
RIDGE = 3.0
SOLVER_STEPS, POWER_STEPS = 12, 4
LEAST = 1e-3  # of the largest component's norm


class Guide:
    """Computes the V of periods. directory: where they are kept, as those of a run (its id); None: nowhere."""

    def __init__(self, factors: Factors, rows: int) -> None:
        if factors.model.classifies or factors.model.head.transforms:
            raise UserError("zo.guide: needs a language model whose head is a matrix; set zo.guide=null")
        self.factors, self.rows = factors, rows
        self.directory: Path | None = None
        self.run: str | None = None
        self.ahead: list[Batch] = []
        self.inputs: Inputs | None = None  # during the passes

    @property
    def is_due(self) -> bool:
        """Whether the next step begins a period whose V is not known."""
        return self.factors.found_for != self.factors.period

    @property
    def tokens(self) -> int:
        """The most tokens of a pass, unless those of a step have more."""
        return tokens_per_pass(self.factors.model.layout.widest, self.factors.model.dtype.itemsize)

    @torch.no_grad()
    def renew(self, batches: list[Batch]) -> None:
        """Before the first step of a period: computes V, from weights to which the update was applied. batches: those
        of the step; a closure has none."""
        factors, rows = self.factors, self.ahead or batches
        if not rows:
            raise UserError(
                "closure: zo.guide finds the directions of a period from rows, and a closure has none; call "
                "look_ahead(batches) before a step, if rows_ahead is not None"
            )
        self.ahead = []
        v, ranks = self._find(rows), factors.model.ranks
        if ranks.several:
            v = ranks.from_leader(v.cpu).to(v.device)
        if self.directory is not None and ranks.is_leader:
            self._write(v)
        factors.take_v(v)

    def _find(self, batches: list[Batch]) -> torch.Tensor:
        factors, model = self.factors, self.factors.model
        sent = _thinned(model.send(batches, **send_options(batches)))
        positions = [torch.unique(batch.index_N, return_inverse=True) for batch in sent]
        self.inputs = inputs = Inputs(factors, sent, [at_N for at_N, _ in positions])
        try:
            d_NH = torch.cat(_errors(model, sent, positions))
        finally:
            self.inputs = None
        parts, shape = factors.parts, (len(d_NH), factors.rank)
        after = parts.v_start + -(-parts.v_numel // ALIGN) * ALIGN  # the first index of noise after that of all V
        how = factors.noise | {"step": factors.period, "device": model.device}
        v = factors.draw_v(factors.period)
        solved = inputs.solve(
            principal_errors(d_NH, ops.draw_noise(math.prod(shape), offset=after, **how).view(shape)), v
        )
        random = len(parts.matrices) - solved
        if random:
            warn(
                f"zo.guide: V of {random} of {len(parts.matrices)} layers is random in this period: their inputs are "
                "not the tokens of a batch, each once"
            )
        return v

    # -- files beside a journal ------------------------------------------------------------------------------------

    def _about(self, v: torch.Tensor) -> dict[str, str]:
        crc = zlib.crc32(v.cpu().contiguous().view(torch.uint8).numpy().data)
        return {"crc32": f"{crc:08x}", "run": str(self.run), "period": str(self.factors.period)}

    def _write(self, v: torch.Tensor) -> None:
        assert self.directory is not None
        path = self.directory / f"{self.factors.period:06d}.safetensors"
        try:
            make_directories(self.directory)
            with replacing(path) as file:
                file.write(save({"v": v.cpu()}, self._about(v)))
        except OSError as error:
            raise UserError(
                f"zo.guide: {path} cannot be written: {error.strerror or error}; steps of this period could not be "
                "replayed. Free some space, and go on with --resume"
            ) from error

    def read(self) -> None:
        """Takes the V of the period from its file; UserError if it is missing, damaged, or of something else."""
        if self.directory is None:
            raise UserError("zo.guide: directions are files beside the journal, and no journal is known")
        factors, path = self.factors, self.directory / f"{self.factors.period:06d}.safetensors"
        way_on = (
            f"steps from {factors.period * factors.refresh + 1} on of the journal need it. Put it back (the directory "
            "directions of the run, beside its journal), or resume from a checkpoint by its name"
        )
        try:
            with safe_open(path, "pt") as file:
                v, about = file.get_tensor("v"), file.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise UserError(f"zo.guide: {path} cannot be read ({error}); {way_on}") from error
        if v.shape != factors.v.shape or v.dtype != factors.v.dtype:
            raise UserError(f"zo.guide: {path} holds {v.dtype} {tuple(v.shape)}, not the directions of this model")
        if about != (own := self._about(v)):
            raise UserError(f"zo.guide: {path} is damaged, or of another run or period ({about}, not {own}); {way_on}")
        factors.take_v(v)


def tokens_per_pass(widest: int, element_bytes: int) -> int:
    """So many that the widest activation takes PASS_BYTES."""
    return max(1, PASS_BYTES // (element_bytes * widest))


def _thinned(sent: list[DeviceBatch]) -> list[DeviceBatch]:
    """The batches with every k-th of the trained tokens only, if there are many (a choice needs all of a candidate)."""
    every = -(-sum(batch.token_count for batch in sent) // MOST_POSITIONS)
    if every <= 1 or sent[0].loss.entries:
        return sent
    names = ("index_N", "target_N", "row_N")
    fewer = [{name: getattr(batch, name)[::every] for name in names} for batch in sent]
    return [replace(b, **few, token_count=few["index_N"].numel()) for b, few in zip(sent, fewer, strict=True)]


# -- the error at the head ---------------------------------------------------------------------------------------------


def _errors(
    model: Model, sent: list[DeviceBatch], positions: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[torch.Tensor]:
    """[N, H] float32, per batch. positions: the N distinct ones, and which of them each trained token has."""
    head = VocabularyGradients(model)
    swept(model, sent, lambda hidden, common: [head.loss(hidden, sent, common, loss_count=1)], at_home=True)
    with model.engine.sweep("guide", [unit.index for unit in model.layout.head_units]):
        try:
            head.common = model.device_weights.acquire(model.layout.common)
            head.restart(1.0)
            grads = head.hidden_grads()
        finally:
            model.binding.bind_homes()
    summed = []
    for d_NH, (at, place_N) in zip(grads.values(), positions, strict=True):
        if len(at) < len(d_NH):  # candidates of one token behind the same prompt share a position, with opposite errors
            one_hot = torch.nn.functional.one_hot(place_N, len(at))
            d_NH = one_hot.float().t() @ d_NH  # a product, since index_add_ has no fixed order on a GPU
        summed.append(d_NH)
    return summed


def principal_errors(d_NH: torch.Tensor, start_Nr: torch.Tensor) -> torch.Tensor:
    """[N, r] the errors along their r principal directions, by subspace iteration; components with (nearly) no error
    are 0, and so are columns beyond the width. start_Nr: random numbers."""
    p_Hr, _ = torch.linalg.qr(d_NH.t() @ start_Nr)
    for _ in range(POWER_STEPS):
        p_Hr, _ = torch.linalg.qr(d_NH.t() @ (d_NH @ p_Hr))
    y_Nr = d_NH @ p_Hr
    norm_r = y_Nr.norm(dim=0)
    y_Nr = y_Nr * (norm_r > LEAST * norm_r.max())
    return torch.nn.functional.pad(y_Nr, (0, start_Nr.shape[1] - y_Nr.shape[1]))


# -- the inputs that predict it ----------------------------------------------------------------------------------------


class Inputs:
    """The inputs of layers at the positions `at` of each pass, by matrix and pass."""

    def __init__(self, factors: Factors, sent: list[DeviceBatch], at: list[torch.Tensor]) -> None:
        self.factors, self.at = factors, at
        self.tokens = [batch.inputs["input_ids"].numel() for batch in sent]
        self.seen: dict[int, dict[int, torch.Tensor]] = {}
        self.odd: set[int] = set()  # matrices whose inputs are not the tokens of a pass, once each
        self.last: tuple[torch.Tensor, torch.Tensor] | None = None  # an input, and its part: several layers read it
        self.kept_bytes = 0

    def see(self, index: int, x: torch.Tensor) -> None:
        """Called with the input of a layer."""
        conductor, parts = self.factors.model.conductor, self.seen.setdefault(index, {})
        assert conductor is not None  # a pass is running
        current = conductor.current.index
        if x.shape[:-1].numel() != self.tokens[current] or current in parts:
            self.odd.add(index)
            return
        if self.last is None or self.last[0] is not x:
            part = x.reshape(self.tokens[current], -1)[self.at[current]]
            self.kept_bytes += part.nbytes
            self.last = x, part if self.kept_bytes <= KEPT_BYTES else part.cpu()
        parts[current] = self.last[1]

    def solve(self, y_Nr: torch.Tensor, v: torch.Tensor) -> int:
        """Writes V of layers into the array of all V, those that read the same inputs at once. Returns their number."""
        readers: dict[tuple[int, ...], list[int]] = {}
        for index, parts in self.seen.items():
            if len(parts) == len(self.at) and index not in self.odd:
                readers.setdefault(tuple(id(parts[i]) for i in range(len(self.at))), []).append(index)
        for group in readers.values():
            seen = self.seen[group[0]]
            x_NI = torch.cat([seen[i].to(v.device) for i in range(len(self.at))])
            found_rI = predictors(x_NI.float(), y_Nr).to(v.dtype)  # where large numbers of float16 become infinite
            usable_r = torch.isfinite(found_rI).all(dim=1, keepdim=True) & found_rI.any(dim=1, keepdim=True)
            for index in group:
                place_rI = self.factors.rows(v, self.factors.parts.matrices[index].v)
                place_rI.copy_(torch.where(usable_r, found_rI, place_rI))
        return sum(map(len, readers.values()))


def predictors(x_NI: torch.Tensor, y_Nr: torch.Tensor) -> torch.Tensor:
    """[r, I] the directions of the inputs of a layer that predict the errors best, scaled: (X^T X / N + ridge)^-1 X^T y
    by conjugate gradients, for every column of y on its own."""
    count, width = x_NI.shape
    energy = x_NI.square().sum() / count
    left_Ir = x_NI.t() @ y_Nr / count
    v_Ir, way_Ir, left_r = torch.zeros_like(left_Ir), left_Ir.clone(), left_Ir.square().sum(dim=0)
    for _ in range(SOLVER_STEPS):
        applied_Ir = x_NI.t() @ (x_NI @ way_Ir) / count + RIDGE * energy / width * way_Ir
        length_r = _ratio(left_r, (way_Ir * applied_Ir).sum(dim=0))
        v_Ir = v_Ir + length_r * way_Ir
        left_Ir = left_Ir - length_r * applied_Ir
        before_r, left_r = left_r, left_Ir.square().sum(dim=0)
        way_Ir = left_Ir + _ratio(left_r, before_r) * way_Ir
    seen_r = (x_NI @ v_Ir).square().mean(dim=0)
    scaled_Ir = v_Ir * (energy / y_Nr.shape[1] / seen_r).sqrt()
    return torch.where(seen_r > 0, scaled_Ir, torch.zeros_like(v_Ir)).t().contiguous()


def _ratio(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x / y, and 0 where y is."""
    return torch.where(y > 0, x / y, torch.zeros_like(x))
