"""The learner: train state, update, batches from rollouts, checkpoints, diagnostics, metrics."""
