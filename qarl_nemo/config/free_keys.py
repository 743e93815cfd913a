"""Keys of a run that change no result but how long it goes on and what its sums round to. Imports no torch."""

# Keys that may change when a run is resumed, because they affect no result but for rounding. num_threads and those that
# divide a step's work over the memory add in another order: only with the same ones does a run continue bit for bit.
# Those that decide which responses are decoded together, rollout.batch_size and rollout.kv_cache_gib, are not among
# them: engines draw the tokens of such responses one after the other from the same random numbers.
FREE_KEYS = (
    "run_dir",
    "run.name",
    "grpo.max_num_steps",
    "grpo.val_at_end",
    "policy.max_skipped_steps",
    "checkpointing.",
    "logger.",
    "num_threads",
    "compare",
    "policy.train_micro_batch_size",
    "policy.logprob_batch_size",
    "policy.logprob_chunk_size",
    "policy.sequence_packing.",
    "policy.activation_checkpointing",
    "qarl.keep_operand",
    "rollout.keep_operand",
)
