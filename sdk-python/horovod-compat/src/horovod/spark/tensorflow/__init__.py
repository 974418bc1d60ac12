"""Programs on Spark for TensorFlow."""
