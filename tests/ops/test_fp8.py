"""The 8-bit format: PyTorch's own conversion of scaled groups, exact where it can be, unbiased elsewhere."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.ops import fp8
from keyhole.ops.backend import force
from keyhole.ops.rounding.bits import bits_at_reference

INF, NAN, TOP = float("inf"), float("nan"), torch.finfo(torch.float32).max
EVERY_CODE = torch.arange(256).to(torch.uint8)
TINY = [0.0, -0.0, 1e-45, -3e-42, 2.0**-127, 2.0**-126, 2.0**-10, 2.0**-9, -(2.0**-6)]
HUGE = [448.0, -448.0, 448.1, 1.75 * 2.0**127, 1.9375 * 2.0**127, TOP, -TOP, INF, -INF, NAN]
ODD = TINY + HUGE


@pytest.fixture(params=["reference", "kernel"])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Runs a test twice: with the reference on the CPU, and with the kernel where it can run."""
    with force(request.param):
        yield torch.device("cpu") if request.param == "reference" else request.getfixturevalue("kernel_device")


def encode(
    w: torch.Tensor, rounding: str = "nearest", *, offset: int = 0, seed: int = 5, step: int = 3
) -> torch.Tensor:
    packed = torch.full((fp8.packed_bytes(w.numel()),), 0xEE, dtype=torch.uint8, device=w.device)
    fp8.fp8_encode_(w, packed, offset=offset, seed=seed, step=step, rounding=rounding)
    return packed


def decode(packed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full((packed.numel() // 65 * 64,), 7.0, dtype=dtype, device=packed.device)
    fp8.fp8_decode(packed, out)
    return out


def split(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [n] and exponents [n / 64]."""
    n = packed.numel() // 65 * 64
    return packed[:n], packed[n:]


def samples(groups: int, seed: int = 0) -> torch.Tensor:
    """Groups of every magnitude, spread inside a group over all codes, with some of the odd values."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(groups, 64, generator=generator) * torch.logspace(-6, 0, 64)
    w *= torch.logspace(-41, 37, groups, dtype=torch.float64).float().unsqueeze(1)
    w[torch.rand(groups, 64, generator=generator) < 0.02] = 0.0
    odd = torch.randint(len(ODD), (groups,), generator=generator)
    w[::5, 17] = torch.tensor(ODD)[odd][::5]
    w[3:4] = 0.0
    return w.view(-1)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, zeros by sign too; NaN equals NaN."""
    number = ~a.isnan()
    a_numbers, b_numbers = a[number], b[number]
    return (
        torch.equal(number, ~b.isnan())
        and torch.equal(a_numbers, b_numbers)
        and torch.equal(a_numbers.signbit(), b_numbers.signbit())
    )


def test_every_code_and_exponent_decodes_to_its_definition() -> None:
    k = torch.arange(248)
    packed = torch.cat((EVERY_CODE.repeat(248), k.to(torch.uint8).repeat_interleave(4)))
    value = EVERY_CODE.view(torch.float8_e4m3fn).double().repeat(248)
    expected = value * (2.0 ** (k.double() - 127)).repeat_interleave(256)
    assert same(decode(packed), expected.float())
    finite = expected.abs() < 2.0**128
    assert torch.equal(decode(packed).double()[finite], expected[finite])  # no rounding at all
    for dtype in (torch.bfloat16, torch.float16):
        assert same(decode(packed, dtype), expected.float().to(dtype))


def test_the_scale_is_the_smallest_that_fits() -> None:
    edges = 448 * 2.0 ** torch.arange(-126.0, 119.0)
    edges = torch.cat((edges, edges.nextafter(torch.tensor(INF)), edges.nextafter(torch.tensor(0.0))))
    amax = torch.cat((edges, torch.tensor([1e-45, 2.0**-126, 2.0**-119, 1.0, TOP]), samples(500)[::64].abs()))
    amax = amax[amax.isfinite() & (amax > 0)]
    w = torch.linspace(-1, 1, 64) * amax.unsqueeze(1)
    k = split(encode(w.view(-1)))[1].double()
    assert (amax.double() <= 448 * 2 ** (k - 127)).all()
    assert ((amax.double() > 448 * 2 ** (k - 128)) | (k == 0)).all()


def ties() -> torch.Tensor:
    """The middles between all neighbouring codes and the floats next to them, in groups of scale 1."""
    grid = EVERY_CODE[:127].view(torch.float8_e4m3fn).float()
    middle = (grid[1:] + grid[:-1]) / 2
    values = torch.cat((middle, middle.nextafter(torch.tensor(INF)), middle.nextafter(torch.tensor(0.0)), -middle))
    values_G63 = values.view(-1, 63)
    return torch.cat((values_G63, torch.full((len(values_G63), 1), 448.0)), dim=1).view(-1)


def test_nearest_is_pytorchs_conversion_of_the_scaled_group(device: torch.device) -> None:
    for w in (samples(120), ties(), ties() * 2.0**-100, ties() * 2.0**100):
        w = torch.where(w.isfinite(), w, 0.0)  # which PyTorch converts differently from version to version
        codes, k = split(encode(w.to(device)).cpu())
        scaled = w.double() / (2.0 ** (k.double() - 127)).repeat_interleave(64)
        assert torch.equal(codes, scaled.float().to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("code", [2, 7, 8, 77, 120])
def test_stochastic_rounding_turns_at_the_last_bit(device: torch.device, code: int) -> None:
    """With bits r, a fraction of 2^20 - 16 r - 8 (of 2^20) goes up, and one less does not."""
    bits = bits_at_reference(torch.arange(128), seed=5, step=3).double()
    below, above = EVERY_CODE[code : code + 2].view(torch.float8_e4m3fn).double()
    for short, up in ((8, 1), (9, 0)):
        w = (below + (above - below) * (1 - (16 * bits + short) / 2**20)).float()
        w[::64] = 448.0
        codes, _ = split(encode(w.to(device), "stochastic").cpu())
        codes[::64] = code + up
        assert (codes == code + up).all()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_what_codes_can_hold_is_unchanged(rounding: str) -> None:
    once = decode(encode(samples(300), rounding))
    once = torch.where(once.isinf(), 0.0, once)  # TOP, rounded up
    assert same(decode(encode(once, rounding, step=4)), once)
    again = encode(once, rounding, step=5)
    assert torch.equal(encode(decode(again), rounding, step=6), again)


def test_stochastic_rounding_draws_the_bits_of_its_element() -> None:
    w, offset = samples(300), 8192 * 3 + 64 * 5
    codes, k = split(encode(w, "stochastic", offset=offset, seed=11, step=2))
    bits = bits_at_reference(torch.arange(offset, offset + w.numel()), seed=11, step=2)
    scaled = (w.double() / (2.0 ** (k.double() - 127)).repeat_interleave(64)).float()
    assert torch.equal(codes, fp8.codes_reference(scaled, bits))
    assert not torch.equal(codes, split(encode(w, "stochastic", offset=offset, seed=11, step=3))[0])


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_not_finite_values_become_nan_alone(rounding: str) -> None:
    """NaN and inf take the NaN code, without a sign; the other 63 are as if a zero stood there."""
    for bad in (NAN, INF, -INF):
        w = torch.randn(64, generator=torch.Generator().manual_seed(1))
        clean = w.clone()
        w[9], clean[9] = bad, 0.0
        packed, expected = encode(w, rounding), encode(clean, rounding)
        expected[9] = 0x7F
        assert torch.equal(packed, expected) and decode(packed)[9].isnan()
    everything = encode(torch.full((64,), INF), rounding)
    assert everything.tolist() == [0x7F] * 64 + [0]


groups = st.lists(st.one_of(st.sampled_from(ODD), st.floats(width=32)), min_size=1, max_size=64)


@settings(max_examples=150)
@given(groups, st.sampled_from(["nearest", "stochastic"]))
def test_any_group_comes_back_within_a_step(values: list[float], rounding: str) -> None:
    w = torch.tensor(values + [0.0] * (64 - len(values)))
    packed = encode(w, rounding)
    back, scale = decode(packed).double(), 2.0 ** (packed[64].item() - 127)
    assert torch.equal(back.isnan(), ~w.isfinite())
    fine = w.isfinite() & (w.abs() < 1.875 * 2.0**127)  # above, the step up may leave float32
    exact = w.double()[fine]
    step = (2.0 ** (exact.abs().clamp(min=1e-60).log2().floor() - 3)).clamp(min=scale * 2.0**-9)
    error = (back[fine] - exact).abs()
    assert (error <= step / 2).all() if rounding == "nearest" else (error < step).all()
    assert torch.equal(back[fine].signbit(), exact.signbit()) and (back[fine][exact == 0] == 0).all()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_pieces_encode_like_the_whole(rounding: str) -> None:
    groups, offset = 4096 + 700, 8192 * 31 + 64 * 3
    w = samples(groups)
    codes, k = split(encode(w, rounding, offset=offset))
    cuts = [0, 1, 4, 129, 130, 2000, 4097, groups]
    pieces = [split(encode(w[64 * a : 64 * b], rounding, offset=offset + 64 * a))
              for a, b in zip(cuts, cuts[1:], strict=False)]  # fmt: skip
    assert torch.equal(codes, torch.cat([piece[0] for piece in pieces]))
    assert torch.equal(k, torch.cat([piece[1] for piece in pieces]))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("groups", "offset"), [(1, 0), (5, 64 * 127), (400, 64 * 3), (131, (1 << 43) - 64 * 9)])
def test_kernel_encodes_like_the_reference(
    kernel_device: torch.device, rounding: str, groups: int, offset: int
) -> None:
    w = samples(groups)
    with force("reference"):
        expected = encode(w, rounding, offset=offset)
    room = torch.full((expected.numel() + 128,), 0xEE, dtype=torch.uint8, device=kernel_device)
    with force("kernel"):
        fp8.fp8_encode_(w.to(kernel_device), room[64:-64], offset=offset, seed=5, step=3, rounding=rounding)
    assert torch.equal(room[64:-64].cpu(), expected)
    assert (room[:64] == 0xEE).all() and (room[-64:] == 0xEE).all()


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, where Triton is interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernel_decodes_like_the_reference(kernel_device: torch.device, dtype: torch.dtype) -> None:
    k = torch.arange(248).to(torch.uint8)
    packed = torch.cat((EVERY_CODE.repeat(248), k.repeat_interleave(4)))
    for n in (64 * 4 * 248, 64 * 37):
        part = torch.cat((packed[:n], packed[64 * 992 :][992 - n // 64 :]))
        with force("reference"):
            expected = decode(part, dtype)
        out = torch.full((n + 64,), 7.0, dtype=dtype, device=kernel_device)
        with force("kernel"):
            fp8.fp8_decode(part.to(kernel_device), out[:n])
        assert same(out[:n].cpu(), expected) and (out[n:] == 7.0).all()


def test_a_large_tensor_on_the_gpu(cuda: torch.device) -> None:
    n, offset = 300_000_000 // 64 * 64, 64 * 77
    w = torch.randn(n, device=cuda) * 0.02
    packed = encode(w, "stochastic", offset=offset)
    back = decode(packed, torch.bfloat16)
    for start in (0, n // 2 // 64 * 64, n - 64 * 1000):
        part = slice(start, start + 64 * 1000)
        with force("reference"):
            expected = encode(w[part].cpu(), "stochastic", offset=offset + start)
            assert torch.equal(packed[part].cpu(), split(expected)[0])
            assert torch.equal(packed[n + start // 64 :][:1000].cpu(), split(expected)[1])
            assert torch.equal(back[part].cpu(), decode(expected, torch.bfloat16))
