"""What must hold after every step of a history, whatever happened.

Rules (the letters stand in the messages):
* a: what was acknowledged stays whole; a local copy goes only if every required mirror has it.
* b: nothing on a mirror is ever overwritten or deleted, but that a meta may come to name what was sent in the stead of
  an object that the mirror lost; lists of attempts only grow.
* c: no catalog advertises what is not all there, and none hides what is.
* f: on a mirror a meta exists only if all that it names does, with the right bytes.
* g: nobody touches foreign files.
* ``latest`` names nothing that is not whole.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.codec import meta_from_bytes
from ckptmirror.core.errors import BrokenMeta
from ckptmirror.core.model import Meta
from ckptmirror.flow.places.catalog import Catalog, local_catalog, mirror_catalog
from ckptmirror.flow.places.mirrors import Mirror
from tests.simulation.sight import Object, Seen, look_at_disk, look_at_mirror, objects_of
from tests.simulation.world import Broken, Host, World

Copy = tuple[int, int, str, str]
"""Host, how many disks it had lost by then, save id, untagged path."""


class Watch:
    """Remembers what it saw after the last step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._objects: dict[str, dict[str, Object]] = {}
        self._lists: dict[str, dict[str, bool]] = {}
        self._copies: set[Copy] = set()
        self.mirrored: dict[str, Seen] = {}

    def look(self, rule: str) -> None:
        """Check everything; ``rule`` is what just happened.

        Raises:
            Broken: Says what does not hold.
        """
        if self._world.noted:
            raise Broken(self._world.noted[0])
        for place in self._world.mirrors:
            self._look_at_mirror(place.url)
        copies: set[Copy] = set()
        for host in self._world.hosts:
            seen = self._look_at_root(host.root)
            copies |= {(host.number, host.disks_lost, save_id, path) for save_id, path in seen.right}
        self._look_at_root(self._world.eval_root)
        self._check_gone(rule, self._copies - copies)
        self._copies = copies
        self._check_acknowledged()
        self._check_foreign()

    def _look_at_mirror(self, url: str) -> None:
        world = self._world
        place = next(place for place in world.mirrors if place.url == url)
        objects = objects_of(place)
        for name, there in self._objects.get(url, {}).items():
            now = objects.get(name)
            if name == names.WRITER_NAME or now == there or (url, name) in world.lost_objects:
                continue
            if now is None or not self._names_what_replaces_the_lost(url, there[0], now[0]):
                raise Broken(f"b: {name} on {url} was {'overwritten' if name in objects else 'deleted'}")
        self._objects[url] = objects
        seen = self.mirrored[url] = look_at_mirror(world, objects)
        loses = any(lost == url for lost, _ in world.lost_objects)
        if not loses and (seen.wrong or seen.odd or seen.partial):
            raise Broken(f"f: {url} has a meta of what is not there: {sorted(seen.wrong.values())} {seen.odd}")
        if seen.list_is_broken:
            raise Broken(f"b: the list of {url} cannot be read")
        listed = {a.id: a.decided for a in seen.attempts.attempts} if seen.attempts is not None else {}
        for attempt, was_decided in self._lists.get(url, {}).items():
            if attempt not in listed or (was_decided and not listed[attempt]):
                raise Broken(f"b: the list of {url} forgot attempt {attempt[:8]}")
        self._lists[url] = listed
        _check_advertised(url, mirror_catalog(Mirror(url, True, place.behind)), seen)
        for (there, name), data in world.foreign_objects.items():
            if there == url and objects[name][0] != data:
                raise Broken(f"g: {name} on {url} was not ours")

    def _names_what_replaces_the_lost(self, url: str, before: bytes, after: bytes) -> bool:
        try:
            old, new = meta_from_bytes(before), meta_from_bytes(after)
        except BrokenMeta:
            return False
        lost = {(url, artifact.object_name) for artifact in old.artifacts} & self._world.lost_objects
        return bool(lost) and _without_objects(old) == _without_objects(new)

    def _look_at_root(self, root: Path) -> Seen:
        world = self._world
        seen = look_at_disk(world, root)
        for (save_id, path), named in seen.wrong.items():
            if root / named not in world.damaged:
                raise Broken(f"c: {root.name} has a meta of save {save_id[:8]}, but not the right {path}")
        for meta in (*seen.metas.values(), *seen.partial):
            if len(meta.artifacts) < len(world.truth[meta.save_id].content):
                world.partly_staged.add(meta.save_id)
        if not root.exists() or seen.list_is_broken:
            return seen
        _check_advertised(root.name, local_catalog(root), seen)
        latest = root / names.LATEST_NAME
        tops = {a.path.partition("/")[0] for meta in (*seen.metas.values(), *seen.partial) for a in meta.artifacts}
        if latest.is_symlink() and latest.exists() and str(latest.readlink()) not in tops and not seen.odd:
            raise Broken(f"latest of {root.name} names {latest.readlink()}, which no save owns")
        return seen

    def _check_gone(self, rule: str, gone: set[Copy]) -> None:
        """A stage may replace what its own mirror holds; everybody else needs every required mirror."""
        places = [place for place in self._world.mirrors if place.required or rule == "stage"]
        need = any if rule == "stage" else all
        for number, lost, save_id, path in sorted(gone):
            if self._world.hosts[number].disks_lost != lost:
                continue
            if not need((save_id, path) in self.mirrored[place.url].right for place in places):
                step = self._world.truth[save_id].meta.step
                raise Broken(f"a: host {number} lost {path} of save {save_id[:8]} (step {step}), the only copy")

    def _check_acknowledged(self) -> None:
        for host, save_id in self._world.just_acknowledged:
            truth = self._world.truth[save_id]
            missing = {
                path for path in truth.content if (host.number, host.disks_lost, save_id, path) not in self._copies
            }
            if missing:
                raise Broken(f"a: save {save_id[:8]} was acknowledged without {sorted(missing)}")
        self._world.just_acknowledged.clear()

    def _check_foreign(self) -> None:
        for path, data in self._world.foreign.items():
            if not path.is_file() or path.read_bytes() != data:
                raise Broken(f"g: {path} was not ours and is {'changed' if path.exists() else 'gone'}")

    def forget(self, host: Host, save_id: str, path: str | None = None) -> None:
        """The history itself damages a file (None: a save's meta)."""
        self._copies = {
            copy
            for copy in self._copies
            if (copy[0], copy[2]) != (host.number, save_id) or (path is not None and copy[3] != path)
        }


def _check_advertised(place: str, catalog: Catalog, seen: Seen) -> None:
    if catalog.whole.keys() != seen.metas.keys():
        raise Broken(f"c: {place} advertises {_short(catalog.whole)}, and holds {_short(seen.metas)}")
    advertised = {save_id: set(meta.kinds) for save_id, meta in catalog.saves.items()}
    if advertised != {save_id: set(meta.kinds) for save_id, meta in seen.readable.items()}:
        raise Broken(f"c: {place} advertises the kinds {advertised}, and holds {seen.torn}")


def _without_objects(meta: Meta) -> Meta:
    return replace(meta, artifacts=tuple(replace(artifact, object=None) for artifact in meta.artifacts))


def _short(saves: object) -> list[str]:
    return sorted(save_id[:8] for save_id in saves)  # type: ignore[attr-defined]
