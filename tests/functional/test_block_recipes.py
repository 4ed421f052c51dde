"""Layers of the programs that attention within blocks is for, each by its paper's formulas over padded
neighbours or a list of pairs, beside ours: energies, forces and the training of forces."""

import math

import pytest
import torch
import torch.nn.functional as F
from test_block_attention import error, offsets_of
from torch import nn

from dfgnn.functional import block_attention

HEADS, WIDTH, RADIUS, SIZES = 2, 8, 4.0, [5, 0, 9, 1, 7]


class Potential(nn.Module):
    """An energy of edges of a few centres, a layer of attention among the edges of each in its middle."""

    def __init__(self, layer):
        super().__init__()
        self.embed, self.rows, self.layer = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), layer

    def forward(self, edge):
        length = edge.norm(dim=1)
        x = torch.tanh(self.embed(torch.cat([edge, length[:, None]], 1)))
        cutoff = 0.5 * (1 + torch.cos(math.pi * length / RADIUS)) * (length < RADIUS)
        query, key, value = self.rows(x).view(len(x), 3, HEADS, -1).unbind(1)
        return self.layer(query, key, value, edge / length[:, None], cutoff).square().sum()


def steps(layer):
    """Energy, forces, and the gradients of a loss on forces."""
    torch.manual_seed(0)
    model = Potential(layer).double()
    edge = torch.randn(sum(SIZES), 3, dtype=torch.float64)
    edge = (
        edge / edge.norm(dim=1, keepdim=True) * torch.linspace(0.5, 4.4, len(edge))[:, None]
    ).requires_grad_()
    energy = model(edge)
    (forces,) = torch.autograd.grad(energy, edge, create_graph=True)
    inputs = [edge, *model.parameters()]
    return energy, forces, *torch.autograd.grad(forces.square().sum(), inputs, materialize_grads=True)


def padded(x, fill=0.0):
    """[centres, longest, ...] of the edges' rows."""
    return nn.utils.rnn.pad_sequence(x.split(SIZES), batch_first=True, padding_value=fill)


def ragged(x):
    return torch.cat([rows[:n] for rows, n in zip(x, SIZES)])


def heads_first(x):
    return padded(x).transpose(1, 2)


def of_pet(query, key, value, unit, cutoff):
    """PET's attention among the neighbours of an atom, whose weights a cut-off multiplies: metatrain adds its
    logarithm to the scores, bounded from below, of padded neighbours, too."""
    bias = padded(cutoff).clamp(min=1e-15).log()[:, None, None]
    query, key, value = map(heads_first, (query, key, value))
    weight = (query @ key.mT / math.sqrt(key.shape[-1]) + bias).softmax(-1)
    return ragged((weight @ value).transpose(1, 2))


def of_pet_in_blocks(query, key, value, unit, cutoff):
    bias = cutoff.clamp(min=1e-15).log()
    return block_attention(query, key, value, offsets_of(SIZES), key_bias=bias)


SHIFT = 20.0


def of_dpa(query, key, value, unit, cutoff):
    """DPA's attention among the edges of a centre, over a list of their pairs: scores that a switch of both
    edges takes smoothly to the least, a softmax of each segment, and weights times both switches and the
    cosine of the angle between the edges."""
    block = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    i, j = (block[:, None] == block).nonzero().T
    query, key, value = (F.normalize(x, dim=-1) for x in (query, key, value))
    switch = (cutoff[i] * cutoff[j])[:, None]
    score = ((query[i] * key[j]).sum(-1) / math.sqrt(key.shape[-1]) + SHIFT) * switch - SHIFT
    top = score.new_full((len(query), HEADS), -math.inf)
    top = top.scatter_reduce(0, i[:, None].expand_as(score), score.detach(), "amax")
    weight = (score - top[i]).exp()
    weight = weight / torch.zeros_like(top).index_add(0, i, weight)[i]
    weight = weight * switch * (unit[i] * unit[j]).sum(1, keepdim=True)
    return torch.zeros_like(value).index_add(0, i, weight[..., None] * value[j])


def of_dpa_in_blocks(query, key, value, unit, cutoff):
    """The same without a number per pair: (s + c) w_i w_j is a product of rows with one more column, whose
    constant the softmax does not see; w_i w_j r_i . r_j is a sum of products of both ends."""
    query, key, value = (F.normalize(x, dim=-1) for x in (query, key, value))
    switch, columns = cutoff[:, None, None], math.sqrt(SHIFT)
    query, key = (switch * F.pad(x, (0, 1), value=columns) for x in (query / math.sqrt(key.shape[-1]), key))
    ends = switch * unit[:, None]
    values = (value.unsqueeze(-1) * ends.unsqueeze(2)).flatten(2)
    out = block_attention(query, key, values, offsets_of(SIZES), scale=1.0)
    return (out.unflatten(2, (-1, 3)) * ends.unsqueeze(2)).sum(-1)


@pytest.mark.parametrize(
    ("theirs", "ours"), [(of_pet, of_pet_in_blocks), (of_dpa, of_dpa_in_blocks)], ids=["PET", "DPA"]
)
def test_energies_forces_and_their_training(theirs, ours):
    for x, y in zip(steps(ours), steps(theirs)):
        assert error(x.detach(), y.detach()) <= 1e-12


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_windows_of_tokens(softcap):
    """WeatherGenerator's: the queries of a cell see its tokens, and a softcap bounds the scores."""
    torch.manual_seed(0)
    queries, tokens = [2, 3, 0, 4], [6, 0, 5, 30]
    query, *others = (torch.randn(n, HEADS, 8, dtype=torch.float64) for n in (9, 41, 41))
    found = block_attention(query, *others, offsets_of(queries), offsets_of(tokens), softcap=softcap)
    for q, k, v, out in zip(
        *(x.split(n) for x, n in zip((query, *others, found), (queries, tokens, tokens, queries)))
    ):
        score = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(8)
        score = score if softcap is None else softcap * (score / softcap).tanh()
        torch.testing.assert_close(out, torch.einsum("hij,jhd->ihd", score.softmax(2), v))
