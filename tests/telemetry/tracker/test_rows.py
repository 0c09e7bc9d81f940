"""The names under which trackers get events. Pure functions."""

import pytest

from launcher.telemetry.tracker.protocol import ConfusionMatrix, Histogram, Table, Text
from launcher.telemetry.tracker.rows import media_of, scalars_of


@pytest.mark.parametrize(
    ("record", "row"),
    [
        (
            {"event": "step", "time": 1.0, "step": 5, "epoch": 0, "loss": 0.5, "lr": 0.1, "grad_norm": None}
            | {"scale": 65536.0, "skipped": 1, "samples_per_s": 99.0, "step_ms": 3.0},
            {"train/epoch": 0, "train/loss": 0.5, "train/lr": 0.1, "scale/value": 65536.0}
            | {"scale/skipped": 1, "train/samples_per_s": 99.0, "time/step_ms": 3.0},
        ),
        (
            {"event": "eval", "time": 1.0, "step": 9, "val_loss": 0.2, "accuracy": 0.9},
            {"eval/val_loss": 0.2, "eval/accuracy": 0.9},
        ),
        (
            {
                "event": "overflow",
                "time": 1.0,
                "step": 2,
                "ranks": [0, 1],
                "parameters": ["a.b"],
                "scale": 8.0,
            },
            {
                "scale/overflow_ranks": "0, 1",
                "scale/overflow_parameters": "a.b",
                "scale/value": 8.0,
            },
        ),
        ({"event": "gpu", "time": 1.0, "step": 2, "power_w": 300.0}, {"gpu/power_w": 300.0}),
        (
            {"event": "gpu", "time": 1.0, "step": 2, "power_w": 300.0}
            | {"gpus": [{"index": 1, "uuid": "GPU-b", "power_w": 300.0, "throttled_s": {"hw_thermal": 0.5}}]},
            {"gpu/power_w": 300.0, "gpu/1/power_w": 300.0, "gpu/1/throttled_s/hw_thermal": 0.5},
        ),
        ({"event": "warning", "time": 1.0, "step": 2, "text": "x"}, {}),
        ({"event": "end", "time": 1.0, "step": 2, "state": "done"}, {}),
    ],
)
def test_events_appear_under_grouped_names(record, row):
    assert scalars_of(record) == row


def test_gradients_and_reports_have_histograms_and_tables():
    gradients = {"event": "gradients", "time": 1.0, "step": 2, "epoch": 0, "zero_share": 0.5, "layers": {}}
    counted = gradients | {"first_exponent": -24, "histogram": [1, 2, 3]}
    assert scalars_of(counted) == {"gradients/zero_share": 0.5}
    assert media_of(counted) == {"gradients/exponents": Histogram([1, 2, 3], [-24, -23, -22, -21])}
    table = [{"class": "a", "precision": 1.0, "support": 3}]
    report = {"event": "report", "time": 1.0, "step": 2, "text": "t", "table": table, "classes": ["a"]}
    assert scalars_of(report) == {}
    assert media_of(report | {"confusion_matrix": [[3]]}) == {
        "eval/classification_report": Text("t"),
        "eval/classes": Table(("class", "precision", "support"), [("a", 1.0, 3)]),
        "eval/confusion_matrix": ConfusionMatrix(["a"], [[3]]),
    }
