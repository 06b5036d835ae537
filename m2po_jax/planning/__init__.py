"""What a run will need, before it runs: its programs compiled for a TPU topology without a TPU, and its store."""
