"""Products of few rows, with wide matrices and those in one byte per number: the torch reference against plain
products, and its Triton kernel against both."""

import pytest
import torch
import torch.nn.functional as F
from comfyui_specar.kernels import linear
from comfyui_specar.models.networks.quantised import to_bits
from torch.utils._python_dispatch import TorchDispatchMode

from ..support.triton_kernels import agrees, interpreted

INT8, FP8, INT4 = torch.int8, torch.float8_e4m3fn, torch.uint4
SHAPES = [(1, 1, 1), (2, 5, 3), (17, 70, 300), (33, 33, 129), (100, 64, 256)]  # rows, N, K
slim = pytest.mark.parametrize("slim", [0, 4096])  # rows up to which a matrix has the smallest tiles


def problem(rows, outer, inner, storage, dtype=torch.float32):
    """x, narrow weights and their scales."""
    generator = torch.Generator().manual_seed(rows + outer + inner)
    x = torch.randn(rows, inner, generator=generator).to(dtype)
    if storage == FP8:
        return x, to_bits((torch.randn(outer, inner, generator=generator) * 3).to(FP8)), None
    if storage == INT4:
        groups = -(-inner // linear.GROUP)
        weight = torch.randint(256, (outer, groups, linear.GROUP // 2), generator=generator, dtype=torch.uint8)
        return x, weight, torch.randn(outer, groups, 2, generator=generator).bfloat16()
    weight = torch.randint(-127, 128, (outer, inner), generator=generator, dtype=INT8)
    return x, weight, torch.rand(outer, generator=generator)


def assert_near(found, x, weight, scale, wide_in=torch.float64):
    """Equal to the product in fp64, but for sums in fp32 in any order, the scale, and one rounding.

    wide_in: what 4 bits are widened to; on a GPU the dtype of x.

    Roundings of n terms are independent, so that they hardly ever add up to more than sqrt(n) of the size of all terms
    together (Higham and Mary, 2019).
    """
    if scale is None:
        wide = weight.view(FP8).double()
    elif scale.ndim == 3:
        wide = linear.widen(weight, scale, wide_in)[:, : x.shape[1]].double()
    else:
        wide = weight.double() * scale.double()[:, None]
    exact, terms = x.double() @ wide.T, x.double().abs() @ wide.abs().T
    sums = torch.finfo(torch.float32).eps * (2 + x.shape[-1] ** 0.5) * terms
    assert ((found - exact).abs() <= sums + torch.finfo(found.dtype).eps * exact.abs()).all()


def every_number():
    """All numbers in e4m3 but its two NaN, as one row."""
    numbers = torch.arange(256, dtype=torch.uint8)
    return numbers[~torch.isnan(numbers.view(FP8).float())][None]


@pytest.mark.parametrize("storage", [INT8, FP8, INT4], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_that_with_the_wide_matrix(shape, dtype, storage):
    x, weight, scale = problem(*shape, storage, dtype)
    found = linear.linear_narrow(x, weight, scale)
    assert found.dtype == dtype and found.shape == (shape[0], shape[1])
    assert_near(found, x, weight, scale)
    batched = linear.linear_narrow(x[None, :, None], weight, scale)
    assert torch.equal(batched[0, :, 0], found)


@pytest.mark.parametrize("storage", [INT8, INT4], ids=str)
def test_matrices_are_widened_in_blocks(monkeypatch, storage):
    x, weight, scale = problem(3, 70, 30, storage)
    monkeypatch.setattr(linear, "_BLOCK", 64)  # two rows
    widened, sizes = linear.widen, []
    monkeypatch.setattr(linear, "widen", lambda part, *rest: sizes.append(len(part)) or widened(part, *rest))
    found = linear.few_rows(x, weight, scale)
    assert sizes == [2] * 35
    assert_near(found, x, weight, scale)


class Counting(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += 1
        return operation(*args, **kwargs or {})


@pytest.mark.parametrize("storage", [INT8, FP8, INT4], ids=str)
@pytest.mark.parametrize("rows", [1, linear.FEW, linear.FEW + 1])
def test_devices_without_a_kernel_of_ours_multiply_once(rows, storage):
    """Each of the blocks that a CPU makes would be several launches there, hundreds for a matrix."""
    x, weight = (torch.empty(shape, device="meta") for shape in ((rows, 4096), (11008, 4096)))
    if storage == INT4:
        weight, scale = (
            torch.empty(11008, 64, size, dtype=dtype, device="meta")
            for size, dtype in ((32, torch.uint8), (2, torch.bfloat16))
        )
    else:
        weight, scale = to_bits(weight.to(storage)), torch.empty(11008, device="meta") if storage == INT8 else None
    with Counting() as operations:
        assert linear.linear_narrow(x, weight, scale).shape == (rows, 11008)
    assert operations.count < 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_number_in_fp8_is_widened_exactly(dtype):
    numbers = every_number()
    assert torch.equal(linear.widen(numbers, None, dtype), numbers.view(FP8).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_both_numbers_of_a_byte_are_widened_in_their_places(dtype):
    half = linear.GROUP // 2
    lower, upper = torch.arange(half) % 16, torch.arange(half) // 2
    weight = (lower + 16 * upper).to(torch.uint8).view(1, 1, half).repeat(2, 2, 1)
    scale = torch.tensor([[[2, -3], [0.5, 1]], [[-1, 0], [1, 8]]]).bfloat16()
    wanted = torch.cat((lower, upper)) * scale[..., :1].float() + scale[..., 1:].float()
    assert torch.equal(linear.widen(weight, scale, dtype), wanted.flatten(1).to(dtype))


def test_a_copy_for_prompts_holds_scaled_numbers():
    """Sums of whole levels would be too large for fp16."""
    x, weight, scale = torch.ones(1, 2000).half(), torch.full((3, 2000), 100, dtype=INT8), torch.tensor([0.1, 0.01, 0])
    assert torch.isinf(F.linear(x, weight.half())).all()
    found = F.linear(x, linear.widen(weight, scale, torch.float16))
    torch.testing.assert_close(found, torch.tensor([[20000.0, 2000.0, 0.0]]).half(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("storage", [INT8, FP8, INT4], ids=str)
@pytest.mark.parametrize(("shape", "dtype"), [*((s, torch.float32) for s in SHAPES), ((17, 20, 300), torch.float16)])
def test_the_kernel_agrees(shape, dtype, storage):
    """Triton's interpreter cannot turn whole numbers into bf16, for which the same kernel is only compiled."""
    given = problem(*shape, storage, dtype)
    assert_near(interpreted("linear.few_rows", *given), *given, dtype)


def test_the_kernel_knows_every_number_in_fp8():
    numbers = every_number()
    found = [interpreted("linear.few_rows", x, numbers, None) for x in torch.eye(numbers.shape[1]).split(128)]
    assert torch.equal(torch.cat(found)[:, 0], numbers[0].view(FP8).float())


def transformer(rows, outer, inner, dtype, gate, storage=None):
    """Arguments of few_rows with everything that a transformer puts after a product."""
    generator = torch.Generator().manual_seed(rows + outer + inner)

    def noise(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    x, weight, scale = noise(rows, inner), noise((1 + gate) * outer, inner) * inner**-0.5, None
    if storage:
        _, weight, scale = problem(rows, (1 + gate) * outer, inner, storage, dtype)
        scale = None if scale is None else scale / 100
    return x, weight, scale, noise(len(weight)), gate, noise(rows, outer)


def test_the_reference_is_what_a_block_does():
    x, weight, _, bias, _, residual = transformer(3, 20, 30, torch.float32, True)
    gate, value = F.linear(x, weight, bias).chunk(2, dim=-1)
    wanted = residual + F.silu(gate) * value
    torch.testing.assert_close(linear.few_rows(x, weight, None, bias, True, residual), wanted)
    plain = linear.few_rows(x, weight)
    assert torch.equal(plain, F.linear(x, weight)), "to the last bit"
    normed = torch.nn.RMSNorm(30, eps=1e-5)
    normed.weight.data = bias[:30]
    assert torch.equal(linear.rms_norm(x, normed.weight, 1e-5), normed(x))


@pytest.mark.parametrize(("shape", "gate"), [((2, 40, 300), True), ((17, 70, 256), True), ((40, 33, 130), False)])
@pytest.mark.parametrize("storage", [None, INT8, FP8, INT4], ids=str)
@slim
def test_the_kernel_does_what_a_block_does(shape, gate, storage, slim):
    given = transformer(*shape, torch.float32, gate, storage)
    wanted, found = linear.few_rows(*given), interpreted("linear.few_rows", *given, SLIM=slim)
    size = wanted.abs().max()  # of which numbers that nearly cancel keep the error
    assert (found - wanted).abs().max() <= 8 * torch.finfo(torch.float32).eps * shape[-1] ** 0.5 * size


@pytest.mark.parametrize(("shape", "dtype"), [((5, 300), torch.float32), ((2, 3, 64), torch.float16)])
def test_the_norm_agrees(shape, dtype):
    """In fp16 with numbers whose squares are infinite there."""
    generator = torch.Generator().manual_seed(1)
    x, weight = 1000 * torch.randn(shape, generator=generator), torch.randn(shape[-1], generator=generator)
    agrees("linear.rms_norm", x.to(dtype), weight.to(dtype), 1e-5, rtol=torch.finfo(dtype).eps * 4)


@pytest.mark.parametrize(
    ("dtype", "storage"), [(torch.float32, None), (torch.float16, None), (torch.float16, INT4)], ids=str
)
@pytest.mark.parametrize("gate", [False, True])
def test_a_row_does_not_depend_on_the_number_of_rows(gate, dtype, storage):
    """To the last bit, whatever the tile. Here the interpreter multiplies; of the GPU's instruction see
    test_kernels_compiled.py."""
    x, weight, levels, bias, _, residual = transformer(70, 40, 300, dtype, gate, storage)
    every = interpreted("linear.few_rows", x, weight, levels, bias, gate, residual)
    for rows, slim in ((1, 0), (8, 4096), (16, 0), (17, 0), (17, 4096), (64, 4096)):
        few = interpreted("linear.few_rows", x[:rows], weight, levels, bias, gate, residual[:rows], SLIM=slim)
        assert torch.equal(few, every[:rows])
