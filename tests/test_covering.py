"""The combinations that stand for a product of options."""

import itertools

import covering as module
import pytest
from covering import covered, covering

OPTIONS = {"a": (1, 2, 3), "b": "xy", "c": (None, True, False, "H"), "d": range(5), "e": (0,)}


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_all_combinations_of_some_options_occur(strength):
    rows = covering(strength, **OPTIONS)
    for names in itertools.combinations(OPTIONS, strength):
        found = {tuple(row[name] for name in names) for row in rows}
        assert found == set(itertools.product(*(OPTIONS[name] for name in names)))
    assert len(rows) < {1: 10, 2: 40, 3: 110}[strength]  # the product has 120


def test_every_run_has_the_same_rows():
    assert covering(**OPTIONS) == covering(**OPTIONS)


def test_more_rows_where_tests_are_to_be_exhaustive(monkeypatch):
    options = {**OPTIONS, "d": {"one": 1.0, "two": 2.0}}
    found = []
    for exhaustive in (False, True):
        monkeypatch.setattr(module, "EXHAUSTIVE", exhaustive)
        names, rows = covered(**options).args
        assert names == list(options) and {row.values[3] for row in rows} == {1.0, 2.0}
        found.append(rows)
    few, many = found
    assert many[: len(few)] == few and not any(row.marks for row in few)
    assert all(row.marks for row in many[len(few) :])
    rows = {row.values for row in many}
    for k in itertools.combinations(range(5), 3):
        values = [{"one": 1.0, "two": 2.0}.values() if n == "d" else v for n, v in options.items()]
        assert {tuple(row[i] for i in k) for row in rows} == set(itertools.product(*(values[i] for i in k)))
