"""The verbs: what ckptmirror does with a disk, its mirrors and the ranks. One file a verb; decisions lie in core."""
