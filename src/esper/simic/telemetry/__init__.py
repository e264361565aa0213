"""Telemetry of learning: what to measure, and when to worry."""
