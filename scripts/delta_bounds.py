"""Measures the error of gradients of scores when delta is computed from a rounded output.

    python scripts/delta_bounds.py                 # emulated, and the CPU engine
    python scripts/delta_bounds.py --device cuda   # besides these, split rows and tiles of a GPU

The gradient of a score is alpha (g . v - delta). If delta = g . out is computed from an output that was
rounded with relative error u (2**-8 in bfloat16, 2**-11 in float16, 2**-24 in float32), its error is
residual <= u sum_d |g_d out_d|, and that of the gradient of a query scale residual sum_j alpha_j k_j: large
if the keys of a row have a large common part. *Bound* is the largest number of that over all rows;
*emulated* is the error with an output that is rounded and otherwise exact; then comes each schedule. A cell
is the largest error of a gradient of the query against float64, divided by the largest |g| |v| |k| scale of
a row.
"""

import argparse

import torch

from dfgnn import Graph, functional

ROWS, SOURCES, HEADS = 16, 1000, 2
DTYPES = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
DEGREES = 64, 300, 5000
DIMS = 32, 128
# ((c, d) of keys, (c, d) of values): their elements are c + d * a normal random number; c is the common part.
CASES = {
    "equal keys": ((1.0, 0.0), (0.0, 1.0)),
    "random": ((0.0, 1.0), (0.0, 1.0)),
    "a common part in keys and values": ((3.0, 0.1), (3.0, 0.1)),
}
SCHEDULES = {"cpu": ["natural"], "cuda": ["natural", "natural<=64", "tiles"]}


def features(part, dim, generator):
    common, spread = part
    one = torch.randn(1, HEADS, dim, generator=generator) if spread == 0 else torch.ones(1, HEADS, dim)
    return common * one + spread * torch.randn(SOURCES, HEADS, dim, generator=generator)


def exact_and_emulated(src, degree, tensors, grad, dtype):
    """Returns the query's gradient in float64, the same computed with the delta of the rounded output, and
    the bound of the difference of the two."""
    query, key, value = (x.double() for x in tensors)
    k, v, g = (x.unflatten(0, (ROWS, degree)) for x in (key[src], value[src], grad.double()[_rows(degree)]))
    scale = query.shape[2] ** -0.5
    alpha = torch.einsum("ihd,ijhd->ijh", query, k).mul(scale).softmax(1)
    out = torch.einsum("ijh,ijhd->ihd", alpha, v)
    products, mean_key = (g * v).sum(-1), torch.einsum("ijh,ijhd->ihd", alpha, k)
    gradients = []
    for used in (out, out.to(dtype).double()):
        acc = torch.float64 if used is out or dtype == torch.float32 else torch.float32
        delta = (grad.to(acc) * used.to(acc)).sum(-1).double()
        ds = alpha * (products - delta.unsqueeze(1))
        gradients.append(scale * torch.einsum("ijh,ijhd->ihd", ds, k))
    rest = DTYPES[dtype] * (grad.double() * out).abs().sum(-1, keepdim=True)
    return *gradients, (scale * rest * mean_key.abs()).max().item()


def _rows(degree):
    return torch.arange(ROWS).repeat_interleave(degree)


def measure(case, degree, dim, dtype, device):
    generator = torch.Generator().manual_seed(0)
    src = torch.cat([torch.randperm(max(SOURCES, degree), generator=generator)[:degree] for _ in range(ROWS)])
    src = src % SOURCES
    query, grad = (torch.randn(ROWS, HEADS, dim, generator=generator) for _ in range(2))
    key, value = (features(part, dim, generator) for part in CASES[case])
    query, key, value, grad = (x.to(dtype) for x in (query, key, value, grad))
    exact, emulated, bound = exact_and_emulated(src, degree, (query, key, value), grad, dtype)
    lengths = (x.double().norm(dim=-1).max().item() for x in (grad, value, key))
    unit = dim**-0.5 * torch.tensor(list(lengths)).prod().item()
    cells = {"bound": bound / unit, "emulated": (emulated - exact).abs().max().item() / unit}
    graph = Graph.from_coo(src.to(device), _rows(degree).to(device), num_src=SOURCES, num_dst=ROWS)
    for schedule in SCHEDULES[device]:
        leaves = [x.to(device).requires_grad_() for x in (query, key, value)]
        try:
            out = functional.dot_attention(graph, *leaves, kernel_options={"schedule": schedule})
        except ValueError:  # the schedule is not available for this type, or with repeated edges
            continue
        found = torch.autograd.grad(out, leaves[0], grad.to(device))[0].cpu().double()
        cells[f"dfgnn, {schedule}"] = (found - exact).abs().max().item() / unit
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=SCHEDULES)
    device = parser.parse_args().device
    columns = ["bound", "emulated", *(f"dfgnn, {name}" for name in SCHEDULES[device])]
    print(f"| case | edges | D | type | {' | '.join(columns)} |\n|---|---|---|---|{'---|' * len(columns)}")
    for case in CASES:
        for degree in DEGREES:
            for dim in DIMS:
                for dtype in DTYPES:
                    cells = measure(case, degree, dim, dtype, device)
                    row = " | ".join(f"{cells[c]:.1e}" if c in cells else "" for c in columns)
                    print(f"| {case} | {degree} | {dim} | {str(dtype).removeprefix('torch.')} | {row} |")


if __name__ == "__main__":
    main()
