"""Consensus ADMM: plain, DVP and PVP.

parameters  the parameters of a spec, and the conditions that raise errors or warnings
algorithm   the local problem of a node, its solver, and the state machine
accounting  the noise of an iteration, and the privacy accountant of its messages
"""
