"""What must hold after every step of a history, and at its end.

Rules:
* Lost: a save that was acknowledged stays whole on the disks that it was written to, or is on every mirror, or these
  disks and the parts on a mirror together have all of it; one that was acknowledged as mirrored stays on every mirror,
  and can be staged.
* A mirror that lost an object owes it to nobody; what disks had of that save then, they keep until it is there again.
* Replaced: no object, and no committed file, ever changes; lists of attempts only grow. Where a mirror lost a file, and
  it was sent again under another name, a meta or part may name that.
* Mixed: every file of a save has the same bytes wherever it is, and they hold the numbers of that save and no other.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch

from ckptmirror import load_checkpoint
from ckptmirror.core import names
from ckptmirror.core.codec import attempts_from_bytes, meta_from_bytes
from ckptmirror.core.model import Kind, Meta
from ckptmirror.flow.fetch.stage import stage_save
from ckptmirror.flow.places.catalog import mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.stores import open_store
from tests.nodes.campaign.sight import Seen, look_at_disk, look_at_mirror, together
from tests.nodes.campaign.trained_values import PLACES
from tests.nodes.campaign.world import Broken, Lost, MirrorPlace, Mixed, Object, Truth, World

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
        disks = self._disks()
        for truth in self._world.truths.values():
            self._check_not_lost(truth, disks)

    def lose(self, mirror: MirrorPlace, name: str) -> None:
        """Let a mirror lose an object, and note which saves that hurts, and which of them nobody has whole now."""
        url, before = mirror.url, self._mirrored[mirror.url].whole()
        mirror.lose(name)
        del self._objects[url][name]
        self._world.lost.add((url, name))
        self._mirrored[url] = look_at_mirror(self._world, url, mirror.objects())
        after, disks = self._mirrored[url].whole(), self._disks()
        for truth in self._world.truths.values():
            save_id = truth.save_id
            if save_id in before and before[save_id] != after.get(save_id):
                self._world.hurt.add((url, save_id))
            if save_id not in after and save_id not in self._with_disks(truth, disks, url).whole():
                self._world.gone.add((url, save_id))

    def _disks(self) -> dict[str, Seen]:
        return {node: look_at_disk(self._world, self._world.root(node)) for node in self._world.disk}

    def _with_disks(self, truth: Truth, disks: dict[str, Seen], url: str) -> Seen:
        """The disks that a save was written to, if they are still those, and the parts on a mirror."""
        if any(self._world.disk[node] != number for node, number in truth.disks.items()):
            return Seen()
        return Seen([*together(disks[node] for node in truth.disks).shares, *self._mirrored[url].parts])

    def _check_kept(self, url: str, objects: dict[str, Object]) -> None:
        for name, before in self._objects.get(url, {}).items():
            if name == names.WRITER_NAME or objects.get(name) == before:
                continue
            if name not in objects or not self._names_what_was_sent_again(url, name, before[1], objects[name][1]):
                raise Broken(f"{name} on {url} was {'replaced' if name in objects else 'deleted'}")
        if names.WRITER_NAME in objects:
            listed = {one.id for one in attempts_from_bytes(objects[names.WRITER_NAME][1]).attempts}
            if forgotten := self._listed.get(url, set()) - listed:
                raise Broken(f"the list of {url} forgot {sorted(forgotten)}")
            self._listed[url] = listed

    def _names_what_was_sent_again(self, url: str, name: str, before: bytes, now: bytes) -> bool:
        parsed = names.parse_name(name)
        if parsed is None or parsed.role not in ("meta", "part"):
            return False
        old, new = meta_from_bytes(before), meta_from_bytes(now)
        if _without_objects(old) != _without_objects(new):
            return False
        changed = [one.object_name for one, other in zip(old.artifacts, new.artifacts, strict=True) if one != other]
        return bool(changed) and all((url, one) in self._world.lost for one in changed)

    def _check_not_lost(self, truth: Truth, disks: dict[str, Seen]) -> None:
        lacking = [url for url, seen in self._mirrored.items() if truth.save_id not in seen.whole()]
        owed = [url for url in lacking if (url, truth.save_id) not in self._world.hurt]
        if truth.mirrored and owed:
            raise Lost(f"step {truth.step} of job {truth.job} was acknowledged as mirrored, and {owed} lack it")
        kept = all(self._world.disk[node] == number for node, number in truth.disks.items())
        if not (truth.acknowledged and kept):
            return
        for url in lacking:
            both = self._with_disks(truth, disks, url)
            if truth.save_id not in both.whole() and (url, truth.save_id) not in self._world.gone:
                where = ", ".join(truth.disks)
                raise Lost(
                    f"step {truth.step} of job {truth.job} was acknowledged, is not whole on {where}, nor on {url}"
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
            whole = look_at_mirror(self._world, place.url, place.objects()).whole()
            for meta in mirror_catalog(mirror).saves.values():
                for kind in whole[meta.save_id][1] if meta.save_id in whole else ():
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


def _without_objects(meta: Meta) -> Meta:
    return replace(meta, artifacts=tuple(replace(one, object=None) for one in meta.artifacts))


def _main(dest: Path, meta: Meta, kind: Kind) -> Path:
    return next(path for path in dest.iterdir() if path.name.startswith(f"{kind}_{meta.step:06d}"))
