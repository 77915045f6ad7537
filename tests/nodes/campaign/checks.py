"""What must hold after every step of a history, and at its end.

Rules:
* Lost: a save that was acknowledged stays whole on the disks that it was written to, or is on every mirror, or these
  disks and the parts on a mirror together have all of it; one that was acknowledged as mirrored stays on every mirror,
  and can be staged.
* Replaced: no object, and no committed file, ever changes; lists of attempts only grow.
* Mixed: every file of a save has the same bytes wherever it is, and they hold the numbers of that save and no other.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from ckptmirror import load_checkpoint
from ckptmirror.core import names
from ckptmirror.core.codec import attempts_from_bytes
from ckptmirror.core.model import Kind, Meta
from ckptmirror.flow.fetch.stage import stage_save
from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.stores import open_store
from tests.nodes.campaign.sight import Seen, look_at_disk, look_at_mirror, together
from tests.nodes.campaign.trained_values import PLACES
from tests.nodes.campaign.world import Broken, Lost, Mixed, Object, Truth, World

__all__ = ["Watch"]


class Watch:
    """Remembers what it saw after the last step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._objects: dict[str, dict[str, Object]] = {}
        self._listed: dict[str, set[str]] = {}
        self._mirrored: dict[str, Seen] = {}

    def look(self) -> None:
        """Check everything.

        Raises:
            Broken: Says what does not hold.
        """
        for mirror in self._world.mirrors:
            objects = mirror.objects()
            self._check_kept(mirror.url, objects)
            self._objects[mirror.url] = objects
            self._mirrored[mirror.url] = look_at_mirror(self._world, mirror.url, objects)
        disks = {node: look_at_disk(self._world, self._world.root(node)) for node in self._world.disk}
        for truth in self._world.truths.values():
            self._check_not_lost(truth, disks)

    def _check_kept(self, url: str, objects: dict[str, Object]) -> None:
        for name, before in self._objects.get(url, {}).items():
            if name != names.WRITER_NAME and objects.get(name) != before:
                raise Broken(f"{name} on {url} was {'replaced' if name in objects else 'deleted'}")
        if names.WRITER_NAME in objects:
            listed = {one.id for one in attempts_from_bytes(objects[names.WRITER_NAME][1]).attempts}
            if forgotten := self._listed.get(url, set()) - listed:
                raise Broken(f"the list of {url} forgot {sorted(forgotten)}")
            self._listed[url] = listed

    def _check_not_lost(self, truth: Truth, disks: dict[str, Seen]) -> None:
        lacking = [url for url, seen in self._mirrored.items() if truth.save_id not in seen.whole()]
        if truth.mirrored and lacking:
            raise Lost(f"step {truth.step} of job {truth.job} was acknowledged as mirrored, and {lacking} lack it")
        if not truth.acknowledged or not lacking:
            return
        if all(self._world.disk[node] == number for node, number in truth.disks.items()):
            here = together(disks[node] for node in truth.disks)
            both = [Seen([*here.shares, *self._mirrored[url].parts]) for url in lacking]
            if not all(truth.save_id in seen.whole() for seen in both):
                where = ", ".join(truth.disks)
                raise Lost(
                    f"step {truth.step} of job {truth.job} was acknowledged, is not whole on {where}, nor on {lacking}"
                )

    def check_stage(self) -> int:
        """Stage every save from every mirror and compare its numbers; return how many copies that were.

        Raises:
            Mixed: It is not what was saved.
        """
        staged = 0
        for place in self._world.mirrors:
            store = open_store(place.url)
            mirror = Mirror(place.url, True, store)
            for meta in mirror_catalog(mirror).saves.values():
                for kind in meta.kinds:
                    self._check_staged(mirror, meta, kind)
                    staged += 1
            store.close()
        return staged

    def _check_staged(self, mirror: Mirror, meta: Meta, kind: Kind) -> None:
        dest = self._world.base / "staged"
        dest.mkdir()
        stage_save(mirror, meta, dest, kinds=(kind,), full=True)
        code = self._world.truth_of(meta).code
        for name, tensor in load_checkpoint(_main(dest, meta, kind)).model.items():
            expected = torch.arange(tensor.numel(), dtype=tensor.dtype) + code * PLACES
            if not torch.equal(tensor.flatten(), expected):
                raise Mixed(f"{kind} of step {meta.step} from {mirror.url}: {name} is {tensor}, not of code {code}")
        shutil.rmtree(dest)


def _main(dest: Path, meta: Meta, kind: Kind) -> Path:
    return next(path for path in dest.iterdir() if path.name.startswith(f"{kind}_{meta.step:06d}"))
