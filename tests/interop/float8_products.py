"""Linear layers of PyTorch that compute in fp8: torchao's Float8Linear by torch._scaled_mm, OCP's MX by blocks, and
NVIDIA's fp4."""
import torch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
BLOCK = 32


def scaled(x, dtype):
    """(numbers, scale) with one scale for all numbers."""
    factor = (LARGEST[dtype] / x.abs().max().double().clamp(min=1e-12)).float()
    return (x.float() * factor).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).contiguous(), factor.reciprocal()


def in_blocks(x, dtype):
    """Values of x [rows, K] with a power of two for each 32 numbers of a row; the exponent is rounded up."""
    parts = []
    for part in x.float().split(BLOCK, 1):
        ratio = part.abs().amax(1, keepdim=True).double() / LARGEST[dtype]
        scale = torch.where(ratio > 0, 2.0 ** torch.log2(ratio).ceil(), 1.0).float()
        parts.append((part / scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).float() * scale)
    return torch.cat(parts, 1)


def product(a, a_dtype, b, recipe):
    """a [M, K], b [N, K] -> a b^T"""
    if recipe == "mxfp8":
        return (in_blocks(a, a_dtype) @ in_blocks(b, torch.float8_e4m3fn).t()).to(a.dtype)
    (left, a_scale), (right, b_scale) = scaled(a, a_dtype), scaled(b, torch.float8_e4m3fn)
    return torch._scaled_mm(left, right.t(), a_scale, b_scale, out_dtype=a.dtype)


class Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight, recipe, gradients):
        context.save_for_backward(x, weight)
        context.recipe, context.gradients = recipe, getattr(torch, "float8_" + gradients)
        return product(x.reshape(-1, x.shape[-1]), torch.float8_e4m3fn, weight, recipe).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(context, grad):
        x, weight = context.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        of_x = product(grad, context.gradients, weight.t(), context.recipe).view(x.shape)
        of_weight = product(grad.t(), context.gradients, x.reshape(-1, x.shape[-1]).t(), context.recipe)
        return of_x, of_weight, None, None


GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SIGNS = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1.])


def in_float4(x, block_rows=1, at_random=False):
    """Values of x [rows, K] in E2M1 with a scale in e4m3 for each block of 16 columns, and one for all."""
    blocks = x.bfloat16().float().unflatten(1, (-1, 16)).unflatten(0, (-1, block_rows))
    amax = blocks.abs().amax((1, 3), keepdim=True)
    of_all = amax.max() / (448 * 6)
    scales = (amax / 6 / of_all).clamp(2**-6, 448).to(torch.float8_e4m3fn).float()
    fitted = (blocks * (1 / of_all / scales)).clamp(-6, 6)
    upper = torch.bucketize(fitted.abs(), GRID).clamp(1, 7)
    below, above = GRID[upper - 1], GRID[upper]
    share = (fitted.abs() - below) / (above - below)
    up = share > torch.rand(share.shape) if at_random else (share > 0.5) | ((share == 0.5) & (upper % 2 == 0))
    return (torch.where(up, above, below) * fitted.sign() * scales * of_all).reshape(x.shape)


def mixed(rows):
    """Each 16 columns by the Hadamard matrix with the recipe's signs; a last part is filled up with zeros."""
    pair = torch.tensor([[1., 1.], [1., -1.]])
    matrix = SIGNS[:, None] / 4 * torch.kron(torch.kron(pair, pair), torch.kron(pair, pair))
    rows = torch.nn.functional.pad(rows.bfloat16().float(), (0, -rows.shape[1] % 16))
    return (rows.unflatten(1, (-1, 16)) @ matrix).bfloat16().flatten(1)


class Float4Product(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(x, weight)
        rows = in_float4(x.reshape(-1, x.shape[-1]))
        return (rows @ in_float4(weight, 16).t()).to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(context, grad):
        x, weight = context.saved_tensors
        rows, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        of_x = (in_float4(grad, at_random=True) @ in_float4(weight, 16)).to(grad.dtype).view(x.shape)
        of_weight = in_float4(mixed(grad.t()), at_random=True) @ in_float4(mixed(rows.t())).t()
        return of_x, of_weight.to(weight.dtype)


def use_float8(model, recipe, gradients):
    """All linear layers but the output's, as torchao's module filter."""
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and not name.endswith("lm_head"):
            if recipe == "nvfp4":
                layer.forward = lambda x, layer=layer: Float4Product.apply(x, layer.weight)
            else:
                layer.forward = lambda x, layer=layer: Float8Product.apply(x, layer.weight, recipe, gradients)
