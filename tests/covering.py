"""Few combinations of options in which all combinations of some of them occur."""

import itertools
import random


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
