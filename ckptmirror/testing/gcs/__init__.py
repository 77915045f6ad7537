"""A strict server of the Cloud Storage JSON API, for tests: ``python -m ckptmirror.testing.gcs --port 0 --dir D``.

Rules:
* What the service documents it does the same way; what it does not serve it refuses with 501, never in silence.
* An acknowledged change survives SIGKILL of the server (not a power loss); an unacknowledged one is whole or absent.
* Checksums are computed with a library that ckptmirror itself does not use.

Served: buckets (insert, get, list, delete), objects (media, multipart and resumable upload, get, download with ranges,
list, patch, update, delete), all generation preconditions, bearer tokens. Not served: compose, rewrite, copy, batch,
object versions, access lists, soft delete.
"""
