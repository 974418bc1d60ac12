"""Horovod's classes for elastic jobs: discovery of hosts, the driver of rounds, notifications of workers.

`horovodrun` needs none of them, because `ronde run` decides the membership of its jobs. They serve programs and tests
that start workers with a function of their own.
"""
