"""Dual averaging: DPSDA-C, DPSDA-PS, DPCDA, DPPS.

parameters  what a spec gives, and how a run is made of it
conditions  what is refused, and what is only reported
algorithm   the state machine
accounting  what its messages cost: the meter
"""
