"""What befalls disks, tables, lists and mirrors from outside. Rules like those of ``rules``."""

from __future__ import annotations

import random
from pathlib import Path

from ckptmirror.core import names
from tests.simulation.sight import is_meta, look_at_disk
from tests.simulation.watch import Watch
from tests.simulation.world import World, hosts_to_act_on

__all__ = [
    "damage",
    "lose_disk",
    "lose_list",
    "lose_table",
    "mirror_down",
    "mirror_loses",
    "mirror_up",
    "stranger",
    "time_passes",
]


def lose_disk(world: World, watch: Watch, draw: random.Random) -> None:
    world.lose_disk(draw.choice(hosts_to_act_on(world)))


def lose_table(world: World, watch: Watch, draw: random.Random) -> None:
    """Between processes: one that has a table open keeps its file."""
    host = draw.choice(hosts_to_act_on(world))
    table = host.root / names.TABLE_NAME
    if host.is_busy or not table.exists():
        return
    if draw.random() < 0.5:
        for path in host.root.glob(f"{names.TABLE_NAME}*"):
            path.unlink()
        return
    data = bytearray(table.read_bytes())
    for _ in range(draw.choice([1, 40])):
        data[draw.randrange(len(data))] ^= 0xFF
    table.write_bytes(data)
    world.damaged_tables.add(host.number)


def lose_list(world: World, watch: Watch, draw: random.Random) -> None:
    path = draw.choice(hosts_to_act_on(world)).root / names.ATTEMPTS_NAME
    if not path.exists():
        return
    if draw.random() < 0.5:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-20])


def damage(world: World, watch: Watch, draw: random.Random) -> None:
    """A bit flips in a committed file, or it is cut short, or goes."""
    host = draw.choice(hosts_to_act_on(world))
    metas = sorted(look_at_disk(world, host.root).metas.values(), key=lambda meta: meta.save_id)
    if not metas:
        return
    meta = draw.choice(metas)
    artifact = draw.choice(meta.artifacts)
    if draw.random() < 0.15:
        path = host.root / names.SaveName(meta.step, meta.tag).meta
        _spoil(path, "flip", draw)
        world.damaged.add(path)
        watch.forget(host, meta.save_id)
        return
    path = host.root / artifact.path
    _spoil(path, draw.choice(["flip", "flip", "flip", "cut", "remove"]), draw)
    world.damaged.add(path)
    watch.forget(host, meta.save_id, names.untagged(artifact.path))


def _spoil(path: Path, how: str, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if how == "remove":
        path.unlink()
        return
    data[draw.randrange(len(data))] ^= 1
    path.write_bytes(data[:-1] if how == "cut" else data)


def mirror_loses(world: World, watch: Watch, draw: random.Random) -> None:
    """Somebody deletes an object of ours on a mirror."""
    place = draw.choice(world.mirrors)
    ours = sorted(
        name for name in place.objects() if name != names.WRITER_NAME and (place.url, name) not in world.foreign_objects
    )
    if ours:
        name = draw.choice(ours)
        info = place.behind.stat(name)
        assert info is not None
        place.behind.delete(name, generation=info.generation)
        world.lost_objects.add((place.url, name))


def stranger(world: World, watch: Watch, draw: random.Random) -> None:
    """Somebody else's file, here or on a mirror, under a name that is nearly ours, or is ours."""
    step = draw.choice([100, 200, 300, 400])
    name = draw.choice(
        [
            "notes.txt",
            f"model_{step:06d}.pt",
            f"model_{step:06d}.pt.bak",
            f"dcp_{step:06d}/notes.txt",
            f"extra_{step:06d}_rank0.pt",
            f"model_{step:06d}.tmp",
        ]
    )
    data = draw.randbytes(30)
    if draw.random() < 0.3 and not name.startswith("dcp"):
        place = draw.choice(world.mirrors)
        if place.behind.stat(name) is None:
            place.behind.write(name, data, if_generation=0)
            world.foreign_objects[(place.url, name)] = data
        return
    root = draw.choice(hosts_to_act_on(world)).root
    cut_short = sorted(root.glob("*.tmp"))
    if cut_short and draw.random() < 0.7:  # the very name that a save or a stage was about to take
        final = root / draw.choice(cut_short).name.rsplit(".", 2)[0]
        name = f"{final.name}/notes.txt" if final.name.startswith("dcp") else final.name
    path = root / name
    if is_meta(path.name):
        return
    if path.exists() or not (path.parent.is_dir() or path.parent.parent.is_dir()):
        return
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    world.foreign[path] = data


def mirror_down(world: World, watch: Watch, draw: random.Random) -> None:
    draw.choice(world.mirrors).go_down()


def mirror_up(world: World, watch: Watch, draw: random.Random) -> None:
    for place in world.mirrors:
        place.come_back()


def time_passes(world: World, watch: Watch, draw: random.Random) -> None:
    world.clock.pass_s(draw.choice([30, 400, 100_000]))
