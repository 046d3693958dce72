"""Dual averaging: DPSDA-C, DPSDA-PS, DPCDA, DPPS.

parameters  what a spec gives, how a run is made of it, what is refused and what is only reported
algorithm   the state machine
accounting  what its messages cost: the meter
"""
