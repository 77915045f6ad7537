"""Claims of a run without any training: what a start does, but for the loading."""

from __future__ import annotations

from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.events import EventBus
from ckptmirror.core.model import Attempt, Meta, new_id
from ckptmirror.core.start.attempts import claim_from
from ckptmirror.core.start.decide import Refuse, Scratch, Try, Wish, next_move, run_of
from ckptmirror.flow.places.mirrors import Mirror
from ckptmirror.flow.start.bring import Bringer
from ckptmirror.flow.start.claim import DrainConfirmation, RunClaim
from ckptmirror.flow.start.disk_facts import look_at_disk
from ckptmirror.flow.start.leader import Node
from ckptmirror.flow.start.survey import survey
from ckptmirror.local import directories
from ckptmirror.local.root_id import keep_root_id
from ckptmirror.local.uploads import UploadsTable
from ckptmirror.stores import open_store
from ckptmirror.stores.base import Store
from tests.kit.faulty_store import FaultyStore

_AUTO = Wish()


def opened(url: str) -> Mirror:
    return Mirror(url, True, open_store(url, retry=False))


def down(store: Store) -> FaultyStore:
    broken = FaultyStore(store)
    broken.go_down()
    return broken


def table_of(root: Path) -> UploadsTable:
    directories.make_dirs(root / names.CONTROL_DIR)
    (root / names.LOCK_NAME).touch()
    return UploadsTable.open(root / names.CONTROL_DIR / "uploads.db", create=True)


def claim_run(root: Path, *mirrors: Mirror, wish: Wish = _AUTO) -> RunClaim:
    """Decide as a start does, load nothing, and claim."""
    table = table_of(root)
    seen = survey([look_at_disk(root, table, keep_root_id(root))], mirrors)
    move = next_move(seen.evidence, wish)
    if isinstance(move, Refuse):
        raise move.error
    assert isinstance(move, Try | Scratch)
    parent = seen.metas[(move.save.save_id, move.place)].ref if isinstance(move, Try) else None
    claim = claim_from(
        seen.evidence,
        Attempt(new_id(), 0, parent, by_person=move.by_person),
        run_of(seen.evidence) or new_id(),
        needs_all=isinstance(move, Scratch) or move.needs_all,
        adopted=move.adopt if isinstance(move, Try) else (),
    )
    run = RunClaim(root, table, mirrors, claim, {})
    run.make(seen)
    return run


def start_node(node: Node, *, parent: Meta | None = None) -> RunClaim:
    """Start a node as a trainer does, but for the loading.

    Args:
        parent: Where it is to begin; None: where the rules say.
    """
    node.prepare()
    bringer = Bringer(node, Wish() if parent is None else Wish(parent.save_id), EventBus())
    claim = bringer.claim(bringer.next())
    node.start(claim)
    return claim


def drain_confirmation(root: Path, *mirrors: Mirror) -> DrainConfirmation:
    """What a drain of the root asks."""
    return DrainConfirmation(root, table_of(root), mirrors)
