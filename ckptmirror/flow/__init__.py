"""The verbs: what ckptmirror does with a disk, its mirrors and the ranks. Decisions are in core."""
