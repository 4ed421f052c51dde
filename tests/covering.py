"""Few combinations of options in which all combinations of some of them occur."""

import itertools
import os
import random

import pytest

#: Whether tests marked `exhaustive` are collected, too: `make exhaustive`.
EXHAUSTIVE = os.environ.get("DFGNN_EXHAUSTIVE", "") not in ("", "0")
exhaustive = pytest.mark.exhaustive


def covering(strength=2, **options):
    """Dictionaries of one value for each option, such that any ``strength`` options take all their values.

    The product of the options would be exponentially many; these are somewhat more than the product of the
    ``strength`` options with the most values. Each is the best of some random ones, equal in every run.
    """
    names, draw = tuple(options), random.Random(0)
    pairs = list(itertools.combinations(range(len(names)), strength))
    left = {
        (chosen, values)
        for chosen in pairs
        for values in itertools.product(*(range(len(options[names[k]])) for k in chosen))
    }

    def covers(row):
        return {(chosen, tuple(row[k] for k in chosen)) for chosen in pairs} & left

    rows = []
    while left:
        tried, missing = [], sorted(left)
        for _ in range(20):
            row = [draw.randrange(len(options[name])) for name in names]
            chosen, values = draw.choice(missing)
            for k, value in zip(chosen, values):
                row[k] = value
            tried.append(row)
        best = max(tried, key=lambda row: len(covers(row)))
        left -= covers(best)
        rows.append({name: options[name][k] for name, k in zip(names, best)})
    return rows


def some(few, of, name="name", **options):
    """Parametrizes a test over the values ``few``; in exhaustive tests over all values ``of``."""
    more = [pytest.param(value, marks=exhaustive) for value in of if value not in few]
    return pytest.mark.parametrize(name, [*few, *more], **options)


def id_of(value) -> str:
    """The value in a test's id. A function is named, because its text has an address, which differs between
    processes."""
    return getattr(value, "__name__", str(value)).removeprefix("torch.")


def covered(strength=2, further=True, **options):
    """Parametrizes a test over the rows of `covering`; in exhaustive tests also over those of strength + 1,
    unless further is False.

    An option is a sequence of values, or a dictionary of values by the names that they have in test ids.
    """
    values = {name: tuple(given) for name, given in options.items()}  # of a dictionary its names
    rows, marks = covering(min(strength, len(values)), **values), {}
    if EXHAUSTIVE and further and strength < len(values):
        more = [row for row in covering(strength + 1, **values) if row not in rows]
        marks = dict.fromkeys(range(len(rows), len(rows) + len(more)), exhaustive)
        rows += more

    def value_of(name, value):
        return options[name][value] if isinstance(options[name], dict) else value

    return pytest.mark.parametrize(
        list(values),
        [
            pytest.param(*(value_of(name, row[name]) for name in values), marks=marks.get(k, ()))
            for k, row in enumerate(rows)
        ],
        ids=["-".join(map(id_of, row.values())) for row in rows],
    )
