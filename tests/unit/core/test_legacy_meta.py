"""What an older writer's ``meta.json`` says, and what a config from before a feature is given."""

from __future__ import annotations

import pytest

from ckptmirror.core.errors import BrokenMeta
from ckptmirror.core.legacy_meta import legacy_meta_from_bytes
from ckptmirror.core.training_config import _patch_missing_config_keys


def test_a_meta_of_free_json_is_passed_on_and_its_step_and_config_are_found():
    found = legacy_meta_from_bytes(
        b'{"global_step": 7, "config": {"a": 1}, "metrics": {"x": 2, "y": "z", "n": NaN}, "b": []}'
    )
    assert (found.step, found.training_config, found.metrics) == (7, {"a": 1}, {"x": 2.0})
    assert found.values["b"] == []
    assert legacy_meta_from_bytes(b"{}").step is None
    assert legacy_meta_from_bytes(b'{"step": null, "metrics": 3}').metrics == {}


def test_a_metric_that_no_float_can_hold_is_no_metric():
    text = '{"metrics": {"huge": 1%s, "infinite": -Infinity, "loss": 2.5}}' % ("0" * 400)
    assert legacy_meta_from_bytes(text.encode()).metrics == {"loss": 2.5}


@pytest.mark.parametrize(
    "text",
    ["", "nul", "3", '{"step": true}', '{"step": -1}', '{"step": 1.0}', '{"step": 1, "global_step": 2}', "[" * 100_000],
)
def test_a_meta_whose_step_is_none_or_that_is_no_object_is_broken(text: str):
    with pytest.raises(BrokenMeta):
        legacy_meta_from_bytes(text.encode())


def test_keys_that_a_config_lacks_are_off_and_what_it_says_stands():
    config = {"width": 8, "gate": True, "model": {"depth": 2}}
    off = {"gate": False, "window": None, "model": {"depth": 0, "norm": "none"}, "width": {"x": 1}}
    patched, added = _patch_missing_config_keys(config, off)
    assert patched == {"width": 8, "gate": True, "window": None, "model": {"depth": 2, "norm": "none"}}
    assert added == ("window", "model.norm")
    assert config == {"width": 8, "gate": True, "model": {"depth": 2}}  # as it was
