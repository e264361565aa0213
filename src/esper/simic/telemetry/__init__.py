"""Telemetry of learning: measurements and anomaly detection."""
