"""What the tests are made of, one module for each thing.

* ``saves``: files and metas as a save leaves them, made by hand.
* ``roots``: training roots with table and mirrors, driven without threads: pending, mirrored, drained, staged.
* ``training``: a small training with everything that a resume must restore.
* ``formats``: states to save in every kind, and one way to save and load them.
* ``legacy``: checkpoints of writers before ckptmirror.
* ``history``: the events of a run, as a test tells them.
* ``mirrors``: URLs and objects, a store that notes downloads, a mirror with the objects of a long run.
* ``servers``: token services, proxies and certificates; each server is a process of its own.
* ``faults``: a damaged file, a mirror that refuses, a disk that fails at one change.
* ``hostile_files``: pickles and archives that are attacks.
* ``cli``: runs a verb; ``terminal``: runs it on a terminal.
* ``processes``: a clean child process, one that is killed, the ranks of a job.
* ``source_texts``: the messages of the package, as its source has them.
* ``clock``: a clock that a test moves; ``cost``: how many functions a piece of work calls.
"""
