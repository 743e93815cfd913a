"""QaRL for NeMo-RL: aligned low-bit forward, packed refit and TBPO for Mixture-of-Experts RL."""

__version__ = "0.1.0"
