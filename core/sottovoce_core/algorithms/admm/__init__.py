"""Consensus ADMM: plain, DVP and PVP.

parameters  what a spec gives, how a run is made of it, what is refused and what is only reported
algorithm   the problem that a node solves in a round, its solver, and the state machine
accounting  how noisy an iteration is, and what its messages cost: the meter
"""
