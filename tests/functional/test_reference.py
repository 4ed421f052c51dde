import math

import pytest
import torch
from attention import SCORES, TERMS, VALUES, function, make_inputs
from graphs import make_graph

from dfgnn import reference

SMALL = ("no_nodes", "no_edges", "no_destinations", "one_edge", "isolated", "duplicates", "fewer_sources")


def loop(score, graph, inputs, negative_slope=0.2, scale=None, mask=None):
    """Straight from the formula, one edge and one head at a time; also returns the attention."""
    src, dst = graph.edge_index.tolist()
    value = inputs[VALUES[score]]
    heads = value.shape[1]
    out = torch.zeros(graph.num_dst, heads, value.shape[2], dtype=torch.float64)
    attention = torch.zeros(graph.num_edges, heads, dtype=torch.float64)
    bias, weight = inputs.get(TERMS[score]), inputs.get("weight")
    if weight is not None and weight.dim() == 1:
        weight = weight[:, None].expand(-1, heads)
    for h in range(heads):
        for i in range(graph.num_dst):
            edges = [e for e in range(graph.num_edges) if dst[e] == i]
            scores = []
            for e in edges:
                if score == "gat":
                    s = inputs["score_src"][src[e], h].item()
                    s += inputs["score_dst"][i, h].item() if inputs["score_dst"] is not None else 0.0
                elif score == "gatv2":
                    both = inputs["query"][i, h] + inputs["key"][src[e], h]
                    s = inputs["att"][h].dot(torch.where(both > 0, both, negative_slope * both)).item()
                else:
                    s = inputs["query"][i, h].dot(inputs["key"][src[e], h]).item()
                    s *= scale if scale is not None else inputs["key"].shape[2] ** -0.5
                s += bias[e, h].item() if bias is not None else 0.0
                scores.append(s if score != "gat" or s > 0 else negative_slope * s)
            total = sum(math.exp(s) for s in scores)
            for e, s in zip(edges, scores):
                a = math.exp(s) / total
                a *= mask[e, h].item() if mask is not None else 1.0
                a *= weight[e, h].item() if weight is not None else 1.0
                attention[e, h] = a
                out[i, h] += a * value[src[e], h]
    return out, attention


@pytest.mark.parametrize("weight", [None, 1, "H"])
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("score", SCORES)
def test_matches_the_formula(score, name, weight):
    graph = make_graph(name)
    inputs = make_inputs(score, graph, 2, 3, torch.float64, term=weight is not None, weight=weight)
    options = {"scale": 0.7} if score == "dot" else {"negative_slope": 0.3}
    attention = function(score, reference)
    out, a = attention(graph, **inputs, **options, return_attention=True)
    expected = loop(score, graph, inputs, **options)
    torch.testing.assert_close(out, expected[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(a, expected[1], rtol=1e-12, atol=1e-13)
    assert torch.equal(attention(graph, **inputs, **options), out)


def test_defaults_and_absent_destination_term():
    graph = make_graph("duplicates")
    inputs = make_inputs("gat", graph, 2, 3, torch.float64)
    inputs["score_dst"] = None
    torch.testing.assert_close(reference.gat_attention(graph, **inputs), loop("gat", graph, inputs)[0])
    inputs = make_inputs("dot", graph, 2, 3, torch.float64, value_dim=5)
    torch.testing.assert_close(reference.dot_attention(graph, **inputs), loop("dot", graph, inputs)[0])


@pytest.mark.parametrize("score", SCORES)
def test_dropout_applies_the_mask_of_the_seed(score):
    graph = make_graph("duplicates")
    inputs = make_inputs(score, graph, 3, 2, torch.float64)
    mask = reference.dropout_mask(7, graph.num_edges, 3, 0.4)
    out = getattr(reference, f"{score}_attention")(
        graph, **inputs, dropout_p=0.4, generator=torch.tensor([7])
    )
    torch.testing.assert_close(out, loop(score, graph, inputs, mask=mask)[0])


def test_large_scores_do_not_overflow():
    graph = make_graph("random")
    inputs = make_inputs("gat", graph, 1, 2)
    inputs["score_src"] += 1e4
    _, attention = reference.gat_attention(graph, **inputs, return_attention=True)
    total = torch.zeros(graph.num_dst, 1).index_add(0, graph.edge_index[1], attention)
    torch.testing.assert_close(total, (graph.in_degrees() > 0).float()[:, None])


# Known answers of philox4x32, as published with Random123 (kat_vectors).
@pytest.mark.parametrize(
    "rounds, key, counter, expected",
    [
        (7, 0, (0, 0, 0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (7, 2**64 - 1, (2**32 - 1,) * 4, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            7,
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
        (10, 0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (10, 2**64 - 1, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            10,
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(rounds, key, counter, expected):
    words = reference.philox(key, *(torch.tensor([c]) for c in counter), rounds=rounds)
    assert tuple(w.item() for w in words) == expected


def test_philox_takes_a_negative_key_as_its_bits():
    counter = [torch.tensor([c]) for c in (1, 2, 3, 4)]
    assert reference.philox(-1, *counter) == reference.philox(2**64 - 1, *counter)


def test_mask_distribution(device):
    p, edges, heads = 0.3, 20_000, 5
    mask = reference.dropout_mask(11, edges, heads, p, device)
    assert mask.shape == (edges, heads) and mask.dtype == torch.float64 and mask.device.type == device
    kept = mask > 0
    torch.testing.assert_close(mask[kept], torch.full_like(mask[kept], 1 / (1 - p)))
    sigma = math.sqrt(p * (1 - p))
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * sigma / math.sqrt(edges * heads)
    assert (kept.double().mean(0) - (1 - p)).abs().max().item() < 5 * sigma / math.sqrt(edges)
    # Heads, neighbouring edges and seeds are uncorrelated.
    x = (kept.double() - (1 - p)) / sigma
    limit = 5 / math.sqrt(edges)
    correlation = x.T @ x / edges - torch.diag((x * x).mean(0))
    assert correlation.abs().max().item() < limit
    assert (x[1:] * x[:-1]).mean().abs().item() < limit
    other = (reference.dropout_mask(12, edges, heads, p, device) > 0).double() - (1 - p)
    assert (x * other / sigma).mean().abs().item() < limit


def test_mask_at_the_ends():
    assert reference.dropout_mask(0, 10, 3, 1.0).eq(0).all()
    assert reference.dropout_mask(0, 1000, 3, 1e-12).gt(0).all()
    assert reference.dropout_mask(0, 0, 3, 0.5).shape == (0, 3)
