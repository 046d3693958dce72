"""LDP-DOL: locally differentially private distributed online learning (Chen & Wang 2025).

parameters  the parameters of a spec, and the conditions that raise errors or warnings
algorithm   the state machine
accounting  the sensitivity of the sent state to a replaced record, and the privacy accountant
"""
