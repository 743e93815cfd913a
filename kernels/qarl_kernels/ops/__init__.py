"""Triton operators for Hopper: each computes what the torch reference beside this folder defines."""
