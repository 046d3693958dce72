"""LDP-DOL: locally differentially private distributed online learning (Chen & Wang 2025).

parameters  what a spec gives, how a run is made of it, what is refused and what is only reported
algorithm   the state machine
accounting  how far a replaced record moves the state that is said, and what messages cost: the meter
"""
