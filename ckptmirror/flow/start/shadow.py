"""Shadow: each start's choice is compared with that of core.start. For development only."""

from __future__ import annotations

import json
import os
import traceback
from typing import Any

from ckptmirror.core.errors import CkptMirrorError
from ckptmirror.core.start.decide import MakeRoom, Outcome, Refuse, Result, Scratch, Try, Wish, next_move
from ckptmirror.core.start.evidence import evidence_to_json
from ckptmirror.flow.save.persistent_dir import persistent_catalog
from ckptmirror.flow.start.evidence import survey


class Shadow:
    def __init__(self, node: Any, policy: Any, kind: Any, force: bool) -> None:
        self.path = os.environ.get("CKPTMIRROR_SHADOW")
        self.outcomes: list[Outcome] = []
        self.evidence = None
        if not self.path:
            return
        try:
            persistent = persistent_catalog(node.persistent_dir, node.root) if node.persistent_dir else None
            self.evidence = survey(
                node.root, node.mirrors, node.table, node.table.root_id(node.root), persistent
            ).evidence
            ranks = max((c.world_size for r in self.evidence.rows for c in r.copies), default=1)
            self.wish = Wish(policy, kind, force, ranks)
        except Exception as error:  # noqa: BLE001
            self.write({"survey": repr(error), "trace": traceback.format_exc()})

    def write(self, document: Any) -> None:
        assert self.path
        with open(self.path, "a") as out:
            out.write(json.dumps({"test": os.environ.get("PYTEST_CURRENT_TEST", ""), **document}) + "\n")

    def tried(self, save_id: str, kind: Any, place: str, result: str, reason: str, error: Any = None) -> None:
        self.outcomes.append(Outcome(save_id, kind, place, Result(result), reason, error))

    def compare(self, old: Any) -> None:
        if self.evidence is None:
            return
        try:
            move = next_move(self.evidence, self.wish, self.outcomes)
        except Exception as error:  # noqa: BLE001
            self.write({"crash": repr(error), "trace": traceback.format_exc()})
            return
        match move:
            case Try():
                new: Any = [move.save.step, move.save.save_id[:8], move.kind, move.place]
            case MakeRoom():
                new = "room"
            case Scratch():
                new = "scratch"
            case Refuse():
                new = [type(move.error).__name__, str(move.error)]
        if isinstance(old, CkptMirrorError):
            old = [type(old).__name__, str(old)]
        same = new == old or (
            isinstance(new, list) and isinstance(old, list) and new[0] == old[0] and isinstance(new[0], str)
        )
        self.write(
            {"same": same, "old": old, "new": new}
            | (
                {}
                if same
                else {
                    "wish": repr(self.wish),
                    "tried": [repr(o) for o in self.outcomes],
                    "evidence": evidence_to_json(self.evidence),
                }
            )
        )
