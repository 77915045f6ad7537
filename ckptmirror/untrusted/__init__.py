"""The bytes that anyone may have written: archives and pickles, read into plain values and tensors.

Rules:
* Nothing that a file names is called, and no other reader sees the bytes afterwards.
* What is allowed is on a list; what it may cost is in ``read_limits``.
* This room knows nothing of saves: a reviewer of what a hostile file can do reads this room alone, and
  ``formats/dcp_metadata.py``, which turns descriptions into DCP's records.
"""
