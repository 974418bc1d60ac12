"""What jobs on Ray and Spark share: where ranks run, which of them share a sidecar, and how sidecars are started."""
