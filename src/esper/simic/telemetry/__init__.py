"""Telemetry of learning: what to measure, and when to worry."""

from esper.simic.telemetry.anomaly_detector import (
    AnomalyDetector,
    AnomalyReport,
    AnomalyThresholds,
    Escalation,
)
from esper.simic.telemetry.debug_telemetry import (
    LayerGradientStats,
    LayerSummary,
    NumericalStabilityReport,
    check_numerical_stability,
    collect_per_layer_gradients,
    summarize_layers,
)
from esper.simic.telemetry.gradient_collector import (
    GradientDrift,
    GradientEMATracker,
    GradientHealthMetrics,
    GradientThresholds,
    PendingGradientMetrics,
    collect_gradients,
    start_collecting,
)
from esper.simic.telemetry.lstm_health import LSTMHealth, compute_lstm_health
from esper.simic.telemetry.profiler import TrainingProfiler, resident_mb
from esper.simic.telemetry.ratio_diagnostic import RatioExplosionDiagnostic

__all__ = [
    "AnomalyDetector",
    "AnomalyReport",
    "AnomalyThresholds",
    "Escalation",
    "GradientDrift",
    "GradientEMATracker",
    "GradientHealthMetrics",
    "GradientThresholds",
    "LSTMHealth",
    "LayerGradientStats",
    "LayerSummary",
    "NumericalStabilityReport",
    "PendingGradientMetrics",
    "RatioExplosionDiagnostic",
    "TrainingProfiler",
    "check_numerical_stability",
    "collect_gradients",
    "collect_per_layer_gradients",
    "compute_lstm_health",
    "resident_mb",
    "start_collecting",
    "summarize_layers",
]
