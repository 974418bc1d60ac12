"""PyTorch's own tests of its distributed package, run with the backend "ronde" and with Gloo."""
