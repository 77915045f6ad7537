"""Observation: listeners to the events of ``core.events``, and a run's timeline.

The code that builds a bus adds the listeners, and the CLI draws the timeline; ``flow`` knows neither.
"""
