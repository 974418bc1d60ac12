"""tf.data's service for training jobs: `compute_service`, and the program `compute_worker` (docs/DATA.md)."""
