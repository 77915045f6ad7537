"""A strict server of the Cloud Storage JSON API, for tests: ``python -m ckptmirror.testing.gcs --port 0 --dir D``.

Rules:
* What the service documents it does the same way; what it does not serve it refuses with 501, never in silence.
* An acknowledged change survives SIGKILL of the server (not a power loss); an unacknowledged one is whole or absent.
* Checksums are computed with a library that ckptmirror itself does not use.

Served: buckets (insert, get, list, patch, update, delete, storage layout, permissions), objects (media, multipart and
resumable upload, get, download with ranges, list, patch, update, delete, compose, rewrite, copy, move, restore),
versions, soft deletion, hierarchical namespace with its folders, batches, all generation preconditions, bearer tokens
with IAM permissions, TLS. Not served: access lists and IAM policies that are set through the API,
retention, lifecycle rules, customer's encryption keys, notifications, renaming folders, the XML API, gRPC.
"""
