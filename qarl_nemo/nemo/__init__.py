"""The scale-out engine.

`megatron`, the aligned learner; `rl`, the NeMo-RL plug-in; `cluster`, Ray on many hosts; `exchange`, plain data
between ranks.
"""
