"""Who acts on a host, and what becomes of whoever dies of it."""

from __future__ import annotations

from collections.abc import Callable

from ckptmirror.local import crashpoints
from tests.simulation.processes import Trainer
from tests.simulation.world import Dead, Host, World, hosts_to_act_on


def acting(world: World, host: Host, act: Callable[[], None]) -> bool:
    """Let a process of ``host`` act; False if it died of it. The caller lets it go."""
    outer, world.inside = world.inside, host if world.inside is None else world.inside
    try:
        act()
    except Dead:
        crashpoints.disarm()
        return False
    finally:
        world.inside = outer
    return True


def trainers_of(world: World) -> list[Trainer]:
    return [host.trainer for host in hosts_to_act_on(world) if host.trainer is not None]


def end_trainer(host: Host) -> None:
    if host.trainer is not None:
        host.trainer.die()
        host.trainer = None
