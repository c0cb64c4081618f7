"""Linear layers of PyTorch that compute in fp8: torchao's Float8Linear by torch._scaled_mm, and OCP's MX by blocks."""
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


def use_float8(model, recipe, gradients):
    """All linear layers but the output's, as torchao's module filter."""
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and not name.endswith("lm_head"):
            layer.forward = lambda x, layer=layer: Float8Product.apply(x, layer.weight, recipe, gradients)
