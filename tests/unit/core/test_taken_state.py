"""What an object returns after a load is compared with what it was given, value by value."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from ckptmirror.core.taken_state import not_taken

NAN = float("nan")


def places(given: Any, returned: Any) -> list[str]:
    return [at for at, _, _ in not_taken(given, returned, "it")]


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        ({"a": 1, "b": [1.5, "x", None, True]}, {"a": 1, "b": (1.5, "x", None, True), "more": 2}),
        ({"rates": [NAN, float("inf")]}, {"rates": [NAN, float("inf")]}),
        (OrderedDict(a=1), {"a": 1}),
        ({"t": torch.tensor([1.0, NAN])}, {"t": torch.tensor([1.0, NAN])}),
        ({"lr": 0.1}, {"lr": torch.tensor(0.1)}),
        ({"lr": torch.tensor(0.1)}, {"lr": 0.1}),
        ({"lr": torch.tensor(0.1)}, {"lr": torch.tensor(0.1, dtype=torch.float64)}),
        ({"n": np.float64(0.1)}, {"n": 0.1}),
        ({"large": torch.zeros(5000)}, {"large": torch.ones(5000)}),
        ({"own": object()}, {"own": object()}),
        ({"function": {"rate": 1}}, {"function": None}),
        ({"meta": torch.empty(2, device="meta")}, {"meta": torch.empty(2)}),
    ],
)
def test_what_is_equal_or_cannot_be_compared_is_no_difference(given: Any, returned: Any) -> None:
    assert places(given, returned) == []


@pytest.mark.parametrize(
    ("given", "returned", "found"),
    [
        ({"a": 1, "b": {"c": [1, 2]}}, {"a": 2, "b": {"c": [1, 3]}}, ["it.a", "it.b.c[1]"]),
        ({"best": 0.5}, {"best": None}, ["it.best"]),
        ({"best": None}, {"best": 0.5}, ["it.best"]),
        ({"seen": 3, "own": object()}, {}, ["it.seen"]),
        ({"rates": [1.0, 2.0]}, {"rates": [1.0]}, ["it.rates"]),
        ({"t": torch.tensor([1, 2])}, {"t": torch.tensor([1, 3])}, ["it.t"]),
        ({"t": torch.tensor([1, 2])}, {"t": torch.tensor([1])}, ["it.t"]),
        ({"lr": 0.1}, {"lr": torch.tensor(0.2)}, ["it.lr"]),
        ({"lr": 0.1}, {"lr": 0.1 + 1e-12}, ["it.lr"]),
        ({"mode": "min"}, {"mode": "max"}, ["it.mode"]),
    ],
)
def test_what_differs_is_named_with_its_place(given: Any, returned: Any, found: list[str]) -> None:
    assert places(given, returned) == found


def test_containers_without_an_end_are_followed_only_so_far() -> None:
    one: list[Any] = []
    one.append(one)
    assert places(one, one) == []
