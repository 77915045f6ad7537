"""What a load is given on each rank: only what can load differently differs."""

from __future__ import annotations

import pytest

from ckptmirror.core.errors import UsageError
from ckptmirror.core.load_options import LoadOptions, check_given_alike
from ckptmirror.core.name_rules import NameRules
from ckptmirror.core.stages import NO_STAGES, Stages


def changed(**rules: object) -> LoadOptions:
    return LoadOptions(rules=NameRules(**rules))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (changed(exclude=("a.*", "b.*")), changed(exclude=("b.*", "a.*", "a.*"))),
        (changed(rename={"x": "y", "z": "w"}), changed(rename={"z": "w", "x": "y"})),
        (LoadOptions(command_wins=("lr", "eps")), LoadOptions(command_wins=("eps", "lr"))),
    ],
)
def test_the_same_in_another_order_is_the_same(one: LoadOptions, other: LoadOptions) -> None:
    check_given_alike([one.texts(), other.texts()], NO_STAGES, ())


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        (LoadOptions(), LoadOptions(exclude=frozenset({"optimizer"})), "exclude"),
        (LoadOptions(), changed(exclude=("a.*",)), "exclude"),
        (changed(rename={"x.*": "y.*", "x.a": "z"}), changed(rename={"x.a": "z", "x.*": "y.*"}), "rename"),
        (changed(rename=str.lower), changed(rename=str.upper), "rename"),
        (LoadOptions(), changed(strict=False), "strict"),
        (LoadOptions(), LoadOptions(command_wins=("lr",)), "command_wins"),
        (LoadOptions(), LoadOptions(allow_cold_optimizer=False), "allow_cold_optimizer"),
        (LoadOptions(), LoadOptions(verify_loaded=False), "verify_loaded"),
    ],
)
def test_what_loads_otherwise_is_refused_with_both_values(one: LoadOptions, other: LoadOptions, name: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_given_alike([one.texts(), other.texts()], NO_STAGES, (0, 1))
    assert f"differ in {name}: rank 0 on node 0 has" in str(refused.value)
    assert "rank 1 on node 1 has" in str(refused.value)


def test_what_is_left_out_may_differ_between_stages_and_nothing_else() -> None:
    stages = Stages((0, 0, 1, 1))
    plain, other = LoadOptions().texts(), changed(exclude=("head.*",), strict=False).texts()
    check_given_alike([plain, plain, other, other], stages, ())
    with pytest.raises(UsageError, match=r"exclude: rank 2 has model\.head"):
        check_given_alike([plain, plain, other, {**other, "exclude": ""}], stages, ())
    with pytest.raises(UsageError, match="rename: rank 0 has none, rank 2 has a -> b"):
        check_given_alike([plain, plain, *[changed(rename={"a": "b"}).texts()] * 2], stages, ())
    with pytest.raises(UsageError, match="policy: rank 0 has 1, rank 3 has auto"):
        check_given_alike([*[{"policy": "1"}] * 3, {"policy": "auto"}], stages, ())
