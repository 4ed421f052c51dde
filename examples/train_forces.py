"""Train a small interatomic potential on energies and forces, with attention layers as they are.

    python examples/train_forces.py --impl dfgnn --picture forces.png

Forces are derivatives of the energy by the positions, and a loss on forces is differentiated once more, so
that every layer is differentiated twice. The potential sees distances only, as radial basis functions on the
edges of a ``TransformerConv`` and a ``GATv2Conv``, so that its forces turn with the atoms. The data are made
by this script: Lennard-Jones atoms in a periodic box, integrated by velocity Verlet.

``--impl pyg`` trains torch_geometric's layers, ``--impl plain`` dfgnn's layers on plain PyTorch operations.
All three start from the same weights and see the same batches, so that their losses agree up to rounding.
"""

import math
import sys
import time
from pathlib import Path

import torch
import torch_geometric.nn
from torch import Tensor, nn
from tqdm import tqdm

import dfgnn.nn.pyg
from dfgnn import reference
from dfgnn.runtime.programs import Parser, device, file_to_write, integer, interruptible, number, positive

CUTOFF = 2.5  # in units of the diameter sigma, as is usual for Lennard-Jones atoms
DENSITY = 0.5
TIME_STEP = 0.004
BASIS = 16


# ---- the data ------------------------------------------------------------------------------------------


def neighbours(position: Tensor, box: float) -> tuple[Tensor, Tensor]:
    """[2, E], both directions of every pair closer than the cutoff; and which image of the source is meant,
    as the shift [E, 3] that is added to its position."""
    apart = position[None, :, :] - position[:, None, :]
    shift = -torch.round(apart / box) * box
    distance = (apart + shift).norm(dim=2)
    dst, src = ((distance < CUTOFF) & (distance > 0)).nonzero().unbind(1)
    return torch.stack([src, dst]), shift[dst, src]


def lennard_jones(position: Tensor, box: float) -> tuple[Tensor, Tensor]:
    """Energy and forces [N, 3] of 4 (r^-12 - r^-6), shifted to 0 at the cutoff."""
    position = position.detach().requires_grad_()
    (src, dst), shift = neighbours(position.detach(), box)
    inverse = (position[src] + shift - position[dst]).square().sum(1).reciprocal() ** 3
    at_cutoff = CUTOFF**-12 - CUTOFF**-6
    energy = 2 * (inverse.square() - inverse - at_cutoff).sum()  # each pair is there twice
    (gradient,) = torch.autograd.grad(energy, position)
    return energy.detach(), -gradient


def simulate(atoms: int, frames: int, temperature: float, seed: int) -> list[dict]:
    """Frames of a trajectory: position, edges, energy and forces, in float64 while it is integrated."""
    generator = torch.Generator().manual_seed(seed)
    box = (atoms / DENSITY) ** (1 / 3)
    side = math.ceil(atoms ** (1 / 3))
    grid = torch.cartesian_prod(*[torch.arange(side)] * 3)[:atoms].double()
    position = (grid + 0.5) * box / side
    velocity = torch.randn(atoms, 3, generator=generator, dtype=torch.float64) * temperature**0.5
    made = []
    _, force = lennard_jones(position, box)
    every, settle = 20, 400
    for step in range(settle + every * frames):
        velocity = velocity + 0.5 * TIME_STEP * force
        position = (position + TIME_STEP * velocity) % box
        energy, force = lennard_jones(position, box)
        velocity = velocity + 0.5 * TIME_STEP * force
        if step % every == 0:  # rescale the velocities to the wanted temperature
            velocity = velocity - velocity.mean(0)
            velocity = velocity * (temperature / velocity.square().mean()) ** 0.5
        if step >= settle and (step - settle) % every == 0:
            edges, shift = neighbours(position, box)
            made.append(
                {
                    "position": position.float(),
                    "edges": edges,
                    "shift": shift.float(),
                    "energy": energy.float(),
                    "force": force.float(),
                }
            )
    return made


def batch_of(frames: list[dict]) -> dict:
    """Frames as one graph."""
    sizes = torch.tensor([len(f["position"]) for f in frames])
    first = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)[:-1]])
    return {
        "position": torch.cat([f["position"] for f in frames]),
        "edges": torch.cat([f["edges"] + at for f, at in zip(frames, first)], dim=1),
        "shift": torch.cat([f["shift"] for f in frames]),
        "energy": torch.stack([f["energy"] for f in frames]),
        "force": torch.cat([f["force"] for f in frames]),
        "frame": torch.repeat_interleave(torch.arange(len(frames)), sizes),
    }


# ---- the potential -------------------------------------------------------------------------------------


def layers(impl: str, width: int, heads: int) -> list[nn.Module]:
    library = torch_geometric.nn if impl == "pyg" else dfgnn.nn.pyg
    made = [
        library.TransformerConv(width, width // heads, heads, edge_dim=BASIS),
        library.GATv2Conv(width, width // heads, heads, edge_dim=BASIS, add_self_loops=False),
    ]
    if impl == "plain":
        made[0].attention = reference.dot_attention
        made[1].attention = reference.gatv2_attention
    return made


class Potential(nn.Module):
    """The energy of each frame, from distances alone."""

    def __init__(self, impl: str, width: int, heads: int):
        super().__init__()
        self.atom = nn.Parameter(torch.randn(width))
        self.layers = nn.ModuleList(layers(impl, width, heads))
        self.energy = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
        self.register_buffer("centres", torch.linspace(0.8, CUTOFF, BASIS))

    def forward(self, batch: dict, position: Tensor) -> Tensor:
        src, dst = batch["edges"]
        length = (position[src] + batch["shift"] - position[dst]).norm(dim=1, keepdim=True)
        # Smooth to the cutoff, so that forces do not jump where a neighbour leaves.
        fade = 0.5 * (1 + torch.cos(math.pi * length / CUTOFF))
        basis = fade * torch.exp(-8 * (length - self.centres).square())
        x = self.atom.expand(len(position), -1)
        for layer in self.layers:
            x = x + nn.functional.silu(layer(x, batch["edges"], basis))
        per_atom = self.energy(x).squeeze(1)
        return per_atom.new_zeros(len(batch["energy"])).index_add(0, batch["frame"], per_atom)


def energy_and_forces(model: Potential, batch: dict, train: bool) -> tuple[Tensor, Tensor]:
    position = batch["position"].detach().requires_grad_()
    energy = model(batch, position)
    (gradient,) = torch.autograd.grad(energy.sum(), position, create_graph=train)
    return energy, -gradient


# ---- training ------------------------------------------------------------------------------------------


def standardize(frames: list[dict], mean: float, scale: float) -> None:
    """Energies without their mean, in units in which forces have variance 1."""
    for frame in frames:
        frame["energy"] = (frame["energy"] - mean) / scale
        frame["force"] = frame["force"] / scale


def train(args) -> dict:
    torch.manual_seed(args.seed)
    frames = simulate(args.atoms, args.frames + args.test_frames, args.temperature, args.seed)
    mean = float(torch.stack([f["energy"] for f in frames[: args.frames]]).mean())
    scale = float(torch.cat([f["force"] for f in frames[: args.frames]]).std())
    standardize(frames, mean, scale)
    frames = [{name: x.to(args.device) for name, x in f.items()} for f in frames]
    train_frames, test_frames = frames[: args.frames], frames[args.frames :]
    model = Potential(args.impl, args.width, args.heads).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    order = torch.Generator().manual_seed(args.seed)
    losses, begin = [], time.perf_counter()
    steps = args.epochs * math.ceil(len(train_frames) / args.batch_size)
    with tqdm(total=steps, disable=args.quiet, unit="step", file=sys.stderr) as bar:
        for _ in range(args.epochs):
            for at in torch.randperm(len(train_frames), generator=order).split(args.batch_size):
                batch = to_device(batch_of([train_frames[k] for k in at.tolist()]), args.device)
                energy, force = energy_and_forces(model, batch, train=True)
                per_atom = (energy - batch["energy"]) / args.atoms
                loss = per_atom.square().mean() + (force - batch["force"]).square().mean()
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
                bar.update()
                bar.set_postfix(loss=f"{losses[-1]:.4f}")
    seconds = time.perf_counter() - begin
    batch = to_device(batch_of(test_frames), args.device)
    energy, force = energy_and_forces(model, batch, train=False)
    return {
        "losses": losses,
        "seconds_per_step": seconds / steps,
        "force_error": float((force - batch["force"]).square().mean().sqrt()),
        "energy_error": float(((energy - batch["energy"]) / args.atoms).square().mean().sqrt().detach()),
        "true": batch["force"].flatten().cpu(),
        "predicted": force.detach().flatten().cpu(),
    }


def to_device(batch: dict, device: str) -> dict:
    return {name: x.to(device) for name, x in batch.items()}


def draw(found: dict, path: Path) -> None:
    """Predicted forces against true ones."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(4.5, 4.5), layout="constrained")
    limit = 1.05 * float(found["true"].abs().max())
    axes.plot([-limit, limit], [-limit, limit], color="0.6", linewidth=1)
    axes.scatter(found["true"], found["predicted"], s=4, alpha=0.4, linewidths=0)
    axes.set(xlabel="true force (standard deviations)", ylabel="predicted force", aspect="equal")
    axes.set_title(f"test frames, root mean square error {found['force_error']:.3f}")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = Parser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--impl", choices=["dfgnn", "pyg", "plain"], default="dfgnn", help="what computes")
    parser.add_argument("--device", type=device, default=default)
    parser.add_argument("--atoms", type=positive, default=64, metavar="N")
    parser.add_argument("--frames", type=positive, default=200, metavar="N", help="to train on")
    parser.add_argument("--test-frames", type=positive, default=20, metavar="N")
    parser.add_argument("--temperature", type=number(above=0), default=1.0, metavar="T")
    parser.add_argument("--epochs", type=positive, default=40, metavar="N")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="frames")
    parser.add_argument("--width", type=positive, default=32, metavar="N")
    parser.add_argument("--heads", type=positive, default=4, metavar="N")
    parser.add_argument("--lr", type=number(above=0), default=3e-3, metavar="RATE")
    parser.add_argument("--seed", type=integer(0), default=0, metavar="N")
    parser.add_argument(
        "--picture", type=file_to_write, metavar="FILE", help="draw predicted against true forces"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args()
    if args.width % args.heads:
        parser.error(f"--width: expected a multiple of --heads, {args.heads}, got {args.width}")
    with interruptible("nothing is kept, and the same command begins anew"):
        found = train(args)
    shown = ", ".join(f"{x:.4f}" for x in found["losses"][:3])
    print(f"{args.impl}: losses of the first steps {shown}; of the last {found['losses'][-1]:.4f}")
    print(f"test: force error {found['force_error']:.3f} of a standard deviation, energy error per atom "
          f"{found['energy_error']:.4f}; {found['seconds_per_step'] * 1e3:.0f} ms per step")  # fmt: skip
    if args.picture is not None:
        draw(found, args.picture)


if __name__ == "__main__":
    main()
