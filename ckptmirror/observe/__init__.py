"""What happened: listeners to the events of ``core.events``, and a run's timeline.

Who builds a bus wires the listeners, the CLI draws the timeline; flow never names either.
"""
