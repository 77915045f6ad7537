"""Random histories of jobs of several nodes, on real processes: ``python -m tests.nodes.campaign --histories 300``.

* ``plans``: what a job and its ranks are asked to do; ``trained_values``: a model whose every number names its save.
* ``rank``: what a rank does; ``jobs``: starts the ranks of a job, listens to them, and ends them.
* ``world``: disks, mirrors, jobs that sleep, and what is true of every save.
* ``sight``: what really lies on disks and mirrors; ``expected``: where a start may continue, by the reference of the
  simulation; ``checks``: what must hold after every step.
* ``happenings``: what can happen; ``histories``: draws, plays and shortens histories.
"""
