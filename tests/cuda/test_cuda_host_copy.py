"""A host copy from a GPU: every bit, at the moment of the call, in pinned memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptmirror.ranks import host_transfer
from ckptmirror.ranks.host_arena import PINNED_BLOCK_BYTES
from ckptmirror.ranks.host_copy import HostCopier
from tests.unit.ranks.test_host_copy import bits, forms

BEHIND = 200_000_000  # clock ticks: about a tenth of a second


@pytest.mark.parametrize("name", sorted(forms()))
def test_every_form_of_tensor_arrives_bit_for_bit_though_the_device_is_behind(name: str) -> None:
    with torch.device("cuda"):
        source = forms()[name]
    assert source.is_cuda
    torch.cuda._sleep(BEHIND)
    host = HostCopier().copy({"t": source}).tree["t"]
    assert (host.shape, host.dtype, host.device.type) == (source.shape, source.dtype, "cpu")
    assert bits(host) == bits(source.detach().resolve_conj().resolve_neg().contiguous().cpu())


def test_views_of_one_storage_stay_shared_beside_tensors_of_the_host() -> None:
    base = torch.arange(1000.0, device="cuda")
    host = HostCopier().copy({"all": base, "column": base.view(10, 100)[:, 3], "here": torch.ones(3)}).tree
    assert torch.equal(host["all"], base.cpu())
    assert torch.equal(host["column"], base.view(10, 100)[:, 3].cpu())
    host["all"][3] = -1.0
    assert host["column"][0] == -1.0
    assert torch.equal(host["here"], torch.ones(3))


@pytest.mark.parametrize("streams", ["the usual stream", "a stream of the training"])
def test_the_copy_is_of_the_moment_of_the_call(streams: str) -> None:
    values = [torch.zeros(1 << size, device="cuda") for size in (2, 12, 20, 24)]
    stream = torch.cuda.current_stream() if streams == "the usual stream" else torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BEHIND)
        for one in values:
            one.fill_(1.0)
        tree = HostCopier().copy(values).tree
        for one in values:
            one.fill_(2.0)
    torch.cuda.synchronize()
    assert all(bool((one == 1.0).all()) for one in tree)


def test_the_memory_is_pinned_kept_and_no_more_than_a_block_too_large() -> None:
    state = {"weights": torch.ones(PINNED_BLOCK_BYTES // 4 + 1000, device="cuda"), "step": torch.tensor(3.0)}
    copier = HostCopier()
    lease = copier.copy(state)
    place = lease.tree["weights"].data_ptr()
    assert lease.tree["weights"].is_pinned()
    lease.release()
    assert copier.copy(state).tree["weights"].data_ptr() == place
    assert copier.nbytes < 2 * PINNED_BLOCK_BYTES


def test_a_copy_takes_no_memory_of_the_device() -> None:
    state = [torch.ones(1 << 22, device="cuda").view(1024, -1), torch.ones(1 << 20, device="cuda")[::2]]
    copier = HostCopier()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    copier.copy(state)
    assert torch.cuda.max_memory_allocated() - before <= state[1].nbytes


def test_an_interrupted_copy_has_left_the_memory_alone_when_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise what the device still sends would arrive in the next copy."""

    def interrupted(_moves: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(host_transfer, "_move", interrupted)
    source, target = torch.ones(1 << 26, device="cuda"), torch.zeros(1 << 26, pin_memory=True)
    torch.cuda._sleep(BEHIND)
    with pytest.raises(KeyboardInterrupt):
        host_transfer.copy_all([target], [source])
    target.zero_()
    torch.cuda.synchronize()
    assert not target.any()
