"""LDP-DOL: locally differentially private distributed online learning (Chen & Wang 2025).

parameters   what a spec gives, and how a run is made of it
conditions   what is refused, and what is only reported
algorithm    the state machine
accounting   what its messages cost: the meter
sensitivity  how far a replaced record moves the state that is said
"""
