"""Verification over a large vocabulary: row statistics, thresholds, and the streamed surplus."""
