"""LDP-DOL: locally differentially private distributed online learning."""
