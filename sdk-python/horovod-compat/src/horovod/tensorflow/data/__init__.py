"""tf.data's service for training jobs, as `ronde.tensorflow.data` has it."""
