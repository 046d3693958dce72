"""Consensus ADMM: plain, DVP and PVP.

parameters    what a spec gives, and how a run is made of it
conditions    what is refused, and what is only reported
algorithm     the state machine
local         the problem that a node solves in a round, and its solver
calibrations  how noisy an iteration is
accounting    what its messages cost: the meter
"""
