"""What `ronde.tensorflow.keras` and `ronde.keras` share. It imports neither Keras nor one of its back ends."""
